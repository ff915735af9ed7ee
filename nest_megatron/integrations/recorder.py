"""What the first steps of a training process take, from inside it: one record of the whole job.

Nothing here can stop the job. Moments are marked on the device's stream, which is waited for once,
after the last watched step. Ranks leave what they measured in the key-value store in which they met
before training; rank 0 collects it in a thread of its own for a limited time, and a rank that is
gone is missing in the record. No process group of the job is used.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar
from unittest import mock

from nest_megatron.files import now
from nest_megatron.history import store as history
from nest_megatron.history.records import (
    Launch,
    Outcome,
    RankMeasured,
    RunRecord,
    measured_by_ranks,
)
from nest_megatron.integrations.megatron_lm.agreement import Hosts, RendezvousStore, broadcast
from nest_megatron.integrations.run_record import (
    audit_launch,
    audit_outcome,
    audits,
    new_run,
    run_warnings,
    write_prometheus,
)
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.plain import from_plain
from nest_megatron.printing import print_cleaned
from nest_megatron.profile.clock import OUT_OF_MEMORY, HostClock, job_clock
from nest_megatron.report.runs import comparison, first_line
from nest_megatron.units import Bytes

Result = TypeVar("Result")

#: Share of the watched steps that come first and do not count: caches fill, kernels are tuned.
_WARM_UP = 0.25
#: How long rank 0 waits for what others measured, besides two steps, and how often it looks.
_GATHER_S, _PAUSE_S = 60.0, 0.25
#: What does a rank's own work, in ``megatron.core.pipeline_parallel.schedules``.
_PASSES = ("forward_step", "backward_step")
#: Where tokens of all replicas are counted by expert, under --moe-router-enable-expert-bias alone.
_ROUTED = ("megatron.core.distributed.finalize_model_grads", "get_updated_expert_bias")
#: Names in the rendezvous store.
_RUN, _MEASURED, _FAILED = "run", "measured", "failed"


class Recorder:
    """One rank's part in the record of a run.

    Args:
        steps: how many to watch; with 0 there is no record but that of an audit.
        rank, num_ranks: this process's global rank, and how many there are.
        store: where the ranks met; ``None`` for a single one.
        own_run: the record of the run on the rank that planned it.
        plan: the one that runs; megatron-core's passes are timed as it has them.
        prometheus: file that rank 0 writes the measured figures to, if any.

    Attributes:
        is_done: the watched steps are over, and megatron-core's functions in their places.
        measured: what this rank measured, then.
    """

    def __init__(
        self,
        *,
        steps: int,
        rank: int,
        num_ranks: int,
        store: RendezvousStore | None,
        own_run: RunRecord | None = None,
        plan: ParallelPlan | None = None,
        prometheus: str | None = None,
    ) -> None:
        self.steps = steps
        self.rank = rank
        self.num_ranks = num_ranks
        self.plan = plan
        self.is_done = False
        self.measured: RankMeasured | None = None
        self._store = store
        self._own_run = own_run
        self._prometheus = prometheus
        self._clock: HostClock = HostClock()
        self._begun: list[Any] = []
        self._passes: list[list[tuple[Any, Any]]] = []
        self._tokens: list[list[Any]] = []
        self._in_step = False
        self._patches = contextlib.ExitStack()
        self._gathering: threading.Thread | None = None

    def begin(
        self,
        launch: Launch | None,
        *,
        order: Sequence[int] | None = None,
        run: RunRecord | None = None,
    ) -> None:
        """Begin the record of a run that is about to train; every rank comes here.

        Args:
            launch: how it was launched, where that is known.
            order: the global rank that each launched rank has now.
            run: the record, where an audit has it already.

        Raises:
            PolicyError: where a policy has to have an audit, and it cannot be written.
        """

        def keep(hosts: Hosts) -> None:
            launched = hosts()
            is_watched = self.steps > 0
            by_rank = dict(zip(order or range(len(launched)), launched, strict=True))
            named = tuple(by_rank[rank] for rank in range(len(launched)))
            if run is not None:
                self._own_run = replace(run, hosts=named)
                leave_run(self._store, self._own_run, is_watched=is_watched)
            elif self.plan is not None:
                self._own_run = begin_record(
                    self.plan, named, launch, store=self._store, is_watched=is_watched
                )

        broadcast(self._store, keep, what="word that the run may begin")

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around each step; the first one behind the watched ones ends the last of them."""
        if not self.is_done:
            if not self._begun:
                self._clock = job_clock()
                self._patch_megatron()
            self._begun.append(self._clock.mark())
            if len(self._begun) > self.steps:
                self.finish()
            self._passes.append([])
            self._tokens.append([])
        self._in_step = not self.is_done
        try:
            yield
        finally:
            self._in_step = False

    def _patch_megatron(self) -> None:
        """Time this rank's passes in megatron-core, and count tokens where its routers do."""
        schedules = sys.modules.get("megatron.core.pipeline_parallel.schedules")
        if self.plan is None or schedules is None:
            return
        layout = self.plan.layout
        wrapped = list[tuple[ModuleType, str, Callable[..., Any]]]()
        if not layout.execution.overlap_moe_expert_parallel_comm:  # passes of two are one then
            wrapped += [(schedules, name, self.with_timing) for name in _PASSES]
        if (ep := layout.dims.expert_model_parallel_size) > 1:
            routed = importlib.import_module(_ROUTED[0])  # the package has a function of its name
            wrapped.append((routed, _ROUTED[1], functools.partial(self.with_token_counts, ep=ep)))
        for module, name, wrapper in wrapped:
            if (original := getattr(module, name, None)) is not None:
                self._patches.enter_context(mock.patch.object(module, name, wrapper(original)))

    def with_timing(self, function: Callable[..., Result]) -> Callable[..., Result]:
        """A forward or backward pass of this rank's layers, timed inside watched steps.

        No moment can be marked in a CUDA graph that is being captured.
        """
        from torch import cuda

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Result:
            if not self._in_step or (cuda.is_initialized() and cuda.is_current_stream_capturing()):
                return function(*args, **kwargs)
            begun = self._clock.mark()
            result = function(*args, **kwargs)
            self._passes[-1].append((begun, self._clock.mark()))
            return result

        return run

    def with_token_counts(self, function: Callable[..., Result], ep: int) -> Callable[..., Result]:
        """Megatron's update of routers' biases, whose first argument it makes whole counts of.

        Args:
            ep: expert-parallel ranks that experts are divided among, in their order.
        """

        @functools.wraps(function)
        def run(tokens: Any, *args: Any, **kwargs: Any) -> Result:
            result = function(tokens, *args, **kwargs)
            if self._in_step:
                self._tokens[-1].append(tokens.reshape(len(tokens), ep, -1).sum(dim=-1))
            return result

        return run

    def finish(self) -> None:
        """End the watched steps, with those there are; rank 0 collects what all measured."""
        if self.is_done or len(self._begun) < 2:
            return
        self.is_done = True
        self._patches.close()
        with self.reporting_errors("completed"):
            self.measured = self._read()
            self._passes = []
            self._tokens = []
            if self._store is not None:
                self._store.leave(_MEASURED, self.measured)
        if self.measured is None or self.rank != 0:
            return
        if self._store is None:
            self._record({0: self.measured})
        else:
            given = self._store, self.measured
            self._gathering = threading.Thread(target=self._gather, args=given, daemon=True)
            self._gathering.start()

    def end(self, error: BaseException | None = None) -> None:
        """Training ends, or an error ends it; what is known then is kept."""
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.finish()
            if self._gathering is not None:
                self._gathering.join()
            elif self.rank == 0 and not self.is_done:
                self._record({})  # it was too short
            with self.reporting_errors("completed"):
                if self.rank == 0 and (run := self.run()) is not None:
                    audit_outcome(replace(run, outcome=Outcome.FINISHED, end=now()))
            return
        outcome = outcome_of(error)
        with self.reporting_errors("completed"):
            if (run := self.run()) is None:
                return
            # the first rank says why, and one that ran out of memory, which is always a cause
            is_first = self._store is None or self._store.count(_FAILED) == 1
            if is_first or outcome is Outcome.OUT_OF_MEMORY:
                said = f"rank {self.rank} ({socket.gethostname()}): {first_line(error)}"
                run = replace(run, outcome=outcome, end=now(), error=said)
                self._keep(run)
                audit_outcome(run)

    def run(self) -> RunRecord | None:
        """The record of the run as it began; ``None`` if there is none."""
        if self._own_run is None and self._store is not None:
            for run in self._store.parts(_RUN).values():
                self._own_run = from_plain(RunRecord, run)
        return self._own_run

    def _read(self) -> RankMeasured:
        """Wait for the device, and read what the steps and the passes took."""
        (step_times,) = self._clock.read([self._begun])
        steps = [self._clock.read(passes) for passes in self._passes[: len(step_times)]]
        warm_up = int(_WARM_UP * len(step_times))
        ratios = (  # tokens of the busiest expert-parallel rank over the mean, by layer and rank
            float((counts.max(dim=-1).values / counts.float().mean(dim=-1)).mean())
            for step in self._tokens[warm_up : len(step_times)]
            for counts in step
        )
        known = [*filter(math.isfinite, ratios)]
        return RankMeasured(
            rank=self.rank,
            host=socket.gethostname(),
            step_times_s=step_times,
            warm_up=warm_up,
            busy_s=tuple(sum(s for (s,) in step) for step in steps) if all(steps) else (),
            peak_memory_bytes=peak_memory_bytes(),
            peak_allocated_bytes=peak_allocated_bytes(),
            expert_imbalance=statistics.fmean(known) if known else None,
        )

    def _gather(self, store: RendezvousStore, own: RankMeasured) -> None:
        ended = time.monotonic() + _GATHER_S + 2 * max(own.step_times_s)
        parts = {0: own}
        with self.reporting_errors("completed"):
            while store.num_parts(_MEASURED) < self.num_ranks and time.monotonic() < ended:
                time.sleep(_PAUSE_S)
            for part in store.parts(_MEASURED).values():
                parts[part["rank"]] = from_plain(RankMeasured, part)
        self._record(parts)

    def _record(self, parts: Mapping[int, RankMeasured]) -> None:
        """Print and keep the measured run."""
        with self.reporting_errors("kept"):
            if (run := self.run()) is None:
                return
            if parts:
                run = replace(run, measured=measured_by_ranks(parts, self.num_ranks))
                run = replace(run, warnings=run_warnings(run, parts))
                lines = [comparison(run), *(f"warning: {each}" for each in run.warnings)]
                print_cleaned("\n".join(f"nest: {line}" for line in lines))
            ended = replace(run, outcome=Outcome.FINISHED, end=now())
            self._keep(ended)
            if parts:
                self._own_run = run
                if self._prometheus is not None:
                    write_prometheus(ended, Path(self._prometheus))
                audit_outcome(run)  # training goes on

    def _keep(self, run: RunRecord) -> None:
        """Add to the history; an audit is the operators', and needs none."""
        with self.reporting_errors("kept"):
            if self.steps:
                history.append(run)

    @contextlib.contextmanager
    def reporting_errors(self, what: str) -> Iterator[None]:
        """Print why a record cannot be kept, which ends nothing."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - training goes on
            print_cleaned(f"nest: the record of this run could not be {what}: {error}")


def begin_record(
    plan: ParallelPlan,
    hosts: Sequence[str],
    launch: Launch | None,
    *,
    store: RendezvousStore | None = None,
    is_watched: bool,
) -> RunRecord | None:
    """Keep the record of a run that is about to train, on the rank that planned it.

    A history that cannot be written is printed, and no reason to stop.

    Args:
        hosts: of each global rank, or the first alone.
        launch: how it was launched, where that is known.
        store: where the other ranks look for the record.
        is_watched: whether the history gets the run; an audit gets every one.

    Returns:
        The record; ``None`` where neither asks for one, or none can be made.

    Raises:
        PolicyError: where a policy has to have an audit, and it cannot be written.
    """
    if not is_watched and not audits():
        return None
    try:
        run = new_run(plan, hosts, launch)
    except Exception as error:  # noqa: BLE001 - the job trains without a record
        print_cleaned(f"nest: no record of this run is kept: {error}")
        audit_launch(f"no record of the run can be made: {error}")
        return None
    leave_run(store, run, is_watched=is_watched)
    audit_launch(run)
    return run


def leave_run(store: RendezvousStore | None, run: RunRecord, *, is_watched: bool) -> None:
    """Leave the record of a run that begins for the other ranks, and in the history."""
    try:
        if store is not None:
            store.leave(_RUN, run)
        if is_watched:
            history.append(run)
    except Exception as error:  # noqa: BLE001 - the job trains without a record
        print_cleaned(f"nest: no record of this run is kept: {error}")


def outcome_of(error: BaseException) -> Outcome:
    """How a run ended that an error ends."""
    import torch

    if isinstance(error, KeyboardInterrupt):
        return Outcome.KILLED
    # NCCL and CUDA libraries run out of memory outside torch's allocator
    of_cuda = isinstance(error, RuntimeError) and OUT_OF_MEMORY.search(str(error))
    if of_cuda or isinstance(error, torch.OutOfMemoryError):
        return Outcome.OUT_OF_MEMORY
    return Outcome.FAILED


def peak_memory_bytes() -> Bytes | None:
    """The peak of this process on its device, also outside the allocator; ``None`` without one."""
    import torch

    try:
        free, total = torch.cuda.mem_get_info()
        outside = total - free - torch.cuda.memory_reserved()
        return int(torch.cuda.max_memory_reserved() + max(0, outside))
    except (RuntimeError, ValueError, AssertionError, AttributeError):
        return None


def peak_allocated_bytes() -> Bytes | None:
    """The peak of this process's tensors; ``None`` without a device."""
    import torch

    return int(torch.cuda.max_memory_allocated()) or None if torch.cuda.is_initialized() else None
