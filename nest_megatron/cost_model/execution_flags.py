"""From a job's flags, by Megatron's names, to its execution and its traits.

Source: megatron-core 0.16.1 and 0.20, ``validate_args`` (widths of gradients), ``OptimizerConfig``,
``_get_megatron_optimizer_based_on_param_groups``, ``get_megatron_muon_optimizer``,
``HybridDeviceOptimizer``; Transformer Engine's ``FusedAdam``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, TypeVar

from nest_megatron.cluster.records import Precision
from nest_megatron.cost_model.memory_flags import text
from nest_megatron.cost_model.traits import ExecutionTraits, Fp8Recipe
from nest_megatron.errors import UserInputError, nearest
from nest_megatron.layout.cuda_graphs import Flags, cuda_graphs
from nest_megatron.model.execution import (
    ContextTraffic,
    Execution,
    FlexBackend,
    GraphImpl,
    TokenDispatcher,
)
from nest_megatron.plain import Name

_WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
_FP32 = _WIDTHS["fp32"]
#: Momentum of SGD where nobody says (``--sgd-momentum``).
_MOMENTUM = 0.9
#: Memory of a 16-bit logit, and its traffic in both passes, by who works the cross entropy out.
#: Megatron's own (``VocabParallelCrossEntropy``) casts logits to float32 (6 bytes), takes their
#: maximum (4), subtracts it (8), exponentiates (8), sums up (4) and divides (8); back it multiplies
#: (8) and casts (6). Compiled, the cast, what leads to the sum, the division and the gradient are a
#: kernel each (6, 8, 8 and 6). Transformer Engine reads logits for the sum, reads them and writes
#: their gradient, and scales that by the loss mask (``triton/cross_entropy.py``).
_NATIVE_LOSS, _COMPILED_LOSS, _ENGINE_LOSS = (6, 52), (10, 28), (2, 10)
_FP8_ATTENTION = ("fp8_dot_product_attention", "fp8_multi_head_attention")
#: Trait -> the flag that says it alone; without it the trait has its default, as a number has of 0.
_ALONE = {
    "fp8_inputs": "fp8_wgrad",
    "keep_fp8_transpose_cache": "keep_fp8_transpose_cache",
    "overlaps_optimizer_copies": "overlap_cpu_optimizer_d2h_h2d",
    "overlap_p2p_comm": "overlap_p2p_comm",
    "microbatch_group_size_per_vp_stage": "microbatch_group_size_per_vp_stage",
    "optimizer_instances": "num_distributed_optimizer_instances",
    "torch_fsdp2": "use_torch_fsdp2",
    "communication_unit_size": "suggested_communication_unit_size",
    "reshard_after_forward": "torch_fsdp2_reshard_after_forward",
    "nccl_ub": "nccl_ub",
    "fused_activation": "bias_swiglu_fusion",
    "fp8_activation_input": "activation_func_fp8_input_store",
    "ddp_bucket_size": "ddp_bucket_size",
    "pads_to_capacity": "moe_pad_expert_input_to_capacity",
}


def execution_traits(flags: Flags, precision: Precision) -> ExecutionTraits:
    """What a job's flags (``memory_flags.READ``) say of its bytes and its traffic.

    Words or types are those that Megatron has before or after its own validation; a number format
    that it does not take is a ``UserInputError``.
    """
    params = _FP32 if precision is Precision.FP32 else 2
    if precision.is_quantized:
        params = _width(flags, "params_dtype", "bf16")
    fp8_weights = _quantized_weights(flags, precision)
    recipe = _recipe(flags, precision)
    on_device = 1.0 - (moved := _moved_share(flags))
    states, of_matrices = _optimizer_bytes(flags, precision, params, on_device)
    optimizer = _word(flags, "optimizer", "adam")
    capacity = flags.get("moe_expert_capacity_factor")
    loss_bytes, loss_traffic = _NATIVE_LOSS
    if flags.get("cross_entropy_loss_fusion"):
        engine = _word(flags, "cross_entropy_fusion_impl", "native") == "te"
        loss_bytes, loss_traffic = _ENGINE_LOSS if engine else _COMPILED_LOSS
    # User buffers of Megatron-FSDP are double buffers (0.16.1 refuses others; 0.20 args:1176).
    registered = flags.get("use_megatron_fsdp") and flags.get("nccl_ub")
    return ExecutionTraits(
        **dict(_said_alone(flags)),
        flash_attention=_is_fused(flags, params),
        fp8_recipe=recipe,
        params_bytes=params,
        fp8_attention=precision is Precision.FP8 and any(map(flags.get, _FP8_ATTENTION)),
        fp8_weights=fp8_weights,
        fp8_gather=fp8_weights and recipe is not Fp8Recipe.MXFP8,
        fp8_transpose_cache=not flags.get("disable_parameter_transpose_cache"),
        gradient_bytes=_gradient_bytes(flags, precision, params),
        loss_bytes=loss_bytes + params - 2,  # logits of 16 or 32 bits
        loss_traffic_bytes=loss_traffic,
        optimizer_bytes=states,
        matrix_optimizer_bytes=of_matrices,
        optimizer_offload_fraction=moved,
        fsdp_double_buffer=bool(flags.get("fsdp_double_buffer") or registered),
        fsdp_reduce_bytes=_reduce_bytes(flags),
        # Megatron takes a negative factor for none (0.16.1 tc:1104)
        expert_capacity_factor=None if capacity is None or float(capacity) < 0 else float(capacity),
        layer_wise_optimizer=optimizer == "dist_muon"
        or (optimizer == "muon" and bool(flags.get("use_distributed_optimizer"))),
    )


def _said_alone(flags: Flags) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(ExecutionTraits):
        if field.name in _ALONE:
            value, default = flags.get(_ALONE[field.name]), field.default
            kind: Any = type(default)
            yield field.name, value is not False if default is True else kind(value or default)


def execution_of(flags: Flags) -> Execution:
    """How a job with these flags carries its layers out; without a dispatcher by ``alltoall``.

    Raises:
        UserInputError: for a word that Megatron does not take.
    """
    dispatcher = _member(flags, "moe_token_dispatcher_type", TokenDispatcher, "alltoall")
    backend = None
    if dispatcher is TokenDispatcher.FLEX:
        backend = _member(flags, "moe_flex_dispatcher_backend", FlexBackend, "deepep")
    graphs = cuda_graphs(flags)
    overlaps = bool(flags.get("overlap_moe_expert_parallel_comm"))
    traffic = _member(flags, "cp_comm_type", ContextTraffic, "p2p")
    levels = traffic is ContextTraffic.A2A_P2P
    sizes = flags.get("hierarchical_context_parallel_sizes") if levels else ()
    offloads = flags.get("fine_grained_activation_offloading")
    modules = flags.get("offload_modules") if offloads else ()
    return Execution(
        moe_token_dispatcher_type=dispatcher,
        moe_flex_dispatcher_backend=backend,
        overlap_moe_expert_parallel_comm=overlaps,
        delay_wgrad_compute=overlaps and bool(flags.get("delay_wgrad_compute")),
        cp_comm_type=traffic,
        hierarchical_context_parallel_sizes=tuple(map(int, sizes or ())),
        cuda_graph_impl=GraphImpl.NONE if graphs is None else GraphImpl(graphs.impl),
        cuda_graph_scope=() if graphs is None else tuple(sorted(graphs.scope)),
        cpu_offloading_num_layers=int(flags.get("cpu_offloading_num_layers") or 0),
        offload_modules=tuple(map(text, modules or ())),
        **{name: bool(flags.get(name)) for name in _SWITCHES},
    )


_SWITCHES = (
    "moe_permute_fusion",
    "moe_router_fusion",
    "moe_shared_expert_overlap",
    "tp_comm_overlap",
    "use_transformer_engine_op_fuser",
)
Member = TypeVar("Member", bound=Name)


def _word(flags: Flags, name: str, default: str) -> str:
    """One of Megatron's words; of one for each layer the first."""
    value = flags.get(name) or default
    return text(value[0] if isinstance(value, list | tuple) else value)


