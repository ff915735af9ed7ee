"""Operators as a GPU runs them, recorded where there is none."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Let dropout be one operator, and attention stay fused under dropout.

    torch on a CPU, which fake tensors pretend to be on, makes dropout of four operators, and
    attention with dropout of two GEMMs with the whole square of scores in memory. A GPU does
    neither, so what is kept for the backward pass would be wrong.
    """
    from torch.nn import functional

    fused = functools.partial(_attention, functional.scaled_dot_product_attention)
    with (
        mock.patch.object(functional, "dropout", _dropout),
        mock.patch.object(functional, "scaled_dot_product_attention", fused),
    ):
        yield


def _dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """``torch.nn.functional.dropout``, with its arguments' names."""
    import torch

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
    import torch

    own_size = query.dim() == 4 and query.shape[-1] != value.shape[-1]
    if own_size and attn_mask is None and not options.get("enable_gqa"):
        fused = torch.ops.aten._scaled_dot_product_efficient_attention
        scale = options.get("scale")
        return fused(query, key, value, None, True, 0.0, is_causal, scale=scale)[0]
    return func(query, key, value, attn_mask, 0.0, is_causal, **options)
