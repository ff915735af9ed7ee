"""The recorder inside a job: what it says, what it keeps, and that nothing of it stops the job."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nest_megatron import files
from nest_megatron.history import store as history
from nest_megatron.history.records import Outcome, RunRecord
from nest_megatron.integrations import recorder as recording
from nest_megatron.integrations.recorder import Recorder, outcome_of
from nest_megatron.layout.dims import ParallelDims
from nest_megatron.layout.layout import PartialLayout
from tests.cli.runs import environment
from tests.history.runs import run_record
from tests.megatron_lm.training import free_port

torch = pytest.importorskip("torch", reason="torch is not installed")

RANK = Path(__file__).with_name("recorded_rank.py")


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    files.warn_once.cache_clear()
    monkeypatch.setenv(history.VARIABLE, str(tmp_path / "runs.jsonl"))
    return tmp_path / "runs.jsonl"


def started(num_ranks: int = 1, **fields: Any) -> RunRecord:
    """A run that begins, of replicas that do the same."""
    grid = PartialLayout(
        dims=ParallelDims(data_parallel_size=num_ranks),
        global_batch_size=12,
        micro_batch_size=1,
        sequence_parallel=False,
    )
    record = run_record(grid=grid, hosts=("here",) * num_ranks)
    predicted = dataclasses.replace(
        record.predicted, busy_s=(1.4,), peak_memory_bytes=(10 << 30,), low_s=None, high_s=None
    )
    return dataclasses.replace(
        record, **{"predicted": predicted, "outcome": Outcome.STARTED, "measured": None, **fields}
    )


def alone(steps: int, **more: Any) -> Recorder:
    known = {"rank": 0, "num_ranks": 1, "store": None, "own_run": started(), **more}
    return Recorder(steps=steps, **known)


def take_steps(recorder: Recorder, count: int, work: Callable[[], Any] = lambda: None) -> None:
    run = recorder.with_timing(work)
    for _ in range(count):
        with recorder.step():
            run()
        run()  # an evaluation between two steps does not count


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock whose every reading is half a second after the last: six a step."""
    clock = itertools.count()
    monkeypatch.setattr("nest_megatron.profile.clock.time.perf_counter", lambda: next(clock) / 2)
    monkeypatch.setattr(recording, "peak_memory_bytes", lambda: 11 << 30)


@pytest.mark.usefixtures("ticking")
def test_one_record_after_the_watched_steps(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = runs.with_name("nest.prom")
    take_steps(alone(4, prometheus=str(page)), 9)
    assert capsys.readouterr().out.splitlines()[0] == (
        "nest: measured over watched steps 2 to 4: 1.500 s a step (predicted 2.000 s, -25.0 %), "
        "peak memory of rank 0 11.0 GiB (predicted 10.0 GiB, +10.0 %)"
    )
    (run,) = history.read(runs)
    assert "nest_step_seconds{" in page.read_text(encoding="utf-8")
    assert run.measured is not None
    assert run.measured.step_times_s == (1.5,) * 4
    assert run.measured.busy_s == (0.5,)


@pytest.mark.usefixtures("ticking")
def test_a_short_job_is_recorded_with_the_steps_there_are(runs: Path) -> None:
    recorder = alone(20)
    take_steps(recorder, 3)
    recorder.end()
    (run,) = history.read(runs)
    assert run.outcome is Outcome.FINISHED
    assert run.measured is not None
    assert len(run.measured.step_times_s) == 2


def test_a_job_of_one_step_is_over_without_a_measurement(runs: Path) -> None:
    recorder = alone(20)
    take_steps(recorder, 1)
    recorder.end(SystemExit(0))  # Megatron's --exit-interval
    assert [(run.outcome, run.measured) for run in history.read(runs)] == [(Outcome.FINISHED, None)]


@pytest.mark.usefixtures("ticking")
def test_what_fails_later_keeps_its_steps(runs: Path) -> None:
    recorder = alone(2)
    take_steps(recorder, 4)
    recorder.end(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0"))
    (run,) = history.read(runs)
    assert run.outcome is Outcome.OUT_OF_MEMORY
    assert run.error is not None
    assert run.error.endswith("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert run.measured is not None


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (RuntimeError("NCCL error: Cuda failure 2 'out of memory'"), Outcome.OUT_OF_MEMORY),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), Outcome.OUT_OF_MEMORY),
        (RuntimeError("NCCL communicator was aborted"), Outcome.FAILED),
        (ValueError("out of memory"), Outcome.FAILED),
        (SystemExit(1), Outcome.FAILED),
        (KeyboardInterrupt(), Outcome.KILLED),
    ],
)
def test_how_a_run_ends(error: BaseException, outcome: Outcome) -> None:
    assert outcome_of(error) is outcome


