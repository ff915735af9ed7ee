"""``docs/architecture.md`` names what there is, and its layers are those of the imports."""

from __future__ import annotations

import re

from tests.architecture.imports import PACKAGE, ROOT, SOURCES
from tests.architecture.test_layers import LAYERS

TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_the_layers_are_those_that_the_imports_are_held_to() -> None:
    table = TEXT.partition("| package | holds |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| ([^|]+) \|", table, re.M)
    shown = [frozenset(re.findall(r"\w+", row)) for row in rows]
    assert shown == [layer for layer in LAYERS if "__main__" not in layer]


def test_every_file_it_names_is_there() -> None:
    folders = ("nest_megatron", "tests", "docs", "hydra_configs", "cython_ext", "recipes")
    named = re.findall(rf"`((?:{'|'.join(folders)})/[\w./]*)`", TEXT)
    named += re.findall(r"\]\(([\w./-]+\.md)\)", TEXT)
    for name in named:
        assert "NAME" in name or (ROOT / name).exists() or (ROOT / "docs" / name).exists(), name
    assert len(named) > 20


def test_every_class_it_names_is_there() -> None:
    source = "\n".join(path.read_text(encoding="utf-8") for path in SOURCES)
    classes = set(re.findall(r"^class (\w+)", source, re.M))
    functions = set(re.findall(r"^def (\w+)", source, re.M))
    written = set(re.findall(r"\b[A-Z][a-z]+(?:[A-Z][a-z]+)+\b", TEXT))
    foreign = {"NeMo"}
    assert written - classes - foreign == set()
    for name in ("request_for", "catalogue_job", "choose_plan", "assemble", "with_launch"):
        assert name in TEXT
        assert name in functions
    assert PACKAGE.is_dir()
