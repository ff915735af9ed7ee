"""What transformers itself builds of a configuration: modules on the meta device, counted."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_ROUTED = re.compile(r"\.experts\.|\.block_sparse_moe\.(input|output)_linear\.")
_TOP = ("num_experts_per_tok", "moe_topk", "moe_k")
_NUMBER = (
    *("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts"),
    "num_routed_experts",
)


def counted(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as ``save_pretrained`` writes it, and what the model has.

    Returns:
        ``config``, ``parameters``, ``active_parameters`` and ``num_layers``.
    """
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    try:
        from transformers.modeling_utils import no_init_weights
    except ImportError:  # transformers 5
        from transformers.initialization import no_init_weights

    given = {key: value for key, value in config.items() if key != "model_type"}
    built = CONFIG_MAPPING[config["model_type"]](**given)
    with torch.device("meta"), no_init_weights():
        model = AutoModelForCausalLM.from_config(built)
    model.tie_weights()
    routed = sum(p.numel() for name, p in model.named_parameters() if _ROUTED.search(name))
    total = sum(parameter.numel() for parameter in model.parameters())
    written = built.to_diff_dict()
    written.pop("transformers_version", None)
    return {
        "config": written,
        "parameters": total,
        "active_parameters": total - _idle(routed, built),
        "num_layers": built.num_hidden_layers,
    }


def _idle(routed: int, config: Any) -> int:
    """Parameters of the experts that a token does not visit."""

    def first(names: tuple[str, ...]) -> int:
        return next(value for name in names if (value := getattr(config, name, None)))

    return routed and routed // first(_NUMBER) * (first(_NUMBER) - first(_TOP))
