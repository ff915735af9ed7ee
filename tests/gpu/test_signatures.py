"""Each call of torch's CUDA and collectives, NVML and Megatron fits the real signature.

Lines that run on a GPU alone are checked here without one: a keyword that is misspelt, or a name
that is not there, is found in the source.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch

import nest_megatron

PACKAGE = Path(nest_megatron.__file__).parent
#: What our names for modules stand for where a call is written.
MODULES = {
    "torch": "torch",
    "self._torch": "torch",
    "dist": "torch.distributed",
    "self._dist": "torch.distributed",
    "cuda": "torch.cuda",
    "pynvml": "pynvml",
    "nvml": "pynvml",
}
FOLDERS = ("cluster", "integrations", "megatron_core", "profile", "cli")


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = _dotted(node.value)
        return before and f"{before}.{node.attr}"
    return ""


@functools.cache
def _uses() -> tuple[tuple[str, str, ast.Call | None], ...]:
    """Where, the real dotted name, and the call that it is, if it is one."""
    return tuple(
        use
        for folder in FOLDERS
        for path in sorted((PACKAGE / folder).rglob("*.py"))
        for use in _uses_of(path)
    )


def _uses_of(path: Path) -> Iterator[tuple[str, str, ast.Call | None]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Load):
            continue
        owner = _dotted(node.value)
        known = next((name for name in MODULES if f"{owner}.".startswith(f"{name}.")), None)
        if known is not None and not owner.startswith("torch.ops.nest"):  # our own operators
            name = f"{MODULES[known]}{owner.removeprefix(known)}.{node.attr}"
            place = f"{path.relative_to(PACKAGE)}:{node.lineno}"
            yield place, name, calls.get(id(node))


def _found(name: str) -> Any:
    first, *rest = name.split(".")
    return functools.reduce(getattr, rest, importlib.import_module(first))


def test_calls_are_found() -> None:
    """The names of this file are those that the package uses."""
    names = {name for _, name, call in _uses() if call is not None}
    assert names >= {
        *("torch.cuda.mem_get_info", "torch.cuda.Event", "torch.cuda.set_device"),
        *("torch.distributed.all_to_all_single", "torch.distributed.init_process_group"),
        *("pynvml.nvmlDeviceGetMigMode", "pynvml.nvmlDeviceGetHandleByUUID"),
    }


@pytest.mark.parametrize(
    ("place", "name", "call"), _uses(), ids=[f"{place} {name}" for place, name, _ in _uses()]
)
def test_it_exists_and_takes_these_arguments(place: str, name: str, call: ast.Call | None) -> None:
    found = _found(name)
    if call is None or any(isinstance(each, ast.Starred) for each in call.args):
        return
    try:
        signature = inspect.signature(found)
    except ValueError:  # written in C++, as the makers of tensors are; the CPU runs those
        return
    named = {each.arg: None for each in call.keywords if each.arg is not None}
    if any(each.arg is None for each in call.keywords):
        signature.bind_partial(*call.args, **named)
    else:
        signature.bind(*call.args, **named)


#: What is looked up when it is run: the methods of what ``torch.cuda`` makes.
METHODS = {
    torch.cuda.Event: {"record": 0, "synchronize": 0, "elapsed_time": 1},
}


@pytest.mark.parametrize("owner", METHODS)
def test_methods_exist(owner: type) -> None:
    for name, count in METHODS[owner].items():
        inspect.signature(getattr(owner, name)).bind(None, *[None] * count)
