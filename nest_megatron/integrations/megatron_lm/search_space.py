"""What the search may choose for a job: what it states stays, the rest is free."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NoReturn

from nest_megatron.config.job import Job, Requirement
from nest_megatron.config.schema import PlanConfig
from nest_megatron.config.space import read_space
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.megatron_lm.layout_arguments import RECOMPUTE, VIRTUAL_STAGES
from nest_megatron.integrations.megatron_lm.rules import MODULES_OF_ENGINE
from nest_megatron.integrations.megatron_lm.sharding import (
    CHECKPOINT_NEEDS,
    IMPLEMENTATION,
    for_optimizer,
    loads,
    with_own_sharding,
)
from nest_megatron.integrations.megatron_lm.stage_options import STAGE_OPTIONS, stated_partition
from nest_megatron.integrations.megatron_lm.typed import LAYOUT, freed_flags
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.parallel.dims import RankOrder
from nest_megatron.parallel.layout import parse_layout
from nest_megatron.parallel.partition import StagePartition
from nest_megatron.parallel.recompute import RecomputeModule
from nest_megatron.planner.request import Offer
from nest_megatron.solver.space import DEGREES, SearchSpace

_CONTEXT = "context_parallel_size"
_EXPERTS = "expert_model_parallel_size"
_PIPELINE = "pipeline_model_parallel_size"
_VIRTUAL = "virtual_pipeline_model_parallel_size"


def job_space(job: Job, config: PlanConfig) -> tuple[SearchSpace, Offer | None]:
    """The job's flags as bounds of the search, under what our own configuration says.

    Returns:
        The space, and another data-parallel sharding that is only priced.

    Raises:
        UserInputError: if what the job states cannot be kept.
    """
    freed = freed_flags(job.free)
    fixed = {name: value for name, value in job.fixed.items() if name not in freed}
    space, offer = _space(config, job, fixed, freed), None
    space = dataclasses.replace(space, zero_stages=for_optimizer(space.zero_stages, job))
    if config.parallel.zero_stage is None:
        space, offer = with_own_sharding(space, job, freed)
        if IMPLEMENTATION[0] in job.required:
            offer = None  # a checkpoint's sharding is not to be changed
    return _with_required(space, job.spec, job.required), offer


def fixed_choices(job: Job) -> tuple[str, ...]:
    """What of the job's choices a plan holds fixed, by their names in ``LAYOUT``."""
    freed = freed_flags(job.free)
    fixed = {name: value for name, value in job.fixed.items() if name not in freed}
    return tuple(name for name, flags in LAYOUT.items() if any(map(fixed.get, flags)))


def _with_required(
    space: SearchSpace, spec: TransformerSpec, required: Mapping[str, Requirement]
) -> SearchSpace:
    """The space as far as a checkpoint can follow; what it leaves unsaid is checked afterwards."""
    fixed = dict(space.fixed)
    for name, need in required.items():
        if name not in DEGREES or need.value is None:
            continue
        if fixed.setdefault(name, int(need.value)) != need.value:
            _refuse_kept(name, fixed[name], need)
    zeros = tuple(zero for zero in space.zero_stages if loads(zero, space.sharding, required))
    if not zeros:
        needs = [{name: required[name]} for name in CHECKPOINT_NEEDS if name in required]
        alone = [
            n for n in needs if not any(loads(z, space.sharding, n) for z in space.zero_stages)
        ]
        ((name, need),) = (alone or needs)[0].items()
        _refuse_kept(name, not need.value, need)
    partition = space.partition
    layout = required.get("pipeline_model_parallel_layout")
    if layout is not None and layout.value is not None:
        saved = parse_layout(str(layout.value), spec, fixed[_PIPELINE])
        if partition not in (None, saved):
            _refuse_kept("pipeline_model_parallel_layout", "as given", layout)
        partition = saved
    return dataclasses.replace(space, fixed=fixed, zero_stages=zeros, partition=partition)


def _refuse_kept(name: str, value: object, need: Requirement) -> NoReturn:
    raise UserInputError(
        f"--{name.replace('_', '-')}",
        value=value,
        limit=f"{need.who} needs {need.value}: {need.reason}",
        fix=f"Change it, or {need.fix}.",
    )