def _member(flags: Flags, name: str, kind: type[Member], default: str) -> Member:
    word = _word(flags, name, default)
    if word not in tuple(kind):
        raise UserInputError(
            f"--{name.replace('_', '-')}",
            word,
            f"it must be one of {', '.join(kind)}",
            nearest(word, kind),
        )
    return kind(word)


def time_notes(flags: Flags) -> tuple[str, ...]:
    """What flags do to the time of a step that is not priced, one sentence each.

    Flags are named as Megatron's arguments, which are fields of recipes, too.
    """
    notes = []
    if flags.get("optimizer_cpu_offload"):
        notes.append(
            "optimizer_cpu_offload: the time of Adam on the host is that of one public "
            "measurement on nodes of eight H100, whatever processors this host has."
        )
    if flags.get("microbatch_group_size_per_vp_stage"):
        notes.append(
            "microbatch_group_size_per_vp_stage: where it is not the pipeline size, virtual "
            "stages are priced in rounds of one micro batch a pipeline rank, with the "
            "activations that the larger rounds keep; a step takes a few per cent less."
        )
    if flags.get("ddp_num_buckets"):
        notes.append("ddp_num_buckets: buckets are priced in the size that Megatron chooses.")
    if text(flags.get("optimizer") or "adam") in ("muon", "dist_muon"):
        notes.append("Muon: its states are counted, the time of its GEMMs is not.")
    is_flex = text(flags.get("moe_token_dispatcher_type")) == TokenDispatcher.FLEX
    if is_flex and text(flags.get("moe_flex_dispatcher_backend")) == FlexBackend.NCCLEP:
        notes.append(
            "moe_flex_dispatcher_backend ncclep: no public run says how fast it is; it is priced "
            "as HybridEP, whose kernels it runs."
        )
    widths = (flags.get(name) for name in ("moe_dispatch_fwd_dtype", "moe_combine_bwd_dtype"))
    if any(text(width) != "bf16" for width in widths if width is not None):
        notes.append(
            "moe_dispatch_fwd_dtype, moe_combine_bwd_dtype: tokens that travel in MXFP8 are "
            "priced with 16 bits, so a step takes less than predicted."
        )
    if flags.get("first_last_layers_bf16"):
        notes.append(
            "first_last_layers_bf16: in fp8 and NVFP4 the layers that stay in bf16 are priced as "
            "the others, so a step takes longer than predicted."
        )
    return tuple(notes)


