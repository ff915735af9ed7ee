"""Flags of the optimizer that Megatron-LM refuses beside each other, whatever the plan.

Sources: ``validate_args`` (core_v0.16.1 :1190, :1195; 0.20 :1884, :1889) and
``OptimizerConfig.__post_init__`` (``optimizer_config.py``, core_v0.16.1 :416; 0.20 :470).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nest_megatron.cost_model.memory_flags import text
from nest_megatron.errors import UserInputError

_AWARE = "use_precision_aware_optimizer"
_FORMATS = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


def require_optimizer(values: Mapping[str, Any], version: str) -> None:
    """Raise for a flag that needs ``--use-precision-aware-optimizer`` where that is not given.

    And for fp8 weights, which the optimizer on the host takes with delayed scaling alone.

    Args:
        values: Megatron's arguments by destination, before or after its validation.

    Raises:
        UserInputError: naming the flag, and the one that it needs.
    """
    _require_delayed(values, version)
    if values.get(_AWARE):
        return
    given = {name: text(values[name]) for name in _FORMATS if values.get(name)}
    refused: dict[str, object] = {name: word for name, word in given.items() if word != "fp32"}
    if values.get("optimizer_cpu_offload"):
        refused["optimizer_cpu_offload"] = True
    for name, value in refused.items():
        raise UserInputError(
            f"--{name.replace('_', '-')}",
            value=value,
            limit=f"Megatron-LM {version} refuses it without --{_AWARE.replace('_', '-')}",
            fix=f"Add --{_AWARE.replace('_', '-')} and --use-distributed-optimizer, or drop it.",
        )


def _require_delayed(values: Mapping[str, Any], version: str) -> None:
    recipe = text(values.get("fp8_recipe") or "delayed")
    offloads = values.get("optimizer_cpu_offload") and values.get("fp8_param_gather")
    if offloads and recipe != "delayed":
        raise UserInputError(
            "--fp8-recipe",
            value=recipe,
            limit=f"with --fp8-param-gather Megatron-LM {version} offloads the optimizer under "
            "delayed scaling alone",
            fix="Use --fp8-recipe delayed, or drop --optimizer-cpu-offload.",
        )
