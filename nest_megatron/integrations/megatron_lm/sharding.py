"""A job stays with its own data-parallel sharding, unless the user frees it; another is priced."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import NoReturn

from nest_megatron.config.job import Job, Requirement
from nest_megatron.errors import UserInputError
from nest_megatron.parallel.rules import allows_optimizer
from nest_megatron.parallel.zero import DataParallelSharding, ZeroStage
from nest_megatron.planner.request import Offer
from nest_megatron.solver.space import SearchSpace

#: Flags that name the implementation, and those of the ZeRO stage within it.
IMPLEMENTATION = ("use_megatron_fsdp", "use_torch_fsdp2")
STAGE = ("use_distributed_optimizer", "data_parallel_sharding_strategy")
CKPT_FORMAT = "ckpt_format"
#: What of the sharding a checkpoint may need.
CHECKPOINT_NEEDS = ("use_megatron_fsdp", "use_distributed_optimizer")

#: What a plan may choose, and the format that it sets where another is typed.
_FORMATS = {
    DataParallelSharding.DDP: "torch_dist",
    DataParallelSharding.MEGATRON_FSDP: "fsdp_dtensor",
}
_PIPELINE, _EXPERTS = "pipeline_model_parallel_size", "expert_model_parallel_size"


def with_own_sharding(
    space: SearchSpace, job: Job, freed: Collection[str]
) -> tuple[SearchSpace, Offer | None]:
    """The space under the job's own sharding, and the space beside it that is only priced.

    Args:
        space: with every ZeRO stage that the configuration and the optimizer allow.
        freed: destinations that the search may change.

    Raises:
        UserInputError: if the job's own sharding contradicts its degrees or its checkpoint format.
    """
    if CKPT_FORMAT not in freed and not _saves(job.sharding, job.ckpt_format):
        _refuse_format(job)
    held = {s: _held(job, s, freed) for s in _FORMATS if s is not job.sharding}
    every = space.zero_stages
    if not any(held.values()):
        return space, None
    others = tuple(zero for zero in every if held.get(zero.sharding))
    offer = _offer(dataclasses.replace(space, zero_stages=others), job, held)
    freely = tuple(zero for zero in every if held.get(zero.sharding) == [])
    if freely:  # from torch FSDP2 to what saves the format that is kept
        return dataclasses.replace(space, zero_stages=freely), offer
    zeros = job.sharding.zero_stages
    if job.zero is not None and not any(name in freed for name in (*IMPLEMENTATION, *STAGE)):
        zeros = (job.zero,)
    zeros = for_optimizer(zeros, job)
    own = dataclasses.replace(space, zero_stages=zeros, sharding=job.sharding)
    return _on_its_mesh(own, job.sharding), offer


def _offer(
    space: SearchSpace,
    job: Job,
    held: Mapping[DataParallelSharding, list[str]],
) -> Offer | None:
    if not space.zero_stages:
        return None
    saved = job.ckpt_format or _FORMATS.get(job.sharding, "torch_dist")
    return Offer(
        space=space,
        own=job.sharding,
        free={sharding: _spelled(job.free.option, names) for sharding, names in held.items()},
        ckpt_format={s: kind for s, kind in _FORMATS.items() if not _saves(s, saved)},
    )


def loads(
    zero: ZeroStage, sharding: DataParallelSharding | None, required: Mapping[str, Requirement]
) -> bool:
    """Whether a checkpoint can be loaded under a ZeRO stage; what it leaves unsaid is passed."""
    sharding = sharding or zero.sharding
    shards = zero >= ZeroStage.OPTIMIZER and sharding is not DataParallelSharding.TORCH_FSDP2
    fsdp = sharding is DataParallelSharding.MEGATRON_FSDP
    has = dict(zip(CHECKPOINT_NEEDS, (fsdp, shards or fsdp), strict=True))
    return all(
        required[name].value in (None, has[name]) for name in CHECKPOINT_NEEDS if name in required
    )


def for_optimizer(zeros: Collection[ZeroStage], job: Job) -> tuple[ZeroStage, ...]:
    """The stages that the job's optimizer and its flags run under.

    Raises:
        UserInputError: if there is none.
    """
    optimizer = job.optimizer
    if set(zeros) == {ZeroStage.NONE} and (flag := _needs_shared_states(job)):
        raise UserInputError(
            f"--{flag.replace('_', '-')}",
            value=True,
            limit=f"Megatron-LM {job.version} refuses it without --use-distributed-optimizer",
            fix="Add that flag, drop this one, or free zero_stage.",
        )
    allowed = tuple(
        zero
        for zero in zeros
        if allows_optimizer(optimizer, zero, job.version)
        and (zero is not ZeroStage.NONE or not _needs_shared_states(job))
    )
    if allowed:
        return allowed
    raise UserInputError(
        "--optimizer",
        value=optimizer,
        limit=f"Megatron-LM {job.version} refuses it where replicas divide states "
        f"(ZeRO-{', '.join(str(int(zero)) for zero in zeros)})",
        fix="Drop that flag, or free zero_stage.",
    )


def _needs_shared_states(job: Job) -> str | None:
    """A flag of the job that asserts that replicas divide the optimizer's states.

    Source: ``validate_args`` (0.16.1 :652; 0.20 :1096), which a framework's recipe does not run;
    ``OptimizerConfig.__post_init__``.
    """
    of_script = ("fp8_param_gather",) if job.script else ()
    asserting = (*of_script, "use_precision_aware_optimizer")
    return next((name for name in asserting if job.memory_flags.get(name)), None)


def _saves(sharding: DataParallelSharding, ckpt_format: str | None) -> bool:
    """Whether Megatron lets it save that format (args:690, :1042, :1050; 0.20 :1169, :1668)."""
    alone = {
        "fsdp_dtensor": DataParallelSharding.MEGATRON_FSDP,
        "torch_dcp": DataParallelSharding.TORCH_FSDP2,
    }
    if ckpt_format in alone:
        return sharding is alone[ckpt_format]
    return ckpt_format is None or sharding is not DataParallelSharding.MEGATRON_FSDP


def _refuse_format(job: Job) -> NoReturn:
    free = f"or free it with {_spelled(job.free.option, [CKPT_FORMAT])}."
    if job.sharding is DataParallelSharding.MEGATRON_FSDP:
        limit = "--use-megatron-fsdp saves fsdp_dtensor and no other format"
        fix = f"Use --ckpt-format fsdp_dtensor, drop --use-megatron-fsdp, {free}"
    else:
        owner = IMPLEMENTATION[job.ckpt_format == "torch_dcp"].replace("_", "-")
        limit = f"only --{owner} saves it, and the job lacks that flag"
        fix = f"Add --{owner}, {free}"
    limit = f"{limit}; Megatron-LM {job.version} refuses the two together"
    raise UserInputError("--ckpt-format", value=job.ckpt_format, limit=limit, fix=fix)


def _held(job: Job, other: DataParallelSharding, freed: Collection[str]) -> list[str]:
    """What must be freed before another implementation may be taken; nothing if it may."""
    of_torch = job.sharding is DataParallelSharding.TORCH_FSDP2
    names = [] if IMPLEMENTATION[0] in freed else [IMPLEMENTATION[of_torch]]
    if CKPT_FORMAT not in freed and not _saves(other, job.ckpt_format):
        names.append(CKPT_FORMAT)
    return names


def _on_its_mesh(space: SearchSpace, sharding: DataParallelSharding) -> SearchSpace:
    """Neither FSDP has a pipeline, and torch's has no expert parallelism (args:606-612)."""
    needs = {
        DataParallelSharding.DDP: (),
        DataParallelSharding.MEGATRON_FSDP: (_PIPELINE,),
        DataParallelSharding.TORCH_FSDP2: (_PIPELINE, _EXPERTS),
    }[sharding]
    for name in needs:
        if space.fixed.get(name, 1) != 1:
            raise UserInputError(
                f"--{name.replace('_', '-')}",
                value=space.fixed[name],
                limit=f"it must be 1 under --use-{sharding.value.replace('_', '-')}",
                fix="Use 1, or another data-parallel sharding.",
            )
    return dataclasses.replace(space, fixed={**space.fixed, **dict.fromkeys(needs, 1)})


def _spelled(option: str, names: list[str]) -> str:
    """What the user types to free some names."""
    if option == "free":  # of a recipe, where it lists all that may change
        return "free=['all']"
    return f"{option} {','.join(names)}" if option[0] == "-" else f"{option}=[{','.join(names)}]"
