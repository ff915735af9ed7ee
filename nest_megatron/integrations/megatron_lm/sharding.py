"""What divides a job's states among its replicas, and what its optimizer runs under.

A job stays with its own data-parallel sharding, unless the user frees it; another is priced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from nest_megatron.config.job import Job, Requirement
from nest_megatron.cost_model.memory_flags import text
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.megatron_lm.layout_arguments import flag_error, flag_of
from nest_megatron.layout.rulebook.facts import Facts
from nest_megatron.layout.rulebook.rule import violations
from nest_megatron.layout.rulebook.sharding import (
    AWARE,
    OPTIMIZER_RULES,
    STATE_FORMATS,
    allows_optimizer,
)
from nest_megatron.layout.zero import (
    DataParallelSharding,
    ZeroStage,
    shards_optimizer,
    uses_megatron_fsdp,
)
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
        raise _refused_format(job)
    fixed = {s: _fixed_by_user(job, s, freed) for s in _FORMATS if s is not job.sharding}
    every = space.zero_stages
    if not any(fixed.values()):
        return space, None
    others = tuple(zero for zero in every if fixed.get(zero.sharding))
    saved, offer = job.ckpt_format or _FORMATS.get(job.sharding, "torch_dist"), None
    if others:
        offer = Offer(
            space=dataclasses.replace(space, zero_stages=others),
            own=job.sharding,
            free={sharding: _spelled(job.free.option, names) for sharding, names in fixed.items()},
            ckpt_format={s: kind for s, kind in _FORMATS.items() if not _saves(s, saved)},
        )
    freely = tuple(zero for zero in every if fixed.get(zero.sharding) == [])
    if freely:  # from torch FSDP2 to what saves the format that is kept
        return dataclasses.replace(space, zero_stages=freely), offer
    zeros = job.sharding.zero_stages
    if job.zero is not None and not set(freed).intersection((*IMPLEMENTATION, *STAGE)):
        zeros = (job.zero,)
    zeros = for_optimizer(zeros, job)
    own = dataclasses.replace(space, zero_stages=zeros, sharding=job.sharding)
    return _on_its_mesh(own, job.sharding), offer


def loads(
    zero: ZeroStage, sharding: DataParallelSharding | None, required: Mapping[str, Requirement]
) -> bool:
    """Whether a checkpoint can be loaded under a ZeRO stage; what it leaves unsaid is passed."""
    has = (uses_megatron_fsdp(zero, sharding), shards_optimizer(zero, sharding))
    pairs = zip(CHECKPOINT_NEEDS, has, strict=True)
    return all(required[name].value in (None, on) for name, on in pairs if name in required)


def for_optimizer(zeros: Collection[ZeroStage], job: Job) -> tuple[ZeroStage, ...]:
    """The stages that the job's optimizer and its flags run under; none is a user's error."""
    needs = _needs_shared_states(job)
    allowed = tuple(
        zero
        for zero in zeros
        if allows_optimizer(job.optimizer, zero, job.version)
        and not (needs and zero is ZeroStage.NONE)
    )
    if allowed:
        return allowed
    refuses = f"Megatron-LM {job.version} refuses it"
    if needs and set(zeros) == {ZeroStage.NONE}:
        raise flag_error(
            needs,
            True,
            f"{refuses} without --use-distributed-optimizer",
            "Add that flag, drop this one, or free zero_stage.",
        )
    stages = ", ".join(str(int(zero)) for zero in zeros)
    raise flag_error(
        "optimizer",
        job.optimizer,
        f"{refuses} where replicas divide states (ZeRO-{stages})",
        "Drop that flag, or free zero_stage.",
    )


def _needs_shared_states(job: Job) -> str | None:
    """A flag of the job that asserts that replicas divide the optimizer's states.

    Source: ``validate_args`` (0.16.1 :652; 0.20 :1096), which a framework's recipe does not run;
    ``OptimizerConfig.__post_init__``.
    """
    of_script = ("fp8_param_gather",) if job.script else ()
    return next(filter(job.memory_flags.get, (*of_script, AWARE)), None)


def require_optimizer(values: Mapping[str, Any], version: str) -> None:
    """Raise for options of the optimizer that do not go together (``OPTIMIZER_RULES``).

    Args:
        values: Megatron's arguments by destination, before or after its validation.

    Raises:
        UserInputError: naming the flag, and the one that it needs.
    """
    words = {n: text(values[n]) for n in (*STATE_FORMATS, "fp8_recipe") if values.get(n)}
    facts = Facts(options={**values, "fp8_recipe": "delayed", **words}, version=version)
    for _, broken in violations(facts, OPTIMIZER_RULES):
        raise flag_error(broken.what, broken.value, broken.limit, broken.fix)


def _saves(sharding: DataParallelSharding, ckpt_format: str | None) -> bool:
    """Whether Megatron lets it save that format (args:690, :1042, :1050; 0.20 :1169, :1668)."""
    alone = {
        "fsdp_dtensor": DataParallelSharding.MEGATRON_FSDP,
        "torch_dcp": DataParallelSharding.TORCH_FSDP2,
    }
    if ckpt_format in alone:
        return sharding is alone[ckpt_format]
    return ckpt_format is None or sharding is not DataParallelSharding.MEGATRON_FSDP


def _refused_format(job: Job) -> UserInputError:
    free = f"or free it with {_spelled(job.free.option, [CKPT_FORMAT])}."
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


def _fixed_by_user(job: Job, other: DataParallelSharding, freed: Collection[str]) -> list[str]:
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
        DataParallelSharding.MEGATRON_FSDP: ("pipeline_model_parallel_size",),
        DataParallelSharding.TORCH_FSDP2: (
            "pipeline_model_parallel_size",
            "expert_model_parallel_size",
        ),
    }[sharding]
    for name in needs:
        if space.fixed.get(name, 1) != 1:
            raise flag_error(
                name,
                space.fixed[name],
                f"it must be 1 under {flag_of(f'use_{sharding.value}')}",
                "Use 1, or another data-parallel sharding.",
            )
    return dataclasses.replace(space, fixed={**space.fixed, **dict.fromkeys(needs, 1)})


def _spelled(option: str, names: list[str]) -> str:
    if option == "free":  # of a recipe, where it lists all that may change
        return "free=['all']"
    return f"{option} {','.join(names)}" if option[0] == "-" else f"{option}=[{','.join(names)}]"
