"""Stand-ins for what Megatron-Bridge imports and a machine without CUDA does not have.

Transformer Engine, Triton and Energon are imported without a guard, their names used as bases and
decorators. megatron-core and NeMo are loaded first, so that they go on believing that they are
absent, but for Triton, without which megatron-core since 0.19 is not imported.
"""

from __future__ import annotations

import abc
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any

#: Package -> the version that its stand-in tells.
_ABSENT = {
    "transformer_engine": "2.9.0",
    "triton": "3.5.1",
    "megatron.energon": "6.0.1",
    "mamba_ssm": "2.3.0",
    "causal_conv1d": "1.6.0",
    "tensorboard": "2.21.0",
}
_FIRST = (
    "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.optimizer",
    "nemo.collections.llm.api",
    "nemo.collections.llm.recipes",
    "nemo.lightning.run.plugins",
)


class _Anything(abc.ABCMeta):
    """A class with every attribute, that takes every parameter and decorates anything."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})

    def __getitem__(cls, _: object) -> Any:
        return cls

    def __call__(cls, *args: Any, **_: Any) -> Any:
        return args[0] if args and callable(args[0]) else cls


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, absent: set[str]) -> None:
        self.absent = absent

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not any(name == each or name.startswith(f"{each}.") for each in self.absent):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__getattr__ = _attribute  # type: ignore[method-assign]
        module.__version__ = _ABSENT.get(spec.name, "")
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _attribute(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Anything(name, (), {})


def bridge_is_here() -> bool:
    """Whether Megatron-Bridge is installed; it can be imported from then on."""
    try:
        found = importlib.util.find_spec("megatron.bridge") is not None
    except ModuleNotFoundError:
        return False
    if found:
        install()
    return found


def install() -> None:
    """Let Megatron-Bridge be imported, once."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    finder = _Finder({"triton"})
    try:
        importlib.import_module("megatron.core")
    except ImportError:  # since 0.19 not without Triton
        sys.meta_path.append(finder)
    for name in _FIRST:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    finder.absent = {*_ABSENT}
    if finder not in sys.meta_path:
        sys.meta_path.append(finder)
    _give_nemo_its_hybrid_layers()


def _give_nemo_its_hybrid_layers() -> None:
    """NeMo's own import of them, which asked for Transformer Engine before it was substituted."""
    with contextlib.suppress(ImportError):
        ssm = importlib.import_module("nemo.collections.llm.gpt.model.ssm")
        layers = importlib.import_module("megatron.core.models.mamba.mamba_layer_specs")
        ssm.default_mamba_stack_spec = layers.mamba_stack_spec
        ssm.MCoreMambaModel = importlib.import_module("megatron.core.models.mamba").MambaModel
