"""The examples in docstrings and in the documents do what they say."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

from tests.architecture.imports import PACKAGE, ROOT, dotted_name

PROMPT = ">>> "
FOLDERS = (PACKAGE, ROOT / "tests" / "architecture")


def with_examples(paths: list[Path]) -> list[Path]:
    """The files that hold an example."""
    return [path for path in sorted(paths) if PROMPT in path.read_text(encoding="utf-8")]


MODULES = with_examples([path for folder in FOLDERS for path in folder.rglob("*.py")])
DOCUMENTS = with_examples([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


@pytest.mark.parametrize("path", MODULES, ids=dotted_name)
def test_docstring_examples(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    module = importlib.import_module(dotted_name(path))
    assert doctest.testmod(module).failed == 0


def test_document_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for path in DOCUMENTS:
        assert doctest.testfile(str(path), module_relative=False).failed == 0, path