def _recipe(flags: Flags, precision: Precision) -> Fp8Recipe:
    if precision is Precision.NVFP4:
        return Fp8Recipe.NVFP4
    if text(flags.get("fp8_recipe")) == Fp8Recipe.NVFP4:
        raise UserInputError(
            "--fp8-recipe",
            "nvfp4",
            "it is a recipe of --fp4-format",
            "Use --fp4-format e2m1 --fp4-recipe nvfp4.",
        )
    return _member(flags, "fp8_recipe", Fp8Recipe, "delayed")


def _quantized_weights(flags: Flags, precision: Precision) -> bool:
    """Whether weights are below 16 bits alone (``fp4_param`` is 0.16.1's name).

    Megatron turns ``--fp8-param-gather`` off under PyTorch's FSDP2 (0.16.1 args:625; 0.20 :1051).
    """
    if precision is Precision.FP8:
        return bool(flags.get("fp8_param_gather")) and not flags.get("use_torch_fsdp2")
    gathers = flags.get("fp4_param_gather") or flags.get("fp4_param")
    return precision is Precision.NVFP4 and bool(gathers)


def _width(flags: Flags, name: str, default: str) -> int:
    word = _word(flags, name, default)
    if word not in _WIDTHS:
        raise UserInputError(
            f"--{name.replace('_', '-')}",
            word,
            f"number formats are {', '.join(_WIDTHS)}",
            "Use one of them.",
        )
    return _WIDTHS[word]


