"""``tools/release.py`` on two small checkouts."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path

import pytest

_SPEC = importlib.util.spec_from_file_location(
    "release", Path(__file__).parents[1] / "tools" / "release.py"
)
assert _SPEC is not None
assert _SPEC.loader is not None
release = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(release)

_CONFIG = """
class TransformerConfig:
    hidden_size: int = 0
    {field}: bool = False

    def __post_init__(self):
        assert self.hidden_size > 0, "no size"
        if self.{field}:
            raise ValueError("not together")
"""


def checkout(folder: Path, minor: int, field: str) -> Path:
    core = folder / "megatron" / "core"
    (core / "transformer").mkdir(parents=True)
    (core / "package_info.py").write_text(f"MAJOR = 0\nMINOR = {minor}\n")
    (core / "transformer" / "transformer_config.py").write_text(_CONFIG.format(field=field))
    recipes = folder / "src" / "megatron" / "bridge" / "recipes"
    recipes.mkdir(parents=True)
    (recipes / "llama.py").write_text(f"def llama_{field}_config(): ...\n")
    return folder


def test_what_changed_is_told_with_what_we_do_with_it(tmp_path: Path) -> None:
    old = checkout(tmp_path / "old", 29, "sequence_parallel")
    new = checkout(tmp_path / "new", 30, "swallowed_whole")
    said = "\n".join(release.report(old, new, ()))
    assert "## Fields: 1 added, 1 gone, 0 changed" in said
    assert "- added (not known): TransformerConfig.swallowed_whole: bool = False" in said
    assert "- gone (written): TransformerConfig.sequence_parallel: bool = False" in said
    assert "## Checks: 1 added, 1 gone, 0 changed" in said
    assert "- added: `not (self.swallowed_whole)`" in said
    assert "- added: llama_swallowed_whole_config: src/megatron/bridge/recipes/llama.py" in said


def test_rows_go_on_end_and_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "arguments.json"
    monkeypatch.setattr(release, "TABLE", table)
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--stays", type=int, default=1)
    parser.add_argument("--goes", action="store_true")
    stays, goes = map(release._row, parser._actions)
    release.write("0.29", "v29", [stays, goes])
    release.write("0.30", "v30", [{**stays, "default": 2}])
    found = json.loads(table.read_text())
    assert found["releases"] == {"0.29": "v29", "0.30": "v30"}
    assert [(row["dest"], row.get("since"), row.get("until")) for row in found["arguments"]] == [
        ("stays", None, "0.29"),
        ("goes", None, "0.29"),
        ("stays", "0.30", None),
    ]
    with pytest.raises(SystemExit, match=r"0\.30 is in arguments\.json already"):
        release.write("0.30", "v30", [])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["/nowhere", "--since", "/nowhere"], "/nowhere is no work tree of Megatron-LM"),
        ([""], "nothing to do: add --since"),
    ],
)
def test_what_is_no_checkout_is_refused(
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    there = str(checkout(tmp_path / "there", 30, "some"))
    monkeypatch.setattr("sys.argv", ["release.py", *(word or there for word in words)])
    with pytest.raises(SystemExit, match="2"):
        release.main()
    assert said in capsys.readouterr().err
