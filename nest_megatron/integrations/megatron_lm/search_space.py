"""What the search may choose for a job: what it states stays, the rest is free.

A job stays with its own data-parallel sharding, unless the user frees it; another is priced.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nest_megatron.config.compose import Settings
from nest_megatron.config.job import Job, Requirement
from nest_megatron.config.space import fixed_degrees, read_space
from nest_megatron.errors import UserInputError, nearest, require_known
from nest_megatron.integrations.megatron_lm.layout_arguments import (
    PARALLEL_ARGUMENTS,
    RECOMPUTE,
    STAGE_OPTIONS,
    VIRTUAL_STAGES,
    Values,
    flag_error,
    flag_of,
    layers_in_bf16,
    partition_of_values,
    rank_order_of,
    states_stages,
)
from nest_megatron.integrations.megatron_lm.read import pipeline_limits
from nest_megatron.layout.execution_rules import EXECUTION_ARGUMENTS
from nest_megatron.layout.recompute import NO_RECOMPUTE
from nest_megatron.layout.rulebook.devices import AWARE, ELEMENTWISE_OPTIMIZERS, allows_optimizer
from nest_megatron.layout.stage_layout import StagePartition, parse_layout
from nest_megatron.layout.zero import (
    DataParallelSharding,
    ZeroStage,
    shards_optimizer,
    uses_megatron_fsdp,
)
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.planner import Request
from nest_megatron.planner.request import Offer
from nest_megatron.solver.space import DEGREES, SearchSpace

#: Flags that name the implementation, and those of the ZeRO stage within it.
IMPLEMENTATION = ("use_megatron_fsdp", "use_torch_fsdp2")
STAGE = ("use_distributed_optimizer", "data_parallel_sharding_strategy")
CKPT_FORMAT = "ckpt_format"
#: What of the sharding a checkpoint may need, and whether a ZeRO stage has it.
_OF_CHECKPOINTS = {
    "use_megatron_fsdp": uses_megatron_fsdp,
    "use_distributed_optimizer": shards_optimizer,
}

#: What a plan may choose, and the format that it sets where another is typed.
_FORMATS = {
    DataParallelSharding.DDP: "torch_dist",
    DataParallelSharding.MEGATRON_FSDP: "fsdp_dtensor",
}

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


def free_parameters(
    free: Collection[str] | str | None = None, keep: Sequence[str] | str = ()
) -> tuple[str, ...]:
    """What of a recipe's own layout the search may change.

    Args:
        free: choices that may change, a text is one; ``None`` is all of them but those kept and
            ``use_megatron_fsdp``, which changes the format of checkpoints.
        keep: choices that stay as the recipe states them; a text is one.

    Raises:
        UserInputError: for a name that is no choice, or one both freed and kept.
    """
    freed, stay = _choices("free", free or ()), _choices("keep", keep)
    if both := set(freed) & set(stay):
        raise UserInputError(
            "free, keep", sorted(both), "a choice is either freed or kept", "Name it once."
        )
    if free is None:  # all that leaves the checkpoints' format as it is
        freed = tuple(name for name in CHOICES if name != "use_megatron_fsdp")
    elif "all" in freed:
        freed = tuple(CHOICES)
    return tuple(name for name in freed if name not in (CHOICES if "all" in stay else stay))


def _choices(what: str, given: Collection[str] | str) -> tuple[str, ...]:
    names = (given,) if isinstance(given, str) else tuple(map(str, given))
    for name in names:
        require_known(what, name, (*CHOICES, "all"), "it is no choice that a plan makes")
    return names


def freed_flags(job: Job) -> frozenset[str]:
    """Destinations that the search may change for a job.

    Raises:
        UserInputError: for a name that frees nothing.
    """
    known = {**{name: (name,) for name in FAMILIES["all"]}, **FAMILIES, **CHOICES}
    names: set[str] = set()
    for name in job.free:
        plain = name.strip().lstrip("-").replace("-", "_")
        if plain not in known:
            raise UserInputError(
                job.free_option, name, "it is no flag that a plan sets", nearest(plain, known)
            )
        names.update(known[plain])
    for flags in _TOGETHER:
        if names.intersection(flags):
            names.update(flags)
    return frozenset(names)


def kept_flags(job: Job, request: Request, settings: Settings) -> frozenset[str]:
    """Destinations whose flags stay in the job's command; settings of our own command line win."""
    assert job.command
    parallel = settings.parallel
    replaced = set(fixed_degrees(settings))
    if request.space.partition is None:
        replaced.update((*STAGE_OPTIONS, *VIRTUAL_STAGES))
    if parallel.rank_order is not None:
        replaced.add("use_tp_pp_dp_mapping")
    if parallel.recompute_granularity is not None:
        replaced.update(RECOMPUTE)
    if parallel.zero_stage is not None:
        replaced.update((*STAGE, *IMPLEMENTATION, CKPT_FORMAT))
    ours = job.command.explicit.intersection(FAMILIES["all"])
    ours -= {name for name in STAGE_OPTIONS if not states_stages(job.values, name)}
    # what says nothing by itself may contradict a plan
    if job.recompute is None:
        ours -= {*RECOMPUTE}
    if job.spec.num_experts is None:
        ours -= {_EXPERT_TENSOR}
    return ours - replaced - freed_flags(job)