def _space(
    config: PlanConfig, job: Job, kept: Mapping[str, Any], freed: frozenset[str]
) -> SearchSpace:
    own, spec = read_space(config), job.spec
    if job.transformer_impl == "local":
        own = _without_engine(own, spec)
    if job.graphs is not None:
        own = _with_graphs(own, job, alone=not kept.get(_EXPERTS))
    fixed = {name: int(kept[name]) for name in DEGREES if kept.get(name) is not None}
    partition = _fixed_stages(spec, kept, fixed, freed)
    if partition is not None:
        pp = partition.pipeline_model_parallel_size
        fixed |= {_PIPELINE: pp, _VIRTUAL: partition.num_chunks // pp}
    else:
        virtual = _virtual(kept, fixed, spec)
        fixed |= {} if virtual is None else {_VIRTUAL: virtual}
    orders, recompute = own.rank_orders, own.recompute
    if config.parallel.rank_order is None and kept.get("use_tp_pp_dp_mapping"):
        orders = (RankOrder.TP_CP_EP_PP_DP,)
    if recompute is None and not freed.intersection(RECOMPUTE):
        recompute = job.recompute
    return dataclasses.replace(
        own,
        fixed={**fixed, **own.fixed},
        rank_orders=orders,
        recompute=recompute,
        batch_unit=job.batch_unit,
        partition=partition,
    )


def _without_engine(space: SearchSpace, spec: TransformerSpec) -> SearchSpace:
    """The space of Megatron's own layers, which split no sequence and recompute less."""
    without = MODULES_OF_ENGINE | ({RecomputeModule.MLP} if spec.add_bias_linear else set())
    limits = {_CONTEXT: 1, **space.limits}
    return dataclasses.replace(space, limits=limits, without_modules=frozenset(without))


def _with_graphs(space: SearchSpace, job: Job, *, alone: bool) -> SearchSpace:
    """The space of what may stand beside captured CUDA graphs.

    Args:
        alone: the expert-parallel size is not the user's own.
    """
    graphs, limits = job.graphs, dict(space.limits)
    assert graphs is not None
    if alone and not graphs.allows_experts(2, job.version):
        limits[_EXPERTS] = 1
    return dataclasses.replace(
        space,
        limits=limits,
        without_modules=space.without_modules | graphs.without_modules(job.spec),
        full_recompute=graphs.allows_full_recompute(),
    )


def _fixed_stages(
    spec: TransformerSpec,
    kept: Mapping[str, Any],
    fixed: Mapping[str, int],
    freed: frozenset[str],
) -> StagePartition | None:
    """The user's own stages, where they state any."""
    stated = [name for name in STAGE_OPTIONS if kept.get(name)]
    virtual = [name for name in VIRTUAL_STAGES if kept.get(name)]
    if virtual and not stated and not freed.intersection(STAGE_OPTIONS):
        stated = virtual if _PIPELINE in fixed else []  # Megatron divides evenly
    if stated and _PIPELINE in freed:
        raise UserInputError(
            f"--{stated[0].replace('_', '-')}",
            value=kept[stated[0]],
            limit="it divides the model for one number of pipeline ranks, and that number is freed",
            fix="Free stage_layout as well, or keep the number.",
        )
    return stated_partition(spec, kept, fixed.get(_PIPELINE, 1)) if stated else None


def _virtual(
    kept: Mapping[str, Any], fixed: Mapping[str, int], spec: TransformerSpec
) -> int | None:
    """Virtual stages of a rank, from either of Megatron's two flags."""
    direct = kept.get("num_virtual_stages_per_pipeline_rank")
    if isinstance(direct, int):
        return direct
    layers = kept.get("num_layers_per_virtual_pipeline_stage")
    if not isinstance(layers, int):
        return None
    pp = fixed.get("pipeline_model_parallel_size")
    if pp is None or layers < 1 or spec.num_layers % (pp * layers):
        raise UserInputError(
            "--num-layers-per-virtual-pipeline-stage",
            value=layers,
            limit=f"with {pp or 'a free number of'} pipeline ranks it makes no whole number of "
            f"virtual stages of the {spec.num_layers} layers",
            fix=f"Add --free {_VIRTUAL}, or --pipeline-model-parallel-size.",
        )
    return spec.num_layers // (pp * layers)
