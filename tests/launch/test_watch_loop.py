"""The recorder in Megatron's training loop: its functions are wrapped, timed, and put back."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import nest_megatron
from nest_megatron.config import policy as policies
from nest_megatron.config.launch import LaunchWords, Mode
from nest_megatron.config.schema import LaunchConfig, WatchConfig
from nest_megatron.history import store as history
from nest_megatron.history.records import Outcome
from nest_megatron.integrations import run_record as audit
from nest_megatron.integrations.megatron_lm.ranks import LaunchedJob, Watch
from nest_megatron.integrations.recorder import Recorder
from nest_megatron.layout import plan_file
from nest_megatron.layout.diff import Change
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.policy import PolicyError

schedules = pytest.importorskip(
    "megatron.core.pipeline_parallel.schedules", reason="megatron-core is not installed"
)


@pytest.fixture(scope="module")
def plan() -> ParallelPlan:
    return nest_megatron.plan(
        model="llama3_8b", cluster="dgx_h100", num_gpus=8, global_batch_size=128
    ).record


class Board:
    """TensorBoard's writer, and what was written."""

    def __init__(self) -> None:
        self.written: dict[str, tuple[float, int]] = {}

    def add_scalar(self, name: str, value: float, iteration: int) -> None:
        self.written[name] = (value, iteration)


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Board:
    """Megatron's ``global_vars``, with TensorBoard and Weights & Biases."""
    board = Board()

    def log(values: Mapping[str, float], iteration: int) -> None:
        raise ConnectionError("Weights & Biases is down")

    variables = SimpleNamespace(
        get_tensorboard_writer=lambda: board, get_wandb_writer=lambda: SimpleNamespace(log=log)
    )
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", variables)
    return board


