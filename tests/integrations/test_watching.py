"""The recorder in loops of one's own, and in Lightning's; the trainer is a stand-in."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import nest_megatron
from nest_megatron.errors import UserInputError
from nest_megatron.history import store as history
from nest_megatron.history.records import Outcome
from nest_megatron.integrations.nemo import watch_recipe
from nest_megatron.integrations.watching import WatchedLoop, watching
from nest_megatron.layout import plan_file
from nest_megatron.layout.plan import ParallelPlan
from tests.integrations.frameworks import nemo_recipe

pytest.importorskip("torch", reason="torch is not installed")


@pytest.fixture(scope="module")
def plan() -> ParallelPlan:
    return nest_megatron.plan(
        model="llama3_8b",
        cluster="dgx_h100",
        num_gpus=1,
        global_batch_size=8,
        num_alternatives=0,
        **{"model.num_layers": 4},
    ).record


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(history.VARIABLE, str(tmp_path / "runs.jsonl"))
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "runs.jsonl"


def test_a_loop_is_recorded(plan: ParallelPlan, capsys: pytest.CaptureFixture[str]) -> None:
    with watching(plan, steps=4) as watched:
        for _ in range(6):
            with watched.step():
                pass
    (run,) = history.read()
    assert (run.outcome, run.plan) == (Outcome.FINISHED, plan_file.checksum(plan))
    assert run.measured is not None
    assert len(run.measured.step_times_s) == 4
    assert "nest: measured over watched steps" in capsys.readouterr().out


def test_a_loop_takes_what_load_plan_returns(plan: ParallelPlan) -> None:
    with watching(nest_megatron.Plan(record=plan), steps=1) as watched, watched.step():
        pass
    (run,) = history.read()
    assert run.plan == plan_file.checksum(plan)


def runs_out(watched: WatchedLoop) -> None:
    for _ in range(2):
        with watched.step():
            pass
    raise RuntimeError("CUDA error: out of memory")


def test_what_ends_a_loop_is_recorded_and_goes_on(plan: ParallelPlan) -> None:
    with pytest.raises(RuntimeError, match="out of memory"), watching(plan) as watched:
        runs_out(watched)
    (run,) = history.read()
    assert run.outcome is Outcome.OUT_OF_MEMORY


def test_a_run_of_another_size_is_not_recorded(
    plan: ParallelPlan, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    eight = nest_megatron.plan(
        model="llama3_8b", cluster="dgx_h100", num_gpus=8, num_alternatives=0
    ).record
    with watching(eight) as watched, watched.step():
        pass
    assert "this run is not recorded: ranks = 1: the plan is for 8" in capsys.readouterr().out
    assert history.read() == ()


def test_a_run_of_another_batch_has_no_measurement(
    plan: ParallelPlan, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("megatron.core.pipeline_parallel.schedules")
    from megatron.core import num_microbatches_calculator as calculator

    monkeypatch.setattr(calculator, "get_current_global_batch_size", lambda: 8)
    monkeypatch.setattr(calculator, "get_num_microbatches", lambda: 3)
    with watching(plan, steps=2) as watched:
        for _ in range(4):
            with watched.step():
                pass
    assert (
        "batch = '8 sequences in 3 micro batches': the plan is for 8 in" in capsys.readouterr().out
    )
    (run,) = history.read()
    assert run.measured is None


def test_without_a_plan_there_is_nothing_to_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    # nor is the application of another test one that was planned
    monkeypatch.delitem(sys.modules, "nest_megatron.integrations.hydra.plans", raising=False)
    with pytest.raises(UserInputError, match="no Hydra application was planned"):
        watching().__enter__()


def test_no_step_is_no_watch(plan: ParallelPlan) -> None:
    with pytest.raises(UserInputError, match="at least 1"):
        WatchedLoop(plan, steps=0)


@pytest.fixture
def callbacks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Our callback, of Lightning's own class where that is installed."""
    try:
        importlib.import_module("lightning.pytorch.callbacks")
    except ImportError:
        module = ModuleType("lightning.pytorch.callbacks")
        module.Callback = type("Callback", (), {})  # type: ignore[attr-defined]
        for name in ("lightning", "lightning.pytorch"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, "lightning.pytorch.callbacks", module)
    name = "nest_megatron.integrations.lightning"
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name)
    sys.modules.pop(name, None)


def fit(callback: Any, batches: int, accumulated: int = 1, fail_at: int = -1) -> None:
    """What Lightning calls of a callback as it trains."""
    trainer = SimpleNamespace(global_rank=0, world_size=1, global_step=0)
    callback.setup(trainer, None, "fit")
    for number in range(batches):
        callback.on_train_batch_start(trainer, None, None, number)
        if number == fail_at:
            callback.on_exception(trainer, None, ValueError("the data ends here"))
            return
        trainer.global_step += (number + 1) % accumulated == 0
        callback.on_train_batch_end(trainer, None, None, None, number)
    callback.on_train_end(trainer, None)


def test_lightning_s_steps_are_those_of_the_optimizer(plan: ParallelPlan, callbacks: Any) -> None:
    fit(callbacks.WatchCallback(plan_file.dump(plan), steps=3), batches=10, accumulated=2)
    (run,) = history.read()
    assert run.measured is not None
    assert len(run.measured.step_times_s) == 3
    assert run.outcome is Outcome.FINISHED


def test_a_recipe_is_watched_with_what_load_plan_returns(
    plan: ParallelPlan, callbacks: Any
) -> None:
    recipe = nemo_recipe(plan.model)
    watch_recipe(recipe, nest_megatron.Plan(record=plan), steps=2)
    (callback,) = recipe.trainer.callbacks
    assert isinstance(callback, callbacks.WatchCallback)


def test_lightning_says_what_ended_it(plan: ParallelPlan, callbacks: Any, tmp_path: Path) -> None:
    plan_file.write(plan, tmp_path / "plan.yaml")
    fit(callbacks.WatchCallback(str(tmp_path / "plan.yaml"), steps=3), batches=10, fail_at=2)
    (run,) = history.read()
    assert run.outcome is Outcome.FAILED
    assert (run.error or "").endswith("ValueError: the data ends here")


def test_a_validation_begins_no_record(plan: ParallelPlan, callbacks: Any) -> None:
    callback = callbacks.WatchCallback(plan_file.dump(plan))
    callback.setup(SimpleNamespace(global_rank=0, world_size=1), None, "validate")
    assert history.read() == ()
