"""The notebooks under ``recipes/`` run from their first cell to their last."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.cli.runs import PACKAGE_ROOT, ROOT

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")

NOTEBOOKS = sorted((ROOT / "recipes").glob("*.ipynb"))


def test_there_is_a_notebook() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PACKAGE_ROOT), *sys.path]))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    client = nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    client.execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert not [output for output in shown if output.output_type == "error"]
    pages = [output.data["text/html"] for output in shown if "text/html" in output.get("data", {})]
    assert any(page.startswith("<pre") for page in pages), "tables"
    assert any(page.startswith("<iframe") for page in pages), "the page of explain"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_kept_without_its_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    assert not [cell.outputs for cell in notebook.cells if cell.get("outputs")]
    assert not [cell for cell in notebook.cells if cell.get("execution_count")]
