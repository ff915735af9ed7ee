"""``nest.profile.mode=measure``: time this very job's layers on this machine, then plan with them.

Rank 0 plans from data sheets and says which blocks in which shapes matter; every rank times its
share in a child process; the timings meet at rank 0, which adds them to the profile store. What
the store has is not measured again, nor what failed. The most useful comes first: the best plans'
shapes, then near ones.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from operator import attrgetter
from pathlib import Path
from typing import IO, Any

from nest_megatron.cluster.discovery import local_gpus
from nest_megatron.cluster.records import Precision
from nest_megatron.config.cluster_detection import JobCluster, processes_per_host
from nest_megatron.config.job import Job
from nest_megatron.config.schema import with_values
from nest_megatron.cost_model.model import CostModel
from nest_megatron.documents import read_json
from nest_megatron.errors import NestError, ProfileError, UserInputError, require_seconds
from nest_megatron.files import now
from nest_megatron.integrations.megatron_lm import agreement
from nest_megatron.integrations.megatron_lm.agreement import RendezvousStore
from nest_megatron.integrations.megatron_lm.layout_arguments import Values, flag_error
from nest_megatron.integrations.megatron_lm.measure_child import Answer, Orders
from nest_megatron.integrations.megatron_lm.own_layers import job_arguments
from nest_megatron.integrations.megatron_lm.planning import decide
from nest_megatron.integrations.megatron_lm.rendezvous import RankContext
from nest_megatron.integrations.process_variables import Environment
from nest_megatron.layout.dims import LAYER_DEGREES
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.megatron_core.stage import Where
from nest_megatron.model.execution import Implementation
from nest_megatron.model.layer_pattern import LayerBlock
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.plain import from_plain, to_plain
from nest_megatron.planner import Request
from nest_megatron.profile import store
from nest_megatron.profile.installed import driver_version
from nest_megatron.profile.lookup import Point, point_of, shard_of
from nest_megatron.profile.records import (
    LayerProfile,
    Machine,
    ProfileMode,
    default_name,
    fingerprint,
    shape_digest,
)
from nest_megatron.profile.session import Skipped, Task, share_of, tasks_of, this_machine
from nest_megatron.profile.store import LAYERS, profiles_folder
from nest_megatron.report.console import say
from nest_megatron.solver.grids import GridSpace
from nest_megatron.units import Seconds, counted

_COMMAND = (sys.executable, "-m", "nest_megatron.integrations.megatron_lm.measure_child")
#: Time for what the budget leaves out: imports from a slow disk, and a last block that was begun.
SPARE_S = 300.0
_LAST_WORDS = 15
#: Variables by which a process would take itself for a rank of the job.
_OF_RANKS = re.compile(
    r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)"
    r"|(TORCHELASTIC|SLURM|PMI|OMPI)_.*)"
)


class MeasuringError(NestError):
    """A child that measures died, or did not end."""


def measure_job(
    job: Callable[[], tuple[Job, JobCluster]],
    *,
    store: RendezvousStore | None = None,
    defaults: Values | None = None,
    free: Sequence[str] = (),
) -> tuple[Job, JobCluster] | None:
    """Time the layers that a job will build, as far as the profile store lacks them.

    Called on all ranks of the job, or in a process without others; none has touched CUDA yet.

    Args:
        job: the job and where it runs; called on rank 0 alone.
        defaults: what the script sets where the user says nothing.
        free: the user's flags that the search may change.

    Returns:
        The job and where it runs, with the layer times that are stored now, on rank 0.

    Raises:
        NestError: on all ranks, if a child dies or nothing can be timed at all.
    """
    found: tuple[Job, JobCluster, LayerProfile | None] | None = None
    context = RankContext(rank=0, world_size=1, environment={}) if store is None else store.context

    def list_tasks(_: object) -> Orders:
        nonlocal found
        read, place = job()
        orders, known = _orders(read, place, defaults or {}, free)
        found = read, place, known
        if orders.tasks:
            processes = counted(min(context.world_size, len(orders.tasks)), "process")
            say(
                f"nest: {counted(len(orders.tasks), 'block')} of this job's layers to measure, "
                f"in {processes}, for at most {orders.max_seconds:g} s."
            )
        return orders

    def work() -> Answer:
        own = share_of(orders.tasks, context.rank, context.world_size)
        if not own:
            return Answer()
        check = (lambda: None) if store is None else store.raise_failure
        pause_s = 1.0 if store is None else store.interval_s
        return measure_in_child(replace(orders, tasks=own), os.environ, check, pause_s)

    orders = from_plain(
        Orders, agreement.broadcast(store, list_tasks, what="list of what to measure")
    )
    answers: Sequence[Any] = ()
    if orders.tasks:
        answers = agreement.gather(
            store,
            work,
            what="timings",
            limit_s=orders.max_seconds + SPARE_S + context.rendezvous_timeout_s,
        )
    if found is None:
        return None
    read, place, known = found
    with agreement.propagating_errors(store):
        measured = [from_plain(Answer, each) for each in answers if each["machine"] is not None]
        profile = _recorded(orders, measured, place.settings.profile.name, known)
    notes = (*place.notes, *_notes(orders, measured, profile))
    place = with_profile(place, ProfileMode.AUTO, profile.name)
    return read, replace(place, notes=notes)


def _orders(
    job: Job, place: JobCluster, defaults: Values, free: Sequence[str]
) -> tuple[Orders, LayerProfile | None]:
    """What to measure, and the profile that has the rest."""
    if job.transformer_impl not in tuple(Implementation):
        raise flag_error(
            "transformer_impl",
            job.transformer_impl,
            "layers of this kind are not measured",
            "Leave nest.profile.mode=measure out.",
        )
    implementation = Implementation(job.transformer_impl)
    max_seconds = require_seconds("nest.profile.max_seconds", place.settings.profile.max_seconds)
    outcome = decide(job, with_profile(place, ProfileMode.ANALYTIC), free=free)
    assert outcome.searched is not None
    assert job.command
    request = outcome.searched.request
    spec = request.spec
    precision = request.settings.precision
    tasks = tasks_for(outcome.decision.plan, request, implementation)
    machine = machine_here(implementation)
    known = stored_profile(spec, precision, machine)
    done = set()
    if known is not None:  # what it has timed, or found impossible
        timed = (Task(timing.block, shard_of(timing, LayerShard())) for timing in known.timings)
        failed = (skipped.task for skipped in untimed(known))
        done = {shape_of(spec, task) for task in (*timed, *failed)}
    orders = Orders(
        spec=spec,
        precision=precision,
        tasks=tuple(task for task in tasks if shape_of(spec, task) not in done),
        job=job_arguments(job.command, defaults),
        implementation=implementation,
        where=Where.CPU if machine.is_cpu else Where.GPU,
        max_seconds=max_seconds,
    )
    return orders, known


def with_profile(place: JobCluster, mode: ProfileMode, name: str | None = None) -> JobCluster:
    """The same place, its layer times from elsewhere."""
    profile = with_values(place.settings.profile, mode=mode.value, name=name)
    return replace(place, settings=replace(place.settings, profile=profile))


def _recorded(
    orders: Orders, answers: Iterable[Answer], name: str | None, known: LayerProfile | None
) -> LayerProfile:
    """The profile as it is stored now.

    Args:
        name: of the first machine's profile, where it is new; made up if not given.

    Raises:
        MeasuringError: if nothing was timed at all.
        ProfileError: if the store cannot be written to, or the name is taken by another profile.
    """
    joined: dict[object, Answer] = {}  # of equal machines, whose clocks differ all the time
    for answer in answers:
        assert answer.machine is not None
        alike = replace(answer.machine, graphics_mhz=None, memory_mhz=None)
        first = joined.get(alike, replace(answer, timings=(), skipped=()))
        timings, skipped = first.timings + answer.timings, first.skipped + answer.skipped
        joined[alike] = replace(first, timings=timings, skipped=skipped)
    stored = []
    for other, answer in enumerate(joined.values()):
        if answer.machine is None or not answer.timings:
            continue
        given = None if other else name
        profile = store.record(
            LayerProfile(
                name=given or default_name(answer.machine, orders.spec, orders.precision),
                created=now(),
                precision=orders.precision,
                machine=answer.machine,
                model=orders.spec,
                timings=answer.timings,
            )
        )
        stored.append(profile)
        failed = (*untimed(profile), *answer.skipped)
        if shapes := {shape_of(profile.model, one.task): one for one in failed}:
            text = json.dumps([to_plain(one) for one in shapes.values()])
            with contextlib.suppress(OSError):
                untimed_file(profile).write_text(text, encoding="utf-8")
    if (found := next(iter(stored), known)) is not None:
        return found
    reasons = (one.reason for answer in answers for one in answer.skipped)
    why = next(reasons, f"nothing was done within {orders.max_seconds:g} s")
    raise MeasuringError(f"no block of this job's layers could be timed: {why}")


def _notes(orders: Orders, answers: Sequence[Answer], profile: LayerProfile) -> Iterator[str]:
    where = f"profile {profile.name} is in {profiles_folder()}"
    if not orders.tasks:
        failed = untimed(profile)
        words = f", or known not to be timed ({counted(len(failed), 'block')})" if failed else ""
        yield f"Nothing was measured: all blocks are timed already{words}; {where}."
        return
    num_timed = sum(len(answer.timings) for answer in answers)
    seconds = max((answer.seconds for answer in answers), default=0.0)
    device = "the CPU" if orders.where is Where.CPU else profile.machine.device_name
    yield (
        f"Measured {counted(num_timed, 'block')} of this job's layers in {seconds:.0f} s, "
        f"in {counted(len(answers), 'process')} on {device}; {where}."
    )
    skipped = [one for answer in answers for one in answer.skipped]
    large = [one for one in skipped if one.is_too_large]
    refused = [one for one in skipped if not one.is_too_large]
    left = len(orders.tasks) - num_timed - len(skipped)
    if large:
        yield f"Too large for the device: {_block_words(large)}."
    if refused:
        yield (
            f"Could not be timed: {_block_words(refused)} ({refused[0].reason}). "
            f"They are not tried again unless {untimed_file(profile)} is removed."
        )
    if left > 0:
        yield (
            f"Not reached within {orders.max_seconds:g} s: {counted(left, 'block')}; the next "
            "launch measures on (nest.profile.max_seconds)."
        )


def _block_words(skipped: list[Skipped]) -> str:
    """How many blocks, and the first of them by name and shape."""
    shown = [
        f"{one.task.block.value} (tp {one.task.shard.tensor_model_parallel_size}, micro batch "
        f"{one.task.shard.micro_batch_size})"
        for one in skipped[:3]
    ]
    more = " ..." if len(skipped) > 3 else ""
    return f"{counted(len(skipped), 'block')}, {', '.join(shown)}{more}"


def measure_in_child(
    orders: Orders,
    environment: Environment,
    check: Callable[[], None],
    pause_s: Seconds = 1.0,
) -> Answer:
    """Time the blocks of this rank's orders in a process of its own.

    Args:
        check: called after each pause; what it raises ends the child.

    Raises:
        MeasuringError: if the child dies or takes too long, with its last words.
    """
    started = time.monotonic()
    ended = started + orders.max_seconds + SPARE_S
    with contextlib.ExitStack() as stack:
        given, out, err = (
            stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace"))
            for _ in range(3)
        )
        json.dump(to_plain(orders), given)
        given.seek(0)
        command = [*_COMMAND, str(os.getpid()), str(num_threads(environment))]
        variables = child_environment(orders, environment)
        child = subprocess.Popen(command, stdin=given, stdout=out, stderr=err, env=variables)
        stack.callback(child.wait)
        stack.callback(child.kill)
        while time.monotonic() <= ended:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(pause_s)
                break
            check()
        else:
            words = _last_words(err)
            raise MeasuringError(f"the process that measures did not end within its time{words}")
        out.seek(0)
        answer = out.read()
        code = child.returncode
        if code or not answer:
            how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
            raise MeasuringError(f"the process that measures {how}{_last_words(err)}")
    return replace(from_plain(Answer, json.loads(answer)), seconds=time.monotonic() - started)


def _last_words(err: IO[str]) -> str:
    err.seek(0)
    lines = [line.rstrip() for line in err if line.strip()][-_LAST_WORDS:]
    return "\n  ".join(["; it said:", *lines]) if lines else ""


def num_threads(environment: Environment) -> int:
    """Threads of a process: the cores of this host that it may use, shared by the host's ranks."""
    return max(1, len(os.sched_getaffinity(0)) // (processes_per_host(environment) or 1))


def child_environment(orders: Orders, environment: Environment) -> dict[str, str]:
    """A rank's variables without those that make it one, with its own GPU alone.

    The child imports from the same places; where the script lies is among them.
    """
    found = {name: value for name, value in environment.items() if not _OF_RANKS.fullmatch(name)}
    script_folder = str(Path(orders.job.script).resolve().parent)
    paths = [script_folder, *(path or str(Path.cwd()) for path in sys.path)]
    found["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    found["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if orders.where is Where.GPU:
        found["CUDA_VISIBLE_DEVICES"] = gpu_of_rank(environment)
    else:
        found["OMP_NUM_THREADS"] = str(num_threads(environment))
    return found


def gpu_of_rank(environment: Environment) -> str:
    """The one GPU of a rank, as ``CUDA_VISIBLE_DEVICES`` names it.

    >>> gpu_of_rank({"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "4,6"})
    '6'
    """
    local = environment.get("LOCAL_RANK", environment.get("SLURM_LOCALID", "0"))
    seen = re.findall(r"[^,\s]+", environment.get("CUDA_VISIBLE_DEVICES", ""))
    # a launcher may show each rank its own GPU alone
    return seen[int(local) % len(seen)] if seen else local


_DEGREES = attrgetter(
    "tensor_model_parallel_size",
    "micro_batch_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)


def tasks_for(
    plan: ParallelPlan, request: Request, implementation: Implementation
) -> tuple[Task, ...]:
    """Layer blocks and shapes in the order in which they are to be timed, from ``plan`` on."""
    like = LayerShard(flash_attention=implementation is Implementation.TRANSFORMER_ENGINE)
    best = _shard(plan.layout, like)

    def distance(shard: LayerShard) -> tuple[float, ...]:
        """Doublings from the best shape; what is equally far goes by size."""
        degrees: tuple[int, ...] = _DEGREES(shard)
        pairs = zip(degrees, _DEGREES(best), strict=True)
        return (math.fsum(abs(math.log2(a / b)) for a, b in pairs), *degrees)

    model = CostModel(request.spec, request.cluster, request.settings)
    legal = {  # shapes that the search may choose and whose groups lie inside a node
        _shard(grid, like)
        for grid in GridSpace(model, request.global_batch_size, request.space).shards()
        if grid.dims.context_parallel_size == 1
        and max(grid.dims.tensor_model_parallel_size, grid.dims.expert_ranks)
        <= request.cluster.gpus_per_node
    }
    others = (_shard(other.layout, like) for other in plan.alternatives)
    return tasks_of(request.spec, (best, *others, *sorted(legal, key=distance)))


def shape_of(spec: TransformerSpec, task: Task) -> tuple[LayerBlock, Point]:
    """What tells two tasks apart: the block, and what its time depends on."""
    return task.block, point_of(spec, task.block, task.shard)


def _shard(layout: PartialLayout, like: LayerShard) -> LayerShard:
    return replace(
        like,
        **{name: getattr(layout.dims, name) for name in LAYER_DEGREES},
        micro_batch_size=layout.micro_batch_size,
        sequence_parallel=layout.sequence_parallel,
    )


#: What tells this machine, set up as it is now, from others.
_IDENTITY = (
    "device_name",
    "is_cpu",
    "implementation",
    "driver",
    "torch",
    "megatron_core",
    "transformer_engine",
)


def machine_here(implementation: Implementation) -> Machine:
    """This machine as far as it is known without CUDA: its GPU as the driver names it, or its CPU.

    Raises:
        UserInputError: if GPUs are machine_here that cannot be used.
    """
    try:
        gpus = local_gpus()
    except UserInputError as error:
        raise UserInputError(
            "nest.profile.mode",
            "measure",
            f"{error.what} = {error.value}: {error.limit}",
            "Leave nest.profile.mode=measure out.",
        ) from error
    machine = this_machine(Where.CPU, implementation)
    if gpus is None:
        return machine
    return replace(machine, device_name=gpus.device_name, is_cpu=False, driver=driver_version())


def is_same(machine: Machine, other: Machine) -> bool:
    """Whether two machines are one, as ``machine_here`` knows them; builds of a version are."""
    first, second = (
        [str(getattr(each, name)).partition("+")[0] for name in _IDENTITY]
        for each in (machine, other)
    )
    return first == second


def stored_profile(
    spec: TransformerSpec, precision: Precision, machine: Machine
) -> LayerProfile | None:
    """The newest profile that was measured on a machine, of these layers."""
    layers = shape_digest(spec, precision)
    found = []
    for entry in store.stored_entries():
        with contextlib.suppress(ProfileError):  # a broken file is named where it is looked for
            if entry.line(LAYERS) == layers:
                found.append(entry.read())
    own = (p for p in found if not p.imported and is_same(p.machine, machine))
    return max(own, key=lambda p: datetime.fromisoformat(p.created), default=None)


def untimed_file(profile: LayerProfile) -> Path:
    """The file of what could not be timed for a profile, which is not tried each time."""
    identity = fingerprint(profile.machine, profile.model, profile.precision)
    return store.profiles_folder() / f".untimed-{identity}.json"


def untimed(profile: LayerProfile) -> tuple[Skipped, ...]:
    """What could not be timed for a profile; a file that cannot be read says nothing."""
    try:
        lines = read_json(untimed_file(profile), "list of what was not timed")
        return tuple(from_plain(Skipped, line) for line in lines)
    except (ValueError, TypeError):
        return ()
