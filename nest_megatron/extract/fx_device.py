"""Operators as a GPU runs them, recorded where there is none."""

from __future__ import annotations

from typing import Any


def as_on_a_gpu() -> Any:
    """A context in which dropout is one operator and attention stays fused under dropout.

    torch on a CPU, which fake tensors pretend to be on, makes dropout of four operators, and
    attention with dropout of two products with the whole square of scores in memory. A GPU does
    neither, so what is kept for the backward pass would be wrong.
    """
    import torch
    from torch.nn import functional
    from torch.overrides import TorchFunctionMode

    class AsOnAGpu(TorchFunctionMode):  # type: ignore[misc]
        """Replaces two functions of torch where they are called."""

        def __torch_function__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            options = dict(kwargs or {})
            if func is functional.dropout:
                return _dropout(*args, **options)
            if func is functional.scaled_dot_product_attention:
                return _attention(func, *args, **options)
            return func(*args, **options)

    def _dropout(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        dropped = torch.native_dropout(x, p, training)[0] if training and p > 0 else x
        return x.copy_(dropped) if inplace and dropped is not x else dropped

    return AsOnAGpu()


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
    import torch

    own_size = query.dim() == 4 and query.shape[-1] != value.shape[-1]
    if own_size and attn_mask is None and not options.get("enable_gqa"):
        fused = torch.ops.aten._scaled_dot_product_efficient_attention
        scale = options.get("scale")
        return fused(query, key, value, None, True, 0.0, is_causal, scale=scale)[0]
    return func(query, key, value, attn_mask, 0.0, is_causal, **options)