_PIPELINE = "pipeline_model_parallel_size"
_VIRTUAL = "virtual_pipeline_model_parallel_size"
_TENSOR, _EXPERT_TENSOR = "tensor_model_parallel_size", "expert_tensor_parallel_size"
_ORDER = "use_tp_pp_dp_mapping"
_LAYOUT = "pipeline_model_parallel_layout"


def job_space(job: Job, settings: Settings) -> tuple[SearchSpace, Offer | None]:
    """The job's flags as bounds of the search, under what our own configuration says.

    Returns:
        The space, and another data-parallel sharding that is only priced.

    Raises:
        UserInputError: if what the job states cannot be kept.
    """
    freed = freed_flags(job)
    offer = None
    space = _space(settings, job, freed)
    space = replace(space, zero_stages=for_optimizer(space.zero_stages, job))
    if settings.parallel.zero_stage is None:
        space, offer = _with_own_sharding(space, job, freed)
        if IMPLEMENTATION[0] in job.required:
            offer = None  # a checkpoint's sharding is not to be changed
    return with_required(space, job.spec, job.required), offer


def fixed_choices(job: Job) -> tuple[str, ...]:
    """What of the job's choices a plan holds fixed, by their names in ``LAYOUT``."""
    stated = _fixed_values(job, freed_flags(job))
    return tuple(name for name, flags in LAYOUT.items() if any(map(stated.get, flags)))


def _fixed_values(job: Job, freed: frozenset[str]) -> dict[str, Any]:
    return {name: value for name, value in job.fixed.items() if name not in freed}


def with_required(
    space: SearchSpace, spec: TransformerSpec, required: Mapping[str, Requirement]
) -> SearchSpace:
    """The space as far as a checkpoint can follow; what it leaves unsaid is checked afterwards."""
    fixed = dict(space.fixed)
    for name, need in required.items():
        if name not in DEGREES or need.value is None:
            continue
        if fixed.setdefault(name, int(need.value)) != need.value:
            raise _not_loadable(name, fixed[name], need)

    zeros = space.zero_stages
    for name, has in _OF_CHECKPOINTS.items():
        if (state := required.get(name)) is not None and state.value is not None:
            zeros = tuple(zero for zero in zeros if has(zero, space.sharding) == state.value)
            if not zeros:
                raise _not_loadable(name, not state.value, state)
    partition = space.partition
    layout = required.get(_LAYOUT)
    if layout is not None and layout.value is not None:
        saved = parse_layout(str(layout.value), spec, fixed[_PIPELINE])
        if partition not in (None, saved):
            raise _not_loadable(_LAYOUT, "as given", layout)
        partition = saved
    orders = space.rank_orders
    if mapping := required.get(_ORDER):
        order = rank_order_of({_ORDER: mapping.value})
        if order not in orders:
            raise _not_loadable(_ORDER, not mapping.value, mapping)
        orders = (order,)
    return replace(space, fixed=fixed, zero_stages=zeros, partition=partition, rank_orders=orders)


def _not_loadable(name: str, value: object, need: Requirement) -> UserInputError:
    return flag_error(name, value, need.limit, f"Change it, or {need.fix}.")


