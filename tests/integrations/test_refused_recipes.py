"""What a framework refuses as it starts is not priced, and no plan leaves it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nest_megatron.cluster.records import Precision
from nest_megatron.config.compose import compose
from nest_megatron.config.overrides import parse
from nest_megatron.config.request import request_for
from nest_megatron.errors import UserInputError
from nest_megatron.integrations import megatron_bridge, nemo
from nest_megatron.integrations.fields import find
from nest_megatron.integrations.megatron_lm.present_layout import typed_plan
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.solver.space import SearchSpace
from tests import catalogue
from tests.contract.test_adapters import laid_out
from tests.integrations.frameworks import CommOverlapConfig, bridge_config, nemo_recipe

#: Settings of a recipe of Megatron-Bridge 0.6 -> what our refusal says of them.
BRIDGE: dict[str, dict[str, Any]] = {
    r"use_decentralized_pg = True: Megatron-Bridge 0\.6 refuses it beside dist\.use_gloo_proc": {
        "dist.use_decentralized_pg": True,
        "dist.use_gloo_process_groups": True,
    },
    r"ckpt_format = torch_dist: the data-parallel sharding does not save that way": {
        "dist.use_megatron_fsdp": True,
        "ddp.data_parallel_sharding_strategy": "optim_grads_params",
        "checkpoint.save": "somewhere",
    },
    r"delay_wgrad_compute = True: it goes with comm_overlap\.overlap_moe_expert_parallel_comm": {
        "comm_overlap": CommOverlapConfig(delay_wgrad_compute=True),
    },
    r"cpu_offloading = True: whole layers are moved to the host without a pipeline": {
        "model.cpu_offloading": True,
        "model.recompute_granularity": "full",
        "model.recompute_method": "uniform",
        "model.recompute_num_layers": 1,
    },
    r"fine_grained_activation_offloading = True: the layout saves nothing that could be moved": {
        "model.fine_grained_activation_offloading": True,
    },
    r"cuda_graph_impl = local: Megatron-Bridge 0\.6 refuses it": {
        "model.cuda_graph_impl": "local",
        "model.cuda_graph_scope": ["attn"],
    },
    r"cuda_graph_impl = full_iteration: .* beside rerun_state_machine\.check_for_nan_in_loss": {
        "model.cuda_graph_impl": "full_iteration",
        "rerun_state_machine": type("Machine", (), {"check_for_nan_in_loss": True})(),
    },
    r"exp_avg_dtype = bf16: .* without optimizer\.use_precision_aware_optimizer": {
        "optimizer.exp_avg_dtype": "torch.bfloat16",
        "optimizer.use_precision_aware_optimizer": False,
    },
    r"use_precision_aware_optimizer = True: it needs optimizer\.use_distributed_optimizer": {
        "optimizer.use_precision_aware_optimizer": True,
        "optimizer.optimizer": "sgd",
        "optimizer.use_distributed_optimizer": False,
        "ddp.use_distributed_optimizer": False,
    },
    r"moe_layer_recompute = True: .* beside model\.recompute_granularity full": {
        "model.moe_layer_recompute": True,
        "model.recompute_granularity": "full",
        "model.recompute_method": "uniform",
        "model.recompute_num_layers": 1,
    },
    r"eval_global_batch_size = 24: the replicas do not divide the batch of evaluation": {
        "validation": type("Validation", (), {"eval_global_batch_size": 24})(),
    },
    r"deterministic_mode = True: .* beside model\.cross_entropy_loss_fusion": {
        "model.deterministic_mode": True,
        "model.cross_entropy_loss_fusion": True,
    },
}
#: The same of NeMo 2.7.
NEMO: dict[str, dict[str, Any]] = {
    r"enable_cuda_graph = True: NeMo 2\.7 refuses it": {"model.config.enable_cuda_graph": True},
    r"use_megatron_fsdp = True: NeMo 2\.7 refuses it without trainer\.strategy\.fsdp megatron": {
        "trainer.strategy.ddp.use_megatron_fsdp": True,
        "trainer.strategy.ddp.data_parallel_sharding_strategy": "optim_grads_params",
    },
    r"ckpt_load_main_params = True: .* beside trainer\.strategy\.ckpt_load_optimizer": {
        "trainer.strategy.ckpt_load_main_params": True,
        "trainer.strategy.ckpt_load_optimizer": True,
    },
}
SETTINGS = [
    *((megatron_bridge, fields, refused) for refused, fields in BRIDGE.items()),
    *((nemo, fields, refused) for refused, fields in NEMO.items()),
]


def recipe(framework: Any, fields: dict[str, Any]) -> Any:
    """A recipe of 16 GPUs in plain objects, with some fields set."""
    spec = catalogue.model("llama3_8b")
    made = bridge_config(spec) if framework is megatron_bridge else nemo_recipe(spec, num_nodes=2)
    for path, value in fields.items():
        parent, _, name = path.rpartition(".")
        setattr(find(made, parent) if parent else made, name, value)
    return made


def estimate(framework: Any, made: Any, num_gpus: int = 16) -> ParallelPlan:
    """A recipe as it is, as ``nest-megatron estimate`` prices it."""
    composed = compose(parse(["cluster=dgx_h100"]))
    job = framework.read_recipe(made)
    cluster = catalogue.cluster("dgx_h100", num_gpus)
    request = request_for(job, cluster, composed, SearchSpace(), choose_execution=False)
    return typed_plan(job, request, composed)[0]


@pytest.mark.parametrize(("framework", "fields", "refused"), SETTINGS)
def test_no_estimate_of_what_the_framework_refuses(
    framework: Any, fields: dict[str, Any], refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(megatron_bridge, "installed_name", lambda _: "megatron_bridge_0.6")
    assert estimate(framework, recipe(framework, {})).layout.num_gpus == 16
    with pytest.raises(UserInputError, match=refused):
        estimate(framework, recipe(framework, fields))


@pytest.mark.parametrize("pipeline", [1, None])
def test_nemo_drops_virtual_stages_without_a_pipeline(pipeline: int | None) -> None:
    sizes = {"pipeline_model_parallel_size": pipeline, "virtual_pipeline_model_parallel_size": 4}
    made = recipe(nemo, {f"trainer.strategy.{name}": size for name, size in sizes.items()})
    assert estimate(nemo, made).layout.dims.virtual_pipeline_model_parallel_size == 1
    made = recipe(megatron_bridge, {f"model.{name}": size for name, size in sizes.items()})
    with pytest.raises(UserInputError, match="4 virtual stages need more than one pipeline rank"):
        estimate(megatron_bridge, made)


@pytest.mark.parametrize("framework", [megatron_bridge, nemo])
def test_what_mixed_precision_replaces_is_not_refused(framework: Any) -> None:
    """Both copy all of its settings over the model's, those that are unset too."""
    mixed = SimpleNamespace(bf16=True, precision="bf16-mixed", fp8="hybrid", fp4=None)
    fields = {"mixed_precision": mixed, "model.fp4": "e2m1"}
    if framework is nemo:
        fields = {"trainer.plugins": PrecisionPlugin(**vars(mixed)), "model.config.fp4": "e2m1"}
    assert estimate(framework, recipe(framework, fields)).train.precision is Precision.FP8


