"""A model and a plan in Megatron-LM's own arguments, and a user's arguments with a plan's in place.

``model_argv`` makes Megatron build exactly this model; ``planned_arguments`` lay it over the ranks
as planned. Of a user's arguments only the destinations in ``WRITABLE`` are touched; everything else
keeps its words and its place, and every change has a reason.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from nest_megatron.cluster.records import Precision
from nest_megatron.config.job import Option, ReadCommand
from nest_megatron.errors import UnplannableModelError
from nest_megatron.integrations.megatron_lm.layout_arguments import (
    PARALLEL_ARGUMENTS,
    REASONS,
    RECOMPUTE,
    ROLES,
    STAGE_OPTIONS,
    VIRTUAL_STAGES,
    Values,
    flag_of,
)
from nest_megatron.integrations.megatron_lm.parser import (
    load_arguments,
    namespace_values,
    options_for,
)
from nest_megatron.layout.diff import Change, reason
from nest_megatron.layout.dims import RankOrder
from nest_megatron.layout.execution_rules import (
    EXECUTION_ARGUMENTS,
    EXECUTION_FIELDS,
    WITH_EXPERTS,
    execution_arguments,
    execution_environment,
)
from nest_megatron.layout.knobs import execution_reason
from nest_megatron.layout.layout import layout_arguments
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.rulebook.degrees import launched_expert_tensor_size
from nest_megatron.layout.rulebook.devices import initializes_on_meta_device
from nest_megatron.layout.rulebook.facts import (
    DEFAULT_VERSION,
    LaunchRequest,
    Release,
    release_number,
)
from nest_megatron.layout.rulebook.options import (
    ACTIVATION_FLAGS,
    OPTION_RULES,
    contradicted,
    has_activation_flag,
)
from nest_megatron.layout.stage_layout import StagePartition, is_uniform
from nest_megatron.layout.zero import STRATEGIES, DataParallelSharding, ZeroStage
from nest_megatron.model.execution import PLAIN
from nest_megatron.model.layer_pattern import LayerBlock
from nest_megatron.model.spec import (
    ModelFamily,
    TransformerSpec,
)
from nest_megatron.plain import to_plain
from nest_megatron.units import format_gib

_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
#: Arguments of a model by what they are about, in the order in which they are written.
_OF_MODEL = {part: names.split() for part, names in ROLES["of_model"].items()}
#: What arguments of norms were called before 0.16.
_NAMES_OF_0_15 = {
    "layernorm_epsilon": "norm_epsilon",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
}
#: Arguments of a layout before and behind those of how layers are carried out.
_DEGREES, _SHARDING = (ROLES["of_layout"][part].split() for part in ("degrees", "sharding"))


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
    known = {argument.dest for argument in load_arguments(version)}
    for name, value in values.items():
        if value not in (None, False) and name not in known:
            raise UnplannableModelError(
                f"model {spec.name}: {name}",
                value,
                f"Megatron-LM {version} has no {flag_of(name)}",
                "Plan for a newer release (target=megatron_lm).",
            )
    return [word for option in options_for(values, version) for word in option.tokens]


def _model_arguments(spec: TransformerSpec, release: Release) -> dict[str, Any]:
    """Arguments of a model in the order in which they are written; ``None`` is not written.

    ``pretrain_t5.py`` gives the decoder the layers of the encoder. Since 0.17 a hybrid
    model's layers are those of ``parallel_argv``. Gated delta nets have their old name in all.
    """
    counted = release < (0, 17)
    pattern, latent = spec.hybrid_layer_pattern.replace("|", ""), spec.multi_latent_attention
    grouped = spec.num_query_groups is not None and not latent
    window, balanced = spec.window_size, spec.moe_router_enable_expert_bias
    is_t5 = spec.family is ModelFamily.T5
    has_delta_nets = LayerBlock.GATED_DELTA_NET in spec.blocks
    is_sparse = spec.experimental_attention_variant == "dsa"
    linear = has_delta_nets and not pattern
    package = "mamba" if release < (0, 18) else "hybrid"
    activation = spec.activation, spec.gated_linear_unit
    has = {
        "state space": pattern,
        "gated delta nets": has_delta_nets,
        "sparse attention": is_sparse,
        "latent sizes": latent,
        "rotations": spec.position_embedding_type == "rope",
        "experts": spec.num_experts is not None,
    }
    found = {
        "num_layers": None if is_t5 or (pattern and not counted) else spec.num_layers,
        "decoder_num_layers": spec.num_layers if is_t5 else None,
        "hybrid_override_pattern": (pattern if counted else None) or None,
        "is_hybrid_model": counted and bool(pattern),
        "spec": [f"megatron.core.models.{package}.{package}_layer_specs", f"{package}_stack_spec"]
        if pattern
        else None,
        "seq_length": None if is_t5 else spec.seq_length,
        "encoder_seq_length": spec.seq_length if is_t5 else None,
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
        "padded_vocab_size": spec.vocab_size if spec.vocab_is_padded else None,
        "moe_layer_freq": pattern_text(spec.moe_layer_pattern) if spec.moe_layer_pattern else None,
        "moe_router_pre_softmax": spec.moe_router_topk == 1 and not balanced,
        "moe_router_score_function": "sigmoid" if balanced else None,
        "mtp_num_layers": None if pattern else spec.mtp_num_layers,
    }
    return {
        name: found.get(name, getattr(spec, name, None))
        for part, names in _OF_MODEL.items()
        for name in (names if has.get(part, True) else ())
    }


def _freq(value: int | Sequence[int] | None) -> str | None:
    """A period or the flags of all layers, as Megatron's frequencies are typed."""
    if value is None or isinstance(value, int):
        return None if value is None else str(value)
    return f"[{','.join(map(str, value))}]"