@pytest.fixture
def job(plan: ParallelPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A job of one rank that is about to train."""
    monkeypatch.setenv(history.VARIABLE, str(tmp_path / "runs.jsonl"))
    watch = WatchConfig(steps=3, prometheus=str(tmp_path / "nest.prom"))
    return SimpleNamespace(
        launch=LaunchConfig(watch=watch),
        args=Namespace(rank=0, world_size=1, curr_iteration=7),
        store=None,
        decision=SimpleNamespace(plan=plan, ranks=None),
        words=LaunchWords(mode=Mode.AUTO, job=(), launch=()),
        changes=(Change(field="micro_batch_size", before=4, after=1, reason="memory"),),
        signer=None,
        recorder=None,
    )


def training_module(job: Any, fail_at: int = -1) -> ModuleType:
    """``megatron.training.training`` with eight steps of two micro batches."""
    module = ModuleType("training")

    def train_step(number: int) -> int:
        if number == fail_at:
            raise RuntimeError("NCCL error: remote process exited\nmore")
        for _ in range(2):
            schedules.forward_step(number)
            schedules.backward_step(number)
        return number

    def pretrain() -> list[int]:
        LaunchedJob.begin_record(job)
        return [module.train_step(number) for number in range(8)]  # type: ignore[attr-defined]

    watch = Watch(module, lambda: job)
    module.train_step = lambda *a: watch.train_step(train_step, *a)  # type: ignore[attr-defined]
    module.pretrain = lambda: watch.pretrain(pretrain)  # type: ignore[attr-defined]
    return module


@pytest.fixture(autouse=True)
def passes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Passes that do nothing, in the place of the schedule's."""
    done: list[int] = []
    monkeypatch.setattr(schedules, "forward_step", done.append)
    monkeypatch.setattr(schedules, "backward_step", done.append)
    return schedules.forward_step


def test_steps_are_recorded_and_the_loop_is_as_before(
    job: Any, board: Board, passes: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    module = training_module(job)
    assert module.pretrain() == list(range(8))
    (run,) = history.read()
    assert (run.outcome, run.plan) == (Outcome.FINISHED, plan_file.checksum(job.decision.plan))
    assert run.measured is not None
    assert len(run.measured.step_times_s) == 3
    assert run.measured.busy_s[0] is not None
    assert sum(run.predicted.shares.values()) == pytest.approx(1.0)
    assert schedules.forward_step == passes
    assert module.train_step.__name__ == "train_step"
    assert board.written["nest/predicted_step_s"] == (run.predicted.step_s, 7)
    assert "could not be logged: Weights & Biases is down" in capsys.readouterr().out
    assert f'nest_step_seconds{{run="{run.id}"' in (tmp_path / "nest.prom").read_text()


def test_an_error_is_kept_and_goes_on(job: Any, board: Board) -> None:
    with pytest.raises(RuntimeError, match="NCCL"):
        training_module(job, fail_at=6).pretrain()
    (run,) = history.read()
    assert run.outcome is Outcome.FAILED
    assert run.error is not None
    assert run.error.endswith(": RuntimeError: NCCL error: remote process exited")
    assert run.measured is not None


@pytest.fixture
def audited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that a policy, which must have it, names for its audit."""
    policy, path = tmp_path / "policy.yaml", tmp_path / "audit.jsonl"
    policy.write_text(f"audit:\n  file: {path}\n  required: true\n")
    monkeypatch.setenv(policies.VARIABLE, str(policy))
    return path


@pytest.mark.usefixtures("board")
@pytest.mark.parametrize("steps", [3, 0])
def test_an_audit_has_the_launch_the_steps_and_the_end(job: Any, audited: Path, steps: int) -> None:
    job.launch.watch.steps, job.signer = steps, "87C09460C7CF688F"
    module = training_module(job)
    module.pretrain()
    lines = [json.loads(line) for line in audited.read_text().splitlines()]
    assert [line["outcome"] for line in lines] == ["started"] * (2 if steps else 1) + ["finished"]
    (run,) = history.read(audited)
    assert run.launch is not None
    assert run.launch.signer == "87C09460C7CF688F"
    (change,) = run.launch.changes
    assert (change.name, change.before, change.after) == ("micro_batch_size", "4", "1")
    assert (run.measured is None) == (steps == 0)
    assert len(history.read()) == (1 if steps else 0)  # that is the user's to choose


@pytest.mark.usefixtures("board")
def test_an_audit_knows_what_ended_a_run(job: Any, audited: Path) -> None:
    with pytest.raises(RuntimeError, match="NCCL"):
        training_module(job, fail_at=6).pretrain()
    (run,) = history.read(audited)
    assert run.outcome is Outcome.FAILED
    assert run.measured is not None
    assert "NCCL error" in (run.error or "")


def test_a_run_without_a_record_is_refused_where_an_audit_is_required(
    job: Any, audited: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nest_megatron.integrations.recorder.new_run", lambda *_: 1 / 0)
    with pytest.raises(PolicyError, match=r"audit\.required"):
        LaunchedJob.begin_record(job)
    assert not audited.exists()


@pytest.mark.usefixtures("board")
def test_an_audit_that_cannot_be_completed_stops_no_training(
    job: Any, audited: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, append = training_module(job), audit.append_line
    lines: list[bytes] = []

    def fails_later(path: Path, line: bytes, **options: Any) -> None:
        lines.append(line)
        if len(lines) > 1:
            raise OSError(28, "No space left on device")
        append(path, line, **options)

    monkeypatch.setattr(audit, "append_line", fails_later)
    assert module.pretrain() == list(range(8))
    said = capsys.readouterr().out
    assert said.count(f"what became of this launch is not in the audit {audited}") == 2
    assert "No space left on device" in said
    (run,) = history.read(audited)
    assert run.outcome is Outcome.STARTED


def test_nothing_is_kept_of_what_is_not_watched(job: Any) -> None:
    job.launch.watch.steps = 0
    LaunchedJob.begin_record(job)
    assert job.recorder.run() is None
    assert history.read() == ()


def test_fused_passes_are_not_taken_for_whole_ones(
    job: Any, board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    execution = SimpleNamespace(overlap_moe_expert_parallel_comm=True)
    planned = job.decision.plan
    LaunchedJob.begin_record(job)
    train = SimpleNamespace(batch_schedule=None)
    dims = SimpleNamespace(expert_model_parallel_size=1)
    layout = SimpleNamespace(dims=dims, execution=execution)
    job.recorder.plan = SimpleNamespace(layout=layout, train=train)
    module = training_module(job)
    for number in range(5):
        module.train_step(number)
    (run,) = history.read()
    assert run.measured is not None
    assert run.measured.busy_s == (None,)
    assert run.plan == plan_file.checksum(planned)


def test_a_growing_batch_is_watched_once_it_is_the_planned_one(
    job: Any, board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core import num_microbatches_calculator as calculator

    sizes = iter([32, 64, 128, 128, 128, 128, 128, 128])
    monkeypatch.setattr(calculator, "get_current_global_batch_size", lambda: next(sizes))
    LaunchedJob.begin_record(job)
    train = SimpleNamespace(batch_schedule=object())
    layout = dataclasses.replace(job.decision.plan.layout, global_batch_size=128)
    job.decision.plan = SimpleNamespace(layout=layout, train=train)
    module = training_module(job)
    for number in range(5):
        module.train_step(number)
    assert history.read()[0].measured is None  # two smaller ones, three watched, none behind them
    module.train_step(5)
    measured = history.read()[0].measured
    assert measured is not None
    assert len(measured.step_times_s) == 3


def test_tokens_are_counted_where_megatron_updates_routers() -> None:
    counting = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    original = counting.get_updated_expert_bias
    layout = SimpleNamespace(
        execution=SimpleNamespace(overlap_moe_expert_parallel_comm=False),
        dims=SimpleNamespace(expert_model_parallel_size=2),
    )
    plan = SimpleNamespace(layout=layout)
    own: Any = {"plan": plan, "own_run": None, "store": None}
    recording = Recorder(steps=1, rank=0, num_ranks=1, **own)
    with recording.step():
        assert counting.get_updated_expert_bias.__wrapped__ is original
    with recording.step():
        assert counting.get_updated_expert_bias is original
    assert counting.get_updated_expert_bias is original