class PrecisionPlugin(SimpleNamespace):
    """Stands for ``MegatronMixedPrecision``."""


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dist.use_decentralized_pg", True),
        ("optimizer.exp_avg_dtype", "torch.bfloat16"),
        ("model.use_te_activation_func", True),
    ],
)
def test_no_plan_leaves_what_the_framework_refuses(
    field: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(megatron_bridge, "installed_name", lambda _: "megatron_bridge_0.6")
    others = {"dist.use_gloo_process_groups": True, "model.bias_activation_fusion": True}
    made = recipe(megatron_bridge, {**others, field: value})
    before = find(made, "model.tensor_model_parallel_size")
    with pytest.raises(UserInputError, match=rf"^{field} = "):
        megatron_bridge.apply_plan(made, laid_out(tp=4))
    assert find(made, "model.tensor_model_parallel_size") == before


def test_a_plan_takes_back_what_does_not_go_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_bridge, "installed_name", lambda _: "megatron_bridge_0.6")
    fields = {
        "comm_overlap": CommOverlapConfig(delay_wgrad_compute=True),
        "model.moe_layer_recompute": True,
        "model.cpu_offloading": True,
        "model.ep_overlap_early_attn_memory_release": True,
    }
    made = recipe(megatron_bridge, fields)
    megatron_bridge.apply_plan(made, laid_out(tp=4, pp=2))
    for path in ("comm_overlap.delay_wgrad_compute", *[*fields][1:]):
        assert find(made, path) is False, path


def test_a_format_of_checkpoints_says_nothing_where_none_is_written() -> None:
    sharding = {
        "dist.use_megatron_fsdp": True,
        "ddp.data_parallel_sharding_strategy": "optim_grads_params",
        "checkpoint.save": None,
    }
    assert estimate(megatron_bridge, recipe(megatron_bridge, sharding)).layout.zero.is_fsdp


def test_overlapped_shared_experts_are_not_said_of_a_model_without() -> None:
    fields = {"model.moe_shared_expert_overlap": True}
    found = estimate(megatron_bridge, recipe(megatron_bridge, fields))
    assert not found.layout.execution.moe_shared_expert_overlap


def test_recomputed_layers_of_experts_count_by_their_old_name() -> None:
    fields = {"model.moe_layer_recompute": True}
    found = estimate(megatron_bridge, recipe(megatron_bridge, fields)).layout.recompute
    assert "moe" in [module.value for module in found.modules]


def test_what_refuses_a_recipe_is_not_megatron_lm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_bridge, "installed_name", lambda _: "megatron_bridge_0.6")
    fields = {"optimizer.use_precision_aware_optimizer": True, "optimizer.optimizer": "sgd"}
    with pytest.raises(UserInputError, match=r"optimizer = True: megatron-core 0\.19 refuses it"):
        megatron_bridge.auto_recipe(
            recipe(megatron_bridge, fields), cluster="dgx_h100", overrides=["cluster.num_gpus=16"]
        )
