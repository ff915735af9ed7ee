"""NeMo-Run's experiments, scripts and command line with the plugin and the factories."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest

run = pytest.importorskip("nemo_run", reason="nemo-run is not installed (.ci/nemo installs it)")

from nemo_run.cli.api import RunContext, resolve_factory  # noqa: E402 - after the skip

from nest_megatron.errors import UserInputError  # noqa: E402
from nest_megatron.integrations.nemo_run import NestPlugin, cli  # noqa: E402
from nest_megatron.integrations.nemo_run import plugin as plugin_module  # noqa: E402
from nest_megatron.integrations.nemo_run.task import read_executor  # noqa: E402
from nest_megatron.layout import plan_file  # noqa: E402
from nest_megatron.layout.policy import PolicyError  # noqa: E402
from nest_megatron.tuning.job import RunCommand  # noqa: E402
from nest_megatron.tuning.launchers import launcher_named  # noqa: E402
from tests import catalogue  # noqa: E402
from tests.integrations import frameworks  # noqa: E402

pytestmark = pytest.mark.nemo


def train(model: Any, data: Any, trainer: Any, optim: Any) -> None:
    """Stands for ``llm.pretrain``."""


class GPTModel:
    """Stands for NeMo's."""

    def __init__(self, config: Any, tokenizer: Any = None) -> None:
        self.config, self.tokenizer = config, tokenizer


class Trainer:
    """Stands for NeMo's."""

    def __init__(
        self, devices: int, num_nodes: int, strategy: Any, plugins: Any, callbacks: list[Any]
    ) -> None:
        self.devices, self.num_nodes, self.strategy = devices, num_nodes, strategy
        self.plugins, self.callbacks = plugins, callbacks


class OptimizerConfig:
    """Stands for megatron-core's."""

    def __init__(self, use_distributed_optimizer: bool = True, optimizer: str = "adam") -> None:
        self.use_distributed_optimizer, self.optimizer = use_distributed_optimizer, optimizer


class Optimizer:
    """Stands for NeMo's."""

    def __init__(self, config: Any) -> None:
        self.config = config


def recipe() -> Any:
    """A small recipe of Llama 3 8B as a ``run.Partial``."""
    spec = catalogue.model("llama3_8b")
    config = frameworks.nemo_recipe(spec).model.config
    fields = {name: getattr(config, name) for name in config.__dataclass_fields__}
    return run.Partial(
        train,
        model=run.Config(GPTModel, config=run.Config(frameworks.TransformerConfig, **fields)),
        data=run.Config(frameworks.MockDataModule, seq_length=8192, global_batch_size=128),
        trainer=run.Config(
            Trainer,
            devices=8,
            num_nodes=1,
            strategy=run.Config(
                frameworks.MegatronStrategy,
                ddp=run.Config(frameworks.DistributedDataParallelConfig),
            ),
            plugins=run.Config(frameworks.MegatronMixedPrecision),
            callbacks=[],
        ),
        optim=run.Config(Optimizer, config=run.Config(OptimizerConfig)),
    )


@pytest.fixture(autouse=True)
def none_waiting() -> None:
    """No plugin of an earlier test is waiting for its task."""
    plugin_module._waiting.clear()


def experiment(home: Path, **more: Any) -> Any:
    return run.Experiment("planned", executor=executor(**more), base_dir=str(home))


def executor(**more: Any) -> Any:
    return run.LocalExecutor(**{"ntasks_per_node": 8, **more})


def plugin(**more: Any) -> Any:
    return NestPlugin(**{"cluster": "dgx_h100", "vocab_size": 128_256, **more})


def test_the_job_is_planned_and_the_recipe_stays(tmp_path: Path) -> None:
    mine = recipe()
    with experiment(tmp_path) as added:
        added.add(mine, plugins=[plugin()], name="llama")
        job = added.jobs[0].task
    (path,) = (tmp_path / "nest_plans").glob("planned_*-llama.yaml")
    plan = plan_file.read(path)
    strategy = job.trainer.strategy
    assert strategy.tensor_model_parallel_size == plan.layout.dims.tensor_model_parallel_size
    assert job.data.micro_batch_size == plan.layout.micro_batch_size
    assert job != mine == recipe()


def test_every_task_of_a_group_is_planned(tmp_path: Path) -> None:
    with experiment(tmp_path) as added:
        two = [executor(), executor()]
        added.add([recipe(), recipe()], executor=two, plugins=[plugin()], name="both")
        tasks = added.jobs[0].tasks
    assert all(task != recipe() for task in tasks)


