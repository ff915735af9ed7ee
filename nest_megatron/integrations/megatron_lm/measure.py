"""``nest.profile.mode=measure``: time this very job's layers on this machine, then plan with them.

Rank 0 plans from data sheets and says which blocks in which shapes matter; every rank times its
share in a child process; the timings meet at rank 0, which adds them to the profile store. What
the store has is not measured again.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nest_megatron.config.cluster_detection import JobCluster
from nest_megatron.config.job import Job
from nest_megatron.errors import require_seconds
from nest_megatron.integrations.megatron_lm import agreement, measure_process, measure_store
from nest_megatron.integrations.megatron_lm.agreement import RendezvousStore
from nest_megatron.integrations.megatron_lm.layout_arguments import flag_error
from nest_megatron.integrations.megatron_lm.measure_store import tasks_for
from nest_megatron.integrations.megatron_lm.messages import (
    Answer,
    Orders,
    from_json,
    to_json,
)
from nest_megatron.integrations.megatron_lm.own_layers import job_arguments
from nest_megatron.integrations.megatron_lm.planning import decide
from nest_megatron.integrations.megatron_lm.rendezvous import RankContext
from nest_megatron.megatron_core.stage import Where
from nest_megatron.model.implementation import Implementation
from nest_megatron.profile.mode import ProfileMode
from nest_megatron.profile.records import LayerProfile, Timing
from nest_megatron.profile.session import Skipped, share_of
from nest_megatron.profile.store import profiles_folder
from nest_megatron.report.console import say
from nest_megatron.units import Seconds, counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What measuring brought, on rank 0: the profile as it is stored now, what is new in it."""

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
) -> Measured:
    """Time the layers that a job will build, as far as the profile store lacks them.

    Called on all ranks of the job, or in a process without others; none has touched CUDA yet.

    Args:
        job: the job and where it runs; called on rank 0 alone.
        defaults: what the script sets where the user says nothing.
        free: the user's flags that the search may change.

    Raises:
        NestError: on all ranks, if a child dies or nothing can be timed at all.
    """
    known: list[tuple[str | None, LayerProfile | None]] = []
    context = RankContext(rank=0, world_size=1, environment={}) if store is None else store.context

    def plan_tasks(_: object) -> str:
        found, place = job()
        orders, before = _orders(found, place, defaults or {}, tuple(free))
        known.append((place.settings.profile.name, before))
        if orders.tasks:
            processes = counted(min(context.world_size, len(orders.tasks)), "process")
            say(
                f"nest: {counted(len(orders.tasks), 'block')} of this job's layers to measure, "
                f"in {processes}, for at most {orders.max_seconds:g} s."
            )
        return to_json(orders)

    orders = from_json(
        Orders, agreement.broadcast(store, plan_tasks, what="list of what to measure")
    )
    answers = _answers(orders, store, context) if orders.tasks else []
    if not known:
        return Measured()
    with agreement.propagating_errors(store):
        return _recorded(orders, answers, *known[0])


def _orders(
    job: Job, place: JobCluster, defaults: Mapping[str, Any], free: tuple[str, ...]
) -> tuple[Orders, LayerProfile | None]:
    """What to measure, and the profile that has the rest."""
    seconds = place.settings.profile.max_seconds
    if job.transformer_impl not in tuple(Implementation):
        limit, fix = "layers of this kind are not measured", "Leave nest.profile.mode=measure out."
        raise flag_error("transformer_impl", job.transformer_impl, limit, fix)
    implementation = Implementation(job.transformer_impl)
    max_seconds = require_seconds("nest.profile.max_seconds", seconds)
    outcome = decide(job, with_profile(place, ProfileMode.ANALYTIC), free=free, alternative=0)
    assert outcome.searched is not None
    assert job.command is not None
    request = outcome.searched.request
    tasks = tasks_for(outcome.decision.plan, request, implementation)
    now = measure_store.here(implementation)
    known = measure_store.stored_profile(request.spec, request.settings.precision, now)
    orders = Orders(
        spec=request.spec,
        precision=request.settings.precision,
        tasks=measure_store.missing(request.spec, tasks, known),
        job=job_arguments(job.command, defaults),
        implementation=implementation,
        where=now.where,
        max_seconds=max_seconds,
    )
    return orders, known


def with_profile(place: JobCluster, mode: ProfileMode, name: str | None = None) -> JobCluster:
    """The same place, its layer times from elsewhere."""
    profile = dataclasses.replace(place.settings.profile, mode=mode.value, name=name)
    settings = dataclasses.replace(place.settings, profile=profile)
    return dataclasses.replace(place, settings=settings)