def _space(settings: Settings, job: Job, freed: frozenset[str]) -> SearchSpace:
    own = read_space(settings)
    spec = job.spec
    stated = _fixed_values(job, freed)
    limits = pipeline_limits(job.values, job.script, job.version)
    # what the user states is kept
    if not any(map(stated.get, (_PIPELINE, *STAGE_OPTIONS, *VIRTUAL_STAGES))):
        own = replace(own, limits={**limits, **own.limits})
    # every field of a recipe is said: those at None stay, too, at Megatron's defaults
    says_all = job.command is None and bool(job.stated)
    if says_all and states_stages(stated, _LAYOUT):  # it may state the virtual stages beside it
        stated = {name: value for name, value in stated.items() if name not in VIRTUAL_STAGES}
    fixed = {name: int(stated[name]) for name in DEGREES if stated.get(name) is not None}
    if says_all:
        ones = {_TENSOR, _PIPELINE, "context_parallel_size"}
        ones |= {"expert_model_parallel_size"} if spec.is_moe else set()
        fixed = {**dict.fromkeys(ones - freed, 1), **fixed}
        if spec.is_moe and _EXPERT_TENSOR not in freed and _TENSOR in fixed:
            fixed.setdefault(_EXPERT_TENSOR, fixed[_TENSOR])
    partition = _fixed_stages(job, stated, fixed, freed)
    if partition is None:
        virtual = _virtual(stated, fixed, spec)
        if virtual is None and says_all and not freed.intersection(VIRTUAL_STAGES):
            virtual = 1
        if virtual is not None:
            fixed[_VIRTUAL] = virtual
    orders, recompute = own.rank_orders, own.recompute
    states_order = stated.get(_ORDER) or says_all
    if states_order and settings.parallel.rank_order is None and _ORDER not in freed:
        orders = (rank_order_of(stated),)
    if recompute is None and not freed.intersection(RECOMPUTE):
        recompute = job.recompute or (NO_RECOMPUTE if says_all else None)
    # sequence parallelism belongs to all degrees together, and is no choice by itself
    return replace(
        own,
        fixed={**fixed, **own.fixed},
        rank_orders=orders,
        recompute=recompute,
        partition=partition,
        layers_in_bf16=layers_in_bf16(job.values),
        even_stages=says_all and partition is None and not freed.intersection(STAGE_OPTIONS),
        sequence_parallel=not (
            says_all
            and not freed.intersection(DEGREES) - {"micro_batch_size"}
            and fixed.get(_TENSOR, 1) > 1
            and not job.stated.get("sequence_parallel")
        )
        and (job.transformer_impl, spec.normalization) != ("local", "RMSNorm"),
    )


def _fixed_stages(
    job: Job, values: Values, fixed: Mapping[str, int], freed: frozenset[str]
) -> StagePartition | None:
    stated = [name for name in STAGE_OPTIONS if states_stages(values, name)]
    virtual = [*filter(values.get, VIRTUAL_STAGES)]
    if virtual and not stated and not freed.intersection(STAGE_OPTIONS):
        stated = virtual if _PIPELINE in fixed else []  # Megatron divides evenly
    number = "pipeline ranks" if _PIPELINE in freed else ""
    if not number and any(job.fixed.get(name) and name in freed for name in VIRTUAL_STAGES):
        number = "virtual stages"
    if stated and number:
        raise flag_error(
            stated[0],
            values[stated[0]],
            f"it divides the model for one number of {number}, and that number is freed",
            "Free stage_layout as well, or keep the number.",
        )
    return partition_of_values(job.spec, values, fixed.get(_PIPELINE, 1)) if stated else None


