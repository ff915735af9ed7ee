"""What must be replaced so that megatron-core builds models on a machine without a GPU.

Every replacement says why. All are undone when the context manager ends.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from nest_megatron.megatron_core.substitutes import described_norms

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("megatron.core", reason="megatron-core is not installed")


class _NoStream:
    """Stands for ``torch.cuda.Stream``: the all-to-all dispatcher makes one when it is built."""

    def __init__(self, *_: object, **__: object) -> None:
        pass


class DuplicatedLinear(torch.nn.Module):
    """Stands for ``TELinear`` in latent attention: every tensor rank holds the whole matrix.

    megatron-core's local layers split these matrices over tp, Transformer Engine's do not; jobs run
    with the latter.
    """

    def __init__(self, input_size: int, output_size: int, **_: object) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size))


def _plain_norm(_: type, config: Any, hidden_size: int, eps: float = 1e-5, **__: object) -> Any:
    """megatron-core's torch norm refuses sequence parallelism and zero-centred weights.

    Both change what is computed, not the parameters, so the plain norm has the right shape.
    """
    rms = config.normalization == "RMSNorm"
    norm = (torch.nn.RMSNorm if rms else torch.nn.LayerNorm)(hidden_size, eps=eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm


def _tolerant(original: Any) -> Any:
    """Latent attention passes two sizes that only Transformer Engine's attention takes."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("k_channels", None)
        kwargs.pop("v_channels", None)
        original(self, *args, **kwargs)

    return __init__


@contextlib.contextmanager
def meta_megatron() -> Iterator[None]:
    """Let megatron-core build models on the meta device."""
    import megatron.core.transformer.multi_latent_attention as latent
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    with contextlib.ExitStack() as stack:
        swap = stack.enter_context
        swap(mock.patch.object(torch.cuda, "current_device", return_value="meta"))
        swap(mock.patch.object(torch.cuda, "Stream", _NoStream))
        swap(mock.patch.object(torch.Tensor, "cuda", lambda self, *_, **__: self))
        swap(mock.patch.object(WrappedTorchNorm, "__new__", _plain_norm))
        swap(mock.patch.object(DotProductAttention, "__init__", _tolerant_attention()))
        # without the engine megatron-core still believes to have it, and its layers are None
        swap(mock.patch.object(latent, "HAVE_TE", False))
        swap(mock.patch.object(latent, "TELinear", DuplicatedLinear))
        norms = {"_resolve_qk_norm_config": described_norms}
        swap(mock.patch.multiple(latent.MLASelfAttention, create=True, **norms))
        swap(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        logging.getLogger("megatron").setLevel(logging.ERROR)
        swap(torch.device("meta"))
        yield


def _tolerant_attention() -> Any:
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    return _tolerant(DotProductAttention.__init__)