def planned_with(place: JobCluster, measured: Measured) -> JobCluster:
    """Where the job runs, with the layer times that were measured, and what is to be told."""
    name = None if measured.profile is None else measured.profile.name
    place = with_profile(place, ProfileMode.AUTO, name)
    return dataclasses.replace(place, notes=(*place.notes, *measured.notes))


def _answers(orders: Orders, store: RendezvousStore | None, context: RankContext) -> list[Answer]:
    """What the ranks that had something to do have measured; on ranks other than 0 nothing."""
    check = (lambda: None) if store is None else store.raise_failure

    def work() -> str:
        tasks = share_of(orders.tasks, context.rank, context.world_size)
        own = dataclasses.replace(orders, tasks=tasks)
        return to_json(
            measure_process.measure_in_child(own, os.environ, check) if tasks else Answer()
        )

    limit_s = orders.max_seconds + measure_process.SPARE_S + context.rendezvous_timeout_s
    parts = agreement.gather(store, work, what="timings", limit_s=limit_s)
    answers = (from_json(Answer, part) for part in parts)
    return [answer for answer in answers if answer.machine is not None]


def _recorded(
    orders: Orders, answers: list[Answer], name: str | None, before: LayerProfile | None
) -> Measured:
    profiles = [
        measure_store.record(answer, orders, None if other else name)
        for other, answer in enumerate(_by_machine(answers))
    ]
    stored = next((profile for profile in profiles if profile is not None), before)
    skipped = tuple(one for answer in answers for one in answer.skipped)
    if stored is None and orders.tasks:
        why = skipped[0].reason if skipped else f"nothing was done within {orders.max_seconds:g} s"
        raise measure_process.MeasuringError(f"no block of this job's layers could be timed: {why}")
    measured = Measured(
        profile=stored,
        timings=tuple(timing for answer in answers for timing in answer.timings),
        skipped=skipped,
        seconds=max((answer.seconds for answer in answers), default=0.0),
    )
    return dataclasses.replace(measured, notes=tuple(_notes(orders, measured, len(answers))))


def _by_machine(answers: Iterable[Answer]) -> Iterable[Answer]:
    """The answers of equal machines as one each; clocks differ from one moment to the next."""
    joined: dict[object, Answer] = {}
    for answer in answers:
        assert answer.machine is not None
        alike = dataclasses.replace(answer.machine, graphics_mhz=None, memory_mhz=None)
        first = joined.get(alike, dataclasses.replace(answer, timings=(), skipped=()))
        timings = (*first.timings, *answer.timings)
        skipped = (*first.skipped, *answer.skipped)
        joined[alike] = dataclasses.replace(first, timings=timings, skipped=skipped)
    return joined.values()


def _notes(orders: Orders, measured: Measured, num_processes: int) -> Iterator[str]:
    profile = measured.profile
    assert profile is not None
    where = f"profile {profile.name} is in {profiles_folder()}"
    if not orders.tasks:
        failed = measure_store.untimed(profile)
        words = f", or known not to be timed ({counted(len(failed), 'block')})" if failed else ""
        yield f"Nothing was measured: all blocks are timed already{words}; {where}."
        return
    device = "the CPU" if orders.where is Where.CPU else profile.machine.device_name
    yield (
        f"Measured {counted(len(measured.timings), 'block')} of this job's layers in "
        f"{measured.seconds:.0f} s, in {counted(num_processes, 'process')} on {device}; {where}."
    )
    large = [one for one in measured.skipped if one.is_too_large]
    refused = [one for one in measured.skipped if not one.is_too_large]
    left = len(orders.tasks) - len(measured.timings) - len(measured.skipped)
    if large:
        yield f"Too large for the device: {_named(large)}."
    if refused:
        yield (
            f"Could not be timed: {_named(refused)} ({refused[0].reason}). "
            f"They are not tried again unless {measure_store.untimed_file(profile)} is removed."
        )
    if left > 0:
        yield (
            f"Not reached within {orders.max_seconds:g} s: {counted(left, 'block')}; the next "
            "launch measures on (nest.profile.max_seconds)."
        )


def _named(skipped: list[Skipped]) -> str:
    """How many blocks, and the first of them by name and shape."""
    shown = [
        f"{one.task.block.value} (tp {one.task.shard.tensor_model_parallel_size}, micro batch "
        f"{one.task.shard.micro_batch_size})"
        for one in skipped[:3]
    ]
    more = " ..." if len(skipped) > 3 else ""
    return f"{counted(len(skipped), 'block')}, {', '.join(shown)}{more}"