def _gradient_bytes(flags: Flags, precision: Precision, params: int) -> int:
    """Width of ``DistributedDataParallel``'s gradient buffer (``grad_reduce_in_fp32``).

    With ``--bf16`` it is float32 unless one of two flags says otherwise, with ``--fp16`` 16-bit
    unless ``--accumulate-allreduce-grads-in-fp32`` is given. Megatron-FSDP of 0.20 has a flag of
    its own, and without it the width of the weights (``_resolve_group_grad_dtype``). PyTorch's
    FSDP2 is given no ``MixedPrecisionPolicy``: gradients are as wide as weights (0.16.1 and 0.20,
    ``TorchFullyShardedDataParallel``).
    """
    if flags.get("use_torch_fsdp2"):
        return params
    own = flags.get("megatron_fsdp_main_grads_dtype")
    if flags.get("use_megatron_fsdp") and own is not None:
        is_auto = text(own) == "auto"
        return params if is_auto else _width(flags, "megatron_fsdp_main_grads_dtype", "auto")
    if params == _FP32 or flags.get("accumulate_allreduce_grads_in_fp32"):
        return _FP32
    if precision is Precision.FP16 or text(flags.get("params_dtype")) == "fp16":
        return params
    narrow = _width(flags, "main_grads_dtype", "fp32") != _FP32
    return params if narrow or flags.get("grad_reduce_in_bf16") else _FP32


def _reduce_bytes(flags: Flags) -> int:
    """Width in which Megatron-FSDP of 0.20 reduces gradients, where a flag says it."""
    name = "megatron_fsdp_grad_comm_dtype"
    if not flags.get("use_megatron_fsdp") or text(flags.get(name) or "auto") == "auto":
        return 0
    return _width(flags, name, "auto")


def _is_fused(flags: Flags, params: int) -> bool:
    """Whether attention saves no score matrix: fused kernels take 16-bit numbers alone."""
    unfused = _word(flags, "attention_backend", "auto") in ("unfused", "local")
    local = _word(flags, "transformer_impl", "transformer_engine") == "local"
    return not unfused and not local and params < _FP32


def _optimizer_bytes(
    flags: Flags, precision: Precision, params: int, on_device: float
) -> tuple[float, float | None]:
    """States of one parameter on the device, and those of a matrix where they differ.

    Only 16-bit weights have a master weight: single precision has none.

    Args:
        on_device: share that ``--optimizer-cpu-offload`` leaves there; the host's are float32.
    """
    name = _word(flags, "optimizer", "adam")
    master = float(_FP32 if params < _FP32 else 0)
    if name == "sgd":
        momentum = flags.get("sgd_momentum")
        moments = _FP32 if (_MOMENTUM if momentum is None else float(momentum)) > 0 else 0
        return (master + moments) * on_device, None
    if name == "lion":
        return master + _FP32, None
    if name in ("muon", "dist_muon"):
        others = 1 if _word(flags, "muon_scalar_optimizer", "adam") == "lion" else 2
        return master + others * _FP32, master + _FP32
    if not flags.get("use_precision_aware_optimizer"):
        return (master + 2 * _FP32) * on_device, None
    moments = _width(flags, "exp_avg_dtype", "fp32") + _width(flags, "exp_avg_sq_dtype", "fp32")
    if flags.get("optimizer_cpu_offload"):
        return (master + 2 * _FP32) * on_device, None
    return _master_bytes(flags, precision, params) + moments, None


def _master_bytes(flags: Flags, precision: Precision, params: int) -> float:
    """A master weight under the precision-aware optimizer.

    ``FusedAdam`` stores of a float32 master weight the 16 bits that a bf16 weight lacks
    (``store_param_remainders``), unless Megatron has it: with fp8 other than delayed scaling. An
    fp8 weight has nothing to be completed by.
    """
    width = _width(flags, "main_params_dtype", "fp32")
    if params == _FP32:
        return 0.0 if width == _FP32 else width
    stored_apart = precision is Precision.FP8 and _word(flags, "fp8_recipe", "delayed") != "delayed"
    completes = (
        width == _FP32
        and not stored_apart
        and precision is not Precision.FP16
        and not _quantized_weights(flags, precision)
        and flags.get("store_param_remainders", True) is not False
    )
    return 2.0 if completes else float(width)


def _moved_share(flags: Flags) -> float:
    if not flags.get("optimizer_cpu_offload"):
        return 0.0
    fraction = flags.get("optimizer_offload_fraction")
    moved = 1.0 if fraction is None else float(fraction)
    if not 0.0 <= moved <= 1.0:
        raise UserInputError(
            "--optimizer-offload-fraction",
            moved,
            "it must lie between 0 and 1",
            "Give the share of optimizer states that goes to the host.",
        )
    return moved
