"""The batch of a job, and how it grows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from nest_megatron.config.job import Job
from nest_megatron.config.schema import PlanConfig
from nest_megatron.config.target import read_target
from nest_megatron.cost_model.target_defaults import MEGATRON_LM
from nest_megatron.cost_model.targets import Target
from nest_megatron.errors import UserInputError
from nest_megatron.parallel.batch_schedule import RAMPUP, STEPS, BatchSchedule, read_schedule

#: Sequences of one optimizer step where nobody says: with 8,192 tokens each, the 4 Mi tokens a step
#: that models of 70 B parameters and more are trained with.
DEFAULT_GLOBAL_BATCH_SIZE = 512

#: Degrees whose product is the ranks of one replica.
REPLICA_DEGREES = (
    "tensor_model_parallel_size",
    "context_parallel_size",
    "pipeline_model_parallel_size",
)


def batch_schedule_of(config: PlanConfig, job: Job) -> BatchSchedule | None:
    """How the batch grows: as the job says, or the settings of a model of the catalogue."""
    train, own = config.train, job.batch_schedule
    size = train.global_batch_size
    settings = {RAMPUP: train.rampup_batch_size, STEPS: train.step_batch_size_schedule}
    stated: dict[str, Any] = {n: value for n, value in settings.items() if value is not None}
    if own is not None and size is not None and job.command is None:
        stated["global_batch_size"] = size
    for name, value in stated.items() if own or job.command or job.fixed else ():
        limit, fix = "the batch, and how it grows, are the job's own", "Change the job."
        raise UserInputError(f"train.{name}", value=value, limit=limit, fix=fix)
    if own is not None or not stated:
        return own
    _require_taken(stated, read_target(config, job.target), size)
    return read_schedule(
        stated.get,
        last=size,
        seq_length=job.spec.seq_length,
        samples=train.train_samples,
        name="train.{}".format,
    )


def _require_taken(stated: Mapping[str, object], target: Target, size: int | None) -> None:
    """Refuse a way to state a growing batch that the target does not have.

    0.16.1 knows no schedule of steps, 0.20 takes no notice of a ramp.
    """
    taken = RAMPUP if target.megatron_core.startswith("0.16") else STEPS
    for name in stated.keys() - {taken}:
        limit = f"{target.framework} with megatron-core {target.megatron_core} does not take it"
        fix = f"Give train.{taken}, or another target."
        raise UserInputError(f"train.{name}", value=stated[name], limit=limit, fix=fix)
    if taken == STEPS and size is not None:
        limit, fix = "the schedule says every size", "Leave it out."
        raise UserInputError("train.global_batch_size", value=size, limit=limit, fix=fix)


def batch_of(
    config: PlanConfig, job: Job, num_gpus: int, schedule: BatchSchedule | None
) -> tuple[int, list[str]]:
    """The global batch size, and what was assumed of the job.

    Megatron's own, where none is given, is one micro batch on each replica of the user's layout.
    Source: ``validate_args`` (0.16.1 :591).
    """
    notes, stated = list(job.notes), config.train.global_batch_size
    batch = job.global_batch_size if stated is None else stated
    if schedule is not None:
        batch = schedule.longest
        known = "with which most of the run is trained"
        if schedule.parts[-1].samples is None:
            known = "the last; with the length of the run (train_samples) it would be the longest"
        notes.append(
            f"The batch grows ({schedule.words()}): every layout that is searched is legal at each "
            f"size; the plan is the best at {batch}, {known}."
        )
    if batch is None:
        batch = DEFAULT_GLOBAL_BATCH_SIZE
        if job.micro_batch_size and job.num_gpus is not None:
            one_replica = math.prod(int(job.fixed.get(name) or 1) for name in REPLICA_DEGREES)
            batch = job.micro_batch_size * max(1, num_gpus // one_replica)
        name = "train.global_batch_size" if job.target is None else "--global-batch-size"
        notes.append(f"{name} is not given; {batch} sequences are assumed.")
    target = read_target(config, job.target)
    if job.target is None and config.target is None:
        own = f"{target.framework} is assumed (target={target.name})"
        notes.append(f"No framework is named; {own}.")
    elif job.target is None and target not in MEGATRON_LM:
        notes.append(f"The plan is for {target.framework}; docs/nemo.md says how recipes take it.")
    if job.num_gpus not in (None, num_gpus):
        notes.append(f"The launcher starts {job.num_gpus} ranks, but the plan is for {num_gpus}.")
    return batch, notes
