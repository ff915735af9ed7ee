"""Documents of other people: a key that stands twice is refused, whatever the format."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from nest_megatron.documents import parse_json, parse_yaml, read_csv
from nest_megatron.errors import UserInputError
from tests.cli.runs import ROOT


@pytest.mark.parametrize(
    "text",
    [
        "a: 1\na: 2",
        "a: 1\n'a': 2",
        "a: 1\n!!str a: 2",
        "on: 1\nyes: 2",
        "16: 1\n0x10: 2",
        "b: [{a: 1, a: 2}]",
        "x: &x {a: 1, a: 2}",
        "<<: {a: 1}\n<<: {b: 1}",
        '{"a": 1, "a": 2}',
    ],
)
def test_a_repeated_key_is_refused(text: str) -> None:
    with pytest.raises(UserInputError, match="stands twice"):
        parse_yaml(text, "file")


def test_keys_of_other_mappings_and_kinds_are_others() -> None:
    assert parse_yaml("a: {a: 1}\nb: [{a: 1}, {a: 2}]\n'1': 2\n1: 3", "file")["b"][1] == {"a": 2}
    assert parse_yaml("x: &x {a: 1}\ny: {<<: *x, a: 2}", "file")["y"] == {"a": 2}


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', '[{"b": {"a": 1, "a": 1}}]'])
def test_a_repeated_key_of_json_is_refused(text: str) -> None:
    with pytest.raises(UserInputError, match="the key 'a' stands twice"):
        parse_json(text, "file")


def test_a_repeated_column_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("a,b,a\n1,2,3\n")
    with pytest.raises(UserInputError, match="the column 'a' stands twice"):
        read_csv(path, "file")


#: Read no file of anybody else: what ranks of a job said to one another, the catalogue.
WITH_OWN_LOADER = {
    "catalogue_files.py",
    "documents.py",
    "integrations/dry_run/recorder.py",  # what it and run.py wrote themselves
    "integrations/dry_run/__init__.py",
    "integrations/hydra/plans.py",  # what another rank wrote
    "integrations/megatron_lm/agreement.py",
    "integrations/megatron_lm/measure.py",
    "integrations/megatron_lm/measure_child.py",
}


def test_files_are_read_by_one_loader() -> None:
    found = set()
    package = ROOT / "nest_megatron"
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            module, _, call = name.rpartition(".")
            if module in ("json", "yaml", "tomllib") and "load" in call:
                found.add(str(path.relative_to(package)))
    assert found == WITH_OWN_LOADER
