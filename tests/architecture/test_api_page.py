"""``docs/api.md`` says what the docstrings of the Python API say."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys

import nest_megatron
from tests.architecture.imports import ROOT
from tests.cli.runs import environment

PAGE = ROOT / "docs" / "api.md"


def test_the_page_is_written_from_the_docstrings() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "make_api.py", "--check"], env=environment(), check=False
    )
    assert done.returncode == 0, "run python docs/make_api.py"


def test_the_page_names_all_that_is_public() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name in nest_megatron.__all__:
        assert name.startswith("_") or f"`{name}`" in text or f"## {name}\n" in text


def test_errors_that_the_page_names_are_where_it_says() -> None:
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    (head,) = re.findall(r"Errors are imported from (.*?)\. A `Source`", text)
    told = dict[str, str]()
    for module, names in re.findall(r"`([\w.]+)` \((.*?)\)", head):
        for name in re.findall(r"\w+", names):
            assert hasattr(importlib.import_module(module), name)
            told[name] = module
    assert told.keys() == set(re.findall(r"\* `(\w+Error)`:", text))
