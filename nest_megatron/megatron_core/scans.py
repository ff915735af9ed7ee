"""Mamba-2 layers and gated delta nets of megatron-core where only shapes are known.

The modules are megatron-core's own. Stand-ins are the kernels that they call in training, of
mamba_ssm, causal_conv1d and flash-linear-attention, which need not be installed. They run a scan as
products of whole chunks, so that torch counts its operations, and keep what the autograd functions
of the kernels keep: ``MambaSplitConv1dScanCombinedFn`` its input, and the output before the gate;
``ChunkGatedDeltaRuleFunction`` its inputs, the decay summed inside a chunk, and a product of each.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from nest_megatron.megatron_core.shapes import FusedNorm, multiply
from nest_megatron.model.layer_pattern import LayerBlock, LayerKind
from nest_megatron.model.operators.mamba import DELTA_CHUNK


def mamba_layer(config: Any, norm: Any) -> Any:
    """A Mamba layer of local modules; its norm stands before the projection, as in no fused one."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec

    projections = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    return MambaLayer(
        config=config,
        submodules=MambaLayerSubmodules(
            norm=norm,
            mixer=ModuleSpec(module=MambaMixer, submodules=projections),
            mamba_bda=get_bias_dropout_add,
        ),
        layer_number=1,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )


@contextlib.contextmanager
def kernels(kind: LayerKind) -> Iterator[None]:
    """What a layer of this kind calls, for the time that it is built and run."""
    with contextlib.ExitStack() as stack:
        if LayerBlock.MAMBA in kind.blocks:
            stack.enter_context(_mamba_kernels())
        if LayerBlock.GATED_DELTA_NET in kind.blocks:
            stack.enter_context(_delta_rule_kernels())
        yield


@contextlib.contextmanager
def _mamba_kernels() -> Iterator[None]:
    # the mixer imports triton for kernels of inference, which are never called here
    absent = importlib.util.find_spec("triton") is None
    if absent:
        sys.modules.update({"triton": mock.MagicMock(), "triton.language": mock.MagicMock()})
    try:
        import megatron.core.ssm.mamba_mixer as mixer
    finally:
        if absent:
            del sys.modules["triton"], sys.modules["triton.language"]
    replaced: dict[str, Any] = {
        "HAVE_MAMBA_SSM": True,
        # mamba_ssm's norm over groups of channels keeps its input and a figure of each group
        "ExtendedRMSNorm": lambda width, *, group_size, dtype, **_: FusedNorm(
            width, dtype, is_rms=True, num_groups=width // group_size
        ),
        # ``[batch, tokens, channels]`` to the inner width
        "mamba_split_conv1d_scan_combined": lambda projected, weight, *_, **sizes: _Scan.apply(
            projected, weight, sizes["chunk_size"], sizes["headdim"], sizes["ngroups"]
        ),
    }
    with mock.patch.multiple(mixer, create=True, **replaced):
        yield


class _Scan(torch.autograd.Function):
    """The scan as products of whole chunks; of its gradient the shapes alone."""

    @staticmethod
    def forward(
        ctx: Any, projected: Tensor, weight: Tensor, chunk: int, width: int, groups: int
    ) -> Tensor:
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
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        projected, weight, _before_gate = ctx.saved_tensors
        return torch.empty_like(projected), torch.empty_like(weight), None, None, None


def gated_delta_net() -> Any:
    """The ``ModuleSpec`` of a gated delta net of local modules."""
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    submodules = GatedDeltaNetSubmodules(
        in_proj=ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear
    )
    return ModuleSpec(module=GatedDeltaNet, submodules=submodules)


@contextlib.contextmanager
def _delta_rule_kernels() -> Iterator[None]:
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet

    def gated_norm(self: Any, values: Tensor, gate: Tensor) -> Tensor:
        normed = self.out_norm(values.reshape(-1, values.shape[-1]))
        product: Tensor = _Gated.apply(normed, gate.reshape(normed.shape))
        return product

    def rule(*given: Tensor, g: Any, beta: Any, **_: object) -> tuple[Tensor, None]:
        return _DeltaRule.apply(*given, g, beta), None

    replaced: dict[str, Any] = {
        "HAVE_FLA": True,
        "l2norm": _UnitLength.apply,
        "causal_conv1d_fn": lambda x, weight, **_: _Convolution.apply(x, weight),
        # since 0.18 that of flash-linear-attention, which returns a final state, too
        "causal_conv1d": lambda x, weight, **_: (_Convolution.apply(x, weight), None),
        "chunk_gated_delta_rule": rule,
    }
    # since 0.19 class and base are in modules of their own, which import the kernels by name
    modules = {each.__module__ for each in GatedDeltaNet.__mro__ if "delta_net" in each.__module__}
    with contextlib.ExitStack() as stack:
        for name in modules:
            stack.enter_context(mock.patch.multiple(sys.modules[name], create=True, **replaced))
        stack.enter_context(mock.patch.object(GatedDeltaNet, "_apply_gated_norm", gated_norm))
        yield


class _Convolution(torch.autograd.Function):
    """``causal_conv1d_fn`` keeps its input; with its activation it is one kernel."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weight = ctx.saved_tensors
        return multiply(gradient, hidden), torch.empty_like(weight)


class _UnitLength(torch.autograd.Function):
    """``l2norm`` keeps its output and a figure of each row."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        row = hidden.new_empty((*hidden.shape[:-1], 1), dtype=torch.float32)
        output = multiply(hidden, hidden)
        ctx.save_for_backward(output, row)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        output, _ = ctx.saved_tensors
        return multiply(gradient, output)


class _Gated(torch.autograd.Function):
    """A normed output times its gate's activation, which ``jit_fuser`` makes one kernel."""

    @staticmethod
    def forward(ctx: Any, normed: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(normed, gate)
        return multiply(normed, gate)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        normed, gate = ctx.saved_tensors
        return tuple(multiply(gradient, other) for other in (gate, normed))


class _DeltaRule(torch.autograd.Function):
    """The gated delta rule as products of whole chunks; of its gradient the shapes alone."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        strength: Tensor,
    ) -> Tensor:
        # ``[batch, tokens, heads, width]`` as a matrix for each head and chunk
        q, k, v = (
            each.new_empty((each.numel() // (DELTA_CHUNK * width), DELTA_CHUNK, width))
            for each in (query, key, value)
            for width in each.shape[-1:]
        )
        inside = torch.bmm(k, k.transpose(1, 2))
        w, u = torch.bmm(inside, k), torch.bmm(inside, v)
        states = torch.bmm(k.transpose(1, 2), u)
        torch.bmm(w, states)
        torch.bmm(q, states)
        torch.bmm(torch.bmm(q, k.transpose(1, 2)), u)
        ctx.save_for_backward(query, key, value, torch.empty_like(decay), strength, inside)
        return torch.empty_like(value)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(each) for each in ctx.saved_tensors[:5])
