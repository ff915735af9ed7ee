"""A model and a plan in Megatron's names and values, and in the flags of its command line.

``model_argv`` makes Megatron build exactly this model; ``planned_values`` lay it over the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from nest_megatron.cluster.records import Precision
from nest_megatron.errors import UnplannableModelError
from nest_megatron.integrations.megatron_lm.layout_arguments import ROLES, flag_of
from nest_megatron.integrations.megatron_lm.parser import argv_for, load_arguments
from nest_megatron.layout.dims import RankOrder
from nest_megatron.layout.execution_rules import (
    EXECUTION_FIELDS,
    WITH_EXPERTS,
    execution_arguments,
    execution_environment,
)
from nest_megatron.layout.layout import layout_arguments
from nest_megatron.layout.rulebook.degrees import launched_expert_tensor_size
from nest_megatron.layout.rulebook.devices import initializes_on_meta_device
from nest_megatron.layout.rulebook.facts import (
    DEFAULT_VERSION,
    LaunchRequest,
    Release,
    release_number,
)
from nest_megatron.layout.rulebook.options import ACTIVATION_FLAGS, has_activation_flag
from nest_megatron.layout.stage_layout import StagePartition, is_uniform
from nest_megatron.layout.zero import DataParallelSharding, ZeroStage
from nest_megatron.model.execution import PLAIN
from nest_megatron.model.layer_pattern import LayerBlock
from nest_megatron.model.spec import ModelFamily, TransformerSpec
from nest_megatron.plain import to_plain

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
#: Arguments of a model by what they are about, in the order in which they are written.
_OF_MODEL = {part: names.split() for part, names in ROLES["of_model"].items()}
#: What arguments of norms were called before 0.16.
_NAMES_OF_0_15 = {
    "layernorm_epsilon": "norm_epsilon",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
}
#: Arguments of a layout before and behind those of how layers run.
_DEGREES, _SHARDING = (ROLES["of_layout"][part].split() for part in ("degrees", "sharding"))
_STAGES, _STRATEGY = "pipeline_model_parallel_layout", "data_parallel_sharding_strategy"


def model_argv(spec: TransformerSpec, *, version: str = DEFAULT_VERSION) -> list[str]:
    """Flags with which Megatron-LM builds this model.

    Raises:
        UnplannableModelError: if the command line cannot state the model's activation or layers.
    """
    if spec.heterogeneous_layers:
        raise UnplannableModelError(
            f"model {spec.name}: heterogeneous_layers",
            f"{spec.num_layers} layers",
            "Megatron-LM reads them from a file of yours",
            "Plan your own command, with --heterogeneous-layers-config-path, by --from, or for "
            "NeMo or Megatron-Bridge (target=nemo, target=megatron_bridge).",
        )
    if not has_activation_flag(spec):
        raise UnplannableModelError(
            f"model {spec.name}: activation",
            f"{'gated ' * spec.gated_linear_unit}{spec.activation}",
            "Megatron-LM's command line has no flag for it",
            "Launch through NeMo or Megatron-Bridge, whose configurations can state it.",
        )
    values = _model_arguments(spec, release_number(version))
    if release_number(version) < (0, 16):
        values = {_NAMES_OF_0_15.get(name, name): value for name, value in values.items()}
        if values.get("spec") and spec.is_moe:  # 0.15 arguments.py:1027
            raise UnplannableModelError(
                f"model {spec.name}: num_experts",
                spec.num_experts,
                f"Megatron-LM {version} takes no experts beside --spec, which its layers need",
                "Plan for a newer release (target=megatron_lm).",
            )
    known = {argument.dest for argument in load_arguments(version)}
    for name, value in values.items():
        if value not in (None, False) and name not in known:
            raise UnplannableModelError(
                f"model {spec.name}: {name}",
                value,
                f"Megatron-LM {version} has no {flag_of(name)}",
                "Plan for a newer release (target=megatron_lm).",
            )
    return argv_for(values, version)


def _model_arguments(spec: TransformerSpec, release: Release) -> dict[str, Any]:
    """Arguments of a model in the order in which they are written; ``None`` is not written.

    ``pretrain_t5.py`` gives the decoder the layers of the encoder. Since 0.17 a hybrid
    model's layers are those of ``parallel_argv``. Gated delta nets have their old name in all.
    """
    counted = release < (0, 17)
    pattern = spec.hybrid_layer_pattern.replace("|", "")
    latent = spec.multi_latent_attention
    grouped = spec.num_query_groups is not None and not latent
    window = spec.window_size
    balanced = spec.moe_router_enable_expert_bias
    has_delta_nets = LayerBlock.GATED_DELTA_NET in spec.blocks
    is_sparse = spec.experimental_attention_variant == "dsa"
    linear = has_delta_nets and not pattern
    activation = spec.activation, spec.gated_linear_unit
    has = {
        "state space": pattern,
        "gated delta nets": has_delta_nets,
        "sparse attention": is_sparse,
        "latent sizes": latent,
        "rotations": spec.position_embedding_type == "rope",
        "experts": spec.num_experts is not None,
    }
    found: dict[str, Any] = {
        "group_query_attention": grouped,
        "num_query_groups": spec.num_query_groups if grouped else None,
        "softmax_type": None if spec.softmax_type == "vanilla" else spec.softmax_type,
        "window_size": None if window is None else f"{window - 1},0",
        "window_attn_skip_freq": None if window is None else _freq(spec.window_attn_skip_freq),
        "no_rope_freq": _freq(spec.no_rope_freq),
        "experimental_attention_variant": (
            "gated_delta_net" if linear else "dsa" if is_sparse else None
        ),
        "linear_attention_freq": _freq(spec.linear_attention_freq or 1) if linear else None,
        "max_position_embeddings": spec.max_position_embeddings or spec.seq_length,
        "layernorm_zero_centered_gamma": spec.apply_layernorm_1p,
        ACTIVATION_FLAGS[activation] or "": True,
        "bias_gelu_fusion": not (spec.activation == "squared_relu" and spec.add_bias_linear),
        "apply_rope_fusion": False,
        "padded_vocab_size": spec.vocab_size if spec.vocab_is_padded else None,
        "moe_layer_freq": pattern_text(spec.moe_layer_pattern) if spec.moe_layer_pattern else None,
        "moe_router_pre_softmax": spec.moe_router_topk == 1 and not balanced,
        "moe_router_score_function": "sigmoid" if balanced else None,
    }
    if spec.family is ModelFamily.T5:
        found |= {"num_layers": None, "decoder_num_layers": spec.num_layers}
        found |= {"seq_length": None, "encoder_seq_length": spec.seq_length}
    if pattern:
        package = "mamba" if release < (0, 18) else "hybrid"
        folder = f"megatron.core.models.{package}"
        found |= {
            "num_layers": spec.num_layers if counted else None,
            "hybrid_override_pattern": pattern if counted else None,
            "is_hybrid_model": counted,
            "spec": [f"{folder}.{package}_layer_specs", f"{package}_stack_spec"],
            "mtp_num_layers": None,
        }
    return {
        name: found.get(name, getattr(spec, name, None))
        for part, names in _OF_MODEL.items()
        for name in (names if has.get(part, True) else ())
    }


def _freq(value: int | Sequence[int] | None) -> str | None:
    """A period or the flags of all layers, as Megatron's frequencies are typed."""
    if value is None:
        return None
    return str(value) if isinstance(value, int) else f"[{','.join(map(str, value))}]"


