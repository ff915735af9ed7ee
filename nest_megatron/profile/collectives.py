"""Measures collectives over the real process groups of a running job.

Groups are the ranks of one host (all hosts at once), the ranks of one place on every host (all
places at once: all adapters are busy, as in training), pairs of both, and all ranks. A time is the
median over repetitions of the slowest rank's; barriers are outside what is timed. NCCL is timed
with CUDA events, gloo with the processor's clock; torch is imported when a ``Caller`` is made.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from nest_megatron.cluster.records import CollectiveKind
from nest_megatron.errors import ProfileError, message_line
from nest_megatron.files import now
from nest_megatron.profile.clock import (
    OUT_OF_MEMORY,
    DeviceClock,
    HostClock,
    middle_half,
    middle_out,
)
from nest_megatron.profile.installed import nccl_version
from nest_megatron.profile.network import (
    NETWORK_SHARE,
    CollectiveSample,
    NetworkBackend,
    NetworkProfile,
    sealed,
)
from nest_megatron.profile.network_fit import fit_hosts
from nest_megatron.units import counted
from nest_megatron.version import __version__

Call = Callable[[], object]

#: Longest that NCCL waits for one call, which takes seconds at most: then something hangs.
LIMIT = timedelta(minutes=3)
#: What torch raises where a backend lacks a collective.
_LACKING = (RuntimeError, NotImplementedError, ValueError, AttributeError)


class Caller:
    """Makes and times calls on this rank of ``world``, the process group of all."""

    #: Tensors are of 4-byte floats, which both backends reduce.
    ITEM_BYTES = 4

    def __init__(self, world: Any) -> None:
        import torch
        import torch.distributed as dist

        self._torch, self._dist, self._world = torch, dist, world
        self.rank: int = dist.get_rank(world)
        self.backend: str = dist.get_backend(world)
        if self.backend not in ("nccl", "gloo"):
            raise ProfileError(
                "world",
                self.backend,
                "collectives are measured over nccl or gloo",
                "Initialize torch.distributed with one of these backends.",
            )
        self._on_gpu = self.backend == "nccl"
        self._device = torch.device("cuda", torch.cuda.current_device()) if self._on_gpu else "cpu"
        #: Of one call; NCCL ends the process then, gloo's is torch's.
        self._timeout = LIMIT if self._on_gpu else None

    def versions(self) -> dict[str, str]:
        """Of the software that runs the collectives."""
        found = {"torch": str(self._torch.__version__)}
        if self._on_gpu:
            found |= {**nccl_version(), "cuda": str(self._torch.version.cuda)}
        return found

    def group_of_rank(self, groups: Iterable[Sequence[int]]) -> Any:
        """This rank's of several groups; every rank makes every group, in the same order."""
        found = None
        for ranks in groups:
            group = self._dist.new_group(list(ranks), timeout=self._timeout, backend=self.backend)
            found = group if self.rank in ranks else found
        return found

    def try_out(self, kind: CollectiveKind) -> str | None:
        """Why a kind cannot be measured here; nothing if it can."""
        reason = ""
        size = self._dist.get_world_size(self._world) * self.ITEM_BYTES
        try:
            self.prepared(kind, size, self._world)()
        except _LACKING as error:
            reason = message_line(error)
        lacking = self.agree(bool(reason))
        return (reason or "another rank refused it") if lacking else None

    def prepared(self, kind: CollectiveKind, message_bytes: int, group: Any) -> Call:
        """A collective of so many bytes in all, ready to be called."""
        count = message_bytes // self.ITEM_BYTES
        size = self._dist.get_world_size(group)
        whole = self._zeros(count)
        if kind is CollectiveKind.ALL_REDUCE:
            return lambda: self._dist.all_reduce(whole, group=group)
        if kind is CollectiveKind.SEND_RECV:
            return self._ring(whole, self._zeros(count), group)
        if kind is CollectiveKind.ALL_TO_ALL:
            other = self._zeros(count)
            return lambda: self._dist.all_to_all_single(other, whole, group=group)
        part = self._zeros(count // size)
        if kind is CollectiveKind.ALL_GATHER:
            gather = _named(self._dist, "all_gather_single", "all_gather_into_tensor")
            return lambda: gather(whole, part, group=group)
        scatter = _named(self._dist, "reduce_scatter_single", "reduce_scatter_tensor")
        return lambda: scatter(part, whole, group=group)

    def fitting(self, kind: CollectiveKind, message_bytes: int, group: Any) -> Call | None:
        """The same; nothing where a rank has too little memory for its tensors."""
        call = None
        try:
            call = self.prepared(kind, message_bytes, group)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            if not OUT_OF_MEMORY.search(str(error)):
                raise
        return None if self.agree(call is None) else call

    def timed(self, call: Call, calls: int) -> float:
        """Seconds of one of several calls that follow each other; all ranks start together."""
        clock, device_ids = HostClock(), None
        if self._on_gpu:  # without the ids torch warns that it takes the current one
            clock, device_ids = DeviceClock(), [self._torch.cuda.current_device()]
        self._dist.barrier(self._world, device_ids=device_ids)
        if self._on_gpu:
            self._torch.cuda.synchronize()
        marks = [clock.mark()]
        for _ in range(calls):
            call()
        marks.append(clock.mark())
        ((seconds,),) = clock.read([marks])
        return seconds / calls

    def slowest(self, times: Sequence[float]) -> list[float]:
        """Each time as the slowest rank of the world had it."""
        return self._reduced(times, self._dist.ReduceOp.MAX)

    def agree(self, flag: bool) -> bool:
        """Whether it is so on any rank."""
        return self.slowest([float(flag)])[0] > 0

    def same(self, number: int) -> int:
        """The least of the ranks' numbers."""
        return int(self._reduced([float(number)], self._dist.ReduceOp.MIN)[0])

    def _reduced(self, values: Sequence[float], operation: Any) -> list[float]:
        tensor = self._torch.tensor(values, dtype=self._torch.float64, device=self._device)
        self._dist.all_reduce(tensor, op=operation, group=self._world)
        found: list[float] = tensor.tolist()
        return found

    def _ring(self, sent: Any, received: Any, group: Any) -> Call:
        """Each rank sends to the next one and receives from the one before."""
        dist = self._dist
        ranks = dist.get_process_group_ranks(group)
        place = ranks.index(dist.get_rank())
        after, before = ranks[(place + 1) % len(ranks)], ranks[place - 1]

        def call() -> None:
            pair = [
                dist.P2POp(dist.isend, sent, after, group),
                dist.P2POp(dist.irecv, received, before, group),
            ]
            for work in dist.batch_isend_irecv(pair):
                work.wait()

        return call

    def _zeros(self, count: int) -> Any:
        return self._torch.zeros(count, dtype=self._torch.float32, device=self._device)


def _named(module: Any, *names: str) -> Any:
    return next(getattr(module, name) for name in names if hasattr(module, name))


#: From where latency rules to where bandwidth does, a factor of four apart.
DEFAULT_SIZES = tuple(4**n * 2**10 for n in range(11))  # 1 KiB to 1 GiB
_MIN_REPETITIONS, _MAX_REPETITIONS = 3, 30
#: A timed stretch is at least so long, in calls that follow each other; shorter ones are noise.
_STRETCH_S = 2e-4
_MAX_CALLS = 20


class _Pattern(NamedTuple):
    """Groups that talk at the same time: ``shape`` is ranks on a host, and hosts."""

    shape: tuple[int, int]
    groups: tuple[tuple[int, ...], ...]


class _Task(NamedTuple):
    """A collective to time; ``group`` is this rank's of those that talk at the same time."""

    shape: tuple[int, int]
    group: Any
    kind: CollectiveKind
    message_bytes: int


def measure(
    world: Any,
    hosts: Sequence[str],
    max_seconds: float,
    sizes: Sequence[int] = DEFAULT_SIZES,
) -> NetworkProfile | None:
    """Measure the network that a job runs on. Every rank calls it.

    Args:
        world: process group of the job's ranks, ``torch.distributed.group.WORLD`` as a rule.
        hosts: host name of each rank, in rank order.
        max_seconds: budget; what it leaves of the sizes covers their range.
        sizes: messages in bytes, the whole tensor.

    Returns:
        The profile on rank 0, nothing on the others. What could not be measured is named in it.

    Raises:
        ProfileError: if there is one rank only, or hosts hold different numbers of ranks.
    """
    import torch.distributed as dist

    caller = Caller(world)
    patterns = _patterns(hosts, dist.get_world_size(world))
    groups = [(shape, caller.group_of_rank(groups)) for shape, groups in patterns]
    reasons = {kind: caller.try_out(kind) for kind in CollectiveKind}
    usable = [kind for kind, reason in reasons.items() if reason is None]
    samples, notes = _measured(caller, list(_tasks(groups, usable, sizes)), max_seconds)
    if caller.rank:
        return None
    lacking = {kind: reason for kind, reason in reasons.items() if reason is not None}
    return _profile(caller, hosts, samples, notes, lacking)


def _patterns(hosts: Sequence[str], num_ranks: int) -> tuple[_Pattern, ...]:
    if len(hosts) != num_ranks or num_ranks < 2:
        raise ProfileError(
            "hosts",
            list(hosts),
            f"it must name the host of each of the {num_ranks} ranks, two at least",
            "Start two processes or more, and name their hosts in rank order.",
        )
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    per_host = {len(ranks) for ranks in by_host.values()}
    if len(per_host) > 1:
        raise ProfileError(
            "hosts",
            dict(Counter(hosts)),
            "each host must hold the same number of ranks",
            "Start as many processes on every host.",
        )
    return tuple(_groups_of([tuple(ranks) for ranks in by_host.values()], per_host.pop()))


def _groups_of(by_host: Sequence[tuple[int, ...]], inside: int) -> Iterator[_Pattern]:
    """Pairs and whole hosts tell the cost of a hop from that of a call; so do two hosts and all."""
    for num in _fan_outs(inside):
        parts = (ranks[i : i + num] for ranks in by_host for i in range(0, inside, num))
        yield _Pattern(shape=(num, 1), groups=tuple(parts))
    for num in _fan_outs(len(by_host)):
        rows = zip(*by_host, strict=True)
        parts = (row[i : i + num] for row in rows for i in range(0, len(by_host), num))
        yield _Pattern(shape=(1, num), groups=tuple(parts))
    if inside > 1 and len(by_host) > 1:
        everyone = tuple(sorted(rank for ranks in by_host for rank in ranks))
        yield _Pattern(shape=(inside, len(by_host)), groups=(everyone,))


def _fan_outs(most: int) -> list[int]:
    """Two and all; every rank must have its part."""
    return sorted({num for num in (2, most) if num > 1 and most % num == 0})


def _tasks(
    groups: Sequence[tuple[tuple[int, int], Any]],
    kinds: Sequence[CollectiveKind],
    sizes: Sequence[int],
) -> Iterator[_Task]:
    for size in middle_out(sizes):
        for shape, group in groups:
            step = math.prod(shape) * Caller.ITEM_BYTES
            whole = max(1, size // step) * step
            for kind in kinds:
                yield _Task(shape=shape, group=group, kind=kind, message_bytes=whole)


def _measured(
    caller: Caller, tasks: Sequence[_Task], max_seconds: float
) -> tuple[list[CollectiveSample], list[str]]:
    """Samples of the tasks until the budget is spent on any rank, and notes on what is missing."""
    samples = list[CollectiveSample]()
    left_out, too_large = list[_Task](), list[_Task]()
    begun = time.monotonic()
    until = begun + max_seconds
    #: Seconds of a byte; shapes differ between groups.
    rates: defaultdict[tuple[object, CollectiveKind], list[float]] = defaultdict(list)

    def least(task: _Task) -> float:
        """Seconds that a task takes, as far as others of its kind tell."""
        rate = min(rates[task.shape, task.kind], default=0.0)
        return rate * task.message_bytes * (_MIN_REPETITIONS + 2)

    for done, task in enumerate(tasks):
        left = until - time.monotonic()
        if caller.agree(left <= 0 or least(task) > left):
            left_out.append(task)
            continue
        sample = _sample(caller, task, max(0.0, left) / (len(tasks) - done))
        if sample is None:
            too_large.append(task)
            continue
        samples.append(sample)
        rates[task.shape, task.kind].append(sample.seconds / task.message_bytes)
    needed = time.monotonic() - begun + sum(map(least, left_out))
    # the shortest message by itself tells its latency alone
    is_told = all(len(rates[task.shape, task.kind]) > 1 for task in left_out)
    needed_s = needed if is_told else None
    return samples, list(_notes(len(tasks), left_out, too_large, max_seconds, needed_s))


def _sample(caller: Caller, task: _Task, budget: float) -> CollectiveSample | None:
    """A task's sample; nothing where a rank has too little memory for it."""
    call = caller.fitting(task.kind, task.message_bytes, task.group)
    if call is None:
        return None
    first = caller.slowest([caller.timed(call, 1)])[0]  # connections and buffers
    trial = min(first, caller.slowest([caller.timed(call, 1)])[0])
    calls = max(1, min(_MAX_CALLS, int(_STRETCH_S / trial)))
    wanted = int(budget / (calls * trial))
    repetitions = caller.same(max(_MIN_REPETITIONS, min(_MAX_REPETITIONS, wanted)))
    times = caller.slowest([caller.timed(call, calls) for _ in range(repetitions)])
    middle, spread = middle_half(times)
    return CollectiveSample(
        kind=task.kind,
        num_ranks=math.prod(task.shape),
        shape=task.shape,
        message_bytes=task.message_bytes,
        seconds=middle,
        spread=spread,
        repetitions=repetitions * calls,
    )


def _notes(
    num_tasks: int,
    left_out: Sequence[_Task],
    too_large: Sequence[_Task],
    budget: float,
    needed: float | None,
) -> Iterator[str]:
    """What is missing, and what brings it.

    Args:
        needed: seconds that all tasks take, if that is known.
    """
    if left_out:
        yield (
            f"{len(left_out)} of {num_tasks} measurements were left out: {budget:.3g} s were too "
            f"short. {_longer(budget, needed)}"
        )
    if too_large:
        smallest = min(task.message_bytes for task in too_large)
        yield (
            f"{len(too_large)} of {num_tasks} measurements, of messages from {smallest} bytes on, "
            "do not fit in the memory that is free."
        )


#: More time is shared by all, also by those that had enough.
_ROOM = 1.5


def _longer(budget: float, needed: float | None) -> str:
    if needed is None:
        return "A longer --max-seconds measures more."
    enough = 10 * (_ROOM * max(needed, budget) // 10 + 1)
    return (
        f"All take about {enough:.0f} s: --max-seconds {enough:.0f}, or "
        f"{enough / NETWORK_SHARE:.0f} where layers are timed as well."
    )


def _profile(
    caller: Caller,
    hosts: Sequence[str],
    samples: Sequence[CollectiveSample],
    notes: Sequence[str],
    not_measured: dict[CollectiveKind, str],
) -> NetworkProfile:
    """The profile; samples that fit nothing are kept, and said to."""
    try:
        _, fits, fit_notes = fit_hosts(samples)
    except ProfileError as error:
        fits, fit_notes = (), (f"No fit: {error}",)
    names = sorted(set(hosts))
    shown = f"{', '.join(names[:4])}{', ...' if len(names) > 4 else ''}"
    profile = NetworkProfile(
        name=f"{names[0]}-{len(hosts)}",
        created=now(),
        source=f"{len(hosts)} ranks on {counted(len(names), 'host')} ({shown})",
        backend=NetworkBackend(caller.backend),
        versions={"nest-megatron": __version__, **caller.versions()},
        samples=tuple(samples),
        fits=fits,
        not_measured=not_measured,
        notes=tuple(notes),
        fit_notes=fit_notes,
    )
    return sealed(profile)
