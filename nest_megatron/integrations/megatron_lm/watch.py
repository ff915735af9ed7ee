"""The recorder inside Megatron's training loop: its steps, its passes, its end.

The functions are those of core_v0.16.1 and 0.20, and of Megatron-Bridge 0.3 and 0.5, whose loop has
the same names. Megatron's own timers of passes (``--timing-log-level 2``: ``forward-compute``,
``backward-compute``) synchronize the device twice a pass and are not used; ``forward_step`` and
``backward_step`` of ``megatron.core.pipeline_parallel.schedules``, which they surround, are timed
by events instead.
"""

from __future__ import annotations

import functools
import importlib
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

from nest_megatron.history.records import Launch
from nest_megatron.integrations import audit, recorder
from nest_megatron.integrations.megatron_lm.ranks import LaunchedJob
from nest_megatron.integrations.outlets import figures
from nest_megatron.integrations.recorder import Recorder
from nest_megatron.layout.plan import ParallelPlan

#: What does a rank's own work, in ``megatron.core.pipeline_parallel.schedules``.
_PASSES = ("forward_step", "backward_step")
#: Where tokens of all replicas are counted by expert, under --moe-router-enable-expert-bias alone.
_ROUTED = ("megatron.core.distributed.finalize_model_grads", "get_updated_expert_bias")


def begin(job: LaunchedJob) -> None:
    """Keep the record of a job that is about to train, on the rank that planned it.

    Raises:
        PolicyError: where a policy has to have an audit, and it cannot be written.
    """
    assert job.decision is not None
    store = job.store
    launched = [socket.gethostname()] if store is None else list(store.hosts().values())
    order = job.decision.ranks or range(len(launched))
    hosts = [host for _, host in sorted(zip(order, launched, strict=True))]
    changes = audit.changed_flags(job.changes)
    launch = Launch(mode=job.words.mode.value, signer=job.signer, changes=changes)
    is_watched = job.launch.watch.steps > 0
    plan = job.decision.plan
    job.run = recorder.begin(plan, hosts, launch, store=store, is_watched=is_watched)


class Watch:
    """Megatron's training loop with a recorder in it.

    Args:
        training: the module whose ``train_step`` this takes the place of.
        job_of: the job, once there is one.
    """

    def __init__(self, training: ModuleType, job_of: Callable[[], LaunchedJob | None]) -> None:
        self._training, self._job_of = training, job_of
        self._recorder: Recorder | None = None
        self._put_back: Callable[[], None] = lambda: None
        self._has_begun = self._is_over = False

    def pretrain(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The whole of training; what ends it is kept."""
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            if (job := self._planned()) is not None:
                self._recording(job).end(error)
            raise
        if (job := self._planned()) is not None:
            self._recording(job).end()
        return result

    def train_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """One step; of a batch that grows, one of the size that the plan is for."""
        job = None if self._is_over else self._planned()
        if job is None or job.decision is None or not job.launch.watch.steps:
            return original(*args, **kwargs)
        if not has_planned_batch(job.decision.plan):
            return original(*args, **kwargs)
        recording = self._recording(job)
        if not self._has_begun:
            self._has_begun = True
            self._put_back = time_passes(recording, job.decision.plan)
        with recording.step():
            if recording.is_done:
                self._stop(original, job, recording)
            return original(*args, **kwargs)

    def _planned(self) -> LaunchedJob | None:
        """The job, once it is planned."""
        job = self._job_of()
        return None if job is None or job.decision is None else job

    def _recording(self, job: LaunchedJob) -> Recorder:
        """This rank's recorder; its rank is the one that the plan gave it."""
        if self._recorder is None:
            self._recorder = Recorder(
                steps=job.launch.watch.steps,
                rank=job.args.rank,
                num_ranks=job.args.world_size,
                store=job.store,
                own_run=job.run,
                prometheus=job.launch.watch.prometheus,
            )
        return self._recorder

    def _stop(self, train_step: Callable[..., Any], job: LaunchedJob, recording: Recorder) -> None:
        """The watched steps are over: Megatron's functions take their places again."""
        self._put_back()
        self._is_over = True  # for a loop that has bound the function before
        self._training.train_step = train_step  # type: ignore[attr-defined]
        with recording.telling("logged"):
            measured, iteration = recording.measured, getattr(job.args, "curr_iteration", 0)
            if measured and (writers := list(_writers())) and (run := recording.run()):
                for write in writers:
                    write(figures(run, measured), iteration)


def time_passes(recording: Recorder, plan: ParallelPlan) -> Callable[[], None]:
    """Time a rank's own passes in megatron-core, and count tokens where its routers do.

    Returns:
        What puts Megatron's functions back.
    """
    from megatron.core.pipeline_parallel import schedules

    wrapped: list[tuple[ModuleType, str, Callable[..., Any]]] = []

    def wrap(module: ModuleType, name: str, wrapper: Callable[..., Any]) -> None:
        if (original := getattr(module, name, None)) is not None:
            wrapped.append((module, name, original))
            setattr(module, name, wrapper(original))

    if not plan.layout.execution.overlap_moe_expert_parallel_comm:  # passes of two are one then
        for name in _PASSES:
            wrap(schedules, name, recording.timed)
    ep = plan.layout.dims.expert_model_parallel_size
    if ep > 1:
        routed = importlib.import_module(_ROUTED[0])  # the package has a function of its name
        wrap(routed, _ROUTED[1], functools.partial(recording.routed, ep=ep))

    def put_back() -> None:
        for module, name, original in wrapped:
            setattr(module, name, original)

    return put_back


def has_planned_batch(plan: ParallelPlan) -> bool:
    """Whether steps have the batch that a plan is for: of a batch that grows, those at its end."""
    if plan.train.batch_schedule is None:
        return True
    from megatron.core.num_microbatches_calculator import get_current_global_batch_size

    return bool(get_current_global_batch_size() == plan.layout.global_batch_size)


def _writers() -> Iterator[Callable[[Mapping[str, float], int], None]]:
    """The job's TensorBoard and Weights & Biases, which Megatron-LM opens on the last rank."""
    global_vars = sys.modules.get("megatron.training.global_vars")
    board = getattr(global_vars, "get_tensorboard_writer", lambda: None)()
    if board is not None:

        def write(values: Mapping[str, float], iteration: int) -> None:
            for name, value in values.items():
                board.add_scalar(name, value, iteration)

        yield write
    wandb = getattr(global_vars, "get_wandb_writer", lambda: None)()
    if wandb is not None:
        yield lambda values, iteration: wandb.log(dict(values), iteration)