@pytest.mark.usefixtures("ticking")
def test_a_history_that_cannot_be_written_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(history.VARIABLE, str(tmp_path / "file" / "runs.jsonl"))
    recorder = alone(2)
    take_steps(recorder, 5)
    recorder.end(RuntimeError("x"))
    said = capsys.readouterr().out
    assert "nest: measured over watched steps" in said
    assert said.count("nest: the record of this run could not be") == 2
    assert history.VARIABLE in said


def launch(words: dict[int, str], num_ranks: int, runs: Path, **more: str) -> list[Any]:
    """Ranks as processes of their own, which meet in rank 0's store."""
    shared = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": free_port(),
        "WORLD_SIZE": str(num_ranks),
        history.VARIABLE: str(runs),
        **more,
    }
    return [
        subprocess.Popen(
            [sys.executable, str(RANK), words.get(rank, "plain")],
            env={**environment(), **shared, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(num_ranks)
    ]


def outputs(processes: list[Any]) -> list[str]:
    return [process.communicate(timeout=300)[0] for process in processes]


@pytest.mark.slow
def test_a_slow_rank_is_named(runs: Path) -> None:
    processes = launch({2: "slow"}, 4, runs)
    said = outputs(processes)
    assert [process.returncode for process in processes] == [0] * 4, said
    (run,) = history.read(runs)
    (warning,) = (each for each in run.warnings if "than those of replicas" in each)
    assert warning.startswith("rank 2 (")
    assert "pipeline rank 0: forward and backward passes take" in warning
    assert warning in said[0]
    assert run.measured is not None
    busy = run.measured.busy_s
    assert max(range(4), key=lambda rank: busy[rank] or 0.0) == 2


def test_a_killed_rank_stops_no_other(runs: Path) -> None:
    processes = launch({0: "without one", 1: "killed"}, 3, runs)
    said = outputs(processes)
    assert [process.returncode for process in processes] == [0, -signal.SIGKILL, 0], said
    (run,) = history.read(runs)
    assert run.outcome is Outcome.FINISHED
    assert any(each.startswith("nothing was heard from rank 1") for each in run.warnings)
    assert run.measured is not None
    assert [busy is None for busy in run.measured.busy_s] == [False, True, False]


@pytest.mark.slow
def test_the_rank_that_runs_out_of_memory_is_the_cause(runs: Path) -> None:
    """The others fail because of it, at once or later."""
    processes = launch({0: "failing", 1: "out_of_memory", 2: "failing"}, 3, runs)
    said = outputs(processes)
    assert all(process.returncode == 1 for process in processes), said
    (run,) = history.read(runs)
    assert run.outcome is Outcome.OUT_OF_MEMORY
    assert run.error is not None
    assert run.error.startswith("rank 1 (")
    assert "Tried to allocate" in run.error


@pytest.mark.slow
def test_a_job_that_is_killed_leaves_its_start(runs: Path) -> None:
    processes = launch({0: "waiting"}, 1, runs)
    assert processes[0].stdout.readline() == "training\n"
    os.kill(processes[0].pid, signal.SIGTERM)
    outputs(processes)
    (run,) = history.read(runs)
    assert (run.outcome, run.end, run.measured) == (Outcome.STARTED, None, None)


@pytest.mark.slow
def test_two_jobs_at_once_keep_whole_lines(runs: Path) -> None:
    jobs = [launch({}, 2, runs, NEST_TEST_RUN=name) for name in ("one", "two")]
    for processes in jobs:
        said = outputs(processes)
        assert [process.returncode for process in processes] == [0, 0], said
    assert {run.id: run.outcome for run in history.read(runs)} == {
        "one": Outcome.FINISHED,
        "two": Outcome.FINISHED,
    }
    assert len(runs.read_text().splitlines()) == 4


@pytest.mark.usefixtures("ticking")
def test_tokens_of_the_busiest_expert_rank_are_kept(runs: Path) -> None:
    """Megatron sums the counts of all replicas into its first argument; two ranks, four experts."""
    recorder = alone(4)
    begun = torch.tensor([[1.0, 1.0, 1.0, 1.0], [3.0, 3.0, 1.0, 1.0]])

    def update(tokens: torch.Tensor, rate: float) -> float:
        tokens *= 8
        return rate

    routed = recorder.with_token_counts(update, ep=2)
    for _ in range(6):
        with recorder.step():
            assert routed(begun.clone(), 1e-3) == 1e-3
    (run,) = history.read(runs)
    assert run.measured is not None
    assert run.measured.expert_imbalance == pytest.approx((1.0 + 1.5) / 2)


@pytest.mark.usefixtures("ticking")
def test_without_counts_nothing_is_said_of_experts(runs: Path) -> None:
    take_steps(alone(4), 6)
    (run,) = history.read(runs)
    assert run.measured is not None
    assert run.measured.expert_imbalance is None