def planned_arguments(request: LaunchRequest) -> dict[str, Any]:
    """Megatron's arguments that lay a model over the ranks, in the order in which they are written.

    ``None`` leaves an argument to Megatron; a release has those that ``options_for`` writes.
    """
    spec, dims, sharding = request.spec, request.dims, request.sharding or request.zero.sharding
    partition = request.partition
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
    stages, pattern, virtual = "pipeline_model_parallel_layout", None, None
    if not spec.hybrid_layer_pattern and is_uniform(spec, partition):  # Megatron's own stages
        found[stages], virtual = None, found["virtual_pipeline_model_parallel_size"]
    if spec.hybrid_layer_pattern:
        pattern, found[stages] = found[stages] or spec.hybrid_layer_pattern.replace("|", ""), None
    experts = spec.num_experts is not None
    if not experts:
        found["expert_model_parallel_size"] = None
    found |= {
        "hybrid_layer_pattern": pattern,
        "num_virtual_stages_per_pipeline_rank": virtual,
        "expert_tensor_parallel_size": launched_expert_tensor_size(spec, dims),
        "moe_grouped_gemm": experts and request.moe_grouped_gemm,
        "recompute_modules": found["recompute_modules"] or None,
    }
    return {
        **{name: found[name] for name in _DEGREES},
        **dict(_execution(request)),
        "use_tp_pp_dp_mapping": dims.rank_order is RankOrder.TP_CP_EP_PP_DP,
        "micro_batch_size": request.micro_batch_size,
        **_batch(request),
        **{name: found[name] for name in _SHARDING},
        **(_of_fsdp(request) if layout.uses_megatron_fsdp else {}),
        **precision_arguments(request.precision, request.fp8_recipe),
    }


def parallel_argv(request: LaunchRequest) -> list[str]:
    """Flags that lay a model over the ranks as planned; a pipeline needs a partition."""
    options = options_for(planned_arguments(request), request.version)
    return [word for option in options for word in option.tokens]


