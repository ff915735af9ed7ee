"""``docs/`` builds as a site without a warning, its drawings are current, the README is short."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.imports import ROOT
from tests.cli.runs import environment

#: A screen and a half.
MOST_LINES = 90


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Every link and anchor resolves, and every page is in the navigation."""
    pytest.importorskip("material", reason="the site needs mkdocs-material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "users" / "megatron_lm" / "index.html").is_file()


def test_drawings_are_what_the_planner_computes() -> None:
    command = [sys.executable, ROOT / "docs" / "make_drawings.py", "--check"]
    done = subprocess.run(command, env=environment(), check=False)
    assert done.returncode == 0, "run python docs/make_drawings.py"


def test_the_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MOST_LINES, "docs/ has the pages that say more"
