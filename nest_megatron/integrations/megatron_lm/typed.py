"""What a user typed: which flags they free by which name, and which of the others a plan keeps."""

from __future__ import annotations

from nest_megatron.config.job import FreeParameters, Job
from nest_megatron.config.schema import PlanConfig
from nest_megatron.config.space import fixed_degrees
from nest_megatron.errors import UserInputError, nearest
from nest_megatron.integrations.megatron_lm.layout_arguments import (
    PARALLEL_ARGUMENTS,
    RECOMPUTE,
    VIRTUAL_STAGES,
)
from nest_megatron.integrations.megatron_lm.sharding import CKPT_FORMAT, IMPLEMENTATION, STAGE
from nest_megatron.integrations.megatron_lm.stage_options import STAGE_OPTIONS
from nest_megatron.parallel.execution_argv import EXECUTION_ARGUMENTS
from nest_megatron.planner import PlanRequest
from nest_megatron.solver.space import DEGREES

#: Names that free several flags at once.
FAMILIES = {
    "all": (*PARALLEL_ARGUMENTS, CKPT_FORMAT),
    "virtual_pipeline_model_parallel_size": VIRTUAL_STAGES,
    "stage_layout": STAGE_OPTIONS,
    "recompute": RECOMPUTE,
    "zero_stage": STAGE,
    "use_megatron_fsdp": IMPLEMENTATION,
    "use_torch_fsdp2": IMPLEMENTATION,
    "rank_order": ("use_tp_pp_dp_mapping",),
}
#: Choices of a layout, and the flags that state each.
LAYOUT = {
    **{name: (name,) for name in DEGREES if name in PARALLEL_ARGUMENTS},
    **{name: flags for name, flags in FAMILIES.items() if name not in ("all", IMPLEMENTATION[1])},
}
#: What a user can keep, one choice each, and the flags that state it.
CHOICES = {**LAYOUT, **EXECUTION_ARGUMENTS}
#: Flags that mean something together only, so that freeing one frees all.
_TOGETHER = (RECOMPUTE, VIRTUAL_STAGES, *EXECUTION_ARGUMENTS.values())


def freed_flags(free: FreeParameters) -> frozenset[str]:
    """Destinations that the search may change.

    Raises:
        UserInputError: for a name that frees nothing.
    """
    known = {
        **{name: (name,) for name in (*PARALLEL_ARGUMENTS, CKPT_FORMAT)},
        **FAMILIES,
        **CHOICES,
    }
    names: set[str] = set()
    for name in free.names:
        plain = name.strip().lstrip("-").replace("-", "_")
        if plain not in known:
            raise UserInputError(
                free.option,
                value=name,
                limit="it is no flag that a plan sets",
                fix=nearest(plain, known),
            )
        names.update(known[plain])
    for flags in _TOGETHER:
        if names.intersection(flags):
            names.update(flags)
    return frozenset(names)


def kept_flags(job: Job, request: PlanRequest, config: PlanConfig) -> frozenset[str]:
    """Destinations whose flags stay in the job's command as they are.

    Args:
        config: settings of our own command line, which win over it.
    """
    assert job.command is not None
    parallel = config.parallel
    replaced = set(fixed_degrees(config))
    if request.space.partition is None:
        replaced.update((*STAGE_OPTIONS, *VIRTUAL_STAGES))
    if parallel.rank_order is not None:
        replaced.add("use_tp_pp_dp_mapping")
    if parallel.recompute_granularity is not None:
        replaced.update(RECOMPUTE)
    if parallel.zero_stage is not None:
        replaced.update((*STAGE, *IMPLEMENTATION, CKPT_FORMAT))
    ours = {*PARALLEL_ARGUMENTS, CKPT_FORMAT}
    return frozenset(ours.intersection(job.command.explicit) - replaced - freed_flags(job.free))