def planned_values(request: LaunchRequest) -> dict[str, Any]:
    """All that a plan sets, by Megatron's names, in the order in which a command states it.

    The command, the Namespace and the fields of recipes are written of it; ``None`` leaves a choice
    to Megatron, as stages that it makes even by itself.
    """
    spec = request.spec
    dims = request.dims
    sharding = request.sharding or request.zero.sharding
    partition = request.partition
    hybrid = spec.hybrid_layer_pattern
    if partition is None:
        assert dims.is_one_stage, "a pipeline needs a stage partition"
        partition = StagePartition(boundaries=(0, spec.num_units), pipeline_model_parallel_size=1)
    layout = replace(
        request.with_stages(partition, sharding),
        overlap_grad_reduce=request.overlap_grad_reduce,
        overlap_param_gather=request.overlap_param_gather,
    )
    found = to_plain(layout_arguments(spec, layout))
    if sharding is DataParallelSharding.TORCH_FSDP2:  # which overlaps by itself
        found |= {"overlap_grad_reduce": False, "overlap_param_gather": False}
    stages, virtual = found[_STAGES], found["virtual_pipeline_model_parallel_size"]
    is_even = is_uniform(spec, partition)
    of_fsdp = _of_fsdp(request) if layout.uses_megatron_fsdp else {_STRATEGY: "no_shard"}
    # the batch, or how it grows; or since 0.18 a schedule in the place of a size (args:698)
    batch: dict[str, Any] = {"global_batch_size": request.global_batch_size}
    if schedule := request.batch_schedule:
        ramp = list(schedule.rampup_batch_size or ()) or None
        batch = {"global_batch_size": schedule.last, "rampup_batch_size": ramp}
        if (steps := schedule.step_batch_size_schedule) is not None:
            batch = {"step_batch_size_schedule": steps}
    return {
        **dict.fromkeys(_DEGREES),
        **execution_arguments(request.execution, request.version),
        "use_tp_pp_dp_mapping": dims.rank_order is RankOrder.TP_CP_EP_PP_DP,
        "micro_batch_size": request.micro_batch_size,
        **batch,
        **dict.fromkeys(_SHARDING),
        **found,
        _STAGES: None if is_even else stages,
        "num_virtual_stages_per_pipeline_rank": virtual if is_even and not hybrid else None,
        "hybrid_layer_pattern": (stages or hybrid.replace("|", "")) if hybrid else None,
        "expert_tensor_parallel_size": launched_expert_tensor_size(spec, dims),
        "moe_grouped_gemm": spec.num_experts is not None and request.moe_grouped_gemm,
        "recompute_modules": found["recompute_modules"] or None,
        **of_fsdp,
        **precision_arguments(request.precision, request.fp8_recipe),
    }