def test_each_task_has_a_plan_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of a group, and those of one name, share NeMo-Run's folder."""
    with experiment(tmp_path) as added:
        for batch in (128, 64):
            task = recipe()
            task.data.global_batch_size = batch
            added.add(task, plugins=[plugin()], name="one")
        added.add([recipe(), recipe()], executor=[executor()] * 2, plugins=[plugin()], name="both")
    said = capsys.readouterr().out
    plans = {path: plan_file.read(path) for path in (tmp_path / "nest_plans").iterdir()}
    assert len(plans) == 4
    assert all(path.name in said for path in plans)
    batches = [plan.layout.global_batch_size for plan in plans.values()]
    assert sorted(batches) == [64, 128, 128, 128]


def test_the_plugin_says_what_it_assumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with experiment(tmp_path) as added:
        task = recipe()
        task.model.config.vocab_size = None
        added.add(task, plugins=[NestPlugin(cluster="dgx_h100")], name="llama")
    assert "note: The recipe names no tokenizer" in capsys.readouterr().out


def test_a_policy_of_pinned_plans_holds_for_recipes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("launch:\n  pinned_only: true\n", encoding="utf-8")
    monkeypatch.setenv("NEST_MEGATRON_POLICY", str(path))
    with (
        pytest.raises(PolicyError, match="only pinned plans are launched here"),
        experiment(tmp_path) as added,
    ):
        added.add(recipe(), plugins=[plugin()])
    assert not added.jobs


def test_a_script_gets_words(tmp_path: Path) -> None:
    script = run.Script(path="pretrain_gpt.py", entrypoint="python", args=["--bf16"])
    with experiment(tmp_path) as added:
        added.add(script, plugins=[NestPlugin(cluster="dgx_h100")], name="gpt")
        args = added.jobs[0].task.args
    assert args == ["--bf16", "+nest=auto", "nest.cluster=dgx_h100"]
    assert script.args == ["--bf16"]


def test_without_a_plan_nothing_is_launched(tmp_path: Path) -> None:
    with (
        pytest.raises(UserInputError, match="starts 1 x 4 processes"),
        experiment(tmp_path, ntasks_per_node=4) as added,
    ):
        added.add(recipe(), plugins=[plugin()])
    assert not added.jobs
    others = recipe()  # as many processes, of which Lightning's devices are half
    others.trainer.num_nodes, others.trainer.devices = 2, 4
    with (
        pytest.raises(UserInputError, match="= '2 x 4': the executor starts 1 x 8 processes"),
        experiment(tmp_path) as added,
    ):
        added.add(others, plugins=[plugin()])
    assert not added.jobs


def ran_directly(caplog: pytest.LogCaptureFixture) -> set[str]:
    """What the plugin says: NeMo-Run's first output takes a handler off the root logger."""
    own = logging.getLogger(plugin_module.__name__)
    own.addHandler(caplog.handler)
    try:
        run.run(run.Partial(print), direct=True, dryrun=True)
    finally:
        own.removeHandler(caplog.handler)
    return {record.message for record in caplog.records if "NestPlugin" in record.message}


@pytest.mark.parametrize("steps", ["5", -1, 1.5])
def test_watched_steps_are_a_whole_number(steps: Any) -> None:
    with pytest.raises(UserInputError, match="it is a whole number of at least 0"):
        plugin(watch=steps)


def test_a_direct_run_says_that_it_calls_no_plugin(caplog: pytest.LogCaptureFixture) -> None:
    assert not ran_directly(caplog)
    waiting = plugin()
    (said,) = ran_directly(caplog)
    assert "direct=True" in said
    assert waiting.cluster == "dgx_h100"


def test_a_plugin_that_was_called_does_not_warn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    called = plugin()
    with experiment(tmp_path) as added:
        added.add(recipe(), plugins=[called])
    assert not ran_directly(caplog)


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        (["plugins=nest", "plugins.cluster=dgx_h100"], {"mode": "auto", "cluster": "dgx_h100"}),
        (
            ["plugins=nest", "plugins.mode=pinned", "plugins.plan=/plans/a.yaml"],
            {"mode": "pinned", "plan": "/plans/a.yaml"},
        ),
        (
            ["plugins=nest", "plugins.keep=['recompute']"],
            {"keep": ["recompute"]},
        ),
        (["plugins=nest", "plugins.vocab_size=32000"], {"vocab_size": 32_000}),
    ],
)
def test_the_command_line_makes_the_plugin(words: list[str], fields: dict[str, Any]) -> None:
    assert cli.nest().cluster is None
    context = RunContext(name="test")
    context.parse_args(words)
    (made,) = context.plugins
    assert {name: getattr(made, name) for name in fields} == fields


