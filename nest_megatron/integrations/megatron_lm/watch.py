"""The recorder inside Megatron's training loop: its steps, its passes, its end.

The functions are those of core_v0.16.1 and 0.20, and of Megatron-Bridge 0.3 and 0.5, whose loop has
the same names. Megatron's own timers of passes (``--timing-log-level 2``: ``forward-compute``,
``backward-compute``) synchronize the device twice a pass and are not used; ``forward_step`` and
``backward_step`` of ``megatron.core.pipeline_parallel.schedules``, which they surround, are timed
by events instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

from nest_megatron.history.records import Launch
from nest_megatron.integrations import audit
from nest_megatron.integrations.megatron_lm.ranks import LaunchedJob
from nest_megatron.integrations.outlets import figures
from nest_megatron.integrations.recorder import Recorder
from nest_megatron.layout.plan import ParallelPlan


def begin(job: LaunchedJob) -> None:
    """Begin the record of a job that is about to train; every rank comes here.

    Raises:
        PolicyError: where a policy has to have an audit, and it cannot be written.
    """
    assert job.decision is not None
    changes = audit.changed_flags(job.changes)
    launch = Launch(mode=job.words.mode.value, signer=job.signer, changes=changes)
    recorder = Recorder(
        steps=job.launch.watch.steps,
        rank=job.args.rank,
        num_ranks=job.args.world_size,
        store=job.store,
        plan=job.decision.plan,
        prometheus=job.launch.watch.prometheus,
    )
    recorder.begin(launch, what="word that the run may begin", order=job.decision.ranks)
    job.recorder = recorder


class Watch:
    """Megatron's training loop with the recorder of a job in it.

    Args:
        training: the module whose ``train_step`` this takes the place of.
        job_of: the job, once there is one.
    """

    def __init__(self, training: ModuleType, job_of: Callable[[], LaunchedJob | None]) -> None:
        self._training, self._job_of = training, job_of

    def pretrain(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The whole of training; what ends it is kept."""
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            self._end(error)
            raise
        self._end()
        return result

    def _end(self, error: BaseException | None = None) -> None:
        if (job := self._job_of()) is not None and job.recorder is not None:
            job.recorder.end(error)

    def train_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """One step; of a batch that grows, one of the size that the plan is for."""
        job = self._job_of()
        recording = None if job is None else job.recorder
        if job is None or recording is None or not recording.steps:
            return original(*args, **kwargs)
        if job.decision is not None and not has_planned_batch(job.decision.plan):
            return original(*args, **kwargs)
        was_done = recording.is_done
        with recording.step():
            if recording.is_done != was_done:
                self._training.train_step = original  # type: ignore[attr-defined]
                _log(recording, getattr(job.args, "curr_iteration", 0))
            return original(*args, **kwargs)


def _log(recording: Recorder, iteration: int) -> None:
    """Tell the job's own trackers what was measured."""
    with recording.telling("logged"):
        if recording.measured and (writers := list(_writers())) and (run := recording.run()):
            for write in writers:
                write(figures(run, recording.measured), iteration)


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