def planned_arguments(request: LaunchRequest) -> dict[str, Any]:
    """What a command of Megatron-LM states of it; a release has what ``words_for`` writes.

    How layers run is written where Megatron's default differs, and the dispatcher always.
    """
    found, plain = planned_values(request), execution_arguments(PLAIN, request.version)
    unsaid = {name for name, value in plain.items() if found[name] == value}
    unsaid.discard("moe_token_dispatcher_type")
    if not request.spec.is_moe:
        unsaid.update(name for name in plain if EXECUTION_FIELDS[name] in WITH_EXPERTS)
    if request.spec.num_experts is None:
        unsaid.add("expert_model_parallel_size")
    if request.spec.hybrid_layer_pattern:
        unsaid.add(_STAGES)
    if not found["use_megatron_fsdp"]:
        unsaid.add(_STRATEGY)
    return {name: value for name, value in found.items() if name not in unsaid}


def parallel_argv(request: LaunchRequest) -> list[str]:
    """Flags that lay a model over the ranks as planned; a pipeline needs a partition."""
    return argv_for(planned_arguments(request), request.version)


def _of_fsdp(request: LaunchRequest) -> dict[str, Any]:
    """What goes with Megatron-FSDP.

    Without the meta device every rank first builds the whole model on its GPU (``get_model`` calls
    ``cuda()``: 0.16.1 training.py:1258, 0.20 :2465). Fused accumulation of gradients adds to a
    buffer that Megatron-FSDP overwrites, which old releases of Transformer Engine do not know
    (0.16.1 args:677; 0.20 mcore_fsdp_adapter.py:165 refuses them). 0.20 keeps gradients in the
    width of the weights by default, and ignores ``grad_reduce_in_fp32``.
    """
    wide = request.gradient_bytes == 4 and request.precision is not Precision.FP32
    meta = request.zero >= ZeroStage.OPTIMIZER and initializes_on_meta_device(request.spec)
    return {
        "ckpt_format": "fsdp_dtensor",
        "init_model_with_meta_device": meta,
        "gradient_accumulation_fusion": False,
        "megatron_fsdp_main_grads_dtype": "fp32" if wide else None,
    }


