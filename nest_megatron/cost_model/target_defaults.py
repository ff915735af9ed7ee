"""What the frameworks that plans are made for set where a job does not say, and which file does.

For a framework with recipes these are the settings of its performance recipes, by which its
published runs were made; a recipe that is planned itself states its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nest_megatron.cluster.records import Precision
from nest_megatron.cost_model.targets import Default, Target
from nest_megatron.errors import UserInputError, nearest

_ARGUMENTS = "megatron/training/arguments.py (validate_args)"
_MODEL = "megatron/core/transformer/transformer_config.py"
_PARALLEL = "megatron/core/model_parallel_config.py"
#: What a plan's launch command sets beside its layout.
_LAUNCH = "nest_megatron/integrations/megatron_lm/write.py"
_BLACKWELL = "G?B[23]00"


def _megatron_lm(release: str, tag: str) -> Target:
    """Megatron-LM as a plan launches it: its own defaults, and what the command sets."""

    def default(argument: str, value: object, file: str) -> Default:
        source = file if file is _LAUNCH else f"Megatron-LM {tag}: {file}"
        return Default(argument=argument, value=value, source=source)

    return Target(
        name=f"megatron_lm_{release}",
        framework=f"Megatron-LM {release}",
        reason="argparse's defaults with --bf16, and what a plan's command sets",
        fitted="megatron_lm",
        megatron_core=release,
        defaults=(
            default("grad_reduce_in_bf16", False, _ARGUMENTS),
            default("main_grads_dtype", "fp32", _ARGUMENTS),
            default("fp8_param_gather", False, _ARGUMENTS),
            default("fp8_recipe", "delayed", _MODEL),
            default("cross_entropy_loss_fusion", False, _PARALLEL),
            default("cross_entropy_fusion_impl", "native", _PARALLEL),
            default("optimizer", "adam", _ARGUMENTS),
            default("use_precision_aware_optimizer", False, _ARGUMENTS),
            default("tp_comm_overlap", False, _PARALLEL),
            default("overlap_moe_expert_parallel_comm", False, _PARALLEL),
            default("delay_wgrad_compute", False, _PARALLEL),
            default("moe_permute_fusion", False, _MODEL),
            default("moe_router_fusion", False, _MODEL),
            default("cuda_graph_impl", "none", _MODEL),
            default("moe_token_dispatcher_type", "alltoall", _LAUNCH),
            default("moe_grouped_gemm", True, _LAUNCH),
            default("sequence_parallel", True, _LAUNCH),
            default("use_distributed_optimizer", True, _LAUNCH),
            default("overlap_grad_reduce", True, _LAUNCH),
            default("overlap_param_gather", True, _LAUNCH),
            default("expert_tensor_parallel_size", 1, _LAUNCH),
        ),
    )


_NEMO_FILES = {
    "precision": "nemo/collections/llm/recipes/precision/mixed_precision.py",
    "performance": "scripts/performance/helpers.py",
    "model": "nemo/collections/llm/gpt/model/base.py",
    "recipe": "nemo/collections/llm/recipes/llama3_70b.py",
    "optimizer": "nemo/collections/llm/recipes/optim/adam.py",
    "deepseek": "scripts/performance/llm/pretrain_deepseek_v3.py",
    "experts": "nemo/collections/llm/gpt/model/deepseek.py",
    "mixtral": "nemo/collections/llm/gpt/model/mixtral.py",
    "layouts": "scripts/performance/recommended_model_configs/model_configs_h100.csv",
}


def _nemo() -> Iterator[Default]:
    def default(argument: str, value: object, file: str, **when: object) -> Default:
        source = f"NeMo 2.7: {_NEMO_FILES[file]}"
        return Default(argument=argument, value=value, source=source, **when)  # type: ignore[arg-type]

    yield default("grad_reduce_in_bf16", True, "performance")
    yield default("fp8_param_gather", True, "precision", precision=Precision.FP8)
    yield default("fp8_recipe", "delayed", "precision")
    yield default("cross_entropy_loss_fusion", True, "model")
    yield default("cross_entropy_fusion_impl", "native", "model")
    yield default("optimizer", "adam", "optimizer")
    yield default("use_distributed_optimizer", True, "optimizer")
    yield default("use_precision_aware_optimizer", True, "performance", precision=Precision.BF16)
    yield default("tp_comm_overlap", True, "recipe")
    yield default("moe_token_dispatcher_type", "alltoall", "mixtral")
    yield default("moe_permute_fusion", True, "deepseek")
    yield default("moe_shared_expert_overlap", True, "experts")
    yield default("moe_grouped_gemm", True, "mixtral")
    yield default("overlap_moe_expert_parallel_comm", False, "recipe")
    yield default("cuda_graph_impl", "none", "layouts")
    yield default("sequence_parallel", True, "recipe")
    yield default("overlap_grad_reduce", True, "recipe")
    yield default("overlap_param_gather", True, "recipe")
    yield default("expert_tensor_parallel_size", None, "layouts")
    yield default("recompute_granularity", None, "layouts", experts=False)
    yield default("num_layers_per_virtual_pipeline_stage", 1, "layouts")


_BRIDGE_0_3 = {
    "precision": "src/megatron/bridge/training/mixed_precision.py",
    "common": "scripts/performance/utils/overrides.py",
    "model": "src/megatron/bridge/models/gpt_provider.py",
    "dense": "scripts/performance/configs/llama/llama3_llm_pretrain.py",
    "experts": "scripts/performance/configs/deepseek/deepseek_workload_base_configs.py",
    "gradients": "scripts/performance/configs/deepseek/deepseek_llm_pretrain.py",
    "fusion": "scripts/performance/configs/deepseek/deepseek_llm_pretrain.py",
    "exchange": "scripts/performance/configs/qwen/qwen3_workload_base_configs.py",
    "provider": "src/megatron/bridge/models/deepseek/deepseek_provider.py",
    "recipe": "src/megatron/bridge/recipes/deepseek/deepseek_v3.py",
}
_BRIDGE_2026 = {
    "precision": "src/megatron/bridge/training/mixed_precision.py",
    "common": "src/megatron/bridge/perf_recipes/_common.py",
    "model": "src/megatron/bridge/models/gpt_provider.py",
    "dense": "src/megatron/bridge/perf_recipes/llama",
    "experts": "src/megatron/bridge/perf_recipes/deepseek/common.py",
    "fp8": "src/megatron/bridge/perf_recipes/qwen/common.py",
    "bf16": "src/megatron/bridge/perf_recipes/qwen/gb200/qwen3_moe.py",
    "gradients": "src/megatron/bridge/perf_recipes/_common.py",
    "fusion": "src/megatron/bridge/perf_recipes/deepseek/common.py",
    "provider": "src/megatron/bridge/models/deepseek/deepseek_v3_bridge.py",
    "recipe": "src/megatron/bridge/recipes/deepseek/h100/deepseek_v3.py",
}

_GRACE_EXPERTS: dict[str, Any] = {"gpu": "GB[23]00", "experts": True}
#: With experts in 8 bits on GB200 and GB300 a whole step is one graph.
_FULL_ITERATION = {
    "cuda_graph_impl": "full_iteration",
    "overlap_moe_expert_parallel_comm": True,
    "delay_wgrad_compute": True,
    "use_transformer_engine_op_fuser": True,
    "fp8_dot_product_attention": True,
}


def _bridge(release: str, files: dict[str, str]) -> Iterator[Default]:
    """What the recipes of both releases set alike."""

    def default(argument: str, value: object, file: str, **when: object) -> Default:
        source = f"Megatron-Bridge {release}: {files[file]}"
        return Default(argument=argument, value=value, source=source, **when)  # type: ignore[arg-type]

    yield default("grad_reduce_in_bf16", True, "gradients")
    yield default("fp8_param_gather", True, "precision", precision=Precision.FP8)
    yield default("fp8_recipe", "mxfp8", "precision", gpu=_BLACKWELL)
    yield default("fp8_recipe", "tensorwise", "precision")
    yield default("cross_entropy_loss_fusion", True, "model")
    yield default("cross_entropy_fusion_impl", "te", "common")
    yield default("optimizer", "adam", "recipe")
    if release != "0.3":
        yield default("fp4_param_gather", True, "precision", precision=Precision.NVFP4)
    if release == "0.3":
        yield default("use_precision_aware_optimizer", True, "common", precision=Precision.BF16)
    yield default("use_distributed_optimizer", True, "recipe")
    yield default("tp_comm_overlap", False, "recipe", experts=True)
    yield default("tp_comm_overlap", True, "dense")
    # HybridEP turns it off (``apply_flex_dispatcher_backend``)
    yield default("moe_shared_expert_overlap", False, "experts", gpu="GB[23]00")
    yield default("moe_token_dispatcher_type", "flex", "experts", gpu="GB[23]00")
    yield default("moe_flex_dispatcher_backend", "hybridep", "experts", gpu="GB[23]00")
    if release == "0.3":
        for name in ("overlap_moe_expert_parallel_comm", "delay_wgrad_compute"):
            yield default(name, True, "exchange", gpu="H[12]00", experts=True)
    else:
        yield default("moe_shared_expert_overlap", False, "experts")
        yield default("moe_token_dispatcher_type", "flex", "experts")
        yield default("moe_flex_dispatcher_backend", "hybridep", "experts")
        for name, value in _FULL_ITERATION.items():
            yield default(name, value, "fp8", **_GRACE_EXPERTS, precision=Precision.FP8)
        yield default("cuda_graph_impl", "transformer_engine", "bf16", **_GRACE_EXPERTS)
    yield default("moe_token_dispatcher_type", "alltoall", "recipe")
    yield default("moe_shared_expert_overlap", True, "provider")
    yield default("cuda_graph_impl", "transformer_engine", "experts", gpu="GB200", experts=True)
    yield default("overlap_moe_expert_parallel_comm", False, "experts")
    yield default("delay_wgrad_compute", False, "experts")
    yield default("cuda_graph_impl", "none", "dense")
    yield default("moe_permute_fusion", True, "recipe")
    yield default("moe_router_fusion", True, "fusion")
    yield default("moe_grouped_gemm", True, "provider")
    yield default("sequence_parallel", True, "recipe")
    yield default("overlap_grad_reduce", True, "recipe")
    yield default("overlap_param_gather", True, "recipe")
    yield default("expert_tensor_parallel_size", 1, "recipe")
    yield default("recompute_granularity", None, "dense", experts=False)


MEGATRON_LM_0_16 = _megatron_lm("0.16.1", "core_v0.16.1")
MEGATRON_LM_0_20 = _megatron_lm("0.20", "main at 0.20")
NEMO = Target(
    name="nemo_2.7",
    framework="NeMo 2.7",
    reason="performance recipes: bf16 gradients, fp8 weights, user buffers",
    fitted="nemo",
    defaults=tuple(_nemo()),
)
BRIDGE_0_3 = Target(
    name="megatron_bridge_0.3",
    framework="Megatron-Bridge 0.3",
    reason="performance recipes: bf16 gradients, fp8 weights, HybridEP on GB200 and GB300",
    fitted="megatron_bridge",
    defaults=tuple(_bridge("0.3", _BRIDGE_0_3)),
)
BRIDGE_2026 = Target(
    name="megatron_bridge_2026",
    megatron_core="0.20",
    framework="Megatron-Bridge since 26.06",
    reason="performance recipes: HybridEP; in fp8 on GB200 and GB300 whole steps in CUDA graphs, "
    "the all-to-all overlapped, attention in fp8",
    fitted="megatron_bridge_2026",
    defaults=tuple(_bridge("2026", _BRIDGE_2026)),
)

#: Those that a plan's command launches.
MEGATRON_LM = (MEGATRON_LM_0_16, MEGATRON_LM_0_20)
#: Targets that a plan may be made for.
TARGETS: tuple[Target, ...] = (
    *MEGATRON_LM,
    NEMO,
    BRIDGE_0_3,
    BRIDGE_2026,
)
#: What a plan is made for where neither the job nor the user names a framework.
DEFAULT_TARGET = MEGATRON_LM_0_16


def target_named(name: str) -> Target:
    """A target by its name.

    Raises:
        UserInputError: naming those that there are.
    """
    names = [target.name for target in TARGETS]
    for target in TARGETS:
        if target.name == name:
            return target
    raise UserInputError(
        "target",
        value=name,
        limit=f"targets are {', '.join(names)}",
        fix=nearest(name, names),
    )
