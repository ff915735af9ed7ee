"""The recipes of this repository run as they are."""

from __future__ import annotations

import importlib.util
import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "recipes"
FRAMEWORKS = {"nemo": "nemo_run", "nemo_run": "nemo", "megatron_bridge": "megatron.bridge"}

pytestmark = pytest.mark.nemo
pytest.importorskip("megatron.core", reason="megatron-core is not installed")


@pytest.mark.parametrize(
    "path", sorted(FOLDER.glob("*/*.py")), ids=lambda path: f"{path.parent.name}/{path.stem}"
)
def test_a_recipe_runs(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    framework = FRAMEWORKS[path.parent.name]
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed (.ci/nemo installs it)")
    if path.parent.name == "megatron_bridge":
        from tests.nemo import substitutes

        substitutes.install()
    runpy.run_path(str(path), run_name="__main__")
    assert "this job runs as" in capfd.readouterr().out
