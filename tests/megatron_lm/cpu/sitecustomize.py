"""Makes an unmodified Megatron-LM script train on a machine without a GPU.

Python imports this by its name from ``PYTHONPATH`` at every start; it acts in training scripts
alone, so that the command that is tested is the one that a user types. Every replacement says why.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_ARGV = getattr(sys, "orig_argv", [])
_TRAINS = any(Path(word).name.startswith("pretrain_") for word in _ARGV)
_LAUNCHES = any("torch.distributed.run" in word or word.endswith("torchrun") for word in _ARGV)


def _pretend_to_have_a_device() -> None:
    """Megatron makes its groups only where it counts devices, and asks for their generation."""
    import torch

    device = SimpleNamespace(
        name="cpu", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30
    )
    for name, value in {
        "is_available": True,
        "device_count": 8,
        "get_device_properties": device,
        "get_device_capability": (9, 0),
        "get_device_name": "cpu",
        "set_device": None,
    }.items():
        setattr(torch.cuda, name, lambda *_, _value=value, **__: _value)


def _without_compiled_kernels() -> None:
    """0.16 compiles kernels with nvcc as it starts."""
    try:
        import megatron.legacy.fused_kernels as kernels
    except ImportError:
        return
    kernels.load = lambda _: None


def _without_pinned_memory() -> None:
    """Pinning the pages of a batch needs CUDA."""
    from torch.utils.data import DataLoader

    plain = DataLoader.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **{**kwargs, "pin_memory": False})

    DataLoader.__init__ = __init__  # type: ignore[method-assign]


def _cpu_megatron() -> Any:
    """``tests/training/cpu_megatron.py`` by its path: Megatron-LM has a ``tests`` of its own."""
    path = Path(__file__).resolve().parents[2] / "training" / "cpu_megatron.py"
    spec = importlib.util.spec_from_file_location("nest_cpu_megatron", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _install() -> None:
    import typing

    import typing_extensions

    if not hasattr(typing, "override"):  # Megatron 0.20 wants Python 3.12
        typing.override = typing_extensions.override  # type: ignore[attr-defined]
    import torch

    torch.set_num_threads(1)
    _cpu_megatron().install()
    _pretend_to_have_a_device()
    _without_compiled_kernels()
    _without_pinned_memory()


if _TRAINS and not _LAUNCHES:
    _install()
