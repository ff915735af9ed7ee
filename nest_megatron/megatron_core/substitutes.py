"""What must be replaced so that megatron-core's layers run where they were not meant to.

Every replacement says why. All are undone when their context manager ends.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode


@contextlib.contextmanager
def without_gpu() -> Iterator[None]:
    """Let megatron-core run on the CPU: what names a GPU means the CPU."""
    import megatron.core.tensor_parallel.random as megatron_random

    generator = torch.Generator()

    def get_state(*_: object, **__: object) -> Any:
        return generator.get_state()

    def set_state(state: Any, *_: object, **__: object) -> None:
        generator.set_state(state)

    gpu = {
        "current_device": lambda: "cpu",
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "current_stream": _NoStream,
        "default_stream": _NoStream,
        "stream": _no_context,
        "Stream": _NoStream,
        "Event": _NoStream,
        "get_rng_state": get_state,
        "manual_seed": generator.manual_seed,
    }
    states = {"_get_cuda_rng_state": get_state, "_set_cuda_rng_state": set_state}
    # compiled fusions would run as kernels of this CPU, on tensors that have no memory
    eager = torch.compiler.set_stance("force_eager")
    with _replaced(torch.cuda, gpu), _replaced(megatron_random, states), _CpuForCuda(), eager:
        yield


def _replaced(owner: Any, attributes: Mapping[str, Any]) -> Any:
    """Replace attributes of a module or class, some of which it may lack."""
    if not attributes:  # which mock refuses
        return contextlib.nullcontext()
    return mock.patch.multiple(owner, create=True, **attributes)


def _completed(owner: Any, attributes: Mapping[str, Any]) -> Any:
    """Add those attributes that a module lacks."""
    return _replaced(owner, {n: each for n, each in attributes.items() if not hasattr(owner, n)})


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep back what torch and megatron-core say of being used in an unusual way."""
    with warnings.catch_warnings(), at_level("megatron", logging.ERROR):
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def at_level(name: str, level: int) -> Iterator[None]:
    """Let a logger say nothing below a level."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def without_transformer_engine(*, shapes_only: bool) -> Iterator[None]:
    """Let the local layers of megatron-core be built with all that they leave out.

    Its torch norm refuses sequence parallelism; its attention does not take the sizes that latent
    attention passes; latent attention believes to have Transformer Engine without it, and since
    0.19 asks for its norms; and two helpers of recomputation and routing are names that only
    Transformer Engine defines.

    Args:
        shapes_only: nothing is computed, so the norm may be one that only has the right shapes.
    """
    import megatron.core.tensor_parallel.random as megatron_random
    import megatron.core.transformer.multi_latent_attention as latent
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.moe import moe_layer, moe_utils
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    of_engine = {
        "activation_recompute_forward": _no_context,
        "fp8_autocast": _no_context,
        "FP8GlobalStateManager": SimpleNamespace(is_fp8_enabled=lambda: False),
    }
    with (
        _completed(megatron_random, of_engine),
        _completed(moe_utils, {"te_general_gemm": None}),
        _replaced(WrappedTorchNorm, {"__new__": _norm(shapes_only)}),
        _replaced(DotProductAttention, {"__init__": _tolerant(DotProductAttention)}),
        _replaced(latent, {"HAVE_TE": False}),
        _replaced(latent.MLASelfAttention, {"_resolve_qk_norm_config": described_norms}),
        _replaced(moe_layer, {"HAVE_TE": True, "TELinear": _WholeLinear}),
    ):
        yield


def _no_context(*_: object, **__: object) -> Any:
    return contextlib.nullcontext()


@contextlib.contextmanager
def balanced_routing() -> Iterator[None]:
    """Give every expert the same number of tokens, as far as they divide.

    Megatron counts tokens by communication and reads the counts from the device. Nothing is
    communicated here, and the load that a random router makes is not the one of training; so the
    counts are those of a balanced router, known beforehand.
    """
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    known: dict[str, Any] = {
        "preprocess": _balanced_counts,
        "_maybe_dtoh_and_synchronize": lambda _, __, counts=None: counts,
    }
    with _replaced(MoEAlltoAllTokenDispatcher, known):
        yield


@contextlib.contextmanager
def fused_kernels(*, flash: bool, context_ranks: int) -> Iterator[None]:
    """Where only shapes are known, keep what a GPU's kernels keep, not what the CPU's do.

    Args:
        flash: attention keeps no scores; else it is megatron-core's own, in two GEMMs.
        context_ranks: that hold the rest of a sequence; only fused attention knows of others.
    """
    import megatron.core.tensor_parallel.random as megatron_random
    from megatron.core.fusions import fused_softmax
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    from nest_megatron.megatron_core.shapes import FlashAttention

    def forward(self: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
        window = self.scale_mask_softmax.window_size
        is_causal = "causal" in self.attn_mask_type.name
        span = context_ranks * key.shape[0] / (2 if is_causal else 1)
        span = span if window is None else min(span, window[0] + 1)
        return FlashAttention.apply(query, key, value, span, context_ranks - 1)

    def one_mask(*_: object, **__: object) -> Any:
        return torch.zeros((), dtype=torch.bool)  # one mask serves all layers: it is not kept

    masks = ("get_default_causal_mask", "get_sliding_window_causal_mask")
    # nothing is drawn, and the states are tensors that hold numbers
    states = {"_get_all_rng_states": lambda: (), "_set_all_rng_states": lambda *_: None}
    with (
        _replaced(DotProductAttention, {"forward": forward} if flash else {}),
        _replaced(functional, {"dropout": _dropout}),
        _replaced(fused_softmax, dict.fromkeys(masks, one_mask)),
        _replaced(megatron_random.CudaRNGStatesTracker, {"fork": _no_context}),
        _replaced(megatron_random, states),
    ):
        yield


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Let dropout be one operator, and attention stay fused under dropout.

    torch on a CPU, which fake tensors pretend to be on, makes dropout of four operators, and
    attention with dropout of two GEMMs with the whole square of scores in memory. A GPU does
    neither, so what is saved for the backward pass would be wrong.
    """
    fused = functools.partial(_attention, functional.scaled_dot_product_attention)
    attributes = {"dropout": _dropout, "scaled_dot_product_attention": fused}
    with _replaced(functional, attributes):
        yield


