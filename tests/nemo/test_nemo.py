"""NeMo's own recipes: read to the parameter, planned, rewritten, and accepted by NeMo."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import pytest

import nest_megatron
from nest_megatron.errors import UnplannableModelError, UserInputError
from nest_megatron.integrations import nemo, recipe_command
from nest_megatron.integrations.fields import find
from nest_megatron.integrations.nemo import (
    auto_recipe,
    plan_changes,
    read_recipe,
    require_language_models,
)
from nest_megatron.layout import plan_file
from nest_megatron.model.parameters import total_parameters
from nest_megatron.report.failure import NothingFitsError

pytest.importorskip("nemo_run", reason="nemo-run is not installed (.ci/nemo installs it)")
try:
    require_language_models()
except UserInputError as error:
    pytest.skip(str(error), allow_module_level=True)

# a model of megatron-core sets these for its own attention, and refuses the next model's
for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
    os.environ.pop(name, None)

from tests.integrations.test_refused_recipes import estimate  # noqa: E402 - after the skips
from tests.nemo import recipes, substitutes  # noqa: E402

pytestmark = pytest.mark.nemo


@pytest.mark.parametrize("name", [*recipes.RECIPES, *recipes.PARAMETERS_ONLY])
def test_a_recipe_is_read_to_the_parameter(name: str) -> None:
    source = recipes.recipe(name)
    spec = read_recipe(source).spec
    assert total_parameters(spec) == recipes.own_parameters(source, spec)


@pytest.mark.parametrize("num_nodes", [1, 8, pytest.param(128, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", recipes.RECIPES)
def test_nemo_accepts_the_plan(name: str, num_nodes: int) -> None:
    source = recipes.recipe(name, num_nodes=num_nodes)
    try:
        plan, _ = auto_recipe(source, cluster="dgx_h100")
    except NothingFitsError:
        assert num_nodes < 128
        return
    recipes.validate(source)
    assert plan_changes(source, plan) == ()
    job = read_recipe(source)
    stated = {name: job.memory_flags.get(name) for name in ("tp_comm_overlap", *_OF_EXPERTS)}
    of_plan = {name: getattr(plan.layout.execution, name) for name in stated}
    if not plan.model.is_moe:
        stated, of_plan = {}, {}
    assert {name: value or False for name, value in stated.items()} == of_plan


@pytest.mark.parametrize("name", ["llama3_8b", "qwen3_30b_a3b"])
def test_the_plan_file_states_the_job(name: str, tmp_path: Path) -> None:
    source, path = recipes.recipe(name, num_nodes=4), tmp_path / "plan.yaml"
    few = ["search.num_alternatives=0"]
    plan, _ = auto_recipe(source, cluster="dgx_h100", keep=["micro_batch_size"], overrides=few)
    plan_file.write(plan, path)
    changes = {"memory": "141GB", "search.num_alternatives": 0}
    again = nest_megatron.whatif(path, changes).variants[0].row.plan
    assert again is not None
    assert (again.predicted, again.layout) == (plan.predicted, plan.layout)


_OF_EXPERTS = (
    "moe_token_dispatcher_type",
    "moe_permute_fusion",
    "moe_router_fusion",
    "moe_shared_expert_overlap",
)


@pytest.mark.parametrize("name", recipes.FAMILIES)
def test_families_with_layers_of_their_own_are_planned_within_their_limits(name: str) -> None:
    substitutes.install()
    source = recipes.recipe(name, num_nodes=8)
    plan, _ = auto_recipe(source, cluster="dgx_h100", vocab_size=128_000)
    recipes.validate(source)
    assert plan_changes(source, plan) == ()
    for degree, value in recipes.FAMILIES[name].items():
        assert plan.arguments[degree] == value, degree


def test_layers_beside_their_pattern_are_as_many() -> None:
    source = recipes.recipe("mamba2_130m")
    source.model.config.num_layers = 12
    with pytest.raises(UserInputError, match="num_layers = 12: the pattern of the model has 24"):
        read_recipe(source, vocab_size=50_000)


def test_a_command_is_read_as_nemo_runs_it() -> None:
    text = 'nemo llm pretrain --factory "llama3_8b(num_nodes=2)" data.global_batch_size=256 --yes'
    job = recipe_command.read_recipe(text)
    assert job is not None
    assert (job.num_gpus, job.global_batch_size) == (16, 256)
    assert job.spec == read_recipe(recipes.recipe("llama3_8b")).spec
    found = nest_megatron.plan_command(text, cluster="dgx_h100", search={"num_alternatives": 0})
    assert found.before is not None
    assert found.before.before is not None
    with pytest.raises(UserInputError, match="does not make it"):
        recipe_command.read_recipe("nemo llm pretrain --factory llama3_9b")


def test_capped_attention_takes_no_packs() -> None:
    source = recipes.finetune("gemma2_2b", packed_sequence=True)
    with pytest.raises(UserInputError, match="packed_sequence_size"):
        auto_recipe(source, cluster="dgx_h100", vocab_size=256_000)


def test_the_callback_sets_what_was_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    import fiddle
    from nemo.collections.llm.recipes import llama3_70b
    from nemo.lightning.pytorch.callbacks import megatron_comm_overlap

    monkeypatch.setattr(megatron_comm_overlap, "HAVE_TE", True)
    source = llama3_70b.pretrain_recipe(
        name="nest", dir="/nowhere", num_nodes=8, num_gpus_per_node=8, performance_mode=True
    )
    plan, _ = auto_recipe(source, cluster="dgx_h100")
    (config,) = [c for c in source.trainer.callbacks if hasattr(c, "tp_comm_overlap_cfg")]
    strategy = fiddle.build(source.trainer.strategy)
    found = fiddle.build(config)._get_model_comm_overlap_cfgs(strategy.parallelism)
    assert found.tp_comm_overlap == plan.layout.execution.tp_comm_overlap


def test_a_plain_recipe_gets_the_callback_that_makes_user_buffers() -> None:
    from nemo.collections.llm.recipes import llama3_8b

    source = llama3_8b.pretrain_recipe(
        name="nest", dir="/nowhere", num_nodes=8, num_gpus_per_node=8
    )
    assert not any(hasattr(each, "tp_comm_overlap") for each in source.trainer.callbacks)
    plan = nest_megatron.plan(
        model="llama3_8b",
        cluster="dgx_h100",
        num_gpus=64,
        target="nemo_2.7",
        num_alternatives=0,
        tensor_model_parallel_size=2,
    )
    assert plan.layout.execution.tp_comm_overlap
    changed = plan.apply(source)
    assert "trainer.callbacks" in [change.field for change in changed]
    assert source.trainer.callbacks[-1].tp_comm_overlap
    assert plan.apply(source) == ()
    recipes.validate(source)


def test_experts_of_deepseek_travel_as_planned() -> None:
    from nemo.collections.llm.recipes import deepseek_v3

    source = deepseek_v3.pretrain_recipe(
        name="nest", dir="/nowhere", num_nodes=128, num_gpus_per_node=8, performance_mode=True
    )
    names = [callback.__fn_or_cls__.__name__ for callback in source.trainer.callbacks]
    assert "DeepEPCallback" in names
    assert read_recipe(source).memory_flags["moe_token_dispatcher_type"] == "flex"
    plan, _ = auto_recipe(source, cluster="dgx_h100")
    job = read_recipe(source)
    assert (
        job.memory_flags["moe_token_dispatcher_type"]
        == plan.layout.execution.moe_token_dispatcher_type
    )
    assert not plan.layout.execution.overlap_moe_expert_parallel_comm
    recipes.validate(source)


@pytest.mark.parametrize("name", recipes.REFUSED)
def test_what_cannot_be_planned_is_refused_by_name(name: str) -> None:
    source = recipes.recipe(name)
    before = copy.deepcopy(source)
    with pytest.raises(UnplannableModelError, match=recipes.REFUSED[name]):
        auto_recipe(source, cluster="dgx_h100")
    assert source == before


def test_stale_overlap_settings_are_cleared() -> None:
    from nemo.collections.llm.recipes import llama3_70b

    source = llama3_70b.pretrain_recipe(
        name="nest", dir="/nowhere", num_nodes=8, num_gpus_per_node=8, performance_mode=True
    )
    (callback,) = [c for c in source.trainer.callbacks if hasattr(c, "tp_comm_overlap_cfg")]
    assert callback.tp_comm_overlap_cfg is not None
    assert callback.defer_embedding_wgrad_compute
    assert read_recipe(source).not_modelled == (), "what a plan takes back weighs on no memory"
    auto_recipe(source, cluster="dgx_h100")
    assert callback.tp_comm_overlap_cfg is None
    assert not callback.defer_embedding_wgrad_compute
    recipes.validate(source)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model.config.enable_cuda_graph", True),
        ("model.config.cuda_graph_impl", "full_iteration"),
        ("model.config.cpu_offloading", True),
        ("model.config.fine_grained_activation_offloading", True),
        ("model.config.moe_router_group_topk", 2),
        ("trainer.strategy.ckpt_load_main_params", True),
    ],
)
def test_what_nemo_refuses_is_not_priced(field: str, value: object) -> None:
    recipe = recipes.recipe("llama3_70b", num_nodes=8)
    recipes.validate(recipe)
    assert estimate(nemo, recipe, 64).layout.num_gpus == 64
    parent, _, name = field.rpartition(".")
    setattr(find(recipe, parent), name, value)
    with pytest.raises((AssertionError, NotImplementedError, ValueError)):
        recipes.validate(recipe)
    with pytest.raises(UserInputError, match=name):
        estimate(nemo, recipe, 64)
