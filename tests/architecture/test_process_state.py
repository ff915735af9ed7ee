"""What belongs to the whole process is not ours to change: other threads of it train."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.architecture.imports import PACKAGE, SOURCES, imports_of

#: Calls that change something for all threads, by module.
FORBIDDEN = {("os", "umask"), ("os", "chdir"), ("sys", "setrecursionlimit")}
#: What keeps its work in a place of the process, and what is there in its stead.
SINGLETONS = {"initialize_config_dir", "initialize_config_module", "create_main_hydra2"}
#: What fails for users and accounts that are not there; ``files`` has it with an error of ours.
HOMES = {"expanduser", "home", "getuser", "platformdirs"}
#: A program by itself, which no thread of ours runs.
PROGRAM = PACKAGE / "integrations" / "dry_run" / "view.py"


@pytest.mark.parametrize(
    "path",
    [each for each in SOURCES if each != PROGRAM],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_nothing_is_set_for_all_threads(path: Path) -> None:
    assert "gc" not in {each.module for each in imports_of(path)}
    tree = ast.parse(path.read_text(encoding="utf-8"))
    used = {
        (node.value.id, node.attr)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    assert not used & FORBIDDEN
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names |= {each.module.partition(".")[0] for each in imports_of(path)}
    assert not names & SINGLETONS
    if path != PACKAGE / "files.py":
        assert not names & HOMES
