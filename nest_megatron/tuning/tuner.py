"""Run, learn, choose again: from a session's runs so far to the plan that is taken."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from nest_megatron.errors import NestError, UserInputError
from nest_megatron.files import write_text
from nest_megatron.history.store import append
from nest_megatron.layout import plan_file
from nest_megatron.plain import frozen
from nest_megatron.planner import describe_grid
from nest_megatron.solver.ranking import SolvedLayout
from nest_megatron.tuning.job import RunCommand, TunedJob
from nest_megatron.tuning.launchers import Launcher, running_file
from nest_megatron.tuning.selection import Known, NextRun, candidate_words, next_run
from nest_megatron.tuning.session import (
    Ended,
    Failure,
    Session,
    State,
    Trial,
    in_history,
    judged,
    measured,
    open_locked,
    record_of,
)
from nest_megatron.units import format_duration, format_gib, format_seconds

#: A run whose program was killed is ended with it, which takes some seconds.
_ENDING_S = 120.0
#: Runs that fail for another reason than memory before any succeeds: the job itself fails.
_HOPELESS = 2

_HISTORY, _OUTPUT, _PLAN = "record.jsonl", "output.txt", "plan.yaml"


class Tuned(NamedTuple):
    """How a tuning ended, and why."""

    known: Known
    stop: str


@frozen
class Tuner:
    """A tuning at work.

    Args:
        launcher_of: the launcher for a command.
        tell: called with what happens, one sentence at a time.
    """

    session: Session
    job: TunedJob
    launcher_of: Callable[[RunCommand], Launcher]
    tell: Callable[[str], None]

    def run(self) -> Tuned:
        """Run until the budget is spent or nothing is left to learn that pays for its time.

        Raises:
            KeyboardInterrupt: if the user interrupts; it says how to go on.
        """
        self.settle()
        try:
            while not isinstance(found := self._next(self.known()), str):
                self._run(found)
        except KeyboardInterrupt as error:
            resume = f"nest-megatron tune --resume {shlex.quote(str(self.session.folder))}"
            raise KeyboardInterrupt(f"`{resume}` goes on from there") from error
        return Tuned(known=self.known(), stop=found)

    def known(self) -> Known:
        """What the runs so far say."""
        known = Known(
            ranked=self.job.ranked,
            iterations=self.session.request.iterations,
            num_steps=self.job.num_steps,
        )
        for trial in self.session.trials:
            if trial.state is State.MEASURED:
                assert trial.step_s is not None
                known = known.measured(
                    self._solved(trial), trial.step_s, trial.seconds, trial.peak_allocated_bytes
                )
            elif trial.state is State.FAILED:
                short = trial.failure is Failure.OUT_OF_MEMORY
                known = known.without(self._solved(trial), out_of_memory=short)
        return known

    def _next(self, known: Known) -> NextRun | str:
        counted = [trial for trial in self.session.trials if trial.counts]
        failed = [
            trial
            for trial in counted
            if trial.state is State.FAILED and trial.failure is not Failure.OUT_OF_MEMORY
        ]
        found = next_run(known, self.session.request.budget - len(counted))
        if known.steps_s or not failed:
            return found
        last = f"{failed[-1].reason} ({self.session.path(failed[-1], _OUTPUT)})"
        if len(failed) >= _HOPELESS:
            return f"the job itself fails: {last}"
        if isinstance(found, str):
            return f"{found}, and nothing was measured: {last}"
        return found

    def _run(self, run: NextRun) -> None:
        number, candidate = len(self.session.trials) + 1, run.candidate
        request, path = self.session.request, self.session.path
        layout = candidate_words(candidate)
        prior = next(e for e in self.job.ranked.candidates if e.solved == candidate.solved)
        trial = Trial(
            number=number,
            plan="",
            layout=layout,
            predicted_s=prior.step.median_s,
            state=State.STARTED,
        )
        self.session.folder.joinpath(trial.folder).mkdir(exist_ok=True)
        plan_file.write(self.job.ranked.plan(candidate), path(trial, _PLAN))
        try:
            plan = self.job.plan(candidate)
        except NestError as error:
            failed = dataclasses.replace(
                trial, state=State.FAILED, failure=Failure.REFUSED, reason=str(error)
            )
            self._ended(failed)
            return
        plan_file.write(plan, path(trial, _PLAN))
        trial = dataclasses.replace(trial, plan=plan_file.checksum(plan))
        history, output = path(trial, _HISTORY), path(trial, _OUTPUT)
        command = self.job.command(plan, path(trial, "pinned.yaml"), request.iterations, history)
        launch = self.launcher_of(command)
        write_text(path(trial, "command.txt"), f"{shlex.join(command.words())}\n")
        self.tell(
            f"Run {number}: {layout}; expected {format_seconds(candidate.step.median_s)} a step, "
            f"{format_duration(run.seconds)} in all."
        )
        self.session.note(trial)
        ended = launch(command, request.run_timeout_s, output)
        self._ended(judged(trial, record_of(history), ended, output))

    def _ended(self, trial: Trial) -> None:
        self.session.note(trial)
        self.tell(f"Run {trial.number}: {outcome_words(trial)}.")
        record = record_of(self.session.path(trial, _HISTORY))
        if record is None or trial.state is State.REPEATED:
            return
        try:
            append(in_history(record, trial))
        except UserInputError as error:
            self.tell(f"The site's history lacks this run: {error.value}: {error.limit}.")

    def settle(self) -> None:
        """Say of runs whose program was killed how they ended, from what they recorded.

        Raises:
            UserInputError: if one of them still runs.
        """
        for trial in self.session.trials:
            if trial.state is not State.STARTED:
                continue
            running = running_file(self.session.folder / trial.folder)
            with open_locked(running, _ENDING_S) as lock:
                if lock is None:
                    raise UserInputError(
                        "tune", trial.folder, "it still runs", "End it, or wait for its end."
                    )
            history, output = (self.session.path(trial, name) for name in (_HISTORY, _OUTPUT))
            self._ended(interrupted(trial, history, output))

    def _solved(self, trial: Trial) -> SolvedLayout:
        """The candidate that a run was of."""
        layout = plan_file.read(self.session.path(trial, _PLAN)).layout
        for each in self.job.ranked.candidates:
            if each.solved.layout == layout:
                return each.solved
        limit = "planned again, this job has no such plan"
        fix = "Begin again, with the command, settings and profiles of now."
        raise UserInputError("tune", describe_grid(layout), limit, fix)


def trials_of(session: Session) -> frozenset[str]:
    """Ids of a session's runs, as their records have them."""
    records = (record_of(session.path(trial, _HISTORY)) for trial in session.trials)
    return frozenset(record.id for record in records if record is not None)


