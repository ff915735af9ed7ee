"""The loop, with runs that a table answers: what runs, what is chosen, what a kill leaves."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from nest_megatron.cost_model.mechanisms import Mechanism
from nest_megatron.errors import UserInputError
from nest_megatron.files import MAX_BYTES
from nest_megatron.history import store
from nest_megatron.history.records import Outcome
from nest_megatron.planner.choice import Candidate
from nest_megatron.tuning.report import (
    lessons,
    lost_percent,
    taken_words,
    tuned_document,
    tuned_report,
)
from nest_megatron.tuning.selection import chosen
from nest_megatron.tuning.session import (
    Ended,
    Failure,
    State,
    Trial,
    in_history,
    judged,
    new_session,
    resumed_session,
)
from nest_megatron.tuning.tuner import Tuned, trials_of
from tests.cli.runs import run
from tests.history.runs import run_record
from tests.integrations.test_sharding import job as command
from tests.tuning.stand_in import ASKED, START_S, Answered, job, tuner


def as_predicted(candidate: Candidate) -> float:
    return candidate.step.median_s


def off_by(**errors: float) -> Answered:
    """Runs whose mechanisms take longer than predicted, each by a logarithm."""

    def step_s(candidate: Candidate) -> float:
        shares = candidate.step.shares
        off = sum(shares.get(Mechanism(name), 0.0) * error for name, error in errors.items())
        return candidate.step.median_s * math.exp(off)

    return Answered(step_s)


def tuned(folder: Path, launcher: Answered, **asked: object) -> Tuned:
    with new_session(folder, ASKED) as session:
        return tuner(session, launcher, **asked).run()


def test_runs_that_would_be_ended_before_their_end_are_not_begun(tmp_path: Path) -> None:
    typed = command("--use-distributed-optimizer")
    words = ("cluster=dgx_h100", "cluster.num_gpus=16", "--dry-run", "--run-timeout", "1min")
    done = run("tune", "--from", typed, *words)
    assert (done.code, "a run is expected to take" in done.err) == (2, True)
    minutes = done.err.partition("Begin a tuning with --run-timeout ")[2].partition("min")[0]
    assert run("tune", "--from", typed, *words[:-1], f"{minutes}min").code == 0
    runs = tmp_path / "my runs"
    for more in (words[3:], ("--launcher", "local"), ("--launcher", "srun"), (f"out={runs}",)):
        done = run("tune", "--from", typed, *words[:2], *more, "--out", str(runs))
        assert (done.code, more[0].partition("=")[0] in done.err) == (2, True)
        assert ("Runs are kept" in done.out) is (f"--resume '{runs}' goes on" in done.out)
        assert not runs.exists()


def test_a_dry_run_starts_no_run_of_a_tuning_that_goes_on(tmp_path: Path) -> None:
    done = run("tune", "--resume", str(tmp_path), "--dry-run")
    assert (done.code, "Leave one of the two out." in done.err) == (2, True)


@pytest.mark.parametrize(
    "options",
    [
        ("--launcher", "nemo_run"),
        ("--launcher", "submitit", "--launcher-option", "slurm_partition"),
        ("--launcher-option", "slurm_partition=h100"),
    ],
)
def test_options_of_a_launcher_are_read_before_a_folder_is_made(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    typed = command("--use-distributed-optimizer")
    words = ("cluster=dgx_h100", "cluster.num_gpus=16", "--out", str(tmp_path / "runs"))
    for more in ((), ("--dry-run",)):
        done = run("tune", "--from", typed, *words, *options, *more)
        assert (done.code, "error: --launcher" in done.err) == (2, True)
    assert not (tmp_path / "runs").exists()


def test_the_first_run_is_of_the_plan_without_runs(tmp_path: Path) -> None:
    launcher = Answered(as_predicted)
    found = tuned(tmp_path, launcher)
    assert launcher.ran[0] == job().ranked.candidates[0]
    assert len(launcher.ran) == len({each.solved for each in launcher.ran}) <= ASKED.budget
    assert found.stop


def test_the_chosen_plan_is_the_fastest_where_a_mechanism_was_mispriced(tmp_path: Path) -> None:
    launcher = off_by(pipeline=1.0, replicas=0.5)
    found = tuned(tmp_path, launcher, budget=6)
    taken = chosen(found.known)
    assert taken is not None
    best = min(job().ranked.candidates, key=launcher.step_s)
    assert launcher.step_s(taken) <= 1.02 * launcher.step_s(best)


def test_what_more_likely_runs_out_of_memory_than_not_is_not_chosen_unless_it_ran(
    tmp_path: Path,
) -> None:
    with new_session(tmp_path, ASKED) as session:
        known = tuner(session, Answered(as_predicted)).known()
    fast, *rest = sorted(known.ranked.candidates, key=as_predicted)
    risky = dataclasses.replace(fast, out_of_memory=0.6)
    safe = [dataclasses.replace(each, out_of_memory=0.01) for each in rest]
    ranked = dataclasses.replace(known.ranked, candidates=(risky, *safe))
    known = dataclasses.replace(known, ranked=ranked)
    taken = chosen(known)
    assert taken is not None
    assert taken.solved != risky.solved
    ran = chosen(known.measured(risky.solved, 0.5 * as_predicted(risky), START_S))
    assert ran is not None
    assert ran.solved == risky.solved


def test_runs_end_with_the_budget(tmp_path: Path) -> None:
    launcher = off_by(pipeline=1.0)
    found = tuned(tmp_path, launcher, budget=2)
    assert len(launcher.ran) <= 2
    assert found.stop


def test_a_short_job_is_worth_one_run(tmp_path: Path) -> None:
    launcher = Answered(as_predicted)
    short = dataclasses.replace(job(), job=job().job)
    assert short.num_steps is not None
    with new_session(tmp_path, ASKED) as session:
        work = tuner(session, launcher)
        known = dataclasses.replace(work.known(), num_steps=10)
        first = known.ranked.candidates[0]
        known = known.measured(first.solved, first.step.median_s, START_S)
        found = work._next(known)
    assert isinstance(found, str)
    assert "save the job more time" in found


def test_what_needs_as_much_memory_as_a_plan_that_ran_out_is_not_run(tmp_path: Path) -> None:
    first = job().ranked.candidates[0]

    def step_s(candidate: Candidate) -> float | None:
        short = candidate.peak_memory_bytes >= first.peak_memory_bytes
        return None if short else candidate.step.median_s

    launcher = Answered(step_s)
    found = tuned(tmp_path, launcher)
    ran_out = [each for each in launcher.ran if step_s(each) is None]
    assert ran_out == [first]
    taken = chosen(found.known)
    assert taken is not None
    assert taken.peak_memory_bytes < first.peak_memory_bytes


def test_runs_teach_what_plans_need(tmp_path: Path) -> None:
    """A run out of memory makes others of the job run out more often, a low peak less often."""
    first, *others = job().ranked.candidates
    with new_session(tmp_path, ASKED) as session:
        known = tuner(session, Answered(as_predicted)).known()
    before = {each.solved: each.out_of_memory for each in others}
    short = known.without(first.solved, out_of_memory=True)
    low = known.measured(
        first.solved, first.step.median_s, None, round(0.9 * first.peak_memory_bytes)
    )
    after = {each.solved: each.out_of_memory for each in short.candidates()}
    less = {each.solved: each.out_of_memory for each in low.candidates()}
    assert after
    assert all(after[plan] > before[plan] for plan in after)
    near = [plan for plan in before if before[plan] > 0.02]
    assert all(less[plan] < before[plan] for plan in near)


class Broken(Answered):
    """Runs that die before they say anything."""

    def record(self, *_: object) -> None:
        pass


def test_a_job_that_fails_by_itself_is_given_up(tmp_path: Path) -> None:
    launcher = Broken(as_predicted)
    found = tuned(tmp_path, launcher)
    assert len(launcher.ran) == 2
    assert "the job itself fails" in found.stop


def test_a_budget_that_measured_nothing_says_why(tmp_path: Path) -> None:
    found = tuned(tmp_path, Broken(as_predicted), budget=1)
    assert "the budget is spent, and nothing was measured: " in found.stop
    assert str(tmp_path / "run-1" / "output.txt") in found.stop


def test_an_interruption_says_how_to_go_on(tmp_path: Path) -> None:
    class Interrupted(Answered):
        def __call__(self, *_: object) -> Ended:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match=f"--resume {tmp_path}` goes on from there"):
        tuned(tmp_path, Interrupted(as_predicted))


def test_a_resumed_tuning_goes_on_where_it_stopped(tmp_path: Path) -> None:
    folder, launcher = tmp_path / "runs", off_by(pipeline=1.0, replicas=0.5)
    whole = tuned(tmp_path / "whole", off_by(pipeline=1.0, replicas=0.5))

    class Killed(Exception):
        pass

    class Kills(Answered):
        def __call__(self, *arguments: object) -> object:  # type: ignore[override]
            if len(self.ran) == 1:
                raise Killed
            return super().__call__(*arguments)  # type: ignore[arg-type]

    dying = Kills(launcher.step_s)
    with pytest.raises(Killed), new_session(folder, ASKED) as session:
        tuner(session, dying).run()
    with resumed_session(folder) as session:
        assert [trial.state for trial in session.trials] == [State.MEASURED, State.STARTED]
        found = tuner(session, launcher).run()
        assert session.trials[1].state is State.REPEATED
        assert sum(trial.counts for trial in session.trials) == len(dying.ran) + len(launcher.ran)
    assert found.known.steps_s == whole.known.steps_s
    assert found.stop == whole.stop


def test_a_killed_run_that_had_measured_is_not_repeated(tmp_path: Path) -> None:
    class Kills(Answered):
        def __call__(self, *arguments: object) -> object:  # type: ignore[override]
            super().__call__(*arguments)  # type: ignore[arg-type]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), new_session(tmp_path / "a", ASKED) as session:
        tuner(session, Kills(as_predicted)).run()
    with resumed_session(tmp_path / "a") as session:
        tuner(session, Answered(as_predicted)).run()
        assert session.trials[0].state is State.MEASURED


def test_a_killed_run_that_had_run_out_of_memory_is_not_repeated(tmp_path: Path) -> None:
    class Kills(Answered):
        def __call__(self, *arguments: object) -> object:  # type: ignore[override]
            super().__call__(*arguments)  # type: ignore[arg-type]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), new_session(tmp_path / "a", ASKED) as session:
        tuner(session, Kills(lambda _: None)).run()
    with resumed_session(tmp_path / "a") as session:
        tuner(session, Answered(as_predicted)).run()
        assert session.trials[0].failure is Failure.OUT_OF_MEMORY


@pytest.mark.parametrize("is_there", [True, False])
def test_what_is_refused_leaves_folders_as_they_were(is_there: bool, tmp_path: Path) -> None:
    folder = tmp_path / "a"
    if is_there:
        folder.mkdir()

    def refuse() -> None:
        (folder / "run-1").mkdir()
        raise UserInputError("tune", None, "it is refused", "Ask.")

    with pytest.raises(UserInputError), new_session(folder, ASKED):
        refuse()
    assert [*tmp_path.rglob("*")] == [folder] * is_there


def test_the_last_lines_of_a_long_output_say_why_it_failed(tmp_path: Path) -> None:
    output = tmp_path / "output"
    with output.open("wb") as stream:
        stream.truncate(MAX_BYTES)
        stream.seek(MAX_BYTES)
        stream.write(b"\ntorch.OutOfMemoryError: CUDA out of memory.\n")
    trial = Trial(number=1, plan="0", layout="TP 1", predicted_s=1.0, state=State.STARTED)
    found = judged(trial, None, Ended(1, 60.0), output)
    assert found.failure is Failure.OUT_OF_MEMORY


def test_a_folder_is_held_by_one_tuning(tmp_path: Path) -> None:
    with (
        new_session(tmp_path / "a", ASKED),
        pytest.raises(UserInputError, match=r"process .* tunes in it"),
        resumed_session(tmp_path / "a"),
    ):
        pass


def test_a_line_that_was_cut_off_is_passed_over(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    with new_session(folder, ASKED) as session:
        tuner(session, Answered(as_predicted), budget=1).run()
    journal = folder / "journal.jsonl"
    journal.write_bytes(journal.read_bytes() + b'{"number":2,"pl')
    with resumed_session(folder) as session:
        assert [trial.number for trial in session.trials] == [1]
        tuner(session, Answered(as_predicted)).run()
    with resumed_session(folder) as session:
        assert len(session.trials) > 1


@pytest.mark.parametrize("name", ["nothing", "other"])
def test_only_a_folder_of_runs_is_resumed(name: str, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with pytest.raises(UserInputError, match="holds no tuning"), resumed_session(tmp_path / name):
        pass


def test_what_was_learnt_is_told(tmp_path: Path) -> None:
    found = tuned(tmp_path, off_by(pipeline=1.0, replicas=0.5))
    taken = chosen(found.known)
    assert taken is not None
    told = lessons(found.known)
    assert all(lesson.left < 1.01 for lesson in told)
    assert any(lesson.percent > 0 for lesson in told)
    lost = lost_percent(found.known, taken)
    assert lost is not None
    with resumed_session(tmp_path) as session:
        document = tuned_document(found, session.trials, tmp_path / "plan.yaml", tmp_path)
        assert document["without_runs_slower_percent"] == lost
        assert [*tuned_report(found, session.trials, tmp_path / "plan.yaml")]


def test_a_range_after_one_run_is_said_to_be_too_narrow(tmp_path: Path) -> None:
    found = tuned(tmp_path, off_by(pipeline=1.0, replicas=0.5))
    measured = found.known.steps_s
    assert len(measured) > 1
    one = dict([*measured.items()][:1])
    told = []
    for steps_s in (one, measured):
        known = dataclasses.replace(found.known, steps_s=steps_s)
        other = next(each for each in known.candidates() if each.solved not in measured)
        told.append("too narrow after one run of the job" in taken_words(known, other))
    assert told == [True, False]


def test_runs_are_in_the_site_s_history_once_and_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(store.VARIABLE, str(tmp_path / "site.jsonl"))
    launcher = Answered(as_predicted)
    with new_session(tmp_path / "a", ASKED) as session:
        tuner(session, launcher, budget=1).run()
    with resumed_session(tmp_path / "a") as session:
        tuner(session, launcher, budget=1).run()
        trials = trials_of(session)
    kept = store.read()
    assert {run.id for run in kept} == trials
    assert [(run.outcome, run.trial) for run in kept] == [(Outcome.FINISHED, True)]


def test_a_run_that_told_nothing_of_its_end_is_kept_with_what_ended_it() -> None:
    trial = Trial(
        number=1,
        plan="",
        layout="",
        predicted_s=1.0,
        state=State.FAILED,
        failure=Failure.OUT_OF_MEMORY,
        reason="std::bad_alloc",
    )
    begun = run_record(outcome=Outcome.STARTED, measured=None)
    found = in_history(begun, trial)
    assert (found.outcome, found.error, found.trial) == (
        Outcome.OUT_OF_MEMORY,
        "std::bad_alloc",
        True,
    )
    late = dataclasses.replace(trial, failure=Failure.TIMEOUT)
    assert in_history(begun, late).outcome is Outcome.KILLED
    assert in_history(dataclasses.replace(begun, outcome=Outcome.FAILED), late).outcome is (
        Outcome.FAILED
    )