def _virtual(values: Values, fixed: Mapping[str, int], spec: TransformerSpec) -> int | None:
    layers, direct = map(values.get, VIRTUAL_STAGES)
    if direct is not None or layers is None:
        return None if direct is None else int(direct)
    pp = fixed.get(_PIPELINE)
    if pp is None or layers < 1 or spec.num_layers % (pp * layers):
        raise flag_error(
            VIRTUAL_STAGES[0],
            layers,
            f"with {pp or 'a free number of'} pipeline ranks it makes no whole number of "
            f"virtual stages of the {spec.num_layers} layers",
            f"Add --free {_VIRTUAL}, or --pipeline-model-parallel-size.",
        )
    return int(spec.num_layers // (pp * layers))


def _with_own_sharding(
    space: SearchSpace, job: Job, freed: Collection[str]
) -> tuple[SearchSpace, Offer | None]:
    """The space under the job's sharding, and another space that is only priced.

    Args:
        space: with every ZeRO stage that the configuration and the optimizer allow.
        freed: destinations that the search may change.

    Raises:
        UserInputError: if the job's own sharding contradicts its degrees or its checkpoint format.
    """
    sharding = job.sharding
    if CKPT_FORMAT not in freed and not _saves(sharding, job.ckpt_format):
        raise _refused_format(job)
    # what must be freed before another implementation may be taken; nothing if it may
    every = space.zero_stages
    present = IMPLEMENTATION[sharding is DataParallelSharding.TORCH_FSDP2]
    implementation = [] if IMPLEMENTATION[0] in freed else [present]
    fixed = {}
    for other in _FORMATS:
        saves = CKPT_FORMAT in freed or _saves(other, job.ckpt_format)
        fixed[other] = implementation if saves else [*implementation, CKPT_FORMAT]
    fixed.pop(sharding, None)
    if not any(fixed.values()):
        return space, None
    others = tuple(zero for zero in every if fixed.get(zero.sharding))
    saved = job.ckpt_format or _FORMATS.get(sharding, "torch_dist")
    offer = None
    if others:
        offer = Offer(
            space=replace(space, zero_stages=others),
            own=sharding,
            free={s: _spelled(job.free_option, names) for s, names in fixed.items()},
            ckpt_format={s: kind for s, kind in _FORMATS.items() if not _saves(s, saved)},
        )
    freely = tuple(zero for zero in every if fixed.get(zero.sharding) == [])
    if freely:  # from torch FSDP2 to what saves the format that is kept
        return replace(space, zero_stages=freely), offer
    zeros = sharding.zero_stages
    if job.zero is not None and not set(freed).intersection((*IMPLEMENTATION, *STAGE)):
        zeros = (job.zero,)
    zeros = for_optimizer(zeros, job, sharding)
    sizes = space.fixed
    if sharding is not DataParallelSharding.DDP:  # no FSDP has a pipeline (args:606)
        sizes = {_PIPELINE: 1, **sizes}
    return replace(space, zero_stages=zeros, sharding=sharding, fixed=sizes), offer


def for_optimizer(
    zeros: Collection[ZeroStage], job: Job, sharding: DataParallelSharding | None = None
) -> tuple[ZeroStage, ...]:
    """The stages that the job's optimizer and its flags run under; none is a user's error.

    A flag may assert that replicas divide the optimizer's states, and of one that takes whole
    matrices Megatron-LM lets them divide layers instead. Source: ``validate_args`` (0.16.1 :652;
    0.20 :1096, :1739), which a framework's recipe does not run, though no other optimizer casts
    into weights of 8 bits; ``OptimizerConfig.__post_init__``.
    """
    names = ("fp8_param_gather", "fp4_param_gather", AWARE)
    needs = next(filter(job.memory_flags.get, names), None)
    stays_whole = bool(job.fields) and job.optimizer not in ELEMENTWISE_OPTIMIZERS
    allowed = [
        zero
        for zero in zeros
        if allows_optimizer(job.optimizer, zero, job.version, sharding)
        and not (stays_whole and zero is not ZeroStage.NONE)
    ]
    kept = [
        zero
        for zero in allowed
        if not needs or zero is not ZeroStage.NONE or uses_megatron_fsdp(zero, sharding)
    ]
    if kept:
        return tuple(kept)
    refuses = f"{'megatron-core' if job.fields else 'Megatron-LM'} {job.version} refuses it"
    if needs and allowed:
        raise flag_error(
            needs,
            True,
            f"{refuses} without --use-distributed-optimizer",
            "Drop this one, or add that flag (of optimizers adam takes it), or free zero_stage.",
        )
    if stays_whole and job.target is not None:
        refuses = f"{job.target.framework} gives it a part of each gradient"
    stages = ", ".join(str(int(zero)) for zero in zeros)
    raise flag_error(
        "optimizer",
        job.optimizer,
        f"{refuses} where replicas divide states (ZeRO-{stages})",
        "Drop that flag, or free zero_stage.",
    )


def _saves(sharding: DataParallelSharding, ckpt_format: str | None) -> bool:
    """Whether Megatron lets it save that format (args:690, :1042, :1050; 0.20 :1169, :1668)."""
    is_fsdp = sharding is DataParallelSharding.MEGATRON_FSDP
    return {
        None: True,
        "fsdp_dtensor": is_fsdp,
        "torch_dcp": sharding is DataParallelSharding.TORCH_FSDP2,
    }.get(ckpt_format, not is_fsdp)


def _refused_format(job: Job) -> UserInputError:
    free = f"or free it with {_spelled(job.free_option, [CKPT_FORMAT])}."
    if job.sharding is DataParallelSharding.MEGATRON_FSDP:
        limit = "--use-megatron-fsdp saves fsdp_dtensor and no other format"
        fix = f"Use --ckpt-format fsdp_dtensor, drop --use-megatron-fsdp, {free}"
    else:
        owner = flag_of(IMPLEMENTATION[job.ckpt_format == "torch_dcp"])
        limit = f"only {owner} saves it, and the job lacks that flag"
        fix = f"Add {owner}, {free}"
    return flag_error(
        CKPT_FORMAT,
        job.ckpt_format,
        f"{limit}; Megatron-LM {job.version} refuses the two together",
        fix,
    )


def _spelled(option: str, names: list[str]) -> str:
    if option == "free":  # of a recipe, where it lists all that may change
        return "free=['all']"
    return f"{option} {','.join(names)}" if option[0] == "-" else f"{option}=[{','.join(names)}]"