def interrupted(trial: Trial, history: Path, output: Path) -> Trial:
    """A run that was ended together with this program: measured, failed, or to be repeated."""
    record = record_of(history)
    if record is not None and record.measured is not None and not record.outcome.is_failure:
        return measured(trial, record)
    found = judged(trial, record, Ended(code=1, seconds=0.0), output)
    if found.failure is Failure.OUT_OF_MEMORY:
        return dataclasses.replace(found, seconds=None)
    return dataclasses.replace(trial, state=State.REPEATED)


def outcome_words(trial: Trial) -> str:
    """How a run ended, in words."""
    if trial.state is State.MEASURED:
        assert trial.step_s is not None
        words = f"{format_seconds(trial.step_s)} a step"
        peak = trial.peak_memory_bytes
        return words if peak is None else f"{words}, peak memory {format_gib(peak)}"
    if trial.state is State.FAILED:
        named = {
            Failure.OUT_OF_MEMORY: "out of memory",
            Failure.NCCL: "communication failed",
            Failure.REFUSED: "refused",
            Failure.TIMEOUT: "took too long",
            Failure.OTHER: "failed",
        }
        assert trial.failure is not None
        return f"{named[trial.failure]}: {trial.reason}"
    if trial.state is State.REPEATED:
        return "it was killed before it had measured anything, and is repeated"
    return "it has started"
