"""Everything public says what it is for."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.imports import SOURCES, dotted_name

Documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def public_definitions(body: list[ast.stmt]) -> Iterator[Documented]:
    """Public functions and classes, and the public methods of public classes."""
    for node in body:
        if isinstance(node, Documented) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from public_definitions(node.body)


def overrides(node: Documented) -> bool:
    """An overriding method is documented where it was first declared."""
    decorators = {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}
    return not decorators.isdisjoint({"override", "overload", "setter"})


@pytest.mark.parametrize("path", SOURCES, ids=dotted_name)
def test_public_names_have_docstrings(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    lacking = [
        f"line {node.lineno}: {node.name}"
        for node in public_definitions(tree.body)
        if not overrides(node) and not ast.get_docstring(node)
    ]
    if path.name != "__init__.py" and not ast.get_docstring(tree):
        lacking.insert(0, "the module")
    assert not lacking, "\n".join(lacking)