def _execution(request: LaunchRequest) -> Iterator[tuple[str, Any]]:
    """What carries the layers out otherwise than Megatron does anyway; always the dispatcher."""
    plain = execution_arguments(PLAIN, request.version)
    for name, value in execution_arguments(request.execution, request.version).items():
        differs = value != plain[name] or name == "moe_token_dispatcher_type"
        if differs and (request.spec.is_moe or EXECUTION_FIELDS[name] not in WITH_EXPERTS):
            yield name, value


def _batch(request: LaunchRequest) -> dict[str, Any]:
    """The batch, or how it grows; or since 0.18 a schedule in the place of a size (args:698)."""
    schedule = request.batch_schedule
    if schedule is None:
        return {"global_batch_size": request.global_batch_size}
    if (steps := schedule.step_batch_size_schedule) is not None:
        return {"step_batch_size_schedule": steps}
    return {
        "global_batch_size": schedule.last,
        "rampup_batch_size": (list(schedule.rampup_batch_size or ()) or None),
    }


def _of_fsdp(request: LaunchRequest) -> dict[str, Any]:
    """What goes with Megatron-FSDP.

    Without the meta device every rank first builds the whole model on its GPU (``get_model`` calls
    ``cuda()``: 0.16.1 training.py:1258, 0.20 :2465). Fused accumulation of gradients adds to a
    buffer that Megatron-FSDP overwrites, which old releases of Transformer Engine do not know
    (0.16.1 args:677; 0.20 mcore_fsdp_adapter.py:165 refuses them). 0.20 keeps gradients in the
    width of the weights unless told otherwise, and ignores ``grad_reduce_in_fp32``.
    """
    wide = request.gradient_bytes == 4 and request.precision is not Precision.FP32
    meta = request.zero >= ZeroStage.OPTIMIZER and initializes_on_meta_device(request.spec)
    return {
        "ckpt_format": "fsdp_dtensor",
        "data_parallel_sharding_strategy": STRATEGIES[request.zero],
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
            without, unless they are told to copy over CUDA IPC instead.

    Source: validate_args (0.16.1 :622, :687, :940-951); Transformer Engine, ``initialize_ub``.
    """
    dims = request.dims
    splits = max(dims.tensor_model_parallel_size, dims.context_parallel_size) > 1
    found: dict[str, str | None] = {}
    if (request.sharding or request.zero.sharding) is not DataParallelSharding.DDP:
        found[_CONNECTIONS] = None
    elif request.execution.overlap_moe_expert_parallel_comm:
        found[_CONNECTIONS] = "32"
    elif splits and device_architecture < 10:
        found[_CONNECTIONS] = "1"
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
    is_old, family = release_number(version) < (0, 18), spec.family.value
    if spec.hybrid_layer_pattern:
        return "pretrain_mamba.py" if is_old else "pretrain_hybrid.py"
    if spec.vision is not None:
        return "pretrain_vlm.py"
    folder = "" if is_old or spec.family is ModelFamily.GPT else f"examples/{family}/"
    return f"{folder}pretrain_{family}.py"


#: Set together with the layout; those in the second row only where the user says nothing.
_WITH_LAYOUT = (
    "global_batch_size",
    "ckpt_format",
    "padded_vocab_size",
    "init_model_with_meta_device",
    "megatron_fsdp_main_grads_dtype",
)
_IF_ABSENT = "moe_grouped_gemm"
#: Set where a job comes to Megatron-FSDP; one that has it already knows its Transformer Engine.
_WITH_NEW_FSDP = "gradient_accumulation_fusion"

#: Several spellings of one choice: where the user's own stays, none is added.
_STATEMENTS = (RECOMPUTE, (*STAGE_OPTIONS, *VIRTUAL_STAGES), *EXECUTION_ARGUMENTS.values())

#: What a plan sets, and with the options that it contradicts every destination that it may write.
#: Nothing else of a job is ever changed.
_SET = frozenset((*PARALLEL_ARGUMENTS, *_WITH_LAYOUT, _IF_ABSENT, _WITH_NEW_FSDP))
WRITABLE = _SET | {rule.what for rule in OPTION_RULES}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrite:
    """A rewritten command's arguments, and what changed.

    Args:
        changes: flags before and after; ``None`` is an absent flag, empty text a bare switch.
        values: what the plan decided, by destination; of what it leaves out Megatron's default.
    """

    argv: tuple[str, ...]
    changes: tuple[Change, ...]
    values: Values


def rewrite(
    command: ReadCommand,
    planned: Values,
    plan: ParallelPlan,
    kept: Collection[str] = (),
) -> Rewrite:
    """Put a plan's flags into a user's arguments.

    Args:
        planned: the plan's arguments, from ``write.planned_arguments``.
        kept: destinations whose flags stay as the user wrote them; the plan was searched under
            them, so it says nothing else.
    """
    given, version = command.options, command.version
    stated = {dest for flags in _STATEMENTS if set(flags) & set(kept) for dest in flags}
    refused = contradicted(plan, command.values, command.version)
    settled = stated.union(kept).difference(refused.keys() & EXECUTION_FIELDS.keys())
    settled |= command.explicit & {_IF_ABSENT}
    if command.values.get("use_megatron_fsdp"):
        settled |= {_WITH_NEW_FSDP}
    wanted = {
        option.dest: option
        for option in options_for(planned, version)
        if option.dest is not None and option.dest in _SET - settled
    }
    free = {*PARALLEL_ARGUMENTS} - settled
    if plan.model.num_experts is None:  # a dense model's expert grid is the user's own
        free -= {"expert_tensor_parallel_size"}
    owned = free | wanted.keys() | refused.keys()
    tokens: list[str] = []
    placed: set[str] = set()
    for option in given:
        if option.dest not in owned:
            tokens += option.tokens
        elif option.dest in wanted and option.dest not in placed:
            new = wanted[option.dest]  # the user's own spelling where the value is the same
            tokens += option.tokens if option.value == new.value else new.tokens
            placed.add(option.dest)
    for dest, option in wanted.items():
        if dest not in placed:
            tokens += option.tokens
    assert owned <= WRITABLE
    return Rewrite(
        argv=tuple(tokens),
        changes=tuple(_changes(given, owned, wanted, plan, refused)),
        values=namespace_values({dest: planned[dest] for dest in wanted}, owned, version),
    )


def _changes(
    given: Sequence[Option],
    owned: Collection[str],
    wanted: Mapping[str, Option],
    plan: ParallelPlan,
    refused: Mapping[str, str],
) -> Iterator[Change]:
    mine = {option.dest: option for option in given if option.dest and option.dest in owned}
    for dest in dict.fromkeys((*mine, *wanted)):
        before = mine[dest].value if dest in mine else None
        after = wanted[dest].value if dest in wanted else None
        if before == after or (before is None and after and _is_default(dest, after, plan)):
            continue
        if after is None:
            reason = refused.get(dest) or REASONS["removed"].get(dest, "the plan does not need it")
        else:
            reason = _reason(dest, plan)
        flag = (wanted if dest in wanted else mine)[dest].flag
        yield Change(field=flag, before=before, after=after, reason=reason)


def _is_default(dest: str, value: str, plan: ParallelPlan) -> bool:
    """What Megatron takes anyway: writing it out changes nothing."""
    if dest == "expert_tensor_parallel_size":
        return value == str(plan.layout.dims.tensor_model_parallel_size)
    return dest.endswith("_parallel_size") and value == "1"


def _reason(dest: str, plan: ParallelPlan) -> str:
    if dest in EXECUTION_FIELDS:
        return execution_reason(EXECUTION_FIELDS[dest])
    if dest == "expert_tensor_parallel_size" and not plan.model.is_moe:
        return reason(plan, dest)
    count, predicted = plan.layout.num_microbatches, plan.predicted
    return (
        REASONS["set"]
        .get(dest, "belongs to the plan")
        .format(
            level=plan.placement.group_levels,
            microbatches=f"{count} micro batch{'es' * (count > 1)}",
            peak=format_gib(predicted.peak_memory_bytes),
            capacity=format_gib(predicted.capacity_bytes),
        )
    )
