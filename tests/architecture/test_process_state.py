"""What belongs to the whole process is not ours to change: other threads of it train."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.architecture.imports import PACKAGE, SOURCES, imports_of

#: Calls that change something for all threads, by module.
FORBIDDEN = {("os", "umask"), ("os", "chdir"), ("sys", "setrecursionlimit")}
#: A program by itself, which no thread of ours runs.
PROGRAM = PACKAGE / "integrations" / "dry_run" / "view.py"


@pytest.mark.parametrize(
    "path",
    [each for each in SOURCES if each != PROGRAM],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_nothing_is_set_for_all_threads(path: Path) -> None:
    assert "gc" not in {each.module for each in imports_of(path)}
    used = {
        (node.value.id, node.attr)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    assert not used & FORBIDDEN
