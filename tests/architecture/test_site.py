"""``docs/`` builds as a site without a warning, is short, and is where messages say that it is."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.imports import ROOT
from tests.cli.runs import environment

DOCS = ROOT / "docs"
#: Of the README: a screen and a half.
MOST_LINES = 90
#: Of the pages that are written by hand.
MOST_PAGES, MOST_WORDS = 35, 45_000
LISTED = runpy.run_path(str(DOCS / "generated_pages.py"))
#: A page that a message, a comment or another file names, and none of another repository.
_NAMED = re.compile(
    r"(?<![\w/.-])(?:\.\./)?docs/(?!source/|releases/)([\w/-]+\.(?:md|json))\b(?! @\w)"
)
#: A part of a page that a program writes.
_WRITTEN = re.compile(r"<!-- ([\w, -]+): begin -->.*?<!-- \1: end -->", re.DOTALL)
_NAMING = ("nest_megatron", "hydra_configs", "recipes", "benchmarks", "docs", "tools", ".github")


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Every link and anchor resolves, and every page is in the navigation."""
    pytest.importorskip("material", reason="the site needs mkdocs-material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "launching" / "index.html").is_file()
    searched = json.loads((tmp_path / "search" / "search_index.json").read_text())["docs"]
    found = {entry["location"].partition("#")[0] for entry in searched}
    assert "settings/" in found
    assert not found & {f"{name.removesuffix('.md')}/" for name in LISTED["RESULTS"]}
    assert "<summary>Table of" in (tmp_path / "rules" / "index.html").read_text()


def test_the_list_of_generated_pages_is_current() -> None:
    """Each is there and says what writes it."""
    for name, program in LISTED["GENERATED"].items():
        assert program in (DOCS / name).read_text(encoding="utf-8"), name


def test_pages_by_hand_are_few_and_short() -> None:
    """A page that is added takes the place of another; what programs write has no bound."""
    generated = {DOCS / name for name in LISTED["GENERATED"]}
    pages = {*DOCS.rglob("*.md")} - generated - {DOCS / "images" / "README.md"}
    texts = (_WRITTEN.sub("", page.read_text(encoding="utf-8")) for page in pages)
    words = sum(len(text.split()) for text in texts)
    print(f"{len(pages)} pages, {words} words")
    assert len(pages) <= MOST_PAGES
    assert words <= MOST_WORDS


def test_every_page_that_is_named_is_there() -> None:
    files = [path for folder in _NAMING for path in (ROOT / folder).rglob("*") if path.is_file()]
    endings = {".py", ".toml", ".yaml", ".yml", ".sh", ".j2", ".md", ".ipynb"}
    files = [path for path in files if path.suffix in endings]
    files += [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "setup.py")]
    named = 0
    for path in files:
        for page in _NAMED.findall(path.read_text(encoding="utf-8")):
            named += 1
            assert (DOCS / page).is_file(), f"{path} names docs/{page}"
    assert named > 100


def test_drawings_are_what_the_planner_computes() -> None:
    command = [sys.executable, ROOT / "docs" / "make_drawings.py", "--check"]
    done = subprocess.run(command, env=environment(), check=False)
    assert done.returncode == 0, "run python docs/make_drawings.py"


def test_the_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MOST_LINES, "docs/ has the pages that say more"
