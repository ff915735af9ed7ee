"""Makes an unmodified Megatron-LM script train on a machine without a GPU.

Python imports this by its name from ``PYTHONPATH`` at every start; it acts in training scripts
alone, so that the command that is tested is the one that a user types. Every replacement says why.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if not hasattr(typing, "override"):  # Megatron from 0.19 on wants Python 3.12, where it starts, too
    typing.override = lambda method: method  # type: ignore[attr-defined]
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


def _tokens_of_the_vocabulary() -> None:
    """0.15's mock data counts to 4,095 in any vocabulary; later releases start over."""
    import megatron.core
    from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

    if not megatron.core.__version__.startswith("0.15."):
        return
    count = MockGPTLowLevelDataset.__getitem__

    def __getitem__(self: Any, index: int) -> Any:
        return count(self, index) % self.tokenizer.vocab_size

    MockGPTLowLevelDataset.__getitem__ = __getitem__


def _plain_messages() -> None:
    """The interleaved schedule frees a stage's output once its sending has begun.

    A GPU's streams keep the order; gloo sends from the memory itself, and what arrives is garbage.
    A fake group sends nothing, so a stage behind MTP layers of their own cannot ask for sizes.
    """
    fake = "--fake-process-group" in sys.argv
    from megatron.core.transformer.transformer_config import TransformerConfig

    settle = TransformerConfig.__post_init__

    def __post_init__(self: Any) -> None:
        settle(self)
        self.deallocate_pipeline_outputs = False
        # none in 0.15
        self.mtp_standalone = getattr(self, "mtp_standalone", False) and not fake

    TransformerConfig.__post_init__ = __post_init__


def _build_and_stop() -> None:
    """Build this rank's model on the meta device, print what it holds, and end.

    Asked for with ``NEST_TEST_BUILD``, for models that no machine like this one holds.
    """
    import torch
    from megatron.core.models.gpt import GPTModel

    build = GPTModel.__init__
    built: list[dict[str, int]] = []

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        from megatron.training import get_args

        torch.cuda.current_device = lambda: "meta"  # layers name it, where the CPU does not
        with torch.device("meta"):
            build(self, *args, **kwargs)
        layers, mtp = self.decoder.layers, getattr(self, "mtp", None)
        built.append(
            {
                "layers": len(layers) + (0 if mtp is None else len(mtp.layers)),
                "parameters": sum(parameter.numel() for parameter in self.parameters()),
            }
        )
        if len(built) == (get_args().virtual_pipeline_model_parallel_size or 1):
            print("NEST_BUILT", json.dumps(built), flush=True)
            os._exit(0)

    GPTModel.__init__ = __init__


def _befall(what: str, rank: str) -> None:
    """One rank is slow in its forward passes, or runs out of memory in one of them.

    Asked for with ``NEST_TEST_FAULT``: ``slow:RANK`` or ``out_of_memory:RANK``.
    """
    import itertools
    import time

    import torch
    from megatron.core.models.gpt import GPTModel

    forward, passes = GPTModel.forward, itertools.count()

    def faulty(self: Any, *args: Any, **kwargs: Any) -> Any:
        if os.environ.get("RANK") == rank:
            if what == "slow":
                time.sleep(1.0)
            elif next(passes) == 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return forward(self, *args, **kwargs)

    GPTModel.forward = faulty


def _latent_attention_without_engine() -> None:
    """Latent attention's small projections are whole on every tensor rank, as the engine's are."""
    import torch
    from megatron.core.fusions import fused_softmax
    from megatron.core.transformer import multi_latent_attention as latent
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class WholeLinear(torch.nn.Module):
        def __init__(self, input_size: int, output_size: int, **_: object) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(output_size, input_size))

        def forward(self, hidden: Any) -> tuple[Any, None]:
            return torch.nn.functional.linear(hidden, self.weight.to(hidden.dtype)), None

    attention = DotProductAttention.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("k_channels", None)
        kwargs.pop("v_channels", None)
        attention(self, *args, **kwargs)

    def causal_mask(size: int) -> Any:
        return torch.triu(torch.ones(size, size), diagonal=1).bool()

    fused_softmax.get_default_causal_mask = causal_mask  # it makes one on the GPU
    DotProductAttention.__init__ = __init__
    latent.HAVE_TE, latent.TELinear = False, WholeLinear


def _cpu_megatron() -> Any:
    """``tests/training/cpu_megatron.py`` by its path: Megatron-LM has a ``tests`` of its own."""
    path = Path(__file__).resolve().parents[2] / "training" / "cpu_megatron.py"
    spec = importlib.util.spec_from_file_location("nest_cpu_megatron", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _newer_typing() -> None:
    """Megatron 0.20 wants Python 3.12."""
    import typing

    import typing_extensions

    if not hasattr(typing, "override"):
        typing.override = typing_extensions.override  # type: ignore[attr-defined]


def _install() -> None:
    import torch

    _newer_typing()

    torch.set_num_threads(1)
    _cpu_megatron().install()
    _pretend_to_have_a_device()
    _without_compiled_kernels()
    _without_pinned_memory()
    _tokens_of_the_vocabulary()
    _plain_messages()
    _latent_attention_without_engine()
    if os.environ.get("NEST_TEST_BUILD"):
        _build_and_stop()
    if fault := os.environ.get("NEST_TEST_FAULT"):
        _befall(*fault.split(":"))


if _TRAINS and not _LAUNCHES:
    _install()
elif "nest_megatron.integrations.megatron_lm.measure_child" in _ARGV:
    _newer_typing()  # all else it does for itself
