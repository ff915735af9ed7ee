"""Megatron-Bridge's own recipes: read to the parameter, planned, rewritten, and accepted by it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nest_megatron
from nest_megatron.errors import UserInputError
from nest_megatron.integrations import megatron_bridge, recipe_command
from nest_megatron.integrations.megatron_bridge import (
    auto_recipe,
    hook,
    plan_changes,
    read_recipe,
    to_dotlist,
    to_yaml,
)
from nest_megatron.layout import plan_file
from nest_megatron.layout.knobs import KNOBS
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.model.parameters import total_parameters
from nest_megatron.report.failure import NothingFitsError
from tests.nemo import substitutes

if not substitutes.bridge_is_here():
    pytest.skip("Megatron-Bridge is not installed (.ci/nemo installs it)", allow_module_level=True)

from tests.integrations.test_refused_recipes import estimate
from tests.nemo import bridge

pytestmark = pytest.mark.nemo
GPT3 = "gpt.gpt3_175b:gpt3_175b_pretrain_config"
#: Switches that need what is not here: kernels, variables of a launch, files.
_OF_THIS_MACHINE = (
    "also_save_hf_checkpoint",
    "batch_invariant_mode",
    "deterministic_mode",
    "gradient_accumulation_fusion",
)


@pytest.mark.parametrize("name", bridge.RECIPES)
def test_a_configuration_is_read_to_the_parameter(name: str) -> None:
    cfg = bridge.config(name)
    spec = read_recipe(cfg, environment={}).spec
    assert total_parameters(spec) == bridge.own_parameters(cfg, spec)


@pytest.mark.parametrize("num_gpus", [8, 64, pytest.param(1024, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", bridge.RECIPES)
def test_bridge_accepts_the_plan(name: str, num_gpus: int) -> None:
    cfg = bridge.config(name)
    if num_gpus < 1024:  # a step of 405B with its own batch would take days
        cfg.train.global_batch_size = min(cfg.train.global_batch_size, 128)
    size = f"cluster.num_gpus={num_gpus}"
    try:
        plan, _ = auto_recipe(cfg, cluster="dgx_h100", overrides=[size], environment={})
    except NothingFitsError:
        assert num_gpus < 1024
        return
    trained = bridge.validate(cfg, num_gpus).model
    assert plan_changes(cfg, plan, environment={}) == ()
    for field in carried_out(plan):
        meant, value = getattr(plan.layout.execution, field), getattr(trained, field)
        assert (value or None) == (meant or None), field


def test_a_command_is_read_as_its_script_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.bridge import recipes
    from megatron.bridge.recipes.gpt import gpt3_175b

    name = "gpt3_175b_pretrain_config"  # asks no hub, and is not among those that are exported
    monkeypatch.setattr(recipes, name, getattr(gpt3_175b, name), raising=False)
    words = "torchrun --nproc-per-node 8 --nnodes 64 run_recipe.py --recipe "
    words += "gpt3_175b_pretrain_config train.global_batch_size=1024"
    job = recipe_command.read_recipe(words)
    assert job is not None
    assert (job.num_gpus, job.global_batch_size) == (512, 1024)
    assert job.spec == read_recipe(bridge.config(GPT3), environment={}).spec
    found = nest_megatron.estimate_command(words, cluster="dgx_h100")
    stated = bridge.config(GPT3).model
    assert found.layout.dims.tensor_model_parallel_size == stated.tensor_model_parallel_size
    assert found.layout.dims.pipeline_model_parallel_size == stated.pipeline_model_parallel_size
    with pytest.raises(UserInputError, match="gpt3_175b_pretrain_config"):
        recipe_command.read_recipe("run_recipe.py --recipe gpt3_17b_pretrain_config")


def test_stages_are_those_that_the_script_lays_out_for_sizes_that_are_typed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron.bridge import recipes

    name = "kimi_k2_pretrain_512gpu_h100_bf16_config"
    if not hasattr(recipes, name):
        pytest.skip(f"this Megatron-Bridge has no {name}")
    monkeypatch.setattr(recipes, name, lambda: bridge.config(f"kimi.h100.kimi_k2:{name}"))
    command = f"torchrun --nproc-per-node 8 --nnodes 64 run_recipe.py --recipe {name}"
    for words, virtual, last in (("-pp 8", 1, 5), ("-pp 8 -vp 2", 2, 1), ("", 1, 1)):
        found = nest_megatron.estimate_command(f"{command} {words}", cluster="dgx_h100").layout
        assert found.dims.virtual_pipeline_model_parallel_size == virtual
        assert len(found.partition.chunk(found.partition.num_chunks - 1)) == last + 1  # the head
    with pytest.raises(UserInputError, match="Invalid PP and VP size: 2 and 1"):
        recipe_command.read_recipe(f"{command} -pp 2")


def test_a_scheme_of_fine_tuning_is_read_as_the_script_takes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron.bridge import recipes
    from megatron.bridge.peft.dora import DoRA
    from megatron.bridge.peft.lora import LoRA

    name = "small_peft_config"

    def make(peft_scheme: str = "lora") -> Any:
        cfg = bridge.config(GPT3)
        cfg.peft = {"lora": LoRA, "dora": DoRA}[peft_scheme]()
        return cfg

    monkeypatch.setattr(recipes, name, make, raising=False)
    for mode, scheme in (("lora", "lora"), ("dora", "dora")):
        words = f"torchrun --nproc-per-node 8 run_recipe.py --recipe {name} --mode {mode}"
        job = recipe_command.read_recipe(f"{words} --step-func gpt_step")
        assert job is not None
        assert job.spec.adapters is not None
        assert job.spec.adapters.scheme == scheme


def carried_out(plan: ParallelPlan) -> Iterator[str]:
    """Choices that a configuration states as a plan does."""
    for knob in KNOBS:
        spelled = (
            knob.name == "moe_flex_dispatcher_backend"
        )  # stays where the dispatcher is another
        absent = knob.name == "moe_permute_fusion"  # Transformer Engine is not here
        plain = knob.name.startswith(("cuda_graph", "cp_comm"))
        if not (spelled or absent or plain) and (plan.model.is_moe or not knob.of_experts):
            yield knob.name


def test_the_plan_file_states_the_job(tmp_path: Path) -> None:
    cfg, path = bridge.config("qwen.qwen3_moe:qwen3_30b_a3b_pretrain_config"), tmp_path / "p.yaml"
    few = ["cluster.num_gpus=32", "search.num_alternatives=0"]
    plan, _ = auto_recipe(
        cfg, cluster="gb200_nvl72", keep=["micro_batch_size"], overrides=few, environment={}
    )
    plan_file.write(plan, path)
    changes = {"memory": "141GB", "search.num_alternatives": 0}
    again = nest_megatron.whatif(path, changes).variants[0].row.plan
    assert again is not None
    assert (again.predicted, again.layout) == (plan.predicted, plan.layout)


def test_experts_travel_as_planned() -> None:
    cfg = bridge.config("qwen.qwen3_moe:qwen3_30b_a3b_pretrain_config")
    cfg.train.global_batch_size = 512
    cfg.model.moe_token_dispatcher_type = "alltoall"
    fixed = (
        "tensor_model_parallel_size=1",
        "pipeline_model_parallel_size=2",
        "virtual_pipeline_model_parallel_size=4",
        "expert_model_parallel_size=32",
        "expert_tensor_parallel_size=1",
    )
    overrides = ["cluster.num_gpus=64", "search.packages=[hybrid_ep]"]
    overrides += [f"parallel.{each}" for each in fixed]
    plan, changes = auto_recipe(cfg, cluster="dgx_h100", overrides=overrides, environment={})
    trained = bridge.validate(cfg, 64).model
    assert plan.layout.execution.is_node_limited
    assert plan.layout.execution.overlap_moe_expert_parallel_comm
    assert trained.moe_token_dispatcher_type == "flex"
    assert trained.moe_flex_dispatcher_backend == "hybridep"
    assert trained.overlap_moe_expert_parallel_comm
    assert not trained.moe_shared_expert_overlap
    assert any(change.field == "model.moe_token_dispatcher_type" for change in changes)


def test_overlay_and_dotlist_make_the_same_configuration(tmp_path: Path) -> None:
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

    before, cfg = bridge.config(GPT3), bridge.config(GPT3)
    plan, changes = auto_recipe(
        cfg, cluster="dgx_h100", overrides=["cluster.num_gpus=512"], environment={}
    )
    file = tmp_path / "nest.yaml"
    file.write_text(to_yaml(changes), encoding="utf-8")
    by_words = process_config_with_overrides(
        copy.deepcopy(before), cli_overrides=to_dotlist(changes)
    )
    by_file = process_config_with_overrides(copy.deepcopy(before), config_filepath=str(file))
    assert plan_changes(before, plan, environment={}) != ()
    assert plan_changes(by_words, plan, environment={}) == ()
    assert plan_changes(by_file, plan, environment={}) == ()


def test_the_word_plans_and_keeps_what_the_user_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

    monkeypatch.setenv("WORLD_SIZE", "512")
    monkeypatch.delenv("RANK", raising=False)
    asked: list[Any] = []
    planning = hook.planning(process_config_with_overrides, asked.append)
    words = ["model.tensor_model_parallel_size=8", "+nest=auto", "nest.cluster=dgx_h100"]
    cfg = planning(bridge.config(GPT3), cli_overrides=words)
    assert asked[0].decision.plan.layout.num_gpus == 512
    assert cfg.model.tensor_model_parallel_size == 8
    assert cfg.comm_overlap.tp_comm_overlap_cfg is None
    bridge.validate(cfg, 512)


def test_without_the_word_nothing_is_planned() -> None:
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

    planning = hook.planning(process_config_with_overrides, lambda _: pytest.fail("planned"))
    cfg = planning(bridge.config(GPT3), cli_overrides=["train.micro_batch_size=1"])
    assert cfg.train.micro_batch_size == 1
    assert cfg.model.pipeline_model_parallel_size == 8


def test_no_switch_is_priced_with_which_bridge_does_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each switch of the parts that plans read or write, turned over by itself."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    whole, refused, priced = bridge.config(GPT3), 0, []
    whole.comm_overlap.defer_embedding_wgrad_compute = False  # asks for fused accumulation
    bridge.validate(whole, 512)
    for part in ("model", "ddp", "optimizer", "dist", "checkpoint"):
        for field in dataclasses.fields(getattr(whole, part)):
            cfg = bridge.copied(whole)
            holder = getattr(cfg, part)
            value = getattr(holder, field.name, None)
            if not isinstance(value, bool) or field.name in _OF_THIS_MACHINE:
                continue
            setattr(holder, field.name, not value)
            try:
                bridge.validate(cfg, 512)
            except (AssertionError, NotImplementedError, ValueError):
                refused += 1
                with contextlib.suppress(UserInputError):
                    estimate(megatron_bridge, cfg, 512)
                    priced.append(f"{part}.{field.name}")
    assert refused > 15
    assert priced == []
