"""The claims of docs/security.md: each names the test that holds it, and these are here."""

from __future__ import annotations

import ast
import csv
import dataclasses
import io
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import nest_megatron
from nest_megatron.app.task import Task, Work
from nest_megatron.catalogue_files import catalogue_root
from nest_megatron.config.launch import read_words
from nest_megatron.documents import csv_text
from nest_megatron.errors import NestError
from nest_megatron.megatron_core.layers import CACHE_VARIABLE as extracted_variable
from nest_megatron.megatron_core.layers import cache_folder as extracted_folder
from nest_megatron.profile.store import FOLDER_VARIABLE as profile_variable
from nest_megatron.profile.store import profiles_folder
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


LEAK = "${oc.env:NEST_SECRET}"


@pytest.mark.parametrize(
    "words",
    [
        (*SMALL, f"train.seq_length={LEAK}"),
        (*SMALL, "train.seq_length=$\\{oc.env:NEST_SECRET\\}"),
        (*SMALL, f"cluster.levels.0.name='{LEAK}'"),
        (*SMALL, f"model.name=[a,{{b: '{LEAK}'}}]"),
        (*SMALL, f"out={LEAK}"),
        (*SMALL, f"cluster.{LEAK}=1"),
        (*SMALL, "train.seq_length=${oc.${model.name}:NEST_SECRET}"),
        (*SMALL, "--multirun", "hydra/launcher=joblib", f"hydra.launcher.n_jobs={LEAK}"),
        (f"model=FOLDER/{LEAK}", *SMALL[1:]),
    ],
    ids=repr,
)
def test_no_typed_value_is_interpolated_by_a_resolver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setenv("NEST_SECRET", "4096321")
    (tmp_path / LEAK).mkdir()
    (tmp_path / LEAK / "config.json").write_text(json.dumps(LLAMA))
    refused = run("plan", *(word.replace("FOLDER", str(tmp_path)) for word in words))
    assert refused.code == 2
    assert "calls a resolver" in refused.err
    assert "4096321" not in refused.out + refused.err


LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 1000}
LLAMA |= {"intermediate_size": 128, "num_attention_heads": 4, "max_position_embeddings": 64}


def test_no_value_of_a_program_a_browser_or_a_site_is_interpolated_by_a_resolver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEST_SECRET", "4096321")
    shipped = catalogue_root().joinpath("model", "llama3_8b.yaml").read_text(encoding="utf-8")
    fields = {**yaml.safe_load(shipped), "name": LEAK}
    defaults = tmp_path / "defaults.yaml"
    defaults.write_text(f"search.max_seconds: {LEAK}\n")

    def of_program(num_gpus: object) -> object:
        size = {"cluster.num_gpus": num_gpus}
        return nest_megatron.estimate(model="llama3_8b", cluster="dgx_h100", **size)

    def of_site() -> object:
        monkeypatch.setenv("NEST_MEGATRON_DEFAULTS", str(defaults))
        return of_program(8)

    form = Task(work=Work.ESTIMATE, model="llama3_8b", cluster="dgx_h100")
    calls: list[Callable[[], object]] = [
        lambda: nest_megatron.estimate(model=fields, cluster="dgx_h100"),
        lambda: of_program(LEAK),
        dataclasses.replace(form, num_gpus=LEAK).answer,
        dataclasses.replace(form, global_batch_size=LEAK).answer,
        dataclasses.replace(form, settings=f"search.max_seconds={LEAK}").answer,
        lambda: read_words(["+nest=auto", f"nest.plan={LEAK}"]),
        of_site,
    ]
    for call in calls:
        with pytest.raises(NestError, match="calls a resolver") as refused:
            call()
        assert "4096321" not in str(refused.value)
    with pytest.raises(NestError, match="it is a number"):
        dataclasses.replace(form, num_gpus=LEAK, is_local=False).answer()


@pytest.mark.parametrize(
    "included",
    [
        "- UP/secret@_here_",
        "- /UP/secret@_here_",
        "- UP@_here_: secret",
        "- /UP@_here_: secret",
        "- /model@_here_: UP/secret",
        "- /model: [UP/secret]",
        "- optional UP@_here_: secret",
        "- /hydra/launcher: UP/secret",
        "- ../model/llama3_8b",
        "- accelerator: h100_sxm_80gb",
        "- ${name}",
    ],
)
@pytest.mark.parametrize("group", ["model", "cluster"])
def test_a_file_includes_entries_of_the_catalogue_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, included: str
) -> None:
    monkeypatch.setenv("NEST_SECRET", "4096321")
    (tmp_path / "secret.yaml").write_text(f"other: {LEAK}\n")
    up = "../" * 20 + str(tmp_path).lstrip("/")
    shipped = {"model": "llama3_8b", "cluster": "dgx_h100"}[group]
    text = catalogue_root().joinpath(group, f"{shipped}.yaml").read_text(encoding="utf-8")
    text = text.replace("defaults:\n", "")
    text = re.sub("^  - .*\n", "", text, flags=re.MULTILINE)
    own = tmp_path / group / "own.yaml"
    own.parent.mkdir()
    own.write_text(f"defaults:\n{included.replace('UP', up)}\n- _self_\n{text}")
    for name, folder in ((str(own), ()), ("own", ("--config-dir", str(tmp_path)))):
        other = "cluster=dgx_h100" if group == "model" else "model=llama3_8b"
        refused = run("plan", other, f"{group}={name}", *folder)
        assert refused.code == 2
        assert "4096321" not in refused.out + refused.err


