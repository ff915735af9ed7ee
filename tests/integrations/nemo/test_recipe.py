"""A plan in a NeMo recipe: what is set, cleared, kept and refused."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nest_megatron.api import Plan
from nest_megatron.catalogue_files import catalogue_root
from nest_megatron.errors import UnplannableModelError, UserInputError
from nest_megatron.integrations import nemo
from nest_megatron.integrations.fields import find
from nest_megatron.integrations.nemo import (
    apply_plan,
    auto_recipe,
    plan_changes,
    read_recipe,
    require_language_models,
    watch_recipe,
)
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.recompute import RecomputeGranularity
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.model.encoder import Adapters
from nest_megatron.report.failure import NothingFitsError
from tests import catalogue
from tests.contract.test_adapters import laid_out
from tests.integrations.frameworks import MegatronCommOverlapCallback, nemo_recipe


def llama(**sizes: Any) -> Any:
    return nemo_recipe(catalogue.model("llama3_8b"), **sizes)


def by_field(recipe: Any, plan: ParallelPlan) -> dict[str, tuple[object, object]]:
    return {c.field: (c.before, c.after) for c in apply_plan(recipe, plan)}


def test_a_recipe_is_read() -> None:
    found = read_recipe(llama(num_nodes=4))
    assert (found.num_gpus, found.gpus_per_node) == (32, 8)
    assert (found.global_batch_size, found.spec.seq_length) == (512, 8192)
    assert found.spec.num_query_groups == 8
    assert found.spec.vocab_size == catalogue.model("llama3_8b").vocab_size
    assert found.fixed["tensor_model_parallel_size"] == 1


def test_without_a_tokenizer_mock_data_decides_and_says_so() -> None:
    recipe = llama()
    recipe.model.config.vocab_size = None
    found = read_recipe(recipe)
    assert found.spec.vocab_size == 50_257
    assert "50257" in found.notes[0]
    assert read_recipe(recipe, vocab_size=1000).spec.vocab_size == 1000


@pytest.mark.parametrize(
    ("own", "rows"),
    [(None, 1000), ("model", 1000), ("data", 2000), (SimpleNamespace(vocab_size=3000), 3000)],
)
def test_the_tokenizer_is_the_one_that_nemo_takes(own: Any, rows: int) -> None:
    recipe = llama()
    recipe.model.config.vocab_size = None
    recipe.model.tokenizer = SimpleNamespace(vocab_size=1000)
    recipe.data.tokenizer = SimpleNamespace(vocab_size=2000)
    recipe.tokenizer = own
    assert read_recipe(recipe).spec.vocab_size == rows


@pytest.mark.parametrize("name", ["silu", "squared_relu"])
def test_an_activation_may_be_given_by_its_name(name: str) -> None:
    recipe = llama()
    recipe.model.config.activation_func = name
    assert read_recipe(recipe).spec.activation == name


def test_an_unknown_activation_is_refused() -> None:
    recipe = llama()
    recipe.model.config.activation_func = print
    with pytest.raises(UnplannableModelError, match="print"):
        read_recipe(recipe)


def test_every_change_has_a_reason_and_writing_twice_is_writing_once() -> None:
    recipe, plan = llama(), laid_out(tp=2, pp=4, vpp=4)
    changes = apply_plan(recipe, plan)
    assert all(change.reason for change in changes)
    assert apply_plan(recipe, plan) == ()


def test_a_plan_is_taken_as_it_was_found_and_as_it_was_loaded() -> None:
    recipe, plan = llama(), laid_out(tp=2, pp=4, vpp=4)
    assert plan_changes(recipe, Plan(record=plan)) == plan_changes(recipe, plan)
    for other in ("plan.yaml", None):
        with pytest.raises(UserInputError, match=r"it is no plan\. .*load_plan\(FILE\)"):
            apply_plan(recipe, other)  # type: ignore[arg-type]


def test_even_stages_need_no_layout_and_uneven_ones_do() -> None:
    even, uneven = llama(), llama()
    apply_plan(even, laid_out(pp=4))
    apply_plan(uneven, laid_out(pp=4, first=5))
    assert even.trainer.strategy.pipeline_model_parallel_layout is None
    assert uneven.trainer.strategy.pipeline_model_parallel_layout == "Et*5|(t*9|)*2t*9L"


def test_other_ways_to_cut_stages_are_cleared() -> None:
    recipe = llama()
    recipe.trainer.strategy.num_layers_in_first_pipeline_stage = 3
    recipe.trainer.strategy.account_for_loss_in_pipeline_split = True
    changed = by_field(recipe, laid_out(pp=4))
    assert changed["trainer.strategy.num_layers_in_first_pipeline_stage"] == (3, None)
    assert changed["trainer.strategy.account_for_loss_in_pipeline_split"] == (True, False)


def test_shared_weights_come_with_their_checkpoints_and_go_with_them() -> None:
    recipe = llama()
    changed = by_field(recipe, laid_out(zero=ZeroStage.WEIGHTS))
    assert changed["trainer.strategy.fsdp"] == (None, "megatron")
    assert changed["trainer.strategy.save_ckpt_format"] == ("torch_dist", "fsdp_dtensor")
    assert recipe.trainer.strategy.ddp.data_parallel_sharding_strategy == "optim_grads_params"
    assert recipe.model.config.init_model_with_meta_device
    back = by_field(recipe, laid_out())
    assert back["trainer.strategy.fsdp"] == ("megatron", None)
    assert back["trainer.strategy.save_ckpt_format"] == ("fsdp_dtensor", "torch_dist")
    assert not recipe.trainer.strategy.ddp.use_megatron_fsdp
    assert not recipe.model.config.init_model_with_meta_device


def test_shared_weights_may_be_turned_on_where_gradients_are_configured() -> None:
    """``MegatronStrategy`` takes the switch of its ``ddp`` for ``fsdp="megatron"``."""
    recipe = llama()
    recipe.trainer.strategy.ddp.use_megatron_fsdp = True
    recipe.trainer.strategy.ddp.data_parallel_sharding_strategy = "optim_grads_params"
    recipe.trainer.strategy.save_ckpt_format = "fsdp_dtensor"
    assert read_recipe(recipe).zero is ZeroStage.WEIGHTS
    plan, _ = auto_recipe(recipe, cluster="dgx_h100")
    assert plan.layout.uses_megatron_fsdp


def test_stale_overlap_settings_are_cleared() -> None:
    recipe = llama()
    callback = MegatronCommOverlapCallback(
        tp_comm_overlap=True,
        tp_comm_overlap_cfg="tuned for TP 4",
        overlap_p2p_comm=True,
        batch_p2p_comm=False,
        overlap_grad_reduce=False,
        defer_embedding_wgrad_compute=True,
        wgrad_deferral_limit=22,
    )
    recipe.trainer.callbacks.append(callback)
    apply_plan(recipe, laid_out())
    assert callback == MegatronCommOverlapCallback(
        tp_comm_overlap=False, overlap_grad_reduce=True, defer_embedding_wgrad_compute=False
    )


def test_a_single_callback_may_stand_without_a_list() -> None:
    recipe = llama()
    callback = MegatronCommOverlapCallback(tp_comm_overlap=True, tp_comm_overlap_cfg="for TP 4")
    recipe.trainer.callbacks = callback
    apply_plan(recipe, laid_out())
    assert callback == MegatronCommOverlapCallback(tp_comm_overlap=False)
    assert recipe.trainer.callbacks is callback


def test_buffers_stay_where_their_shapes_do() -> None:
    recipe = llama()
    recipe.trainer.strategy.tensor_model_parallel_size = 4
    callback = MegatronCommOverlapCallback(tp_comm_overlap=True, tp_comm_overlap_cfg="for TP 4")
    recipe.trainer.callbacks.append(callback)
    apply_plan(recipe, laid_out(tp=4))
    assert callback.tp_comm_overlap_cfg == "for TP 4"


@pytest.mark.parametrize(
    ("name", "wrong"), [("global_batch_size", 256), ("seq_length", 4096), ("num_gpus", 32)]
)
def test_another_job_is_refused_unless_it_may_change(name: str, wrong: int) -> None:
    recipe, plan = llama(), laid_out()
    if name == "num_gpus":
        recipe.trainer.num_nodes = 4
    else:
        setattr(recipe.data, name, wrong)
    before = copy.deepcopy(recipe)
    with pytest.raises(UserInputError, match=name):
        apply_plan(recipe, plan)
    assert recipe == before
    assert plan_changes(recipe, plan, free=name) == plan_changes(recipe, plan, free=[name])
    apply_plan(recipe, plan, free=[name])
    assert plan_changes(recipe, plan) == ()


def test_another_model_is_refused_by_what_differs() -> None:
    recipe = nemo_recipe(catalogue.model("llama3_70b"))
    with pytest.raises(UserInputError, match=r"num_layers 80 \(plan: 32\)"):
        apply_plan(recipe, laid_out())


def test_a_field_that_is_not_there_is_refused_not_set() -> None:
    recipe = llama()
    recipe.trainer.strategy = without(
        recipe.trainer.strategy, "pipeline_model_parallel_layout", "MegatronStrategy"
    )
    assert apply_plan(recipe, laid_out(pp=4))
    with pytest.raises(UserInputError, match="no such field"):
        apply_plan(recipe, laid_out(pp=4, first=5))
    assert not hasattr(recipe.trainer.strategy, "pipeline_model_parallel_layout")


def without(holder: Any, name: str, kind: str) -> Any:
    """The same settings but one, under the same name of a class."""
    rest = {key: value for key, value in vars(holder).items() if key != name}
    made = type(kind, (SimpleNamespace,), {})
    return made(**rest)


@pytest.mark.parametrize(
    ("kind", "lacking"),
    [
        ("DiTModel", "diffusion"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(kind: str, lacking: str) -> None:
    recipe = llama()
    recipe.model = type(kind, (SimpleNamespace,), {})(config=recipe.model.config)
    with pytest.raises(UnplannableModelError, match=f"{kind}.*{lacking}"):
        read_recipe(recipe)


def test_other_schemes_of_fine_tuning_are_refused() -> None:
    recipe = llama()
    recipe.peft = SimpleNamespace()
    with pytest.raises(UnplannableModelError, match="LoRA, DoRA, CanonicalLoRA are supported"):
        read_recipe(recipe)


def lora(**fields: Any) -> Any:
    return type("LoRA", (SimpleNamespace,), {})(target_modules=["linear_qkv"], dim=8, **fields)


@pytest.mark.parametrize("path", ["peft", "model_transform", "model.model_transform"])
def test_adapters_are_planned_beside_frozen_weights(path: str) -> None:
    recipe = llama()
    parent, _, name = path.rpartition(".")
    setattr(find(recipe, parent), name, lora(alpha=16))
    adapters = Adapters(target_modules=("linear_qkv",), dim=8)
    assert read_recipe(recipe).spec.adapters == adapters
    plan, _ = auto_recipe(recipe, cluster="dgx_h100", free=["all"])
    assert plan.model.adapters == adapters
    kept = [stage.memory_bytes["optimizer"] for stage in plan.predicted.stages]
    assert 0 < max(kept) < 1e9
    assert plan.arguments["recompute_granularity"] is not RecomputeGranularity.FULL


def test_nemo_would_lose_the_gradients_of_adapters_in_recomputed_layers() -> None:
    recipe = llama()
    recipe.peft = lora()
    full = [f"parallel.recompute_{each}" for each in ("granularity=full", "method=uniform")]
    with pytest.raises(UserInputError, match="gradients of adapters"):
        auto_recipe(
            recipe, cluster="dgx_h100", overrides=[*full, "parallel.recompute_num_layers=1"]
        )


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"exclude_modules": ["linear_proj"]}, "exclude_modules"),
        ({"lora_dtype": "float32"}, "lora_dtype"),
        ({"dropout_recompute": True}, "dropout_recompute"),
    ],
)
def test_what_is_not_known_of_adapters_is_refused_by_name(
    fields: dict[str, Any], match: str
) -> None:
    recipe = llama()
    recipe.peft = lora(**fields)
    with pytest.raises(UnplannableModelError, match=match):
        read_recipe(recipe)


def test_a_recipe_is_planned_at_its_own_size() -> None:
    recipe = llama(num_nodes=2)
    plan, changes = auto_recipe(recipe, cluster="dgx_h100")
    assert plan.layout.num_gpus == 16
    assert changes
    assert plan_changes(recipe, plan) == ()


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("trainer.num_nodes", "2", "num_nodes = '2': it must be a whole number"),
        ("trainer.num_nodes", 2.0, "num_nodes = 2.0: it must be a whole number"),
        (
            "trainer.strategy.tensor_model_parallel_size",
            "4",
            "strategy.tensor_model_parallel_size = '4': it must be a whole number",
        ),
        ("trainer.strategy.context_parallel_size", 0, "context_parallel_size = 0: it must be"),
        ("trainer.strategy.pipeline_model_parallel_layout", [4], "a stage is a list of embedding"),
        ("trainer.strategy.pipeline_model_parallel_layout", [["x"]], "a stage is a list of"),
        (
            "model.config.recompute_granularity",
            "ful",
            "model.config.recompute_granularity = 'ful': it must be one of full, selective",
        ),
        ("model.config.recompute_granularity", 1, "granularity = 1: it must be one of full"),
    ],
)
def test_values_of_a_wrong_kind_are_named(path: str, value: object, said: str) -> None:
    recipe = llama()
    parent, _, name = path.rpartition(".")
    setattr(find(recipe, parent), name, value)
    with pytest.raises(UserInputError, match=said):
        read_recipe(recipe)


def test_an_unknown_method_of_recomputation_is_named() -> None:
    recipe = llama()
    recipe.model.config.recompute_granularity = "full"
    recipe.model.config.recompute_method = "blocks"
    with pytest.raises(UserInputError, match=r"model\.config\.recompute_method = 'blocks'.*block"):
        read_recipe(recipe)


def test_a_cluster_is_a_name_a_file_or_a_record(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(catalogue_root().joinpath("cluster", "dgx_a100.yaml").read_bytes())
    plan, _ = auto_recipe(llama(), cluster=path)
    assert plan.cluster.accelerator.name == "A100-SXM-80GB"
    with pytest.raises(UserInputError, match=r"cluster = \{'accelerator': 'h100'\}: it is a name"):
        auto_recipe(llama(), cluster={"accelerator": "h100"})  # type: ignore[arg-type]


def test_a_recipe_watches_one_step_at_least() -> None:
    recipe = llama()
    with pytest.raises(UserInputError, match="steps = 0: it must be at least 1"):
        watch_recipe(recipe, laid_out(), steps=0)
    assert recipe.trainer.callbacks == []


def test_what_is_kept_stays_and_what_is_freed_alone_changes() -> None:
    kept, freed = llama(num_nodes=2), llama(num_nodes=2)
    kept.trainer.strategy.tensor_model_parallel_size = 4
    freed.trainer.strategy.tensor_model_parallel_size = 4
    plan, _ = auto_recipe(kept, cluster="dgx_h100", keep=["tensor_model_parallel_size"])
    assert plan.layout.dims.tensor_model_parallel_size == 4
    plan, _ = auto_recipe(freed, cluster="dgx_h100", free=["micro_batch_size"])
    assert plan.layout.dims.tensor_model_parallel_size == 4
    assert plan.layout.dims.pipeline_model_parallel_size == 1


def test_a_layout_stays_beside_its_virtual_stages() -> None:
    """A plan with uneven virtual stages writes both, as recipes of NVIDIA do."""
    recipe = llama(num_nodes=2)
    strategy = recipe.trainer.strategy
    strategy.pipeline_model_parallel_size, strategy.virtual_pipeline_model_parallel_size = 4, 2
    strategy.pipeline_model_parallel_layout = "Et*3|t*5|(t*4|)*5t*4L"
    before = copy.deepcopy(strategy)
    plan, _ = auto_recipe(recipe, cluster="dgx_h100", free=["micro_batch_size"])
    assert plan.layout.dims.virtual_pipeline_model_parallel_size == 2
    assert strategy.pipeline_model_parallel_layout == before.pipeline_model_parallel_layout
    assert strategy.virtual_pipeline_model_parallel_size == 2


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"keep": ["tp"]}, "keep"),
        ({"free": ["stage_layout"], "keep": ["stage_layout"]}, "free, keep"),
        ({"overrides": ["train.global_batch_size=8"]}, "train.global_batch_size"),
        ({"overrides": ["serch.max_seconds=1"]}, "serch.max_seconds"),  # codespell:ignore serch
    ],
)
def test_wishes_are_checked(options: dict[str, Any], what: str) -> None:
    with pytest.raises(UserInputError) as refusal:
        auto_recipe(llama(), cluster="dgx_h100", **options)
    assert refusal.value.what == what


@pytest.mark.parametrize(
    ("path", "value", "keep", "field"),
    [
        ("data.micro_batch_size", 2, "micro_batch_size", "data.micro_batch_size = 2"),
        (
            "trainer.strategy.num_layers_in_first_pipeline_stage",
            3,
            "stage_layout",
            "trainer.strategy.num_layers_in_first_pipeline_stage = 3",
        ),
        ("trainer.strategy.fsdp", "megatron", "all", "trainer.strategy.ddp.use_megatron_fsdp"),
    ],
)
def test_what_cannot_be_kept_is_named_by_its_field(
    path: str, value: object, keep: str, field: str
) -> None:
    recipe = llama()
    recipe.data.packed_sequence_specs = SimpleNamespace(packed_sequence_size=8192)
    recipe.resume = SimpleNamespace(restore_config=SimpleNamespace(path="/nowhere/llama"))
    parent, _, name = path.rpartition(".")
    setattr(find(recipe, parent), name, value)
    with pytest.raises(UserInputError, match=field) as caught:
        auto_recipe(recipe, cluster="dgx_h100", keep=[keep])
    assert "--" not in str(caught.value)


def test_a_checkpoint_that_has_no_name_yet_is_called_so() -> None:
    """As of ``mamba2_130m.finetune_recipe()``."""
    recipe = llama()
    recipe.resume = SimpleNamespace(restore_config=SimpleNamespace(path=None))
    (note,) = [each for each in read_recipe(recipe).notes if "restores" in each]
    assert "restores a checkpoint that restore_config does not name, in the format" in note


def test_offloading_of_no_layer_is_off_in_a_plan() -> None:
    """megatron-core refuses the switch beside several stages, however many layers it offloads."""
    recipe = llama()
    recipe.model.config.cpu_offloading = True
    changed = by_field(recipe, laid_out(pp=4))
    assert changed["model.config.cpu_offloading"] == (True, False)
    assert "model.config.offload_modules" not in changed
    assert apply_plan(recipe, laid_out(pp=4)) == ()


def test_what_does_not_fit_says_by_how_much() -> None:
    recipe = nemo_recipe(catalogue.model("llama3_70b"), num_nodes=1)
    before = copy.deepcopy(recipe)
    with pytest.raises(NothingFitsError, match="GiB") as refusal:
        auto_recipe(recipe, cluster="dgx_h100")
    assert refusal.value.refusal.missing_bytes > 0
    assert recipe == before


def test_a_release_without_language_models_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nemo, "installed_version", lambda _: "3.0.0")
    with pytest.raises(UserInputError, match="no collection of language models"):
        require_language_models()
    monkeypatch.setattr(nemo, "installed_version", lambda _: "2.7.3")
    require_language_models()


def test_user_buffers_get_the_length_of_the_data() -> None:
    recipe = llama(num_nodes=2)
    recipe.trainer.strategy.tensor_model_parallel_size = 2
    recipe.trainer.callbacks.append(MegatronCommOverlapCallback(tp_comm_overlap=True))
    recipe.model.config.seq_length = 4096
    plan, _ = auto_recipe(recipe, cluster="dgx_h100", keep=["tensor_model_parallel_size"])
    assert plan.layout.execution.tp_comm_overlap
    assert recipe.model.config.seq_length == plan.train.seq_length == 8192

    learned = llama(num_nodes=2)  # whose table would grow
    learned.trainer.strategy.tensor_model_parallel_size = 2
    learned.trainer.callbacks.append(MegatronCommOverlapCallback(tp_comm_overlap=True))
    learned.model.config.position_embedding_type = "learned_absolute"
    learned.model.config.seq_length = 16384
    plan, _ = auto_recipe(learned, cluster="dgx_h100", keep=["tensor_model_parallel_size"])
    assert not plan.layout.execution.tp_comm_overlap
    assert learned.model.config.seq_length == 16384


def test_nodes_that_are_not_the_clusters_are_told() -> None:
    recipe = llama(num_nodes=4)
    recipe.trainer.devices = 4
    plan, _ = auto_recipe(recipe, cluster="dgx_h100")
    assert "The job has 4 ranks on each of 4 nodes; those of dgx_h100 have 8 GPUs" in "".join(
        plan.notes
    )


def test_mxfp8_weights_that_share_a_buffer_with_gradients_are_gathered_first() -> None:
    def quantized() -> Any:
        recipe = llama(num_nodes=2)
        recipe.trainer.plugins.fp8 = "hybrid"
        recipe.trainer.plugins.fp8_recipe = "mxfp8"
        recipe.trainer.plugins.fp8_param_gather = True
        return recipe

    recipe = quantized()
    recipe.trainer.strategy.ddp.overlap_param_gather = True
    recipe.trainer.strategy.ddp.reuse_grad_buf_for_mxfp8_param_ag = True
    plan, _ = auto_recipe(recipe, cluster="b200")
    assert not plan.layout.overlap_param_gather
    assert recipe.trainer.strategy.ddp.overlap_param_gather is False
    other, _ = auto_recipe(quantized(), cluster="b200")
    assert other.layout.overlap_param_gather
    callback = MegatronCommOverlapCallback()
    recipe.trainer.callbacks.append(callback)
    apply_plan(recipe, plan)
    assert callback.overlap_param_gather is False, "by itself it would overlap them"
    assert other.predicted.iteration_time_s < plan.predicted.iteration_time_s
    with pytest.raises(UserInputError, match="reuse_grad_buf_for_mxfp8_param_ag needs False"):
        apply_plan(recipe, other)


def test_another_number_format_than_the_plan_counts_is_warned_of() -> None:
    recipe = llama()
    recipe.trainer.plugins.fp8 = "hybrid"
    with pytest.warns(UserWarning, match="the plan counts bf16, and the job is fp8; auto_recipe"):
        apply_plan(recipe, laid_out())


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("out=plan.yaml", r"out = 'plan\.yaml': .* no file is written"),
        ("flags=--bf16", "flags = '--bf16': the model and the batch are the recipe's own"),
        (5, "override = '5': settings are written key=value"),
    ],
)
def test_overrides_that_say_nothing_of_a_recipe_are_refused(override: Any, told: str) -> None:
    with pytest.raises(UserInputError, match=told):
        auto_recipe(llama(), cluster="dgx_h100", overrides=[override])


def test_a_plan_is_held_to_the_layers_of_the_recipe_that_takes_it() -> None:
    """Windows, which may differ from those of the catalogue's model, have no kernel with a ring."""
    recipe = llama()
    plan, _ = auto_recipe(
        recipe, cluster="dgx_h100", overrides=["parallel.context_parallel_size=2"]
    )
    recipe.model.config.window_size = (4096, 0)
    with pytest.raises(UserInputError, match="sliding windows have no kernel with the ring"):
        apply_plan(recipe, plan)
