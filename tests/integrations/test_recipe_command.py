"""Commands that train a recipe: read by their framework's own words, priced, planned, compared."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import nest_megatron
from nest_megatron.cost_model import target_defaults
from nest_megatron.errors import UserInputError
from nest_megatron.integrations import megatron_bridge, recipe_command
from nest_megatron.integrations.recipe_command import read_recipe
from tests import catalogue
from tests.cli.runs import run
from tests.integrations import frameworks

NEMO = "nemo llm pretrain --factory mine"
BRIDGE = "torchrun --nproc-per-node 8 --nnodes 2 run_recipe.py --recipe mine"
QUICK = (
    *("search.num_alternatives=0", "search.max_pipeline_model_parallel_size=2"),
    *("search.max_context_parallel_size=1", "search.max_virtual_pipeline_model_parallel_size=1"),
)


@pytest.fixture(params=[NEMO, BRIDGE])
def command(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A command whose framework is a stand-in: Llama 3 8B on two nodes, TP 4, PP 2."""
    spec = catalogue.model("llama3_8b")

    def of_nemo(*_: object) -> Any:
        recipe = frameworks.nemo_recipe(spec, num_nodes=2)
        recipe.trainer.strategy.tensor_model_parallel_size = 4
        recipe.trainer.strategy.pipeline_model_parallel_size = 2
        recipe.trainer.strategy.sequence_parallel = True
        return recipe

    def of_bridge(*_: object) -> Any:
        cfg = frameworks.bridge_config(spec)
        cfg.model.tensor_model_parallel_size = 4
        cfg.model.pipeline_model_parallel_size = 2
        cfg.model.sequence_parallel = True
        return cfg

    monkeypatch.setattr(recipe_command, "_nemo_recipe", of_nemo)
    monkeypatch.setattr(recipe_command, "_bridge_recipe", of_bridge)
    return str(request.param)


def test_other_commands_are_none_of_a_recipe() -> None:
    for text in ("pretrain_gpt.py --bf16", "--num-layers 4", ["train.py", "--x", "nemo"]):
        assert read_recipe(text) is None


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("nemo llm export --factory x", "invalid choice"),
        ("nemo llm pretrain", "--factory"),
        ("nemo llm pretrain --factory x --yaml y.yaml", "--yaml"),
        ("run_recipe.py --recipe x --peft_scheme lora", "--peft_scheme"),
        ("run_recipe.py --recipe x model.num_layers", "model.num_layers"),
        ("run_recipe.py --recipe x --deterministic", "FIELD=VALUE"),
        ("run_recipe.py --mode pretrain", "--recipe --model"),
    ],
)
def test_words_of_unknown_meaning_are_refused(words: str, told: str) -> None:
    with pytest.raises(UserInputError, match=told):
        read_recipe(words)


def test_the_step_function_of_a_script_is_no_field_of_its_recipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Models that see images are trained with ``--step_func vlm_step``."""
    found = fields_set(f"{BRIDGE} --step_func vlm_step train.train_iters=10", monkeypatch)
    assert found == ["train.train_iters=10"]


def fields_set(words: str, patch: pytest.MonkeyPatch) -> list[str]:
    """The fields that a command of ``run_recipe.py`` sets, and the name of its data, if any."""
    found: list[str] = []

    def made(_: str, __: object, fields: list[str], data: str | None) -> Any:
        found.extend([*fields, *filter(None, [data])])
        return frameworks.bridge_config(catalogue.model("llama3_8b"))

    patch.setattr(recipe_command, "_bridge_recipe", made)
    assert read_recipe(words) is not None
    return found


def test_options_of_the_script_set_fields_before_those_that_are_typed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``run_recipe.py`` of Megatron-Bridge 0.6, ``COMMON_OVERRIDE_FIELDS``."""
    words = (
        "model.tensor_model_parallel_size=2 -tp 4 -pp=2 -cp 1 -vp 5 -ep 8 -etp 1 -mb 2 "
        "--global_batch_size=64 -sl 4096 --max_steps 10 --lr 1e-4 --min_lr 0 --warmup_iters 5 "
        "--pretrained_checkpoint /data/base --save_dir /a --load_dir /b --save_interval 20 "
        "--dataset mock --dry-run --dump_env"
    )
    sizes = {
        "tensor_model_parallel_size": 4,
        "pipeline_model_parallel_size": 2,
        "context_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": 5,
        "expert_model_parallel_size": 8,
        "expert_tensor_parallel_size": 1,
    }
    assert fields_set(f"{BRIDGE} {words}", monkeypatch) == [
        *("train.train_iters=10", "train.global_batch_size=64", "train.micro_batch_size=2"),
        "dataset.seq_length=4096",
        *(f"model.{name}={size}" for name, size in sizes.items()),
        *("optimizer.lr=1e-4", "optimizer.min_lr=0", "scheduler.lr_warmup_iters=5"),
        "checkpoint.pretrained_checkpoint=/data/base",
        *("checkpoint.save=/a", "checkpoint.load=/b", "checkpoint.save_interval=20"),
        "model.tensor_model_parallel_size=2",
        "mock",
    ]