def test_a_file_that_another_includes_is_checked_too(tmp_path: Path) -> None:
    (tmp_path / "accelerator").mkdir()
    device = catalogue_root().joinpath("accelerator", "h100_sxm_80gb.yaml").read_text("utf-8")
    (tmp_path / "accelerator" / "mine.yaml").write_text(f"{device}\nother: {LEAK}\n")
    refused = run("plan", *SMALL, "cluster.accelerator=mine", "--config-dir", str(tmp_path))
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


_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def test_every_claim_names_a_test() -> None:
    """Rows of the tables of what may not be decided and of claims, and all tests that are named."""
    text = PAGE.read_text(encoding="utf-8")
    tables = text.partition("\n## Who can")[2].partition("\n## Modules")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in tables.splitlines()
        if line.startswith("| ") and not line.startswith(("| who", "| claim"))
    ]
    assert len(rows) > 30
    for row in rows:
        if len(row) == 4 and not row[2]:  # nothing is denied
            continue
        assert _TEST.search(row[-1]), row
    for file, test in _TEST.findall(text):
        assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), (file, test)


def test_caches_and_profiles_lie_in_the_user_s_own_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (profile_variable, extracted_variable, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for user in ("ada", "bob"):
        monkeypatch.setenv("HOME", str(tmp_path / user))
        for folder in (extracted_folder(), profiles_folder()):
            assert folder.is_relative_to(tmp_path / user)


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


#: A name that clears a screen, retitles a window, turns the direction of writing, adds a line.
EVIL = "x\x1b[2J\x1b]0;mine\x07\x9b\u202e\u2066\u200by"
ACTED_ON = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069]")


def test_no_name_reaches_a_terminal_as_more_than_text(tmp_path: Path) -> None:
    files = {group: tmp_path / f"{group}.yaml" for group in ("model", "cluster")}
    for group, shipped in (("model", "llama3_8b"), ("cluster", "dgx_h100")):
        text = catalogue_root().joinpath(group, f"{shipped}.yaml").read_text(encoding="utf-8")
        named = re.sub("^name:.*", lambda _: f"name: {json.dumps(EVIL)}", text, flags=re.MULTILINE)
        files[group].write_text(named)
    plan, page = tmp_path / "plan.yaml", tmp_path / "plan.html"
    model, cluster = (str(files[group]) for group in ("model", "cluster"))
    for words in (
        ("models", model),
        ("clusters", cluster),
        ("plan", f"model={model}", f"cluster={cluster}", "cluster.num_gpus=8", f"out={plan}"),
        ("explain", str(plan), "--html", str(page)),
        ("pin", str(plan), "--by", f"{EVIL}\nSigned by Ada.", "--note", EVIL),
        ("verify", str(plan)),
        ("explain", str(plan)),
    ):
        done = run(*words)
        assert done.code == 0, done.err
        assert not ACTED_ON.search(done.out + done.err), words
        assert "Signed by Ada." not in done.out.splitlines()
        if words[0] in ("models", "verify"):
            assert r"x\x1b[2J" in done.out
    assert not ACTED_ON.search(page.read_text(encoding="utf-8"))
    for words in (("plan", f"model={EVIL}"), ("plan", f"{EVIL}=1"), (EVIL,), ("plan", f"--{EVIL}")):
        done = run(*words)
        assert done.code == 2
        assert not ACTED_ON.search(done.out + done.err), words
    assert not ACTED_ON.search(str(nest_megatron.load_plan(plan)))


def test_nothing_is_printed_but_through_what_cleans_it() -> None:
    found = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if name in ("print", "sys.stdout.write", "sys.stderr.write", "click.echo"):
                found.add(str(path.relative_to(PACKAGE)))
    # shells' completions; answers to a script that runs
    by_themselves = {"cli/commands.py", "integrations/dry_run/recorder.py"}
    assert found == {"printing.py", *by_themselves}


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t"])
def test_no_cell_of_a_table_is_a_formula(start: str) -> None:
    lines = list(csv.reader(io.StringIO(csv_text([{"a": f"{start}cmd|' /C calc'!A0", "b": -1.5}]))))
    assert lines[1] == [f"'{start}cmd|' /C calc'!A0", "-1.5"]
    assert csv_text([{"a": "\r=1\x1b"}]) == "a\n\\r=1\\x1b\n"
    assert "\n-2e-05," in csv_text([{"a": "-2e-05", "b": "x"}])


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
