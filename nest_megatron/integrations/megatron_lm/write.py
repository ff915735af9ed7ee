"""A model and a plan in Megatron-LM's own flags.

``model_argv`` makes Megatron build exactly this model, ``parallel_argv`` lays it over the ranks as
planned. Flags are those of 0.16.1; what 0.20 spells otherwise is branched on the version.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from nest_megatron.cluster.records import Precision
from nest_megatron.errors import UnplannableModelError
from nest_megatron.model.spec import ModelFamily, TransformerSpec
from nest_megatron.parallel.dims import RankOrder
from nest_megatron.parallel.execution_argv import (
    execution_argv,
    execution_environment,
)
from nest_megatron.parallel.layout import layout_string
from nest_megatron.parallel.plan import STRATEGIES
from nest_megatron.parallel.recompute import Recompute, RecomputeGranularity
from nest_megatron.parallel.rules import (
    LaunchRequest,
    initializes_on_meta_device,
    launched_expert_tensor_size,
    overlaps_gradients,
)
from nest_megatron.parallel.zero import DataParallelSharding, ZeroStage

_ACTIVATION_FLAGS = {
    ("gelu", False): (),
    ("silu", True): ("--swiglu",),
    ("squared_relu", False): ("--squared-relu",),
    ("quick_gelu", True): ("--quick-geglu",),
}


def has_activation_flag(spec: TransformerSpec) -> bool:
    """Whether Megatron-LM's command line can state the model's activation."""
    return (spec.activation, spec.gated_linear_unit) in _ACTIVATION_FLAGS


def model_argv(spec: TransformerSpec, *, tokenizer_type: str | None = None) -> list[str]:
    """Flags with which Megatron-LM builds this model.

    Args:
        tokenizer_type: written as ``--tokenizer-type`` where given. ``NullTokenizer`` adds an
            end-of-document token of its own, so one row less is asked for.

    Raises:
        UnplannableModelError: if the command line cannot state the model's activation.
    """
    null = tokenizer_type == "NullTokenizer"
    return [
        *_pair("--num-layers", spec.num_layers),
        *_pair("--hidden-size", spec.hidden_size),
        *_pair("--ffn-hidden-size", spec.ffn_hidden_size),
        *_pair("--num-attention-heads", spec.num_attention_heads),
        *_attention_argv(spec),
        *_pair("--seq-length", spec.seq_length),
        *_pair("--max-position-embeddings", spec.max_position_embeddings or spec.seq_length),
        *_position_argv(spec),
        *_pair("--normalization", spec.normalization),
        *_pair("--norm-epsilon", spec.layernorm_epsilon),
        *_switch("--apply-layernorm-1p", spec.apply_layernorm_1p),
        *_activation_argv(spec),
        *_pair("--hidden-dropout", spec.hidden_dropout),
        *_pair("--attention-dropout", spec.attention_dropout),
        *_switch("--disable-bias-linear", not spec.add_bias_linear),
        *_switch("--untie-embeddings-and-output-weights", spec.untie_embeddings_and_output_weights),
        *_pair("--tokenizer-type", tokenizer_type),
        *_vocab_argv(spec, null=null),
        *_expert_argv(spec),
        *_pair("--mtp-num-layers", spec.mtp_num_layers),
    ]


def parallel_argv(request: LaunchRequest, *, overlap: bool = True) -> list[str]:
    """Flags that lay a model over the ranks as planned.

    Args:
        request: a request that breaks no rule; its partition is needed with a pipeline.
        overlap: hide the gradient reduction under the backward pass, and the gathering of
            parameters under the forward pass where the optimizer is sharded.
    """
    dims = request.dims
    return [
        *_pair("--tensor-model-parallel-size", dims.tensor_model_parallel_size),
        *_switch("--sequence-parallel", request.sequence_parallel),
        *_pair("--context-parallel-size", dims.context_parallel_size),
        *_pipeline_argv(request),
        *_expert_parallel_argv(request),
        *execution_argv(request.execution, request.version, experts=request.spec.is_moe),
        *_switch("--use-tp-pp-dp-mapping", dims.rank_order is RankOrder.TP_CP_EP_PP_DP),
        *_pair("--micro-batch-size", request.micro_batch_size),
        *_pair("--global-batch-size", request.global_batch_size),
        *recompute_argv(request.recompute),
        *sharding_argv(request, overlap=overlap),
        *precision_argv(request.precision, request.fp8_recipe),
    ]


def recompute_argv(recompute: Recompute) -> list[str]:
    """Flags of a recomputation setting; none for none."""
    if recompute.granularity is RecomputeGranularity.NONE:
        return []
    return [
        *_pair("--recompute-granularity", recompute.granularity.value),
        *_pair("--recompute-method", recompute.method and recompute.method.value),
        *_pair("--recompute-num-layers", recompute.num_layers),
        *_list("--recompute-modules", [module.value for module in recompute.modules]),
    ]


def sharding_argv(request: LaunchRequest, *, overlap: bool = True) -> list[str]:
    """Flags that divide states among replicas.

    Megatron-FSDP is always written with the distributed optimizer: without it 0.16.1 trains with
    another gradient norm. ``_fsdp_argv`` has what else it needs.
    """
    zero, sharding = request.zero, request.sharding or request.zero.sharding
    overlap = overlap and overlaps_gradients(request.optimizer, request.version)
    if sharding is DataParallelSharding.TORCH_FSDP2:
        return ["--use-torch-fsdp2"]  # it overlaps by itself
    fsdp = sharding is DataParallelSharding.MEGATRON_FSDP
    if zero is ZeroStage.NONE and not fsdp:
        return _switch("--overlap-grad-reduce", overlap)
    flags = ["--use-distributed-optimizer", *_switch("--overlap-grad-reduce", overlap)]
    flags += _switch("--overlap-param-gather", overlap)
    if fsdp:
        flags += _fsdp_argv(request)
    return flags


def _fsdp_argv(request: LaunchRequest) -> list[str]:
    """Flags without which a Megatron-FSDP job does not start, or trains with other numbers.

    Without the meta device every rank first builds the whole model on its GPU
    (``get_model`` calls ``cuda()``: 0.16.1 training.py:1258, 0.20 :2465). Fused accumulation of
    gradients adds to a buffer that Megatron-FSDP overwrites, which old releases of Transformer
    Engine do not know (0.16.1 args:677; 0.20 mcore_fsdp_adapter.py:165 refuses them). 0.20 keeps
    gradients in the width of the weights unless told otherwise, and ignores
    ``grad_reduce_in_fp32``.
    """
    wide = request.gradient_bytes == 4 and request.precision is not Precision.FP32
    keeps_width = wide and not request.version.startswith("0.16")
    sharded = request.zero >= ZeroStage.OPTIMIZER and initializes_on_meta_device(request.spec)
    return [
        "--use-megatron-fsdp",
        *_pair("--ckpt-format", "fsdp_dtensor"),
        *_pair("--data-parallel-sharding-strategy", STRATEGIES[request.zero]),
        *_switch("--init-model-with-meta-device", sharded),
        "--no-gradient-accumulation-fusion",
        *_pair("--megatron-fsdp-main-grads-dtype", "fp32" if keeps_width else None),
    ]


def precision_argv(precision: Precision, fp8_recipe: str = "delayed") -> list[str]:
    """Flags of a number format."""
    if precision is Precision.FP32:
        return []
    if precision is Precision.FP16:
        return ["--fp16"]
    if precision is Precision.FP8:
        return ["--bf16", "--fp8-format", "hybrid", "--fp8-recipe", fp8_recipe]
    if precision is Precision.NVFP4:
        return ["--bf16", "--fp4-format", "e2m1", "--fp4-recipe", "nvfp4"]
    return ["--bf16"]


def environment(request: LaunchRequest, *, device_architecture: int = 9) -> dict[str, str | None]:
    """Environment variables that Megatron demands; ``None`` means that it must not be set.

    An overlapped exchange of tokens wants many connections. Below Blackwell divided layers and
    sequences want one, and Megatron leaves 1 or 32 to the user where a job has both (0.16.1
    args:940); the exchange is then the longer one.

    Args:
        device_architecture: major compute capability (9 = Hopper, 10 = Blackwell, which is free).

    Source: validate_args (0.16.1 :622, :687, :940-951).
    """
    return {
        **_connections(request, device_architecture),
        **execution_environment(request.execution),
    }


def _connections(request: LaunchRequest, device_architecture: int) -> dict[str, str | None]:
    dims = request.dims
    if (request.sharding or request.zero.sharding) is not DataParallelSharding.DDP:
        return {"CUDA_DEVICE_MAX_CONNECTIONS": None}
    if request.execution.overlap_moe_expert_parallel_comm:
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    splits = max(dims.tensor_model_parallel_size, dims.context_parallel_size) > 1
    if splits and device_architecture < 10:
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    return {}


def pattern_text(pattern: Sequence[int]) -> str:
    """A layer pattern as ``--moe-layer-freq`` takes it.

    >>> pattern_text((0, 0, 0, 1, 1)), pattern_text((1, 1))
    ('([0]*3+[1]*2)', '1')
    """
    if all(pattern):
        return "1"
    runs = ((flag, len(list(run))) for flag, run in groupby(pattern))
    return "(" + "+".join(f"[{flag}]*{count}" for flag, count in runs) + ")"


def _vocab_argv(spec: TransformerSpec, *, null: bool) -> list[str]:
    return [
        *_pair("--vocab-size", spec.vocab_size - null),
        *_pair("--make-vocab-size-divisible-by", spec.make_vocab_size_divisible_by),
        *_pair("--padded-vocab-size", spec.vocab_size if spec.vocab_is_padded else None),
    ]


def _attention_argv(spec: TransformerSpec) -> list[str]:
    grouped = spec.num_query_groups is not None and not spec.multi_latent_attention
    window = None if spec.window_size is None else f"{spec.window_size - 1},0"
    return [
        *_switch("--group-query-attention", grouped),
        *_pair("--num-query-groups", spec.num_query_groups if grouped else None),
        *_pair("--kv-channels", spec.kv_channels),
        *_switch("--add-qkv-bias", spec.add_qkv_bias),
        *_switch("--qk-layernorm", spec.qk_layernorm),
        *_pair("--softmax-type", None if spec.softmax_type == "vanilla" else spec.softmax_type),
        *_pair("--window-size", window),
        *_pair("--window-attn-skip-freq", spec.window_attn_skip_freq if window else None),
        *_latent_argv(spec),
    ]


def _latent_argv(spec: TransformerSpec) -> list[str]:
    if not spec.multi_latent_attention:
        return []
    return [
        "--multi-latent-attention",
        *_pair("--q-lora-rank", spec.q_lora_rank),
        *_pair("--kv-lora-rank", spec.kv_lora_rank),
        *_pair("--qk-head-dim", spec.qk_head_dim),
        *_pair("--qk-pos-emb-head-dim", spec.qk_pos_emb_head_dim),
        *_pair("--v-head-dim", spec.v_head_dim),
    ]


def _position_argv(spec: TransformerSpec) -> list[str]:
    flags = _pair("--position-embedding-type", spec.position_embedding_type)
    if spec.position_embedding_type == "rope":
        flags += _pair("--rotary-base", spec.rotary_base)
        flags += _pair("--rotary-percent", spec.rotary_percent)
    return flags


def _activation_argv(spec: TransformerSpec) -> list[str]:
    if not has_activation_flag(spec):
        raise UnplannableModelError(
            f"model {spec.name}: activation",
            value=(spec.activation, spec.gated_linear_unit),
            limit="Megatron-LM's command line has no flag for it",
            fix="Launch through NeMo or Megatron-Bridge, whose configurations can state it.",
        )
    flags = [*_ACTIVATION_FLAGS[spec.activation, spec.gated_linear_unit]]
    unfused = spec.activation == "squared_relu" and spec.add_bias_linear
    return [*flags, *_switch("--no-bias-gelu-fusion", unfused)]


def _expert_argv(spec: TransformerSpec) -> list[str]:
    if spec.num_experts is None:
        return []
    balanced = spec.moe_router_enable_expert_bias
    return [
        *_pair("--num-experts", spec.num_experts),
        *_pair("--moe-layer-freq", pattern_text(spec.moe_layer_pattern)),
        *_pair("--moe-ffn-hidden-size", spec.moe_ffn_hidden_size),
        *_pair("--moe-router-topk", spec.moe_router_topk),
        *_switch("--moe-router-pre-softmax", spec.moe_router_topk == 1 and not balanced),
        *_pair("--moe-shared-expert-intermediate-size", spec.moe_shared_expert_intermediate_size),
        *_switch("--moe-router-enable-expert-bias", balanced),
        *_pair("--moe-router-score-function", "sigmoid" if balanced else None),
    ]


def _pipeline_argv(request: LaunchRequest) -> list[str]:
    pp = request.dims.pipeline_model_parallel_size
    flags = _pair("--pipeline-model-parallel-size", pp)
    if pp > 1:
        assert request.partition is not None, "a pipeline needs a stage partition"
        layout = layout_string(request.spec, request.partition)
        flags += _pair("--pipeline-model-parallel-layout", layout)
    return flags


def _expert_parallel_argv(request: LaunchRequest) -> list[str]:
    spec, dims = request.spec, request.dims
    flags = _pair("--expert-tensor-parallel-size", launched_expert_tensor_size(spec, dims))
    if spec.num_experts is None:
        return flags
    return [
        *_pair("--expert-model-parallel-size", dims.expert_model_parallel_size),
        *flags,
        *_switch("--moe-grouped-gemm", request.moe_grouped_gemm),
    ]


def script_name(spec: TransformerSpec) -> str:
    """Megatron-LM's own script for a model."""
    return "pretrain_bert.py" if spec.family is ModelFamily.BERT else "pretrain_gpt.py"


def _pair(flag: str, value: object) -> list[str]:
    return [] if value is None else [flag, str(value)]


def _switch(flag: str, on: bool) -> list[str]:
    return [flag] if on else []


def _list(flag: str, values: Iterable[str]) -> list[str]:
    words = list(values)
    return [flag, *words] if words else []
