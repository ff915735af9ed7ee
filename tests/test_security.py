"""The claims of docs/security.md: each names the test that holds it, and these are here."""

from __future__ import annotations

import ast
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from nest_megatron.catalogue_files import catalogue_root
from tests.cli.runs import ROOT, SMALL, environment, run

PAGE = ROOT / "docs" / "security.md"
PACKAGE = ROOT / "nest_megatron"
#: Commands that read a file of somebody else, with the file's name in the place of FILE.
READERS = (
    ("models", "FILE"),
    ("clusters", "FILE"),
    ("plan", "model=FILE", "cluster=dgx_h100"),
    ("plan", "model=llama3_8b", "cluster=FILE"),
    ("explain", "FILE"),
    ("pin", "FILE"),
    ("verify", "FILE"),
    ("whatif", "FILE", "memory=80GB"),
    ("profiles", "import", "FILE"),
    ("network", "import", "FILE", "--cluster", "x", "--out", "OUT"),
)


@pytest.mark.parametrize("command", READERS, ids=" ".join)
@pytest.mark.parametrize(
    "text",
    [
        'name: !!python/object/apply:os.system ["touch MARK"]\n',
        'schema: 6\nmodel: !!python/object/apply:os.system ["touch MARK"]\n',
        "_target_: os.system\ncommand: touch MARK\nname: x\n",
        '{"model_type": "llama", "auto_map": {"AutoConfig": "evil.py"}, "_target_": "os.system"}',
    ],
)
def test_no_file_makes_a_command_run_something(
    tmp_path: Path, command: tuple[str, ...], text: str
) -> None:
    mark, file = tmp_path / "mark", tmp_path / "evil.yaml"
    file.write_text(text.replace("MARK", str(mark)))
    names = {"FILE": str(file), "OUT": str(tmp_path / "out.yaml")}
    words = [re.sub("FILE|OUT", lambda found: names[found[0]], word) for word in command]
    assert run(*words).code != 0
    assert not mark.exists()


@pytest.mark.parametrize("group", ["model", "cluster"])
@pytest.mark.parametrize(
    "value", ["${oc.env:HOME}", "${oc.decode:'1'}", "${nest:x}", "${a.${oc.env:HOME}}"]
)
def test_no_file_reads_the_environment(tmp_path: Path, group: str, value: str) -> None:
    shipped = {"model": "llama3_8b", "cluster": "dgx_h100"}[group]
    text = catalogue_root().joinpath(group, f"{shipped}.yaml").read_text(encoding="utf-8")
    file = tmp_path / "own.yaml"
    file.write_text(text)
    assert run(f"{group}s", str(file)).code == 0
    file.write_text(re.sub("^name:.*", f'name: "{value}"', text, flags=re.MULTILINE))
    refused = run(f"{group}s", str(file))
    assert refused.code == 2
    assert "calls a resolver" in refused.err


def test_planning_opens_no_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    plan = tmp_path / "plan.yaml"
    assert run("plan", *SMALL, f"out={plan}").code == 0
    assert run("pin", str(plan)).code == 0
    assert run("verify", str(plan)).code == 0
    assert run("explain", str(plan), "--html", str(tmp_path / "plan.html")).code == 0


#: Modules that start programs: what each may start is in docs/security.md.
STARTERS = set(re.findall(r"^\| `(nest_megatron/[^`]+)`", PAGE.read_text("utf-8"), re.MULTILINE))


def test_only_named_modules_start_programs_or_evaluate_code() -> None:
    found = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and _runs(ast.unparse(node.func)):
                found.add(str(path.relative_to(ROOT)))
    assert found == STARTERS


def _runs(name: str) -> bool:
    """Whether a call starts a program, or evaluates text or foreign objects as code."""
    first, _, last = name.rpartition(".")
    if name in ("eval", "exec", "__import__", "os.system", "os.popen"):
        return True
    starts = first == "os" and last.startswith(("exec", "spawn", "posix_spawn", "fork"))
    loads = first in ("pickle", "marshal", "torch", "joblib") and last in ("load", "loads")
    return starts or loads or first in ("subprocess", "runpy")


def test_claims_name_tests_that_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE.read_text(encoding="utf-8"))
    assert len(named) >= 10
    for file, test in named:
        assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), (file, test)


def test_a_page_of_a_plan_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    plan, page = tmp_path / "plan.yaml", tmp_path / "plan.html"
    assert run("plan", *SMALL, f"out={plan}").code == 0
    assert run("explain", str(plan), "--html", str(page)).code == 0
    text = page.read_text()
    assert "default-src 'none'" in text
    assert not re.search(r"(?:src|href)=[\"'](?:https?:)?//", text)


def test_a_name_in_a_file_is_no_markup_of_a_page(tmp_path: Path) -> None:
    model, plan, page = (tmp_path / name for name in ("m.yaml", "plan.yaml", "plan.html"))
    text = catalogue_root().joinpath("model", "llama3_8b.yaml").read_text(encoding="utf-8")
    model.write_text(re.sub("^name:.*", "name: <script>x</script>", text, flags=re.MULTILINE))
    made = run("plan", f"model={model}", *SMALL[1:], f"out={plan}")
    if made.code == 0:
        assert run("explain", str(plan), "--html", str(page)).code == 0
        assert "<script>x</script>" not in page.read_text()


def test_help_loads_no_file_of_the_folder(tmp_path: Path) -> None:
    """A folder that somebody else writes to is no place that code is imported from."""
    (tmp_path / "yaml.py").write_text("raise SystemExit('imported from the folder')\n")
    program = Path(sys.executable).with_name("nest-megatron")
    if not program.exists():
        pytest.skip(f"{program} is not installed")
    done = subprocess.run(
        [program, "models", "--json"],
        cwd=tmp_path,
        env={key: value for key, value in environment().items() if key != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "imported from the folder" not in done.stderr
    assert json.loads(done.stdout)["models"]
    assert not os.environ.get("NEST_MEGATRON_DEBUG")
