"""Mamba-2 layers of megatron-core where mamba_ssm is not installed and only shapes are known.

The module is megatron-core's own; what stands in for is the one function of mamba_ssm that it calls
in training, and the norm behind it. The stand-in runs the chunked scan of arXiv 2405.21060 as
products of whole chunks, so that torch counts its operations, and keeps what the kernel's autograd
function keeps (``MambaSplitConv1dScanCombinedFn``: its input, and the output before the gate).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch


def mamba_layer(config: Any, norm: Any) -> Any:
    """A Mamba layer of local modules; its norm stands before the projection, as in no fused one."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec, build_module

    projections = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    submodules = MambaLayerSubmodules(
        norm=norm,
        mixer=ModuleSpec(module=MambaMixer, submodules=projections),
        mamba_bda=get_bias_dropout_add,
    )
    with stand_ins():
        return build_module(
            ModuleSpec(module=MambaLayer, submodules=submodules),
            config=config,
            layer_number=1,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """mamba_ssm's function and norm, for the time that a layer is built or run."""
    import megatron.core.ssm.mamba_mixer as mixer

    replaced: dict[str, Any] = {
        "HAVE_MAMBA_SSM": True,
        "ExtendedRMSNorm": _GroupNorm,
        "mamba_split_conv1d_scan_combined": _scan,
    }
    with mock.patch.multiple(mixer, create=True, **replaced):
        yield


class _GroupNorm(torch.nn.Module):
    """mamba_ssm's norm over groups of channels: it keeps its input and a figure of each group."""

    def __init__(self, width: int, *, group_size: int, dtype: torch.dtype, **_: object) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(width, dtype=dtype))
        self.group_size = group_size

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states ``[tokens, batch, width]``."""
        return _NormOfGroups.apply(hidden, self.weight, self.group_size)


class _NormOfGroups(torch.autograd.Function):
    """Shapes of the norm, forward and backward."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, size: int) -> torch.Tensor:
        groups = hidden.shape[-1] // size
        rows = hidden.new_empty((*hidden.shape[:-1], groups), dtype=torch.float32)
        ctx.save_for_backward(hidden, weight, rows)
        return torch.ops.aten.mul.Tensor(hidden, weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        hidden, weight, _ = ctx.saved_tensors
        return torch.ops.aten.mul.Tensor(gradient, hidden), torch.empty_like(weight), None


def _scan(projected: torch.Tensor, weight: Any, bias: Any, *_: Any, **sizes: Any) -> torch.Tensor:
    """``mamba_split_conv1d_scan_combined``: ``[batch, tokens, channels]`` to the inner width."""
    return _Scan.apply(projected, weight, sizes["chunk_size"], sizes["headdim"], sizes["ngroups"])


class _Scan(torch.autograd.Function):
    """The scan as products of whole chunks; of its gradient the shapes alone."""

    @staticmethod
    def forward(
        ctx: Any, projected: torch.Tensor, weight: torch.Tensor, chunk: int, width: int, groups: int
    ) -> torch.Tensor:
        batch, tokens, channels = projected.shape
        inner_and_heads = channels - weight.shape[0]
        heads = inner_and_heads // (width + 1)
        inner = heads * width
        state = (weight.shape[0] - inner) // (2 * groups)
        chunks = tokens // chunk
        x = projected.new_empty((batch * chunks * heads, chunk, width))
        b, c = (projected.new_empty((batch * chunks * groups, chunk, state)) for _ in range(2))
        of_heads = projected.new_empty((batch * chunks * heads, chunk, state))
        states = torch.bmm(of_heads.transpose(1, 2), x)
        torch.bmm(c, b.transpose(1, 2))
        half = chunk // 2  # of the scores the causal half meets the values
        torch.bmm(x.new_empty((batch * chunks * heads, chunk, half)), x[:, :half])
        torch.bmm(of_heads, states)
        before_gate = projected.new_empty((batch, tokens, heads, width))
        ctx.save_for_backward(projected, weight, before_gate)
        return projected.new_empty((batch, tokens, inner))

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        projected, weight, _before_gate = ctx.saved_tensors
        return torch.empty_like(projected), torch.empty_like(weight), None, None, None
