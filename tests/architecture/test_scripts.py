"""Programs beside the package import what it has today: nobody runs them all after each change."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from types import ModuleType

import pytest

from tests.architecture.imports import ROOT

FOLDERS = ("benchmarks", "docs", "recipes", "tools")
NEEDS_NEMO_RUN = "nest_megatron.integrations.nemo_run"
SCRIPTS = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_program_imports_of_the_package_is_there(path: Path) -> None:
    missing = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nest_megatron"):
            if node.module == NEEDS_NEMO_RUN:
                pytest.importorskip("nemo_run")
            module = importlib.import_module(str(node.module))
            missing += [
                f"{node.module}.{each.name}"
                for each in node.names
                if not hasattr(module, each.name) and not _is_module(module, each.name)
            ]
    assert missing == []


def _is_module(package: ModuleType, name: str) -> bool:
    folders = getattr(package, "__path__", ())
    return any(Path(folder, f"{name}.py").exists() for folder in folders) or any(
        Path(folder, name, "__init__.py").exists() for folder in folders
    )
