"""Targets that plans are made for, by ``targets.toml``, and what some cannot be told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nest_megatron.cluster.records import Precision
from nest_megatron.cost_model.targets import Default, Target
from nest_megatron.documents import packaged
from nest_megatron.errors import UserInputError, nearest

_TABLE = packaged(__package__, "targets.toml")


def _target(fields: dict[str, Any]) -> Target:
    rows = _TABLE["defaults"][fields.pop("defaults")]
    files, release = fields.pop("files"), fields.pop("release")

    def default(row: Mapping[str, Any]) -> Default:
        source: str = files[row["file"]]
        precision = row.get("precision")
        return Default(
            argument=row["argument"],
            value=row.get("value"),
            source=source if source.startswith("nest_megatron/") else f"{release}: {source}",
            gpu=row.get("gpu", ""),
            precision=None if precision is None else Precision(precision),
            experts=row.get("experts"),
            mamba=row.get("mamba"),
            also=row.get("also", {}),
        )

    name, fields["builds"] = fields["name"], tuple(fields.get("builds", ()))
    defaults = tuple(default(row) for row in rows if row.get("only", name) == name)
    return Target(defaults=defaults, **fields)


#: Targets that a plan may be made for.
TARGETS: tuple[Target, ...] = tuple(map(_target, _TABLE["targets"]))
MEGATRON_LM_0_16, MEGATRON_LM_0_20, NEMO, BRIDGE_0_3, BRIDGE_2026 = TARGETS
#: Those that a plan's command launches.
MEGATRON_LM = (MEGATRON_LM_0_16, MEGATRON_LM_0_20)
#: What a plan is made for where neither the job nor the user names a framework.
DEFAULT_TARGET = MEGATRON_LM_0_16


def target_named(name: str) -> Target:
    """A target by its name.

    Raises:
        UserInputError: naming those that there are.
    """
    names = [target.name for target in TARGETS]
    for target in TARGETS:
        if target.name == name:
            return target
    raise UserInputError(
        "target",
        name,
        limit=f"targets are {', '.join(names)}",
        fix=nearest(name, names),
    )


#: Field of ``Execution`` -> why no recipe of NeMo 2.x can have it.
NEMO_LACKS: Mapping[str, str] = {
    **dict.fromkeys(
        ("overlap_moe_expert_parallel_comm", "delay_wgrad_compute"),
        "NeMo's training step makes no schedule of two micro batches (build_schedule_plan)",
    ),
    "hierarchical_context_parallel_sizes": "NeMo makes no process groups of two levels",
}
#: Fields of ``Execution`` that a plan does not set by itself, and why.
GRAPHS_OF_THE_JOB: Mapping[str, str] = dict.fromkeys(
    ("cuda_graph_impl", "cuda_graph_scope"),
    "CUDA graphs need the job's own RNG tracker (use_te_rng_tracker) and NCCL_GRAPH_REGISTER=0",
)
OFFLOADS_OF_THE_JOB: Mapping[str, str] = {
    "offload_modules": "offloaded modules need NVTE_CPU_OFFLOAD_V1=1 where the job is launched",
}
#: What the search for a job leaves as it is: it may switch it off, but not on.
OF_THE_JOB = frozenset({*GRAPHS_OF_THE_JOB, *OFFLOADS_OF_THE_JOB})
_STATES_IN = (
    "{0}.use_precision_aware_optimizer=True {0}.exp_avg_dtype=torch.{1} "
    "{0}.exp_avg_sq_dtype=torch.{1}"
)
_GRADIENTS, _WEIGHTS = "--grad-reduce-in-bf16", "--fp8-param-gather"
_STATES = "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
_HOST = "--optimizer-cpu-offload --use-precision-aware-optimizer"
_FP8_STATES = _STATES.replace("bf16", "fp8")
_CAPACITY = "--moe-expert-capacity-factor 1.0"
_FP4 = "--fp4-format e2m1 --fp4-recipe nvfp4"
_FP8 = {
    f"--fp8-format {each} --fp8-recipe {recipe}": (each, recipe)
    for each, recipe in (("hybrid", "tensorwise"), ("e4m3", "blockwise"), ("e4m3", "mxfp8"))
}
_TENSORWISE = next(iter(_FP8))


def _in(precision: str, optimizer: str, model: str) -> dict[str, str]:
    """What a user sets in the place of flags, where each configuration lies."""
    formats = {
        flags: f"{precision}.fp8={each} {precision}.fp8_recipe={recipe}"
        for flags, (each, recipe) in _FP8.items()
    }
    return {
        _GRADIENTS: f"{precision}.grad_reduce_in_fp32=False",
        _STATES: _STATES_IN.format(optimizer, "bfloat16"),
        _FP8_STATES: _STATES_IN.format(optimizer, "uint8"),
        _HOST: f"{optimizer}.optimizer_cpu_offload=True "
        f"{optimizer}.use_precision_aware_optimizer=True",
        _WEIGHTS: f"{precision}.fp8_param_gather=True",
        _CAPACITY: f"{model}.moe_expert_capacity_factor=1.0",
        **formats,
        f"{_TENSORWISE} {_WEIGHTS}": f"{formats[_TENSORWISE]} {precision}.fp8_param_gather=True",
        _FP4: f"{precision}.fp4=e2m1 {precision}.fp4_recipe=nvfp4",
    }


_IN_BRIDGE = _in("mixed_precision", "optimizer", "model")
#: Framework (``Target.fitted``) -> what its user sets in the place of flags of ``NUMERIC_KNOBS``.
NUMERIC_FIELDS: Mapping[str, Mapping[str, str]] = {
    NEMO.fitted: _in("trainer.plugins", "optim.config", "model.config"),
    BRIDGE_0_3.fitted: _IN_BRIDGE,
    BRIDGE_2026.fitted: _IN_BRIDGE,
}