def test_older_scripts_have_no_such_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """``--seq_length`` of 0.3 is an argument of the recipe, which few have."""
    monkeypatch.setattr(recipe_command, "installed_version", lambda _: "0.3.1")
    with pytest.raises(UserInputError, match="FIELD=VALUE"):
        read_recipe(f"{BRIDGE} --seq_length 4096")
    assert fields_set(f"{BRIDGE} --step_func gpt_step", monkeypatch) == []


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("--model mine --mode pretrain", "mine_pretrain_config"),
        ("--mode sft --model=mine", "mine_sft_config"),
        ("--model mine --mode dora", "mine_peft_config"),
    ],
)
def test_a_model_and_a_mode_name_a_recipe(
    words: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    def made(*given: object) -> Any:
        found.append(given[0])
        return frameworks.bridge_config(catalogue.model("llama3_8b"))

    monkeypatch.setattr(recipe_command, "_bridge_recipe", made)
    job = read_recipe(f"torchrun --nproc-per-node 8 scripts/training/run_recipe.py {words}")
    assert job is not None
    assert (found, job.script) == ([name], name)


def test_a_recipe_is_the_one_that_its_script_takes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of a name in both packages ``run_recipe.py`` takes the benchmark, whose batch it scales."""
    cfg = frameworks.bridge_config(catalogue.model("llama3_8b"))
    cfg.dataset.offline_packing_specs = SimpleNamespace(packed_sequence_size=2048)
    names = ("mine_sft_config", "mine_sft_8gpu_h100_bf16_config")
    recipes = ModuleType("megatron.bridge.recipes")
    recipes.__path__ = [str(tmp_path / "recipes")]
    overrides = ModuleType("megatron.bridge.training.utils.omegaconf_utils")
    overrides.process_config_with_overrides = lambda found, **_: found  # type: ignore[attr-defined]
    for name in names:
        setattr(recipes, name, lambda: cfg)
    benchmarks = tmp_path / "perf_recipes" / "mine" / "__init__.py"
    benchmarks.parent.mkdir(parents=True)
    benchmarks.write_text(f"from .h100 import {names[1]}\n", encoding="utf-8")
    utils = ModuleType("megatron.bridge.training.utils")
    utils.omegaconf_utils = overrides  # type: ignore[attr-defined]
    bridge = ModuleType("megatron.bridge")
    bridge.recipes = recipes  # type: ignore[attr-defined]
    for module in (bridge, recipes, utils, overrides):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, "megatron.bridge.training", ModuleType("training"))
    job = read_recipe(f"run_recipe.py --recipe {names[0]}")
    assert job is not None
    assert job.spec.seq_length == cfg.dataset.seq_length  # of a pack, which the script makes so
    assert not cfg.model.pipeline_model_parallel_layout
    cfg.model._pipeline_model_parallel_layout_builder = lambda pp, vp: "Et*16|t*16L"[: 12 * pp]
    read_recipe(f"run_recipe.py --recipe {names[0]}")  # the script lays stages out by this
    assert cfg.model.pipeline_model_parallel_layout == "Et*16|t*16L"
    cfg.model.pipeline_model_parallel_layout = "Et*9|t*23L"
    typed = "model.pipeline_model_parallel_layout=Et*9|t*23L"
    read_recipe(f"run_recipe.py --recipe {names[0]} '{typed}'")
    assert cfg.model.pipeline_model_parallel_layout == "Et*9|t*23L"
    with pytest.raises(UserInputError, match=r"perf_recipes, which come first, take \+nest=auto"):
        read_recipe(f"run_recipe.py --recipe {names[1]}")


def test_a_recipe_is_priced_as_it_is(command: str) -> None:
    found = nest_megatron.estimate_command(command, cluster="dgx_h100")
    sizes = (
        found.layout.dims.tensor_model_parallel_size,
        found.layout.dims.pipeline_model_parallel_size,
    )
    assert (*sizes, found.layout.dims.data_parallel_size) == (4, 2, 2)
    assert found.layout.sequence_parallel
    assert not found.record.launch


def test_a_release_of_megatron_lm_is_not_that_of_a_recipe(command: str) -> None:
    found = nest_megatron.estimate_command(command, cluster="dgx_h100", megatron_version="0.15")
    note = r"--megatron-version 0\.15 is not taken: the recipe has 0\.\d\d\."
    assert re.search(note, " ".join(found.record.notes))
    same = nest_megatron.estimate_command(command, cluster="dgx_h100")
    assert found.layout == same.layout
    assert "is not taken" not in " ".join(same.record.notes)


@pytest.mark.parametrize(
    ("release", "words", "stages"),
    [
        ("0.6", "model.pipeline_model_parallel_size=5", (12, 12)),
        ("0.7", "model.pipeline_model_parallel_size=5", (None, None)),
        ("0.7", "+model.pipeline_model_parallel_size=4", (12, 12)),
        ("0.7", "model.num_layers=32", (12, 12)),
        ("0.7", "-pp 5 model.num_layers_in_first_pipeline_stage=12", (12, None)),
    ],
)
def test_stages_that_do_not_go_with_a_typed_number_are_dropped_by_the_script(
    release: str, words: str, stages: tuple[int | None, int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``run_recipe.py`` does so since Megatron-Bridge 0.7."""

    def made(name: str, scheme: object, fields: list[str], data: object) -> Any:
        cfg = frameworks.bridge_config(catalogue.model("llama3_8b"))
        cfg.model.pipeline_model_parallel_size = 4 if "=4" in fields[0] else 5
        for end in ends:
            setattr(cfg.model, end, 12)
        found.append(megatron_bridge.as_script(cfg, fields))
        return cfg

    found = list[Any]()
    ends = [f"num_layers_in_{end}_pipeline_stage" for end in ("first", "last")]
    monkeypatch.setattr(target_defaults, "installed_version", lambda _: release)
    monkeypatch.setattr(recipe_command, "_bridge_recipe", made)
    read_recipe(f"{BRIDGE} {words}")
    assert tuple(getattr(found[0].model, end) for end in ends) == stages


def test_what_its_data_do_not_take_is_not_priced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both frameworks end such a job."""

    def packed(*_: object) -> Any:
        cfg = frameworks.bridge_config(catalogue.model("llama3_8b"))
        cfg.dataset.offline_packing_specs = SimpleNamespace(packed_sequence_size=8192)
        cfg.train.micro_batch_size = 2
        return cfg

    monkeypatch.setattr(recipe_command, "_bridge_recipe", packed)
    done = run("estimate", "--from", BRIDGE, "cluster=dgx_h100")
    assert done.code == 2
    assert "micro_batch_size = 2: the data needs 1: a micro batch is one pack" in done.err
    planned = nest_megatron.plan_command(BRIDGE, cluster="dgx_h100", search={"num_alternatives": 0})
    assert planned.layout.micro_batch_size == 1
    assert planned.before is not None
    assert "a micro batch is one pack" in planned.before.refused


@pytest.mark.parametrize(
    ("sizes", "field"),
    [
        ({"pipeline_model_parallel_size": 5}, "model.num_layers_in_first_pipeline_stage"),
        ({"virtual_pipeline_model_parallel_size": 4}, "model.pipeline_model_parallel_size"),
        ({"recompute_granularity": "full"}, "recompute_method / recompute_num_layers"),
        ({"tensor_model_parallel_size": 5}, "megatron-core 0.19 refuses it: tensor_model_parallel"),
    ],
)
def test_what_is_wrong_is_named_by_the_fields_of_the_recipe(
    sizes: dict[str, Any], field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*_: object) -> Any:
        cfg = frameworks.bridge_config(catalogue.model("llama3_8b"))
        vars(cfg.model).update(sizes)
        return cfg

    monkeypatch.setattr(recipe_command, "_bridge_recipe", wrong)
    done = run("estimate", "--from", BRIDGE, "cluster=dgx_h100", "cluster.num_gpus=40")
    assert (done.code, field in done.err) == (2, True), done.err
    assert "--" not in done.err.removeprefix("error: --from")
    assert "parallel.recompute" not in done.err


def test_a_recipe_is_planned_beside_what_it_is(command: str) -> None:
    done = run("plan", "--from", command, "cluster=dgx_h100", *QUICK)
    assert done.code == 0, done.err
    assert re.search(r"Step +\S+ m?s -> \S+ m?s, ", done.out)
    assert "Changes to the recipe's fields" in done.out
    today = nest_megatron.estimate_command(command, cluster="dgx_h100")
    kept = nest_megatron.plan_command(
        command, cluster="dgx_h100", free=["recompute"], search={"num_alternatives": 0}
    )
    assert kept.before is not None
    assert kept.before.before is not None
    assert kept.before.before.predicted == today.predicted
    assert kept.layout.dims.tensor_model_parallel_size == 4
    framework = str(kept.record.provenance.framework)
    assert framework.startswith("NeMo" if command == NEMO else "Megatron-Bridge")


def test_changes_are_named_by_the_fields_of_the_recipe(command: str) -> None:
    few = {"num_alternatives": 0, "max_pipeline_model_parallel_size": 1}
    found = nest_megatron.plan_command(command, cluster="dgx_h100", search=few)
    assert found.before is not None
    assert found.before.changes is not None
    tables = (found.before.changes.alone, found.before.changes.in_order)
    tensor, micro = "model.tensor_model_parallel_size", "train.micro_batch_size"
    if command == NEMO:
        tensor, micro = "trainer.strategy.tensor_model_parallel_size", "data.micro_batch_size"
    for table in tables:
        names = [choice.name for change in table for choice in change.choices]
        assert tensor in names
        assert not {"tensor_model_parallel_size", "micro_batch_size"}.intersection(names)
    changed = found.layout.micro_batch_size != 1
    assert changed == (micro in names)
    assert f"{tensor} 4 ->" in " ".join(str(found.explain()).split())


@dataclasses.dataclass
class PreTrainingDataModule(frameworks.MockDataModule):
    """NeMo's, whose tokenizer the recipe of a Mamba model leaves open."""


def test_the_vocabulary_that_a_recipe_leaves_open_is_set_beside_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def without_tokenizer(*_: object) -> Any:
        recipe = frameworks.nemo_recipe(catalogue.model("llama3_8b"), num_nodes=2)
        recipe.data, recipe.model.config.vocab_size = PreTrainingDataModule(), None
        return recipe

    monkeypatch.setattr(recipe_command, "_nemo_recipe", without_tokenizer)
    words = ("plan", "--from", NEMO, "cluster=dgx_h100", *QUICK)
    lacking = run(*words)
    assert lacking.code == 2
    assert "--set --vocab-size=" in lacking.err
    file = tmp_path / "plan.yaml"
    done = run(*words, "--set", "--vocab-size=50280", f"out={file}")
    assert done.code == 0, done.err
    assert nest_megatron.load_plan(file).record.model.vocab_size == 50_280
    assert run("whatif", str(file), "memory=141GB", "--json").code == 0


def test_positions_that_are_scaled_are_those_of_its_plan_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """``whatif`` refused the plan of GPT-OSS, which has them."""

    def scaled(*_: object) -> Any:
        cfg = frameworks.bridge_config(catalogue.model("llama3_8b"))
        cfg.model.position_embedding_type = "yarn"
        return cfg

    monkeypatch.setattr(recipe_command, "_bridge_recipe", scaled)
    file = tmp_path / "plan.yaml"
    done = run("plan", "--from", BRIDGE, "cluster=dgx_h100", *QUICK, f"out={file}")
    assert done.code == 0, done.err
    done = run("whatif", str(file), "memory=141GB", "--json")
    assert done.code == 0, done.err


@pytest.mark.parametrize("flag", ["--vocab-size=50280", "--bf16"])
def test_nothing_else_of_a_recipe_is_set_beside_it(command: str, flag: str) -> None:
    done = run("plan", "--from", command, "cluster=dgx_h100", *QUICK, "--set", flag)
    assert done.code == 2
    assert "it sets --vocab-size alone, where the recipe does not say the size" in done.err


def test_what_if_of_a_recipe(command: str) -> None:
    words = ("cluster=dgx_h100", "memory=80GB,141GB", *QUICK)
    done = run("whatif", "--from", command, *words, "--json")
    assert done.code == 0, done.err
    first, *others = done.json()["rows"]
    today = nest_megatron.estimate_command(command, cluster="dgx_h100").predicted
    assert first["present_layout"]["iteration_time_s"] == today.iteration_time_s
    assert [row["num_gpus"] for row in (first, *others)] == [16, 16, 16]
    assert first["iteration_time_s"] <= today.iteration_time_s


def test_numbers_of_gpus_of_a_recipe(command: str) -> None:
    words = ("--from", command, "cluster=dgx_h100", *QUICK, "--for-gpus", "8..16", "--json")
    done = run("plan", *words)
    assert done.code == 0, done.err
    assert [row["num_gpus"] for row in done.json()["rows"]] == [8, 16]


def test_its_runs_are_not_tuned(command: str) -> None:
    done = run("tune", "--from", command, "cluster=dgx_h100", "--dry-run", *QUICK)
    assert done.code == 2
    assert "a run is a Megatron-LM command" in done.err
