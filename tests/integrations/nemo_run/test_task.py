"""Tasks of NeMo-Run, without NeMo-Run."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nest_megatron.errors import UserInputError
from nest_megatron.integrations.nemo_run.task import TaskOptions, plan_recipe, script_words
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.planner.pins import Pin, PinnedPlan, write_pinned
from nest_megatron.version import __version__
from tests import catalogue
from tests.cli.runs import environment
from tests.integrations.frameworks import MegatronCommOverlapCallback, nemo_recipe

ON_DGX = TaskOptions(cluster="dgx_h100", vocab_size=128_256)
LLAMA = catalogue.model("llama3_8b")


def recipe(*, num_nodes: int = 1) -> Any:
    return nemo_recipe(LLAMA, num_nodes=num_nodes, batch=128)


def pinned(plan: ParallelPlan, folder: Path) -> TaskOptions:
    pin = Pin(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        by="ada",
        note="",
        nest_megatron_version=__version__,
        megatron_lm="0.16",
    )
    path = folder / "pinned.yaml"
    write_pinned(PinnedPlan(pin=pin, plan=plan), path)
    return TaskOptions(mode="pinned", plan=str(path), vocab_size=128_256)


def test_a_recipe_gets_the_plan() -> None:
    task = recipe()
    plan, changes, _ = plan_recipe(task, ON_DGX, (1, 8))
    chosen = plan.arguments
    assert task.trainer.strategy.tensor_model_parallel_size == chosen["tensor_model_parallel_size"]
    assert task.data.micro_batch_size == plan.layout.micro_batch_size
    assert all(change.before != change.after for change in changes)


def test_a_pinned_plan_is_written_as_it_is(tmp_path: Path) -> None:
    plan, *_ = plan_recipe(recipe(), ON_DGX, None)
    task = recipe()
    again, changes, _ = plan_recipe(task, pinned(plan, tmp_path), (1, 8))
    assert again == plan
    assert plan_recipe(task, pinned(plan, tmp_path), (1, 8))[1] == ()
    assert changes


def test_choices_of_a_pinned_plan_are_written_and_kept_ones_stay(tmp_path: Path) -> None:
    def task() -> Any:
        made = recipe()
        made.trainer.callbacks = [MegatronCommOverlapCallback()]
        return made

    fixed = ("parallel.tensor_model_parallel_size=4", "search.num_alternatives=0")
    options = dataclasses.replace(ON_DGX, overrides=fixed)
    plan, changes, _ = plan_recipe(task(), options, (1, 8))
    assert plan.layout.execution.tp_comm_overlap
    assert "trainer.callbacks[0].tp_comm_overlap" in [change.field for change in changes]
    fresh = task()
    plan_recipe(fresh, pinned(plan, tmp_path), (1, 8))
    assert fresh.trainer.callbacks[0].tp_comm_overlap is True
    held = dataclasses.replace(options, keep=("tp_comm_overlap",))
    assert not plan_recipe(task(), held, (1, 8))[0].layout.execution.tp_comm_overlap


def test_a_pinned_plan_refuses_any_other_task(tmp_path: Path) -> None:
    plan, *_ = plan_recipe(recipe(), ON_DGX, None)
    options, other = pinned(plan, tmp_path), recipe(num_nodes=2)
    with pytest.raises(UserInputError, match="number of GPUs is 16, pinned 8"):
        plan_recipe(other, options, (2, 8))
    assert other == recipe(num_nodes=2)


@pytest.mark.parametrize(
    ("more", "limit"),
    [
        ({"keep": ["micro_batch_size"]}, "keep = .*as it was reviewed"),
        ({"free": ["recompute"]}, "free = .*as it was reviewed"),
        ({"overrides": ["search.max_seconds=9"]}, "overrides = .*as it was reviewed"),
        ({"cluster": "dgx_a100"}, "GPU is A100-SXM-80GB, pinned H100-SXM-80GB"),
        ({"cluster": "dgx_h100", "overrides": ["cluster.oversubscription=2"]}, "network is"),
    ],
)
def test_what_a_pinned_plan_does_not_follow_is_refused(
    more: dict[str, Any], limit: str, tmp_path: Path
) -> None:
    plan, *_ = plan_recipe(recipe(num_nodes=2), ON_DGX, None)
    options, other = pinned(plan, tmp_path), recipe(num_nodes=2)
    with pytest.raises(UserInputError, match=limit):
        plan_recipe(other, dataclasses.replace(options, **more), (2, 8))
    assert other == recipe(num_nodes=2)
    named = dataclasses.replace(options, cluster="dgx_h100")
    assert plan_recipe(other, named, (2, 8))[0] == plan


def test_what_is_assumed_of_a_recipe_comes_with_its_plan(tmp_path: Path) -> None:
    task = recipe()
    task.model.config.vocab_size = None
    plan, _, notes = plan_recipe(task, TaskOptions(cluster="dgx_h100"), None)
    assert "50257 rows are assumed" in " ".join(notes)
    options = dataclasses.replace(pinned(plan, tmp_path), vocab_size=None)
    of_pinned = " ".join(plan_recipe(task, options, None)[2])
    assert "by ada" in of_pinned
    assert "50257 rows are assumed" in of_pinned


def test_the_executor_s_size_is_the_recipe_s() -> None:
    with pytest.raises(UserInputError, match="starts 4 x 8 processes"):
        plan_recipe(recipe(), ON_DGX, (4, 8))


def test_another_task_is_refused() -> None:
    with pytest.raises(UserInputError, match="no recipe of NeMo"):
        plan_recipe(SimpleNamespace(config=None), ON_DGX, None)


@pytest.mark.parametrize("setting", ["cluster.num_gpus=64", "search.use_all_gpus=false"])
def test_a_plan_takes_the_ranks_that_the_executor_starts(setting: str) -> None:
    task = recipe(num_nodes=2)
    options = dataclasses.replace(ON_DGX, overrides=[setting])
    with pytest.raises(UserInputError, match="the executor starts 2 x 8 processes"):
        plan_recipe(task, options, (2, 8))
    assert task == recipe(num_nodes=2)
    same = dataclasses.replace(ON_DGX, overrides=["cluster.num_gpus=16"])
    assert plan_recipe(task, same, (2, 8))[0].layout.num_gpus == 16


def script(**more: Any) -> Any:
    return SimpleNamespace(
        **{"path": "pretrain_gpt.py", "entrypoint": "python", "args": [], **more}
    )


def test_a_script_gets_words() -> None:
    options = TaskOptions(
        cluster="dgx_h100", overrides=("search.max_seconds=9",), free=("recompute", "zero_stage")
    )
    assert script_words(script(), options) == [
        "+nest=auto",
        "nest.cluster=dgx_h100",
        "nest.search.max_seconds=9",
        "nest.free=[recompute,zero_stage]",
    ]
    reviewed = TaskOptions(mode="pinned", plan="/plans/a.yaml")
    assert script_words(script(), reviewed) == ["+nest=pinned", "nest.plan=/plans/a.yaml"]


@pytest.mark.parametrize("other", [{"path": "", "inline": "python x"}, {"entrypoint": "bash"}])
def test_scripts_that_take_no_words_are_refused(other: dict[str, str]) -> None:
    with pytest.raises(UserInputError, match="only a Python script"):
        script_words(script(**other), TaskOptions())


def test_words_of_the_script_itself_stay() -> None:
    own = script(args=["--bf16", "+nest=pinned", "nest.plan=/plans/a.yaml"])
    with pytest.raises(UserInputError, match=r"\+nest=pinned nest.plan=.*plan it already"):
        script_words(own, TaskOptions())


def test_words_are_checked_before_a_script_waits_for_its_machines() -> None:
    with pytest.raises(UserInputError, match=r"nest\.search\.max_second = '9'"):
        script_words(script(), TaskOptions(overrides=["search.max_second=9"]))


def test_a_script_keeps_by_itself() -> None:
    with pytest.raises(UserInputError, match="keeps what its own words say"):
        script_words(script(), TaskOptions(keep=("recompute",)))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mode": "atuo"}, "auto or pinned"),
        ({"mode": "pinned"}, "reviewed plan"),
        ({"plan": "x.yaml"}, "mode='pinned'"),
    ],
)
def test_wishes_that_contradict_themselves(options: dict[str, str], said: str) -> None:
    with pytest.raises(UserInputError, match=said):
        TaskOptions(**options)  # type: ignore[arg-type]


def test_importing_the_door_loads_no_nemo_run() -> None:
    code = (
        "import sys, nest_megatron.integrations.nemo_run\n"
        "print(*{'nemo_run', 'torch', 'omegaconf'} & sys.modules.keys())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


def test_without_nemo_run_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nemo_run", None)
    monkeypatch.delitem(sys.modules, "nest_megatron.integrations.nemo_run.plugin", raising=False)
    with pytest.raises(ImportError, match=r"nest-megatron\[run\]"):
        from nest_megatron.integrations.nemo_run import NestPlugin  # noqa: F401
