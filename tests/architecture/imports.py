"""The package's source files, and what each of them imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "nest_megatron"
SOURCES = sorted(PACKAGE.rglob("*.py"))


class Import(NamedTuple):
    """One imported module: its dotted name, and the line."""

    module: str
    line: int


def dotted_name(path: Path) -> str:
    """Name of the module that a source file is.

    >>> dotted_name(ROOT / "nest_megatron" / "model" / "__init__.py")
    'nest_megatron.model'
    """
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> Iterator[Import]:
    """Everything a source file imports, inside functions and under ``TYPE_CHECKING`` too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                yield Import(named_by(node.module, alias.name), node.lineno)


def named_by(module: str, name: str) -> str:
    """The module that ``from module import name`` reaches: ``name`` may be a module or not."""
    inside = ROOT.joinpath(*module.split("."), name)
    is_module = inside.is_dir() or inside.with_suffix(".py").is_file()
    return f"{module}.{name}" if is_module else module
