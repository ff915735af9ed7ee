"""Modules that stand for a GPU's fused kernels where only shapes are known.

torch takes its norms and its attention apart on a CPU, and the parts keep more than the fused
kernels of a GPU do. These keep what those keep, and are recorded as one kernel each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: One kernel over all elements.
multiply = torch.ops.aten.mul.Tensor


class FusedNorm(torch.nn.Module):
    """LayerNorm or RMSNorm as one kernel: it keeps its input and float32 figures of each row.

    Args:
        num_groups: of channels, each of which is normed by itself.

    Source: ``aten::_fused_rms_norm`` and ``aten::native_layer_norm`` on CUDA.
    """

    def __init__(
        self, width: int, dtype: torch.dtype, *, is_rms: bool, num_groups: int = 1
    ) -> None:
        super().__init__()
        self.num_groups = num_groups
        self.weight = torch.nn.Parameter(torch.empty(width, dtype=dtype))
        self.bias = None if is_rms else torch.nn.Parameter(torch.empty(width, dtype=dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states ``[..., width]`` as they came."""
        if self.bias is None:
            return _RmsNorm.apply(hidden, self.weight, self.num_groups)
        return torch.nn.functional.layer_norm(hidden, self.weight.shape, self.weight, self.bias)


class _RmsNorm(torch.autograd.Function):
    """One pass over the input forward; input and gradient read, gradient written back."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, groups: int) -> Tensor:
        rows = hidden.new_empty((*hidden.shape[:-1], groups), dtype=torch.float32)
        ctx.save_for_backward(hidden, weight, rows)
        return multiply(hidden, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden, weight, _ = ctx.saved_tensors
        return multiply(gradient, hidden), torch.empty_like(weight), None


#: What the ring of context parallelism is called where its group does not exist.
CONTEXT_GROUP = "cp"


class FlashAttention(torch.autograd.Function):
    """Attention that keeps no scores: inputs, output and one float32 figure for each query row.

    Args:
        query: ``[tokens, batch, heads, width]``; key and value have their own heads.
        span: keys that a query attends to on average.
        ring_steps: times that keys and values are passed on to the next context rank, while the
            attention to those that are there goes on (``AttnFuncWithCPAndKVP2P``); backward their
            gradients travel with them.

    Returns:
        ``[tokens, batch, heads * value width]``.

    Source: ``aten::_scaled_dot_product_flash_attention``; on CUDA it takes fewer key heads than
    query heads, and values of another width than keys, as Transformer Engine's does.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        span: float,
        ring_steps: int,
    ) -> Tensor:
        """The context of each query; keys and values are passed on first."""
        tokens, batch, heads, _ = query.shape
        for _ in range(ring_steps):
            torch.ops.nest.pass_on([key, value], CONTEXT_GROUP)
        context, rows = torch.ops.nest.flash_forward(query, key, value, span)
        ctx.span = span
        ctx.ring_steps = ring_steps
        ctx.save_for_backward(query, key, value, context, rows)
        return context.view(tokens, batch, heads * value.shape[-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of query, key and value."""
        query, key, value, context, rows = ctx.saved_tensors
        for _ in range(ctx.ring_steps):
            torch.ops.nest.pass_on([key, value, key, value], CONTEXT_GROUP)
        return (
            *torch.ops.nest.flash_backward(
                gradient.view_as(context), query, key, value, context, rows, ctx.span
            ),
            None,
            None,
        )


# Operators that have shapes alone.
torch.library.define("nest::pass_on", "(Tensor[] tensors, str group) -> Tensor")
torch.library.define(
    "nest::flash_forward",
    "(Tensor query, Tensor key, Tensor value, float span) -> (Tensor, Tensor)",
)
torch.library.define(
    "nest::flash_backward",
    "(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor context, Tensor rows, "
    "float span) -> (Tensor, Tensor, Tensor)",
)


@torch.library.register_fake("nest::pass_on")
def _pass_on(tensors: list[Tensor], _: str) -> Tensor:
    return tensors[0].new_empty(())


@torch.library.register_fake("nest::flash_forward")
def _flash_forward(query: Tensor, _: Tensor, value: Tensor, __: float) -> tuple[Tensor, Tensor]:
    tokens, batch, heads, _ = query.shape
    rows = query.new_empty((batch, heads, tokens), dtype=torch.float32)
    return query.new_empty((tokens, batch, heads, value.shape[-1])), rows


@torch.library.register_fake("nest::flash_backward")
def _flash_backward(_: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The gradients of query, key and value are of their size."""
    return tuple(torch.empty_like(tensor) for tensor in tensors[:3])


#: Collectives by whether they return the tensors of their first argument with their handle.
COLLECTIVES = {
    "allreduce_": True,
    "broadcast_": True,
    "alltoall_": True,
    "allgather_": True,
    "_allgather_base_": True,
    "reduce_scatter_": True,
    "_reduce_scatter_base_": True,
    "alltoall_base_": False,
    "barrier": False,
}


def _with_shapes_of_collectives() -> torch.library.Library:
    """Shapes of the collectives for which torch has none (2.6 to 2.9)."""
    from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]

    def done() -> torch.ScriptObject:
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)
        return _create_work_from_future(future).boxed()

    library = torch.library.Library("c10d", "IMPL")
    for name, gives_tensors in COLLECTIVES.items():
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{name}", "Meta"):
            with_tensors, alone = (lambda *args: (args[0], done())), (lambda *_: done())
            library.impl(name, with_tensors if gives_tensors else alone, "Meta")
    return library


#: What it registers lasts as long as it does.
_LIBRARY = _with_shapes_of_collectives()