def test_the_recipe_factory_lies_where_nemo_looks() -> None:
    assert resolve_factory("nemo.collections.llm.api.pretrain", "nest_auto") is cli.nest_auto
    with pytest.raises(UserInputError, match="nest_auto recipe = 'llama_9_billion'"):
        cli.nest_auto("llama_9_billion")


def test_a_recipe_of_nemo_by_its_name(capfd: pytest.CaptureFixture[str]) -> None:
    if importlib.util.find_spec("nemo") is None:
        pytest.skip("nemo-toolkit is not installed (.ci/nemo installs it)")
    task = cli.nest_auto("llama3_70b", num_nodes=4, cluster="dgx_h100")
    seen = capfd.readouterr()
    assert "nest: this job runs as" in seen.err
    assert "nest:" not in seen.out
    assert task.trainer.strategy.pipeline_model_parallel_size > 1
    assert task.trainer.num_nodes == 4


LAYOUTS = {
    "divided": ["parallel.tensor_model_parallel_size=4"],
    "whole": [
        "parallel.tensor_model_parallel_size=1",
        "parallel.context_parallel_size=1",
        "parallel.pipeline_model_parallel_size=1",
        "parallel.zero_stage=1",
    ],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["llama3_8b", "nemotron3_4b"])
def test_the_order_of_plugins_changes_nothing(name: str, layout: str, tmp_path: Path) -> None:
    pytest.importorskip("nemo.collections.llm.recipes", reason="NeMo is not installed")
    from nemo.lightning.run.plugins import PerfEnvPlugin

    from tests.nemo import recipes

    found = []
    for order in (1, -1):
        planned = plugin(overrides=LAYOUTS[layout], vocab_size=128_256)
        both = [PerfEnvPlugin(nccl_pp_comm_chunksize=2_097_152), planned][::order]
        added = executor()
        with run.Experiment("order", executor=added, base_dir=str(tmp_path / str(order))) as made:
            made.add(recipes.recipe(name), plugins=both, name="task")
            job = made.jobs[0]
        found.append((job.task.trainer.strategy.tensor_model_parallel_size, job.executor.env_vars))
    assert found[0] == found[1]
    connections = found[0][1].get("CUDA_DEVICE_MAX_CONNECTIONS")
    assert connections == ("1" if layout == "divided" else None)


SCRIPT = "import os, sys; print('ran', os.environ['A'], os.environ['WORLD_SIZE'], sys.argv[1:])\n"


@pytest.mark.parametrize(("more", "ended"), [("", 0), ("sys.exit(3)\n", 1)])
def test_a_run_of_tune_is_an_experiment(
    more: str, ended: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nemo_run import config as nemo_run_config
    from nemo_run.cli.config import ConfigSerializer

    programs = tmp_path / "bin"
    programs.mkdir()
    for name, words in (("torchrun", "-m torch.distributed.run "), ("python", "")):
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words}"$@"\n')
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setattr(nemo_run_config, "_NEMORUN_HOME", str(tmp_path / "home"))
    script, file = tmp_path / "script.py", tmp_path / "executor.yaml"
    script.write_text(SCRIPT + more, encoding="utf-8")
    ConfigSerializer().dump_yaml(run.Config(run.LocalExecutor, ntasks_per_node=2), file)
    command = RunCommand(
        launcher=("torchrun",),
        script=(str(script),),
        argv=("--bf16",),
        environment={"A": "1", "B": None},
        num_nodes=1,
        gpus_per_node=2,
    )
    output = tmp_path / "run-1" / "output.txt"
    output.parent.mkdir()
    launcher = launcher_named("nemo_run", [f"executor={file}"], command)
    assert launcher(command, 300.0, output).code == ended
    assert "ran 1 2 ['--bf16']" in output.read_text(encoding="utf-8")
    with pytest.raises(UserInputError, match="the job has 1 x 4 ranks"):
        launcher(dataclasses.replace(command, gpus_per_node=4), 10.0, output)


def test_an_executor_that_is_not_there_is_said(tmp_path: Path) -> None:
    for source in ("no_such", str(tmp_path / "no.yaml")):
        with pytest.raises(UserInputError, match="NeMo-Run cannot make it"):
            read_executor(source)


def test_a_watched_recipe_keeps_a_record_of_its_run(tmp_path: Path) -> None:
    """The callback is in the task that is launched, with the text of the plan."""
    import fiddle

    lightning = pytest.importorskip("nest_megatron.integrations.lightning")
    with experiment(tmp_path) as added:
        added.add(recipe(), plugins=[plugin(watch=5)], name="llama")
        task = added.jobs[0].task
    callback = fiddle.build(task.trainer.callbacks[-1])
    assert isinstance(callback, lightning.WatchCallback)
