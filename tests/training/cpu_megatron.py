"""What must be replaced so that megatron-core 0.16.1 trains on CPU tensors over gloo.

Every replacement says why. They stay for the life of the process, which exists to train.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

#: The generator that stands for the GPU's. Nothing draws from it: no dropout, weights set by name.
_GPU_GENERATOR = torch.Generator()


class _NoStream:
    """Stands for CUDA's streams and events: on the CPU everything has happened by the time."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., _NoStream]:
        return lambda *_, **__: self


class _CpuForCuda(TorchFunctionMode):
    """Makes on the CPU what is asked of a GPU, and lets it pass for a GPU's.

    Optimizer, gradient clipping and schedules name the device "cuda", and the optimizers know the
    tensors that they may update by their type's name.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        options = {name: _cpu_for_cuda(value) for name, value in (kwargs or {}).items()}
        options.pop("pin_memory", None)  # pinning pages needs CUDA
        answer = func(*map(_cpu_for_cuda, args), **options)
        if func is torch.Tensor.type and isinstance(answer, str):
            return answer.replace("torch.", "torch.cuda.")
        return answer


def _cpu_for_cuda(value: Any) -> Any:
    """The CPU for a CUDA device; anything else as it is."""
    is_cuda = (isinstance(value, str) and value.startswith("cuda")) or (
        isinstance(value, torch.device) and value.type == "cuda"
    )
    return torch.device("cpu") if is_cuda else value


def install() -> None:
    """Let megatron-core train on the CPU, from now on."""
    logging.disable(logging.WARNING)
    _replace_streams()
    _replace_random_state()
    _replace_norm()
    _replace_expert_helpers()
    _CpuForCuda().__enter__()


def _replace_streams() -> None:
    """Streams, events and waiting for them; the current device is where tensors are made."""
    replacements = {
        "current_device": lambda: "cpu",
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "current_stream": _NoStream,
        "default_stream": _NoStream,
        "stream": lambda *_: contextlib.nullcontext(),
        "Stream": _NoStream,
        "Event": _NoStream,
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)


def _replace_random_state() -> None:
    """Megatron keeps the GPU's random state for each tensor rank, and around recomputation."""
    import megatron.core.tensor_parallel.random as megatron_random

    def get_state(*_: object, **__: object) -> Any:
        return _GPU_GENERATOR.get_state()

    def set_state(state: Any, *_: object, **__: object) -> None:
        _GPU_GENERATOR.set_state(state)

    torch.cuda.get_rng_state = get_state
    torch.cuda.manual_seed = _GPU_GENERATOR.manual_seed
    megatron_random._get_cuda_rng_state = get_state
    megatron_random._set_cuda_rng_state = set_state


def _replace_norm() -> None:
    """megatron-core's torch norm refuses sequence parallelism.

    It lacks the mark by which the norm's gradients are summed over the tensor ranks, which Apex and
    Transformer Engine set.
    """
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    def norm(_: type, config: Any, hidden_size: int, eps: float = 1e-5, **__: object) -> Any:
        rms = config.normalization == "RMSNorm"
        module = (torch.nn.RMSNorm if rms else torch.nn.LayerNorm)(hidden_size, eps=eps)
        for parameter in module.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return module

    WrappedTorchNorm.__new__ = norm


def _replace_expert_helpers() -> None:
    """Without Transformer Engine one name is missing; counts of tokens are already on the CPU."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def on_cpu(tensor: Any, as_numpy: bool = False, **_: object) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    token_dispatcher.maybe_move_tensor_to_cpu = on_cpu