def precision_arguments(precision: Precision, fp8_recipe: str = "delayed") -> dict[str, Any]:
    """Arguments of a number format."""
    formats: dict[Precision, dict[str, Any]] = {
        Precision.FP32: {},
        Precision.FP16: {"fp16": True},
        Precision.BF16: {"bf16": True},
        Precision.FP8: {"bf16": True, "fp8": "hybrid", "fp8_recipe": fp8_recipe},
        Precision.NVFP4: {"bf16": True, "fp4": "e2m1", "fp4_recipe": "nvfp4"},
    }
    return formats[precision]


def environment(
    request: LaunchRequest, *, device_architecture: int = 9, multicast: bool = True
) -> dict[str, str | None]:
    """Environment variables that Megatron demands; ``None`` means that it must not be set.

    An overlapped all-to-all of tokens wants many connections. Below Blackwell divided layers and
    sequences want one, and Megatron leaves 1 or 32 to the user where a job has both (0.16.1
    args:940); the all-to-all is then the longer one.

    Args:
        device_architecture: major compute capability (9 = Hopper, 10 = Blackwell, which is free).
        multicast: GPUs of a node can write to all at once (``has_multicast``). User buffers stop
            without, unless they copy over CUDA IPC instead.

    Source: validate_args (0.16.1 :622, :687, :940-951); Transformer Engine, ``initialize_ub``.
    """
    dims = request.dims
    splits = max(dims.tensor_model_parallel_size, dims.context_parallel_size) > 1
    found: dict[str, str | None] = {}
    if (request.sharding or request.zero.sharding) is not DataParallelSharding.DDP:
        found[CONNECTIONS] = None
    elif request.execution.overlap_moe_expert_parallel_comm:
        found[CONNECTIONS] = "32"
    elif splits and device_architecture < 10:
        found[CONNECTIONS] = "1"
    overlaps = request.execution.tp_comm_overlap and dims.tensor_model_parallel_size > 1
    if overlaps and not multicast:
        found["UB_SKIPMC"] = "1"
    return found | execution_environment(request.execution)


def pattern_text(pattern: Sequence[int]) -> str:
    """A layer pattern as ``--moe-layer-freq`` takes it.

    >>> pattern_text((0, 0, 0, 1, 1)), pattern_text((1, 1))
    ('([0]*3+[1]*2)', '1')
    """
    if all(pattern):
        return "1"
    runs = ((flag, len(list(run))) for flag, run in groupby(pattern))
    return "(" + "+".join(f"[{flag}]*{count}" for flag, count in runs) + ")"


def script_name(spec: TransformerSpec, version: str) -> str:
    """Megatron-LM's own script for a model; those of BERT and T5 are examples since 0.18."""
    is_old = release_number(version) < (0, 18)
    family = spec.family.value
    if spec.hybrid_layer_pattern:
        return "pretrain_mamba.py" if is_old else "pretrain_hybrid.py"
    if spec.vision is not None:
        return "pretrain_vlm.py"
    folder = "" if is_old or spec.family is ModelFamily.GPT else f"examples/{family}/"
    return f"{folder}pretrain_{family}.py"