def _dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """``torch.nn.functional.dropout`` as one operator, with its arguments' names."""
    if not training or p == 0:
        return input
    dropped = torch.native_dropout(input, p, training)[0]
    return input.copy_(dropped) if inplace else dropped


def _attention(
    func: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Any:
    """Attention without its dropout, which costs a fused kernel no memory and few operations.

    Values of another size than keys (multi-latent attention) have a fused kernel on GPUs alone.
    """
    own_size = query.dim() == 4 and query.shape[-1] != value.shape[-1]
    if own_size and attn_mask is None and not options.get("enable_gqa"):
        fused = torch.ops.aten._scaled_dot_product_efficient_attention
        return fused(query, key, value, None, True, 0.0, is_causal, scale=options.get("scale"))[0]
    return func(query, key, value, attn_mask, 0.0, is_causal, **options)


def _balanced_counts(dispatcher: Any, routing_map: Any) -> Any:
    """What ``MoEAlltoAllTokenDispatcher.preprocess`` works out, for balanced routing."""
    import numpy

    is_fused = dispatcher.config.moe_permute_fusion  # then a kernel reads them on the device
    ep, etp, local = dispatcher.ep_size, dispatcher.tp_size, dispatcher.num_local_experts
    sent = routing_map.size(0) * dispatcher.config.moe_router_topk
    dispatcher.num_out_tokens = sent
    each = numpy.full(ep * local, sent // (ep * local))
    each[: sent % (ep * local)] += 1
    by_rank = each.reshape(ep, local)
    here = by_rank[0]  # what each rank sends to the experts of this one
    chunks = numpy.arange(ep * etp * local)
    if not is_fused:
        dispatcher.sort_input_by_local_experts = chunks.reshape(-1, local).T.ravel()
        dispatcher.restore_output_by_local_experts = chunks.reshape(local, -1).T.ravel()
    if ep > 1 or etp > 1:
        dispatcher.input_splits = by_rank.sum(axis=1).tolist()
        dispatcher.output_splits = numpy.full(ep, here.sum()).tolist()
        dispatcher.output_splits_tp = numpy.full(etp, ep * here.sum())
    if local > 1:
        each_rank = numpy.tile(here, (ep * etp, 1))
        on_device = torch.as_tensor(each_rank, device="cuda") if is_fused else each_rank
        dispatcher.num_global_tokens_per_local_expert = on_device
    return ep * etp * here


class _NoStream:
    """Stands for CUDA's streams and events: on the CPU everything has happened by the time."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., _NoStream]:
        return lambda *_, **__: self


class _CpuForCuda(TorchFunctionMode):
    """Makes on the CPU what is asked of a GPU: Megatron names the device "cuda" in many places."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        options = {name: _on_cpu(value) for name, value in (kwargs or {}).items()}
        return func(*map(_on_cpu, args), **options)


def _on_cpu(value: Any) -> Any:
    is_cuda = (isinstance(value, str) and value.startswith("cuda")) or (
        isinstance(value, torch.device) and value.type == "cuda"
    )
    return torch.device("cpu") if is_cuda else value


def _norm(shapes_only: bool) -> Callable[..., Any]:
    """A norm that bears the mark by which its gradients are summed over the tensor ranks.

    Zero-centred weights change what is computed, not its shape or cost.
    """

    def build(_: type, config: Any, hidden_size: int, eps: float = 1e-5, **__: object) -> Any:
        is_rms = config.normalization == "RMSNorm"
        dtype = config.params_dtype
        module: Any
        if shapes_only:
            from nest_megatron.megatron_core.shapes import FusedNorm

            module = FusedNorm(hidden_size, dtype, is_rms=is_rms)
        else:
            kind = torch.nn.RMSNorm if is_rms else torch.nn.LayerNorm
            module = kind(hidden_size, eps=eps, dtype=dtype)
        for parameter in module.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return module

    return build


def described_norms(_: object, submodules: Any) -> dict[str, Any]:
    """The norms and projections of latent attention as its description has them, as before 0.19.

    Without a query's own rank (``q_lora_rank``) 0.19 refuses what ``get_gpt_layer_local_spec``
    describes: it wants the norm inside a projection of Transformer Engine.
    """
    projections = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj")
    return {
        name: getattr(submodules, name) for name in (*projections, "q_layernorm", "kv_layernorm")
    }


class _WholeLinear(torch.nn.Linear):
    """A linear layer that is whole on every rank, and returns its bias with its output."""

    def __init__(self, inputs: int, outputs: int, *, config: Any, bias: bool, **_: object) -> None:
        super().__init__(inputs, outputs, bias=bias, dtype=config.params_dtype)

    def forward(self, hidden: Any) -> Any:
        return super().forward(hidden), None


def _tolerant(attention: type) -> Callable[..., None]:
    """Attention that takes the two sizes of latent attention, and its own width for the values."""
    original: Callable[..., None] = attention.__init__  # type: ignore[misc]

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("k_channels", None)
        value_width = kwargs.pop("v_channels", None)
        original(self, *args, **kwargs)
        if value_width is not None:
            self.hidden_size_per_partition = value_width * self.num_attention_heads_per_partition

    return __init__
