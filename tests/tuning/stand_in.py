"""Runs that a table answers, in the place of a cluster."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

from nest_megatron.config.compose import compose
from nest_megatron.config.overrides import parse
from nest_megatron.history.records import (
    Measured,
    Outcome,
    Predicted,
    RunRecord,
    cluster_key,
    job_key,
)
from nest_megatron.history.store import VARIABLE, append
from nest_megatron.layout import plan_file
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.planner.choice import Candidate
from nest_megatron.planner.pins import read_pinned
from nest_megatron.tuning.job import RunCommand, TunedJob, read_tuned
from nest_megatron.tuning.session import Ended, Session, TuneRequest
from nest_megatron.tuning.tuner import Tuner
from nest_megatron.units import Seconds
from tests.integrations.commands import LLAMA3_8B

START_S = 60.0

ASKED = TuneRequest(
    command=LLAMA3_8B,
    overrides=("cluster=dgx_h100",),
    config_dir=None,
    free="all",
    megatron_version="0.16",
    budget=5,
    iterations=20,
    run_timeout_s=1800.0,
    launcher="local",
    launcher_options=(),
    folder=str(Path.cwd()),
)


@functools.cache
def job() -> TunedJob:
    """The job, ranked once."""
    return read_tuned(ASKED, compose(parse(ASKED.overrides)))


def candidate_of(plan: ParallelPlan) -> Candidate:
    """The candidate that a plan was written of."""
    own = plan.layout, plan.layout.partition
    return next(
        each
        for each in job().ranked.candidates
        if (each.solved.layout, each.solved.layout.partition) == own
    )


class Answered:
    """A launcher whose runs take what a function says; ``None`` runs out of memory."""

    def __init__(self, step_s: Callable[[Candidate], Seconds | None]) -> None:
        self.step_s = step_s
        self.ran: list[Candidate] = []

    def __call__(self, command: RunCommand, timeout_s: Seconds, output: Path) -> Ended:
        plan = self.plan(command)
        candidate = candidate_of(plan)
        self.ran.append(candidate)
        step_s = self.step_s(candidate)
        self.record(plan, command, step_s)
        if step_s is None:
            output.write_text("[rank1]: torch.OutOfMemoryError: CUDA out of memory.\n")
            return Ended(code=1, seconds=START_S)
        output.write_text("done\n")
        return Ended(code=0, seconds=START_S + (ASKED.iterations + 1) * step_s)

    @staticmethod
    def plan(command: RunCommand) -> ParallelPlan:
        words = dict(word.split("=", 1) for word in command.argv if "=" in word)
        return read_pinned(Path(words["nest.plan"])).plan

    def record(self, plan: ParallelPlan, command: RunCommand, step_s: Seconds | None) -> None:
        """Leave the record that a recorder would."""
        path = command.environment[VARIABLE]
        assert path is not None
        append(run_record(plan, step_s), Path(path))


def run_record(plan: ParallelPlan, step_s: Seconds | None) -> RunRecord:
    """The record of a run of a plan; without a step, of one that ran out of memory."""
    ranks = plan.layout.num_gpus
    steps = None
    if step_s is not None:
        steps = Measured(
            step_times_s=(step_s,) * ASKED.iterations,
            warm_up=5,
            busy_s=(None,) * ranks,
            peak_memory_bytes=(plan.predicted.peak_memory_bytes,) * ranks,
        )
    return RunRecord(
        id=f"run-{plan_file.checksum(plan)}",
        outcome=Outcome.OUT_OF_MEMORY if steps is None else Outcome.FINISHED,
        start="2026-11-23T12:00:00+00:00",
        user="ada",
        batch_job=None,
        hosts=("here",) * ranks,
        plan=plan_file.checksum(plan),
        job=job_key(plan),
        cluster=cluster_key(plan),
        versions={},
        grid=plan.layout,
        pipeline_model_parallel_layout=None,
        predicted=Predicted(
            step_s=plan.predicted.iteration_time_s,
            low_s=None,
            high_s=None,
            shares={},
            features=(),
            busy_s=(),
            peak_memory_bytes=(plan.predicted.peak_memory_bytes,),
        ),
        measured=steps,
        error=None if steps is not None else "rank 1: CUDA out of memory",
    )


def tuner(session: Session, launcher: Answered, **asked: object) -> Tuner:
    """A tuner of the job whose runs are answered."""
    session.request = dataclasses.replace(session.request, **asked)  # type: ignore[arg-type]
    return Tuner(session=session, job=job(), launcher_of=lambda _: launcher, tell=lambda _: None)
