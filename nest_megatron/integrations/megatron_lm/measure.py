"""``nest.profile.mode=measure``: time this very job's layers on this machine, then plan with them.

Rank 0 plans from data sheets and says which blocks in which shapes matter; every rank times its
share in a child process; the timings meet at rank 0, which keeps them in the profile store. What
the store has is not measured again.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nest_megatron.config.cluster_detection import JobCluster
from nest_megatron.config.job import Job
from nest_megatron.errors import UserInputError, require_seconds
from nest_megatron.integrations.megatron_lm.agreement import (
    Check,
    broadcast,
    gather,
    propagating_errors,
)
from nest_megatron.integrations.megatron_lm.measure_process import (
    SPARE_S,
    MeasuringError,
    measure_in_child,
)
from nest_megatron.integrations.megatron_lm.measure_store import (
    here,
    missing,
    record,
    stored_profile,
    untimed,
    untimed_file,
)
from nest_megatron.integrations.megatron_lm.measure_tasks import tasks_for
from nest_megatron.integrations.megatron_lm.messages import (
    Answer,
    Orders,
    Skipped,
    from_json,
    to_json,
)
from nest_megatron.integrations.megatron_lm.own_layers import job_arguments
from nest_megatron.integrations.megatron_lm.planning import decide
from nest_megatron.integrations.megatron_lm.rendezvous import RankContext
from nest_megatron.integrations.megatron_lm.rendezvous_store import RendezvousStore
from nest_megatron.megatron_core.stage import Where
from nest_megatron.model.implementation import Implementation
from nest_megatron.profile.mode import ProfileMode
from nest_megatron.profile.records import LayerProfile, Timing
from nest_megatron.profile.session import share_of
from nest_megatron.profile.store import profiles_folder
from nest_megatron.report.console import say
from nest_megatron.units import Seconds

_TASKS, _TIMINGS = "list of what to measure", "timings"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What measuring brought, on rank 0; other ranks know nothing of it.

    Args:
        profile: as it is stored now, timings of earlier runs among it.
        timings: those taken now.
        skipped: blocks that could not be timed now.
        notes: for the report, one sentence each.
        seconds: of the slowest rank.
    """

    profile: LayerProfile | None = None
    timings: tuple[Timing, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: Seconds = 0.0


def measure_job(
    job: Callable[[], tuple[Job, JobCluster]],
    *,
    store: RendezvousStore | None = None,
    defaults: Mapping[str, Any] | None = None,
    free: Iterable[str] = (),
    max_seconds: Seconds | None = None,
) -> Measured:
    """Time the layers that a job will build, as far as the profile store lacks them.

    Called on all ranks of the job, or in a process without others; none has touched CUDA yet.

    Args:
        job: the job and where it runs; called on rank 0 alone.
        store: where the ranks meet.
        defaults: what the script sets where the user says nothing.
        free: the user's flags that the search may change.
        max_seconds: for measuring; the configuration's ``profile.max_seconds`` if not given.

    Raises:
        NestError: on all ranks, if a child dies or nothing can be timed at all.
    """
    name: list[str | None] = []
    before: list[LayerProfile | None] = []

    def plan_tasks(_: object) -> str:
        found, place = job()
        name.append(place.composed.config.profile.name)
        orders, known = _orders(found, place, defaults or {}, tuple(free), max_seconds)
        before.append(known)
        _announce(orders, 1 if store is None else store.context.world_size)
        return to_json(orders)

    orders = from_json(Orders, broadcast(store, plan_tasks, what=_TASKS))
    answers = _answers(orders, store) if orders.tasks else ()
    if store is not None and store.context.rank:
        return Measured()
    with propagating_errors(store):
        return _kept(orders, answers, name[0], before[0])


def _orders(
    job: Job,
    place: JobCluster,
    defaults: Mapping[str, Any],
    free: tuple[str, ...],
    max_seconds: Seconds | None,
) -> tuple[Orders, LayerProfile | None]:
    """What to measure, and the profile that has the rest."""
    asked = place.composed.config.profile
    seconds = require_seconds(
        "nest.profile.max_seconds", asked.max_seconds if max_seconds is None else max_seconds
    )
    implementation = _implementation(job)
    analytic = with_profile(place, ProfileMode.ANALYTIC)
    outcome = decide(job, analytic, free=free, alternative=0)
    assert outcome.searched is not None
    assert job.command is not None
    request = outcome.searched.request
    tasks = tasks_for(outcome.decision.plan, request, implementation)
    now = here(implementation)
    known = stored_profile(request.spec, request.settings.precision, now)
    orders = Orders(
        spec=request.spec,
        precision=request.settings.precision,
        tasks=missing(request.spec, tasks, known),
        job=job_arguments(job.command, defaults),
        implementation=implementation,
        where=now.where,
        max_seconds=seconds,
    )
    return orders, known


def _implementation(job: Job) -> Implementation:
    asked = job.transformer_impl
    if asked in tuple(Implementation):
        return Implementation(asked)
    raise UserInputError(
        "--transformer-impl",
        value=asked,
        limit="layers of this kind are not measured",
        fix="Leave nest.profile.mode=measure out.",
    )


def with_profile(place: JobCluster, mode: ProfileMode, name: str | None = None) -> JobCluster:
    """The same place, its layer times from elsewhere."""
    config = place.composed.config
    profile = dataclasses.replace(config.profile, mode=mode.value, name=name)
    composed = dataclasses.replace(
        place.composed, config=dataclasses.replace(config, profile=profile)
    )
    return dataclasses.replace(place, composed=composed)


def planned_with(place: JobCluster, measured: Measured) -> JobCluster:
    """Where the job runs, with the layer times that were measured, and what is to be told."""
    name = None if measured.profile is None else measured.profile.name
    place = with_profile(place, ProfileMode.AUTO, name)
    return dataclasses.replace(place, notes=(*place.notes, *measured.notes))


def _announce(orders: Orders, num_ranks: int) -> None:
    if orders.tasks:
        processes = min(num_ranks, len(orders.tasks))
        say(
            f"nest: {_count(orders.tasks)} of this job's layers to measure, in {processes} "
            f"process{'' if processes == 1 else 'es'}, for at most {orders.max_seconds:g} s."
        )


def _answers(orders: Orders, store: RendezvousStore | None) -> tuple[Answer, ...]:
    """What all ranks have measured; on ranks other than 0 nothing."""
    context = RankContext(rank=0, world_size=1, environment={}) if store is None else store.context

    def work(check: Check) -> str:
        return to_json(_own_part(orders, context.rank, context.world_size, check))

    limit_s = orders.max_seconds + SPARE_S + context.rendezvous_timeout_s
    parts = gather(store, work, what=_TIMINGS, limit_s=limit_s)
    return tuple(from_json(Answer, part) for part in parts)


def _own_part(orders: Orders, rank: int, num_ranks: int, check: Check) -> Answer:
    """This rank's share, measured; a rank without one starts no child."""
    tasks = share_of(orders.tasks, rank, num_ranks)
    if not tasks:
        return Answer()
    own = dataclasses.replace(orders, tasks=tasks)
    return measure_in_child(own, os.environ, check)


def _kept(
    orders: Orders,
    answers: Iterable[Answer],
    name: str | None,
    before: LayerProfile | None,
) -> Measured:
    """Everything measured, in the store, and what is to be said of it."""
    answers = [answer for answer in answers if answer.machine is not None]
    profiles = [
        record(answer, orders, None if other else name)
        for other, answer in enumerate(_by_machine(answers))
    ]
    stored = next((profile for profile in profiles if profile is not None), before)
    timings = tuple(timing for answer in answers for timing in answer.timings)
    skipped = tuple(one for answer in answers for one in answer.skipped)
    if stored is None and orders.tasks:
        why = skipped[0].reason if skipped else f"nothing was done within {orders.max_seconds:g} s"
        raise MeasuringError(f"no block of this job's layers could be timed: {why}")
    seconds = max((answer.seconds for answer in answers), default=0.0)
    measured = Measured(profile=stored, timings=timings, skipped=skipped, seconds=seconds)
    return dataclasses.replace(measured, notes=tuple(_notes(orders, measured, len(answers))))


def _by_machine(answers: Iterable[Answer]) -> list[Answer]:
    """The answers of equal machines as one each; clocks differ from one moment to the next."""
    joined: dict[object, Answer] = {}
    for answer in answers:
        assert answer.machine is not None
        alike = dataclasses.replace(answer.machine, graphics_mhz=None, memory_mhz=None)
        first = joined.get(alike)
        joined[alike] = (
            answer
            if first is None
            else dataclasses.replace(
                first,
                timings=(*first.timings, *answer.timings),
                skipped=(*first.skipped, *answer.skipped),
            )
        )
    return list(joined.values())


def _notes(orders: Orders, measured: Measured, num_processes: int) -> Iterable[str]:
    profile = measured.profile
    assert profile is not None
    kept = f"profile {profile.name} is in {profiles_folder()}"
    if not orders.tasks:
        known = len(untimed(profile))
        words = f", or known not to be timed ({_count(range(known))})" if known else ""
        yield f"Nothing was measured: all blocks are timed already{words}; {kept}."
        return
    device = "the CPU" if orders.where is Where.CPU else profile.machine.device_name
    yield (
        f"Measured {_count(measured.timings)} of this job's layers in {measured.seconds:.0f} s, in "
        f"{num_processes} process{'' if num_processes == 1 else 'es'} on {device}; {kept}."
    )
    large = [one for one in measured.skipped if one.is_too_large]
    refused = [one for one in measured.skipped if not one.is_too_large]
    left = len(orders.tasks) - len(measured.timings) - len(measured.skipped)
    if large:
        yield f"Too large for the device: {_count(large)}, {_words(large)}."
    if refused:
        yield (
            f"Could not be timed: {_count(refused)}, {_words(refused)} ({refused[0].reason}). "
            f"They are not tried again unless {untimed_file(profile)} is removed."
        )
    if left > 0:
        yield (
            f"Not reached within {orders.max_seconds:g} s: {_count(range(left))}; the next launch "
            "measures on (nest.profile.max_seconds)."
        )


def _count(blocks: Iterable[object]) -> str:
    count = len(tuple(blocks))
    return f"{count} block{'' if count == 1 else 's'}"


def _words(skipped: list[Skipped]) -> str:
    """The first of some blocks, by name and shape."""
    shown = [
        f"{one.task.block.value} (tp {one.task.shard.tensor_model_parallel_size}, micro batch "
        f"{one.task.shard.micro_batch_size})"
        for one in skipped[:3]
    ]
    return ", ".join(shown) + (" ..." if len(skipped) > 3 else "")
