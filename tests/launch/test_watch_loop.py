"""The recorder in Megatron's training loop: its functions are wrapped, timed, and put back."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import nest_megatron
from nest_megatron.config.schema import LaunchConfig, WatchConfig
from nest_megatron.history import store as history
from nest_megatron.history.records import Outcome
from nest_megatron.integrations.megatron_lm.ranks import Rendezvous
from nest_megatron.integrations.megatron_lm.watch import Watch, begin
from nest_megatron.parallel.plan import ParallelPlan

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
    training = ModuleType("megatron.training")
    training.global_vars = variables  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.training", training)
    return board


@pytest.fixture
def job(plan: ParallelPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A job of one rank that is about to train."""
    monkeypatch.setenv(history.VARIABLE, str(tmp_path / "runs.jsonl"))
    watch = WatchConfig(steps=3, prometheus=str(tmp_path / "nest.prom"))
    return SimpleNamespace(
        launch=LaunchConfig(watch=watch),
        args=Namespace(rank=0, world_size=1, curr_iteration=7),
        rendezvous=Rendezvous(),
        decision=SimpleNamespace(plan=plan, ranks=None),
        run=None,
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
        begin(job, None)
        return [module.train_step(number) for number in range(8)]  # type: ignore[attr-defined]

    watch = Watch(module, job)
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
    assert (run.outcome, run.plan) == (Outcome.FINISHED, job.decision.plan.provenance.checksum)
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


def test_nothing_is_kept_of_what_is_not_watched(job: Any) -> None:
    job.launch.watch.steps = 0
    begin(job, None)
    assert job.run is None
    assert history.read() == ()


def test_fused_passes_are_not_taken_for_whole_ones(
    job: Any, board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    execution = SimpleNamespace(overlap_moe_expert_parallel_comm=True)
    planned = job.decision.plan
    begin(job, None)
    train = SimpleNamespace(batch_schedule=None)
    job.decision.plan = SimpleNamespace(execution=execution, train=train)
    module = training_module(job)
    for number in range(5):
        module.train_step(number)
    (run,) = history.read()
    assert run.measured is not None
    assert run.measured.busy_s == (None,)
    assert run.plan == planned.provenance.checksum


def test_a_growing_batch_is_watched_once_it_is_the_planned_one(
    job: Any, board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core import num_microbatches_calculator as calculator

    sizes = iter([32, 64, 128, 128, 128, 128, 128, 128])
    monkeypatch.setattr(calculator, "get_current_global_batch_size", lambda: next(sizes))
    begin(job, None)
    train = SimpleNamespace(batch_schedule=object(), global_batch_size=128)
    job.decision.plan = SimpleNamespace(execution=job.decision.plan.execution, train=train)
    module = training_module(job)
    for number in range(5):
        module.train_step(number)
    assert history.read()[0].measured is None  # two smaller ones, three watched, none behind them
    module.train_step(5)
    measured = history.read()[0].measured
    assert measured is not None
    assert len(measured.step_times_s) == 3
