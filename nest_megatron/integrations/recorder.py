"""What the first steps of a training process take, from inside it: one record of the whole job.

Nothing here can stop the job. Moments are marked on the device's stream, which is waited for once,
after the last watched step. Ranks leave what they measured in the key-value store in which they met
before training; rank 0 collects it in a thread of its own for a limited time, and a rank that is
gone is missing in the record. No process group of the job is used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from nest_megatron.history import store as history
from nest_megatron.history.records import (
    Outcome,
    RankMeasured,
    RunRecord,
    measured_by_ranks,
)
from nest_megatron.integrations import audit
from nest_megatron.integrations.megatron_lm.rendezvous_store import RendezvousStore
from nest_megatron.integrations.run_record import now
from nest_megatron.integrations.run_warnings import run_warnings
from nest_megatron.plain import from_plain, to_plain
from nest_megatron.profile.clock import OUT_OF_MEMORY, HostClock, job_clock
from nest_megatron.report.runs import comparison, first_line
from nest_megatron.units import Bytes

Result = TypeVar("Result")

#: Share of the watched steps that come first and do not count: caches fill, kernels are tuned.
_WARM_UP = 0.25
#: How long rank 0 waits for what others measured, beside two steps, and how often it looks.
_GATHER_S, _PAUSE_S = 60.0, 0.25
#: Names in the rendezvous store.
_RUN, _MEASURED, _FAILED = "run", "measured", "failed"


class Recorder:
    """One rank's part in the record of a run.

    Args:
        steps: how many to watch; with 0 there is no record but that of an audit.
        rank, num_ranks: this process's global rank, and how many there are.
        store: where the ranks met; ``None`` for a single one.
        own_run: the record of the run on the rank that planned it.
        publish: called with the measured record, on rank 0.

    Attributes:
        is_done: the watched steps are over.
        measured: what this rank measured, then.
    """

    def __init__(
        self,
        *,
        steps: int,
        rank: int,
        num_ranks: int,
        store: RendezvousStore | None,
        own_run: RunRecord | None,
        publish: Callable[[RunRecord], None] = lambda _: None,
    ) -> None:
        self.steps, self.rank, self.num_ranks = steps, rank, num_ranks
        self.is_done = False
        self.measured: RankMeasured | None = None
        self._store, self._own_run, self._publish = store, own_run, publish
        self._clock: HostClock = HostClock()
        self._begun: list[Any] = []
        self._passes: list[list[tuple[Any, Any]]] = []
        self._in_step = False
        self._gathering: threading.Thread | None = None

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around each step."""
        self._begin_step()
        self._in_step = not self.is_done
        try:
            yield
        finally:
            self._in_step = False

    def _begin_step(self) -> None:
        """Note that a step begins; the first one behind the watched ones ends the last of them."""
        if self.is_done:
            return
        if not self._begun:
            self._clock = job_clock()
        self._begun.append(self._clock.mark())
        if len(self._begun) > self.steps:
            self.finish()
        else:
            self._passes.append([])

    def timed(self, function: Callable[..., Result]) -> Callable[..., Result]:
        """A forward or backward pass of this rank's layers, timed inside watched steps."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Result:
            if not self._in_step or _is_capturing():
                return function(*args, **kwargs)
            begun = self._clock.mark()
            result = function(*args, **kwargs)
            self._passes[-1].append((begun, self._clock.mark()))
            return result

        return run

    def finish(self) -> None:
        """End the watched steps, with those there are; rank 0 collects what all measured."""
        if self.is_done or len(self._begun) < 2:
            return
        self.is_done = True
        with self.telling("completed"):
            self.measured = self._read()
            self._passes = []
            if self._store is not None:
                self._store.leave(_MEASURED, json.dumps(to_plain(self.measured)))
        if self.measured is None or self.rank != 0:
            return
        if self._store is None:
            self._record({0: self.measured})
        else:
            self._gathering = threading.Thread(target=self._gather, daemon=True)
            self._gathering.start()

    def end(self, error: BaseException | None = None) -> None:
        """Training ends, or an error ends it; what is known then is kept."""
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.finish()
            if self._gathering is not None:
                self._gathering.join()
            elif self.rank == 0 and not self.is_done:
                self._record({})  # it was too short
            with self.telling("completed"):
                if self.rank == 0 and (run := self.run()) is not None:
                    audit.follow(dataclasses.replace(run, outcome=Outcome.FINISHED, end=now()))
            return
        with self.telling("completed"):
            self._record_failure(error)

    def run(self) -> RunRecord | None:
        """The record of the run as it began; ``None`` if there is none."""
        if self._own_run is None and self._store is not None:
            said = self._store.left(_RUN)
            texts = [json.loads(text) for text in said.values()]
            self._own_run = from_plain(RunRecord, texts[0]) if texts else None
        return self._own_run

    def _read(self) -> RankMeasured:
        """Wait for the device, and read what the steps and the passes took."""
        (step_times,) = self._clock.read([self._begun])
        steps = [self._clock.read(passes) for passes in self._passes[: len(step_times)]]
        return RankMeasured(
            rank=self.rank,
            host=socket.gethostname(),
            step_times_s=step_times,
            warm_up=int(_WARM_UP * len(step_times)),
            busy_s=tuple(sum(s for (s,) in step) for step in steps) if all(steps) else (),
            peak_memory_bytes=peak_memory_bytes(),
            peak_allocated_bytes=peak_allocated_bytes(),
        )

    def _gather(self) -> None:
        assert self._store is not None
        assert self.measured is not None
        ended = time.monotonic() + _GATHER_S + 2 * max(self.measured.step_times_s)
        parts = {0: self.measured}
        with self.telling("completed"):
            while self._store.num_left(_MEASURED) < self.num_ranks and time.monotonic() < ended:
                time.sleep(_PAUSE_S)
            found = [json.loads(text) for text in self._store.left(_MEASURED).values()]
            parts |= {part["rank"]: from_plain(RankMeasured, part) for part in found}
        self._record(parts)

    def _record(self, parts: Mapping[int, RankMeasured]) -> None:
        """Print and keep the measured run."""
        with self.telling("kept"):
            if (run := self.run()) is None:
                return
            if parts:
                measured = measured_by_ranks(parts, self.num_ranks)
                run = dataclasses.replace(run, measured=measured)
                run = dataclasses.replace(run, warnings=run_warnings(run, parts))
                lines = [comparison(run), *(f"warning: {each}" for each in run.warnings)]
                print("\n".join(f"nest: {line}" for line in lines), flush=True)
            ended = dataclasses.replace(run, outcome=Outcome.FINISHED, end=now())
            if parts:
                self._publish(ended)
            self._keep(ended)
            if parts:
                self._own_run = run
                audit.follow(run)  # training goes on

    def _record_failure(self, error: BaseException) -> None:
        """Only the first rank says why, or one that ran out of memory, which is always a cause."""
        outcome = outcome_of(error)
        if (run := self.run()) is None:
            return
        is_first = self._store is None or self._store.count(_FAILED) == 1
        if is_first or outcome is Outcome.OUT_OF_MEMORY:
            said = f"rank {self.rank} ({socket.gethostname()}): {first_line(error)}"
            run = dataclasses.replace(run, outcome=outcome, end=now(), error=said)
            self._keep(run)
            audit.follow(run)

    def _keep(self, run: RunRecord) -> None:
        """Add to the history; an audit is the operators', and needs none."""
        with self.telling("kept"):
            if self.steps:
                history.append(run)

    @contextlib.contextmanager
    def telling(self, what: str) -> Iterator[None]:
        """A record that cannot be kept is told of, and ends nothing."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - training goes on
            print(f"nest: the record of this run could not be {what}: {error}", flush=True)


def begin_run(store: RendezvousStore | None, run: RunRecord, *, is_watched: bool = True) -> None:
    """Keep the record of a run that begins, on the rank that planned it, and show it to others."""
    if store is not None:
        store.leave(_RUN, json.dumps(to_plain(run)))
    if is_watched:
        history.append(run)


def outcome_of(error: BaseException) -> Outcome:
    """How a run ended that an error ends."""
    import torch

    if isinstance(error, KeyboardInterrupt):
        return Outcome.KILLED
    # NCCL and CUDA libraries run out of memory outside torch's allocator
    of_cuda = isinstance(error, RuntimeError) and OUT_OF_MEMORY.search(str(error)) is not None
    if isinstance(error, torch.OutOfMemoryError) or of_cuda:
        return Outcome.OUT_OF_MEMORY
    return Outcome.FAILED


def _is_capturing() -> bool:
    """Whether a CUDA graph is being captured, into which no moment can be marked."""
    import torch

    return torch.cuda.is_initialized() and bool(torch.cuda.is_current_stream_capturing())


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
