"""How layers are carried out is searched, written and read back in NeMo and Megatron-Bridge."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from nest_megatron.config.job import Job
from nest_megatron.cost_model.target_defaults import NEMO_LACKS
from nest_megatron.errors import UserInputError
from nest_megatron.integrations import megatron_bridge, nemo
from nest_megatron.integrations.fields import find
from nest_megatron.integrations.megatron_bridge import BridgeConfig
from nest_megatron.integrations.megatron_bridge.hook import adapt, choices_of_fields
from nest_megatron.integrations.megatron_lm.attach import launch_request
from nest_megatron.integrations.megatron_lm.write import planned_arguments
from nest_megatron.integrations.nemo import NemoRecipe
from nest_megatron.layout.diff import Change
from nest_megatron.layout.execution_rules import execution_arguments
from nest_megatron.layout.knobs import KNOBS
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.model.execution import (
    PLAIN,
    ContextTraffic,
    Execution,
    FlexBackend,
    GraphImpl,
    TokenDispatcher,
)
from tests import catalogue
from tests.contract.test_adapters import laid_out
from tests.integrations.frameworks import (
    CommOverlapConfig,
    DeepEPCallback,
    MegatronCommOverlapCallback,
    bridge_config,
    nemo_recipe,
)

_GPUS = ["cluster.num_gpus=64"]
#: A layout of experts inside a node.
_FIXED = (
    "parallel.tensor_model_parallel_size=1",
    "parallel.pipeline_model_parallel_size=1",
    "parallel.expert_model_parallel_size=8",
    "parallel.expert_tensor_parallel_size=1",
)
_FLEX = Execution(
    moe_token_dispatcher_type=TokenDispatcher.FLEX,
    moe_flex_dispatcher_backend=FlexBackend.HYBRIDEP,
    moe_permute_fusion=True,
    moe_router_fusion=True,
)
_DEEPEP = dataclasses.replace(
    PLAIN,
    moe_token_dispatcher_type=TokenDispatcher.FLEX,
    moe_flex_dispatcher_backend=FlexBackend.DEEPEP,
)
_LEVELS = Execution(cp_comm_type=ContextTraffic.A2A_P2P, hierarchical_context_parallel_sizes=(2, 2))
_OVERLAP = Execution(overlap_moe_expert_parallel_comm=True, delay_wgrad_compute=True)

#: Every choice in a layout that has a use for it.
PLANS: dict[str, Callable[[], ParallelPlan]] = {
    "nothing": lambda: laid_out("mixtral_8x7b", tp=2, ep=8),
    "fusions and HybridEP": lambda: laid_out("mixtral_8x7b", ep=8, execution=_FLEX),
    "DeepEP": lambda: laid_out("mixtral_8x7b", ep=8, execution=_DEEPEP),
    "shared experts beside tokens": lambda: laid_out(
        "qwen2_57b_a14b", ep=8, execution=Execution(moe_shared_expert_overlap=True)
    ),
    "exchange beside another micro batch": lambda: laid_out(
        "mixtral_8x7b", pp=4, vpp=2, ep=8, execution=_OVERLAP
    ),
    "user buffers": lambda: laid_out(tp=4, execution=Execution(tp_comm_overlap=True)),
    "heads exchanged": lambda: laid_out(cp=4, execution=Execution(cp_comm_type=ContextTraffic.A2A)),
    "heads and rings": lambda: laid_out(cp=4, execution=_LEVELS),
    "layers on the host": lambda: laid_out(execution=Execution(cpu_offloading_num_layers=10)),
}
#: What a plan leaves to the job, and the settings that mean it.
OWN: dict[str, tuple[dict[str, Any], Callable[[], ParallelPlan]]] = {
    "graphs": (
        {"cuda_graph_impl": "transformer_engine"},
        lambda: laid_out(execution=Execution(cuda_graph_impl=GraphImpl.TRANSFORMER_ENGINE)),
    ),
    "graph of the step": (
        {"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration"]},
        lambda: laid_out(execution=Execution(cuda_graph_impl=GraphImpl.FULL_ITERATION)),
    ),
    "modules on the host": (
        {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn"]},
        lambda: laid_out(execution=Execution(offload_modules=("core_attn",))),
    ),
}
#: A job that says the contrary of most of them.
_OWN: dict[str, Any] = {
    "moe_token_dispatcher_type": "flex",
    "moe_enable_deepep": True,
    "moe_permute_fusion": True,
    "tp_comm_overlap": True,
    "cp_comm_type": "all_gather",
    "cuda_graph_impl": "local",
    "fine_grained_activation_offloading": True,
    "offload_modules": ["qkv_linear"],
}


def with_own(config: Any, own: dict[str, Any]) -> None:
    for name, value in own.items():
        setattr(config, name, copy.copy(value))


class Bridge:
    """Megatron-Bridge, with its overlap settings in the model or in an object of their own."""

    def __init__(self, overlap: CommOverlapConfig | None = None) -> None:
        self.overlap = overlap

    def job(self, plan: ParallelPlan, own: dict[str, Any]) -> Any:
        cfg = bridge_config(plan.model)
        with_own(cfg.model, own)
        cfg.comm_overlap = copy.copy(self.overlap)
        return cfg

    def apply(self, job: Any, plan: ParallelPlan) -> tuple[Change, ...]:
        return megatron_bridge.apply_plan(job, plan, environment={})

    def read(self, job: Any) -> Job:
        return megatron_bridge.read_recipe(job, environment={})


class Nemo:
    """NeMo, with the callback that makes user buffers."""

    def job(self, plan: ParallelPlan, own: dict[str, Any]) -> Any:
        recipe = nemo_recipe(plan.model)
        recipe.trainer.callbacks = [MegatronCommOverlapCallback()]
        with_own(recipe.model.config, own)
        return recipe

    def apply(self, job: Any, plan: ParallelPlan) -> tuple[Change, ...]:
        return nemo.apply_plan(job, plan)

    def read(self, job: Any) -> Job:
        return nemo.read_recipe(job)


ADAPTERS: dict[str, Bridge | Nemo] = {
    "Megatron-Bridge": Bridge(),
    "Megatron-Bridge with comm_overlap": Bridge(
        CommOverlapConfig(tp_comm_overlap=True, delay_wgrad_compute=True)
    ),
    "NeMo": Nemo(),
}


def carried_out(found: Job) -> Execution:
    """What a job means, as it is priced."""
    assert found.target is not None
    execution = found.target.execution(
        "H100-SXM-80GB", found.precision, found.memory_flags, found.spec
    )
    if found.spec.is_moe:
        return execution
    # fields of experts mean nothing without them
    names = (knob.name for knob in KNOBS if knob.of_experts)
    return dataclasses.replace(execution, **{name: getattr(PLAIN, name) for name in names})


@pytest.fixture(params=ADAPTERS)
def adapter(request: pytest.FixtureRequest) -> Bridge | Nemo:
    return ADAPTERS[request.param]


@pytest.mark.parametrize("own", [{}, _OWN], ids=["defaults", "the contrary"])
@pytest.mark.parametrize("name", PLANS)
def test_a_job_is_carried_out_as_its_plan_was_priced(
    adapter: Bridge | Nemo, name: str, own: dict[str, Any]
) -> None:
    plan = PLANS[name]()
    job = adapter.job(plan, own)
    before = copy.deepcopy(job)
    lacking = [field for field in NEMO_LACKS if getattr(plan.layout.execution, field)]
    if isinstance(adapter, Nemo) and lacking:
        with pytest.raises(UserInputError, match="NeMo"):
            adapter.apply(job, plan)
        assert job == before
        return
    changes = adapter.apply(job, plan)
    assert carried_out(adapter.read(job)) == plan.layout.execution
    assert all(change.reason for change in changes)
    assert len({change.field for change in changes}) == len(changes)
    assert adapter.apply(job, plan) == ()


@pytest.mark.parametrize("name", [name for name in PLANS if name != "DeepEP"])
def test_fields_have_the_values_of_the_flags(adapter: Bridge | Nemo, name: str) -> None:
    plan = PLANS[name]()
    if isinstance(adapter, Nemo) and any(getattr(plan.layout.execution, n) for n in NEMO_LACKS):
        pytest.skip("NeMo lacks a choice of the plan")
    job = adapter.job(plan, {})
    adapter.apply(job, plan)
    paths = BridgeConfig if isinstance(adapter, Bridge) else NemoRecipe
    planned = planned_arguments(launch_request(plan))
    stages = "pipeline_model_parallel_layout"  # Megatron makes even ones by itself
    shared = {n: value for n, value in planned.items() if n in paths.items and n != stages}
    assert len(shared) > 10
    for item, value in shared.items():
        assert value in (find(job, paths.items[item]), None), item


@pytest.mark.parametrize("name", OWN)
def test_what_is_left_to_the_job_is_its_own(adapter: Bridge | Nemo, name: str) -> None:
    own, planned = OWN[name]
    plan = planned()
    if isinstance(adapter, Nemo) or name != "graphs":  # which bring Bridge what they need
        with pytest.raises(UserInputError, match="need"):
            adapter.apply(adapter.job(plan, {}), plan)
    job = adapter.job(plan, own)
    assert not any(field in change.field for change in adapter.apply(job, plan) for field in own)
    assert carried_out(adapter.read(job)) == plan.layout.execution
    adapter.apply(job, laid_out())
    assert carried_out(adapter.read(job)) == PLAIN


def auto(adapter: Bridge | Nemo, job: Any, *words: str, **settings: Any) -> tuple[Any, Any]:
    overrides = [*_GPUS, "search.num_alternatives=0", *words]
    if isinstance(adapter, Nemo):
        return nemo.auto_recipe(job, cluster="dgx_h100", overrides=overrides, **settings)
    return megatron_bridge.auto_recipe(
        job, cluster="dgx_h100", overrides=overrides, environment={}, **settings
    )


def test_choices_are_searched_written_and_kept(adapter: Bridge | Nemo) -> None:
    plan = laid_out("mixtral_8x7b", ep=8)
    job = adapter.job(plan, {"moe_token_dispatcher_type": "alltoall"})
    found, changes = auto(adapter, job)
    assert found.layout.execution.moe_permute_fusion
    assert found.layout.execution.moe_router_fusion
    assert carried_out(adapter.read(job)) == found.layout.execution
    (line,) = (change for change in changes if change.field.endswith(".moe_permute_fusion"))
    assert (line.before, line.after) == (False, True)
    assert "one kernel" in line.reason
    for words, settings in (
        ((*_FIXED, "search.keep=[moe_permute_fusion,cp_comm_type]"), {}),
        (_FIXED, {"keep": ["moe_permute_fusion"]}),
        ((), {"free": ["tensor_model_parallel_size", "pipeline_model_parallel_size"]}),
    ):
        kept_job = adapter.job(plan, {"moe_token_dispatcher_type": "alltoall"})
        kept, changes = auto(adapter, kept_job, *words, **settings)
        assert not kept.layout.execution.moe_permute_fusion
        assert not any("moe_permute_fusion" in change.field for change in changes)


def test_a_dispatcher_is_chosen_where_its_package_is_said_to_be() -> None:
    adapter = ADAPTERS["Megatron-Bridge"]
    plan = laid_out("mixtral_8x7b", ep=8)
    job = adapter.job(plan, {"moe_token_dispatcher_type": "alltoall"})
    found, _ = auto(adapter, job, *_FIXED, "search.packages=[hybrid_ep]")
    backend = found.layout.execution.moe_flex_dispatcher_backend
    assert backend in (None, FlexBackend.HYBRIDEP)
    assert carried_out(adapter.read(job)) == found.layout.execution
    if backend is not None:
        assert job.model.moe_token_dispatcher_type == "flex"
        assert job.model.moe_flex_dispatcher_backend == "hybridep"


def test_user_buffers_need_the_callback_that_makes_them() -> None:
    plan = laid_out(tp=4)
    bare, with_callback = nemo_recipe(plan.model), nemo_recipe(plan.model)
    with_callback.trainer.callbacks = [MegatronCommOverlapCallback()]
    assert "tp_comm_overlap" not in nemo.read_recipe(bare).can_state
    assert "tp_comm_overlap" in nemo.read_recipe(with_callback).can_state
    keep = "parallel.tensor_model_parallel_size=4"
    found, _ = auto(ADAPTERS["NeMo"], bare, keep)
    assert not found.layout.execution.tp_comm_overlap
    found, _ = auto(ADAPTERS["NeMo"], with_callback, keep)
    assert found.layout.execution.tp_comm_overlap
    assert with_callback.trainer.callbacks[0].tp_comm_overlap is True


def test_buffers_without_the_callback_are_off_and_so_they_are_priced() -> None:
    recipe = nemo_recipe(catalogue.model("llama3_8b"))
    recipe.model.config.tp_comm_overlap = True
    assert not carried_out(nemo.read_recipe(recipe)).tp_comm_overlap
    (line,) = (c for c in nemo.apply_plan(recipe, laid_out(tp=2)) if "tp_comm" in c.field)
    assert "MegatronCommOverlapCallback" in line.reason


def test_two_levels_that_nemo_does_not_make_are_taken_out() -> None:
    recipe = nemo_recipe(catalogue.model("llama3_8b"))
    recipe.model.config.cp_comm_type = "a2a+p2p"
    recipe.model.config.hierarchical_context_parallel_sizes = [2, 2]
    changes = {c.field: c for c in nemo.apply_plan(recipe, laid_out(cp=4))}
    assert changes["model.config.cp_comm_type"].after == "p2p"
    assert changes["model.config.hierarchical_context_parallel_sizes"].after is None
    assert "two levels" in changes["model.config.cp_comm_type"].reason


def test_a_field_of_a_later_release_is_neither_meant_nor_chosen() -> None:
    plan = laid_out("mixtral_8x7b", ep=8)
    cfg = bridge_config(plan.model)
    model = SimpleNamespace(**vars(cfg.model))
    del model.moe_router_fusion  # which the recipes that the defaults are from have on
    cfg.model = model
    assert "moe_router_fusion" not in megatron_bridge.read_recipe(cfg, environment={}).can_state
    found, _ = auto(ADAPTERS["Megatron-Bridge"], cfg)
    assert not found.layout.execution.moe_router_fusion
    fused = laid_out("mixtral_8x7b", ep=8, execution=Execution(moe_router_fusion=True))
    with pytest.raises(UserInputError, match="no such field"):
        megatron_bridge.apply_plan(cfg, fused, environment={})


def test_what_the_overlap_object_leaves_unset_is_off() -> None:
    cfg = bridge_config(catalogue.model("mixtral_8x7b"))
    cfg.model.overlap_moe_expert_parallel_comm = True
    assert carried_out(megatron_bridge.read_recipe(cfg, environment={})) == dataclasses.replace(
        PLAIN,
        moe_token_dispatcher_type=TokenDispatcher.ALLGATHER,
        overlap_moe_expert_parallel_comm=True,
    )
    cfg.comm_overlap = CommOverlapConfig(tp_comm_overlap=True)
    cfg.model.sequence_parallel = True
    found = carried_out(megatron_bridge.read_recipe(cfg, environment={}))
    assert found.tp_comm_overlap
    assert not found.overlap_moe_expert_parallel_comm


def test_the_callback_for_deepep_is_read_kept_and_taken_out() -> None:
    plan = laid_out("mixtral_8x7b", ep=8, execution=_DEEPEP)
    recipe = nemo_recipe(plan.model)
    recipe.trainer.callbacks = [DeepEPCallback(), MegatronCommOverlapCallback()]
    recipe.model.config.moe_shared_expert_overlap = True
    assert carried_out(nemo.read_recipe(recipe)) == _DEEPEP
    assert not any("callbacks" in c.field for c in nemo.apply_plan(recipe, plan))
    assert recipe.trainer.callbacks[0] == DeepEPCallback()
    other = laid_out("mixtral_8x7b", ep=8)
    changed = {c.field: c for c in nemo.apply_plan(recipe, other)}
    assert "replace" in changed["trainer.callbacks"].reason
    assert recipe.trainer.callbacks == [MegatronCommOverlapCallback()]
    assert recipe.model.config.moe_token_dispatcher_type == "alltoall"
    assert carried_out(nemo.read_recipe(recipe)) == other.layout.execution


def test_deepep_gives_way_where_it_cannot_run() -> None:
    words = ["search.num_alternatives=0", "search.max_expert_model_parallel_size=8"]
    plan = laid_out("mixtral_8x7b", ep=8)
    recipe = nemo_recipe(plan.model)
    recipe.trainer.callbacks = [DeepEPCallback()]  # which does nothing on Blackwell
    recipe.model.config.moe_token_dispatcher_type = "alltoall"
    found, _ = nemo.auto_recipe(recipe, cluster="gb200_nvl72", overrides=words)
    assert found.layout.execution.moe_token_dispatcher_type is TokenDispatcher.ALLTOALL
    cfg = bridge_config(plan.model)
    with_own(cfg.model, {"moe_token_dispatcher_type": "flex"})
    found, changes = megatron_bridge.auto_recipe(
        cfg, cluster="gb200_nvl72", overrides=[*words, *_GPUS], environment={}
    )
    assert found.layout.execution.moe_token_dispatcher_type is TokenDispatcher.ALLTOALL
    assert "model.moe_token_dispatcher_type" in [change.field for change in changes]


def test_what_a_user_of_bridge_typed_is_kept() -> None:
    stated = ["comm_overlap.tp_comm_overlap", "model.moe_enable_deepep", "model.seq_length"]
    assert choices_of_fields(stated, []) == ("tp_comm_overlap", "token_dispatcher")
    assert choices_of_fields(stated, ["tp_comm_overlap"]) == ("token_dispatcher",)
    copies = ["ddp.use_distributed_optimizer", "dist.use_megatron_fsdp", "dataset.micro_batch_size"]
    assert choices_of_fields(copies, []) == ("zero_stage", "use_megatron_fsdp", "micro_batch_size")


def test_one_connection_does_not_undo_the_overlap() -> None:
    plan = PLANS["exchange beside another micro batch"]()
    variables = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert "overlaps" in next(adapt(plan, variables))
    assert variables == {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    assert not [*adapt(plan, variables)]
    one = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert not [*adapt(PLANS["nothing"](), one)]
    assert one == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def test_a_plan_with_graphs_brings_bridge_what_they_need() -> None:
    graphs = Execution(cuda_graph_impl=GraphImpl.TRANSFORMER_ENGINE)
    plan, variables = laid_out(execution=graphs), dict[str, str]()
    cfg = bridge_config(plan.model)
    megatron_bridge.apply_plan(cfg, plan, environment={})
    assert (cfg.model.cuda_graph_impl, cfg.model.use_te_rng_tracker) == ("transformer_engine", True)
    assert carried_out(megatron_bridge.read_recipe(cfg, environment={})) == graphs
    assert not megatron_bridge.apply_plan(cfg, plan, environment={})
    assert [*adapt(plan, variables)] == [
        "NCCL_GRAPH_REGISTER=0: with CUDA graphs Megatron asks for it."
    ]
    assert not [*adapt(plan, variables)]
    with pytest.raises(UserInputError, match="RNG tracker"):
        nemo.apply_plan(nemo_recipe(plan.model), plan)


def test_no_predictors_are_spelled_as_bridge_takes_them() -> None:
    plan = PLANS["exchange beside another micro batch"]()
    cfg = bridge_config(plan.model)
    cfg.model.mtp_num_layers = 0
    megatron_bridge.apply_plan(cfg, plan, environment={})
    assert cfg.model.mtp_num_layers is None


def test_a_graph_of_the_step_has_the_word_of_each_release() -> None:
    step = Execution(cuda_graph_impl=GraphImpl.FULL_ITERATION)
    old, new = (execution_arguments(step, version) for version in ("0.16", "0.20"))
    assert (old["cuda_graph_impl"], old["cuda_graph_scope"]) == ("local", ["full_iteration"])
    assert (new["cuda_graph_impl"], new["cuda_graph_modules"]) == ("full_iteration", [])


def test_a_dispatcher_that_gathers_all_tokens_may_go_without_any_package() -> None:
    adapter = ADAPTERS["Megatron-Bridge"]
    job = adapter.job(laid_out("mixtral_8x7b", ep=8), {})
    assert job.model.moe_token_dispatcher_type == "allgather"
    found, _ = auto(adapter, job, "parallel.expert_model_parallel_size=8")
    assert found.layout.execution.moe_token_dispatcher_type is TokenDispatcher.ALLTOALL
    assert job.model.moe_token_dispatcher_type == "alltoall"


def test_a_number_of_ranks_for_another_group_of_experts_is_taken_out() -> None:
    plan = PLANS["fusions and HybridEP"]()
    cfg = bridge_config(plan.model)
    own = {"NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN": 4, "USE_MNNVL": 1}
    cfg.env_vars = dict(own)
    cfg.model.expert_model_parallel_size = 4
    changes = {c.field: c for c in megatron_bridge.apply_plan(cfg, plan, environment={})}
    assert cfg.env_vars == {"USE_MNNVL": 1}
    assert "HybridEP finds it" in changes["env_vars"].reason
    name = "env_vars.NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"
    assert megatron_bridge.to_dotlist([changes["env_vars"]]) == [f"~{name}"]
    assert f"# take {name} out" in megatron_bridge.to_yaml([changes["env_vars"]])
    cfg.env_vars = dict(own)  # its group is the plan's now
    assert megatron_bridge.apply_plan(cfg, plan, environment={}) == ()


def test_one_connection_of_a_recipe_goes_where_a_plan_takes_several() -> None:
    plan = laid_out(zero=ZeroStage.WEIGHTS)
    cfg = bridge_config(plan.model)
    cfg.env_vars = {"CUDA_DEVICE_MAX_CONNECTIONS": 1, "NCCL_NVLS_ENABLE": 0}
    changes = {c.field: c for c in megatron_bridge.apply_plan(cfg, plan, environment={})}
    assert cfg.env_vars == {"NCCL_NVLS_ENABLE": 0}
    assert "Megatron-FSDP needs several" in changes["env_vars"].reason
    cfg.env_vars = {"CUDA_DEVICE_MAX_CONNECTIONS": 1}
    plain = laid_out()
    megatron_bridge.apply_plan(cfg, plain, environment={})
    assert cfg.env_vars == {"CUDA_DEVICE_MAX_CONNECTIONS": 1}
