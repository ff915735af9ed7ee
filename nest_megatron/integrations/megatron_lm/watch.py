"""The recorder inside Megatron's training loop: its steps, its passes, its end.

The functions are those of core_v0.16.1 and 0.20. Megatron's own timers of passes
(``--timing-log-level 2``: ``forward-compute``, ``backward-compute``) synchronize the device twice a
pass and are not used; ``forward_step`` and ``backward_step`` of
``megatron.core.pipeline_parallel.schedules``, which they surround, are timed by events instead.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from nest_megatron.history.records import Launch, RunRecord
from nest_megatron.integrations import audit
from nest_megatron.integrations.megatron_lm.ranks import LaunchedJob
from nest_megatron.integrations.megatron_lm.rendezvous_store import RendezvousStore
from nest_megatron.integrations.outlets import figures, write_prometheus
from nest_megatron.integrations.recorder import Recorder, begin_run
from nest_megatron.integrations.run_record import new_run
from nest_megatron.parallel.plan import ParallelPlan

#: What does a rank's own work, in ``megatron.core.pipeline_parallel.schedules``.
_PASSES = ("forward_step", "backward_step")


def begin(job: LaunchedJob, store: RendezvousStore | None) -> None:
    """Keep the record of a job that is about to train, on the rank that planned it.

    A history that cannot be written is told of, and no reason to stop.

    Raises:
        PolicyError: where a policy has to have an audit, and it cannot be written.
    """
    is_watched = job.launch.watch.steps > 0
    if not is_watched and not audit.audits():
        return
    try:
        job.run = _run(job, store)
    except Exception as error:  # noqa: BLE001 - the job trains without a record
        print(f"nest: no record of this run is kept: {error}", flush=True)
        audit.refuse(f"no record of the run can be made: {error}")
        return
    try:
        begin_run(store, job.run, is_watched=is_watched)
    except Exception as error:  # noqa: BLE001 - as above
        print(f"nest: no record of this run is kept: {error}", flush=True)
    audit.begin(job.run)


def _run(job: LaunchedJob, store: RendezvousStore | None) -> RunRecord:
    assert job.decision is not None
    launched = [socket.gethostname()] if store is None else list(store.hosts().values())
    order = job.decision.ranks or range(len(launched))
    hosts = [host for _, host in sorted(zip(order, launched, strict=True))]
    changes = audit.changed_flags(job.changes)
    launch = Launch(mode=job.words.mode.value, signer=job.signer, changes=changes)
    return new_run(job.decision.plan, hosts, os.environ, launch)


class Watch:
    """Megatron's training loop with a recorder in it.

    Args:
        training: ``megatron.training.training``, in whose functions' places this puts its own.
    """

    def __init__(self, training: ModuleType, job: LaunchedJob) -> None:
        self._training, self._job = training, job
        self._recorder: Recorder | None = None
        self._originals: dict[str, Callable[..., Any]] = {}
        self._has_begun = self._is_over = False

    def pretrain(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The whole of training; what ends it is kept."""
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            if self._job.decision is not None:
                self._recording().end(error)
            raise
        if self._job.decision is not None:
            self._recording().end()
        return result

    def train_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """One step; of a batch that grows, one of the size that the plan is for."""
        decision = self._job.decision
        if self._is_over or decision is None or not _has_planned_batch(decision.plan):
            return original(*args, **kwargs)
        recorder = self._recording()
        if not self._has_begun:
            self._has_begun = True
            self._time_passes(recorder, decision.plan)
        with recorder.step():
            if recorder.is_done:
                self._stop(original, recorder)
            return original(*args, **kwargs)

    def _recording(self) -> Recorder:
        """This rank's recorder; its rank is the one that the plan gave it."""
        if self._recorder is None:
            job = self._job
            self._recorder = Recorder(
                steps=job.launch.watch.steps,
                rank=job.args.rank,
                num_ranks=job.args.world_size,
                store=job.rendezvous.store,
                own_run=job.run,
                publish=self._publish,
            )
        return self._recorder

    def _time_passes(self, recorder: Recorder, plan: ParallelPlan) -> None:
        from megatron.core.pipeline_parallel import schedules

        if plan.execution.overlap_moe_expert_parallel_comm:
            return  # passes of two micro batches are one then
        for name in _PASSES:
            if (original := getattr(schedules, name, None)) is not None:
                self._originals[name] = original
                setattr(schedules, name, recorder.timed(original))

    def _stop(self, train_step: Callable[..., Any], recorder: Recorder) -> None:
        """The watched steps are over: Megatron's functions take their places again."""
        from megatron.core.pipeline_parallel import schedules

        for name, original in self._originals.items():
            setattr(schedules, name, original)
        self._is_over = True  # for a loop that has bound the function before
        self._training.train_step = train_step  # type: ignore[attr-defined]
        with recorder.telling("logged"):
            measured, iteration = recorder.measured, getattr(self._job.args, "curr_iteration", 0)
            if measured and (writers := list(_writers())) and (run := recorder.run()):
                for write in writers:
                    write(figures(run, measured), iteration)

    def _publish(self, run: RunRecord) -> None:
        if (path := self._job.launch.watch.prometheus) is not None:
            write_prometheus(run, Path(path))


def _has_planned_batch(plan: ParallelPlan) -> bool:
    if plan.train.batch_schedule is None:
        return True
    from megatron.core.num_microbatches_calculator import get_current_global_batch_size

    return bool(get_current_global_batch_size() == plan.train.global_batch_size)


def _writers() -> Iterator[Callable[[Mapping[str, float], int], None]]:
    """The job's TensorBoard and Weights & Biases, which Megatron opens on the last rank."""
    from megatron.training import global_vars

    board = getattr(global_vars, "get_tensorboard_writer", lambda: None)()
    if board is not None:

        def write(values: Mapping[str, float], iteration: int) -> None:
            for name, value in values.items():
                board.add_scalar(name, value, iteration)

        yield write
    wandb = getattr(global_vars, "get_wandb_writer", lambda: None)()
    if wandb is not None:
        yield lambda values, iteration: wandb.log(dict(values), iteration)
