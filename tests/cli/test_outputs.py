"""Outputs: regular files, never an input, and nobody else's file without --force."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import stat
from pathlib import Path

import click
import pytest
import yaml

from nest_megatron import files
from nest_megatron.cli import main
from nest_megatron.cli.command_kinds import forced
from nest_megatron.errors import BAD_INPUT
from nest_megatron.files import check_output, write_text
from nest_megatron.integrations.plan_output import plan_output
from nest_megatron.layout import plan_file
from nest_megatron.planner import Progress, Request
from nest_megatron.planner import plan as find_plan
from nest_megatron.profile import store
from nest_megatron.profile.network import dump
from tests.cli.runs import LIMITS, SMALL, run
from tests.cli.test_nest import LLAMA2
from tests.cli.test_network import NODE, OVER
from tests.profile.networks import profile_of
from tests.profile.profiles import whole_profile


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.yaml"
    assert run("plan", *SMALL, f"out={path}").code == 0
    return path


#: Every command and option that names one file to write, with a suffix that it takes.
OUTPUTS = [
    (("plan", *SMALL, "out={}"), "yaml"),
    (("estimate", *SMALL, "out={}"), "yaml"),
    (("explain", "{plan}", "--html", "{}"), "html"),
    (("explain", "{plan}", "--timeline", "{}"), "json"),
    (("explain", "{plan}", "--timeline", "{}"), "svg"),
    (("pin", "{plan}", "--out", "{}"), "yaml"),
    (("compare", *SMALL, "--chart", "{}"), "html"),
    (("validate", "{csv}", "--rows", "{}"), "csv"),
    (("network", "import", "{log}", "--out", "{}", "--cluster", "dgx_h100"), "yaml"),
    (("network", "import", "{log}", "--profile", "{}"), "yaml"),
    (("nest", "solve", "{csv}", "--out", "{}"), "json"),
    (("paper", "figure5", "--chart", "{}"), "svg"),
    (("profiles", "export", "x", "--out", "{}"), "yaml"),
    (("profile", *SMALL, "--network-out", "{}"), "yaml"),
    (("extract", "model=llama3_8b", "--draw", "{}"), "svg"),
]


def filled(arguments: tuple[str, ...], plan: Path, target: object) -> list[str]:
    given = plan.parent / "given.csv"
    given.write_text("x\n1\n", encoding="utf-8")
    names = {"{plan}": str(plan), "{csv}": str(given), "{log}": str(given)}
    return [names.get(word, word).replace("{}", str(target)) for word in arguments]


def test_an_output_that_cannot_be_is_told_what_is_wrong(plan: Path, tmp_path: Path) -> None:
    for words, told in {
        ("--html", str(tmp_path)): "it is a folder, not a regular file.\n       Name a file inside",
        ("--html", f"{plan}/x/y.html"): f"{plan} is a file, not a folder",
        ("--timeline", f"{tmp_path}/x.pdf"): "--timeline = {}: a file is one of .json, .png, .svg",
    }.items():
        done = run("explain", str(plan), *words)
        assert done.code == BAD_INPUT
        assert told.format(words[1]) in done.err
        assert "mkdir" not in done.err


@pytest.mark.parametrize(("arguments", "suffix"), OUTPUTS)
def test_what_is_not_ours_stays(
    arguments: tuple[str, ...], suffix: str, plan: Path, tmp_path: Path
) -> None:
    script = tmp_path / f"train.{suffix}"
    text = "#!/bin/bash\nnest-megatron plan out=plan.yaml # written by nest-megatron users\n"
    script.write_text(text, encoding="utf-8")
    link = tmp_path / f"link.{suffix}"
    link.symlink_to(script)
    for target in (script, link):
        done = run(*filled(arguments, plan, target))
        assert done.code == BAD_INPUT
        assert "nothing in it says that nest-megatron has written it" in done.err
        assert "--force" in done.err
    assert script.read_text(encoding="utf-8") == text
    assert link.is_symlink()


@pytest.mark.parametrize(("arguments", "suffix"), OUTPUTS)
def test_devices_and_pipes_are_no_outputs(
    arguments: tuple[str, ...], suffix: str, plan: Path, tmp_path: Path
) -> None:
    pipe = tmp_path / f"pipe.{suffix}"
    os.mkfifo(pipe)
    null = tmp_path / f"null.{suffix}"
    null.symlink_to("/dev/null")
    for target in (pipe, null, "/dev/null", "/dev/stdout", "/proc/self/fd/1", tmp_path):
        done = run(*filled(arguments, plan, target))
        assert done.code == BAD_INPUT
        assert len(done.err.splitlines()) == 2
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)  # noqa: PTH116
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_an_input_is_no_output(plan: Path, tmp_path: Path) -> None:
    text = plan.read_text(encoding="utf-8")
    soft, hard = tmp_path / "soft.yaml", tmp_path / "hard.yaml"
    soft.symlink_to(plan)
    hard.hardlink_to(plan)
    for target in (plan, soft, hard):
        for option in ("--html", "--timeline"):
            done = run("explain", str(plan), option, str(target), "--force")
            assert done.code == BAD_INPUT
            assert "the command reads this file" in done.err
    model = tmp_path / "model.yaml"
    model.write_text("schema: 1\n", encoding="utf-8")
    done = run("plan", f"model={model}", "cluster=dgx_h100", f"out={model}")
    assert "the command reads this file" in done.err
    assert plan.read_text(encoding="utf-8") == text


def test_two_outputs_are_two_files(plan: Path, tmp_path: Path) -> None:
    both, link = tmp_path / "both.yaml", tmp_path / "link.yaml"
    link.symlink_to(both)
    for page in (both, link):
        done = run("plan", *SMALL, f"out={both}", "--html", str(page))
        assert done.code == BAD_INPUT
        assert "is written to this file too" in done.err
        assert not both.exists()


@pytest.mark.parametrize("words", [("out=",), ("--html", ""), ("-m", "out=")])
def test_an_output_without_a_name(words: tuple[str, ...]) -> None:
    done = run("plan", *SMALL, *words)
    assert done.code == BAD_INPUT
    assert "it is empty" in done.err


SWEEP = ("plan", *SMALL, *LIMITS, "search.num_alternatives=0")
#: Commands that print a result and write files of it.
RESULTS = [
    (*SWEEP, "out={}.yaml"),
    (*SWEEP, "--html", "{}.html"),
    (*SWEEP, "-m", "train.global_batch_size=64,128", "--html", "{}.html"),
    (*SWEEP[:3], *SWEEP[4:], "--for-gpus", "8", "--html", "{}.html"),
    (*SWEEP[:3], *SWEEP[4:], "--for-nodes", "1", "out={}.yaml"),
    ("estimate", *SMALL, "parallel.tensor_model_parallel_size=8", "out={}.yaml"),
    ("whatif", "{plan}", "memory=141GB", "search.num_alternatives=0", "--html", "{}.html"),
    ("explain", "{plan}", "--html", "{}.html"),
    ("explain", "{plan}", "--timeline", "{}.json"),
    ("compare", *SMALL, *LIMITS, "planners=[nest]", "--chart", "{}.html"),
    ("nest", "solve", LLAMA2, "--out", "{}.json"),
    ("network", "import", NODE, "--profile", "{}.yaml"),
    ("network", "import", NODE, OVER, "--cluster", "dgx_h100", "--out", "{}.yaml"),
]


@pytest.mark.parametrize("words", RESULTS, ids=lambda words: f"{words[0]} {words[-2]}")
@pytest.mark.parametrize("form", [(), ("--json",)], ids=["text", "json"])
def test_a_result_outlives_a_file_that_cannot_be_written(
    words: tuple[str, ...],
    form: tuple[str, ...],
    plan: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = tmp_path / "nospace"

    def is_full(path: Path, mode: int) -> object:
        if path.stem == "nospace":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return new_file(path, mode)

    new_file = files._new_file
    monkeypatch.setattr(files, "_new_file", is_full)
    done = run(*filled(words, plan, target), *form)
    assert done.code == BAD_INPUT
    assert done.err.startswith(f"error: file = {target}")
    assert "No space left on device" in done.err
    if form:
        assert done.json()
    else:
        assert len(done.out.splitlines()) > 3
        assert "nospace" not in done.out
    assert not [*tmp_path.iterdir()]


def test_a_plan_is_written_although_it_cannot_be_printed(tmp_path: Path) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    out = tmp_path / "plan.yaml"
    with contextlib.redirect_stdout(Full()):
        assert main(["plan", *SMALL, *LIMITS, f"out={out}"]) == BAD_INPUT
    assert plan_file.read(out).cluster.num_gpus == 8


def test_a_folder_that_one_may_not_write_to_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda folder, mode: folder != tmp_path)
    monkeypatch.setattr("nest_megatron.api.jobs.find_plan", None)
    done = run("plan", *SMALL, f"out={tmp_path / 'plan.yaml'}")
    assert done.code == BAD_INPUT
    assert done.err == (
        f"error: out = {tmp_path}/plan.yaml: you may not write to {tmp_path}.\n"
        "       Name another folder.\n"
    )


def test_a_table_that_cannot_be_is_refused_before_a_sweep_runs(tmp_path: Path) -> None:
    for name in (".jobs", "sweep.csv"):
        (tmp_path / name).mkdir()
    done = run("plan", "-m", *SMALL, "train.global_batch_size=64,128", f"out={tmp_path}")
    assert done.code == BAD_INPUT
    assert "sweep.csv: it is a folder, not a regular file" in done.err
    assert not [*(tmp_path / ".jobs").glob("*.json")]


def test_force_and_files_of_ours(plan: Path, tmp_path: Path) -> None:
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    for _ in range(2):  # the second time they are ours
        done = run("explain", str(plan), "--html", str(page), "--timeline", str(trace))
        assert done.code == 0
    page.write_text("mine", encoding="utf-8")
    page.chmod(0o640)
    assert run("explain", str(plan), "--html", str(page)).code == BAD_INPUT
    assert run("explain", str(plan), "--html", str(page), "--force").code == 0
    assert "<html" in page.read_text(encoding="utf-8")
    assert stat.S_IMODE(page.stat().st_mode) == 0o640


def test_a_link_is_followed(tmp_path: Path) -> None:
    file, link, circle = tmp_path / "file.yaml", tmp_path / "link.yaml", tmp_path / "circle.yaml"
    link.symlink_to("file.yaml")
    circle.symlink_to("circle.yaml")
    write_text(link, "schema: 1\n")
    assert link.is_symlink()
    assert file.read_text(encoding="utf-8") == "schema: 1\n"
    with pytest.raises(ValueError, match="circle"):
        check_output("out", circle)


def test_standard_output_holds_the_document_alone(plan: Path) -> None:
    done = run("plan", *SMALL, "out=-")
    assert done.code == 0
    assert yaml.safe_load(done.out)["schema"] == 2
    assert "--tensor-model-parallel-size" in done.err
    done = run("explain", str(plan), "--html", "-")
    assert done.out.startswith("<!doctype html>")
    assert done.out.rstrip().endswith("</html>")
    done = run("explain", str(plan), "--html", "-", "--json")
    assert done.code == BAD_INPUT


def test_a_folder_of_somebody_else_is_no_sweep(tmp_path: Path) -> None:
    (tmp_path / "sweep.csv").write_text("mine", encoding="utf-8")
    sweep = ("plan", "-m", *SMALL, "train.global_batch_size=64,128", f"out={tmp_path}")
    done = run(*sweep)
    assert done.code == BAD_INPUT
    assert "no sweep was run in it" in done.err


def test_a_sweep_asks_before_it_runs_a_job(tmp_path: Path) -> None:
    mine = tmp_path / "global_batch_size=64.yaml"
    mine.write_text("mine", encoding="utf-8")
    sweep = ("plan", "-m", *SMALL, "train.global_batch_size=64,128", f"out={tmp_path}")
    done = run(*sweep)
    assert done.code == BAD_INPUT
    assert "nothing in it says that nest-megatron has written it" in done.err
    assert [path.name for path in (tmp_path / ".jobs").glob("[0-9a-f]*.json")] == []
    assert mine.read_text(encoding="utf-8") == "mine"
    assert run(*sweep, "--force").code == 0
    assert mine.read_text(encoding="utf-8").startswith("schema: ")


def test_pictures_and_pages_are_replaced_with_force(tmp_path: Path) -> None:
    mine = tmp_path / "layer-dense.svg"
    mine.write_text("mine", encoding="utf-8")
    with forcing(None), pytest.raises(ValueError, match="Name another file") as refused:
        check_output("--docs", mine, force=forced())
    assert "--force" not in str(refused.value)
    with forcing(False), pytest.raises(ValueError, match="add --force"):
        check_output("--docs", mine, force=forced())
    with forcing(True):
        check_output("--docs", mine, force=forced())


def forcing(value: bool | None) -> click.Context:
    """A command that runs, with ``--force`` given or not, or that lacks the option."""
    context = click.Context(click.Command("any"))
    if value is not None:
        context.meta["nest_megatron.force"] = value
    return context


def test_the_plan_of_a_launch_takes_no_script_s_place(tmp_path: Path, plan: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\n", encoding="utf-8")
    for named in (str(script), f"'{script}'"):
        with pytest.raises(ValueError, match="nothing in it says") as refused:
            plan_output(named)
        assert "--force" not in str(refused.value)
    with pytest.raises(ValueError, match="the command reads this file"):
        plan_output(str(plan), [str(plan)])
    assert plan_output(str(plan)) == plan
    assert plan_output("null") is None


@pytest.mark.parametrize(
    "text",
    [
        "schema: 1\nservices: [train]\n",
        "schema: public\n",
        "schema: 1\nfiles:\n- name: data.bin\n  checksum: 9e107d9d372bb6826bd81d3542a419d6\n",
    ],
)
def test_a_schema_alone_makes_no_file_ours(text: str, tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(text, encoding="utf-8")
    assert run("plan", *SMALL, f"out={mine}").code == BAD_INPUT
    assert mine.read_text(encoding="utf-8") == text


def test_plans_and_profiles_of_ours_are_replaced(plan: Path, tmp_path: Path) -> None:
    layers, network = tmp_path / "layers.yaml", tmp_path / "network.yaml"
    store.write(whole_profile(), layers)
    network.write_text(dump(profile_of([])), encoding="utf-8")
    for path in (plan, layers, network):
        check_output("out", path)


def test_a_name_that_another_setting_completes_is_checked_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    mine = tmp_path / "llama3_8b.yaml"
    mine.write_text("mine", encoding="utf-8")
    for command in ("plan", "estimate"):
        done = run(command, *SMALL, "out=${model.name}.yaml")
        assert done.code == BAD_INPUT
        assert "add --force" in done.err
        assert mine.read_text(encoding="utf-8") == "mine"
    assert run("plan", *SMALL, "out=${model.name}.yaml", "--force").code == 0


def test_a_pinned_plan_on_standard_output_is_no_file(plan: Path, tmp_path: Path) -> None:
    done = run("pin", str(plan), "--out", "-")
    assert done.code == 0
    assert done.err.startswith("Pinned to standard output: ")
    assert "nest.plan=FILE; any other is refused" in done.err
    key = tmp_path / "k.key"
    assert run("keygen", "--out", str(key), "--no-password").code == 0
    signed = run("pin", str(plan), "--out", "-", "--sign", str(key))
    assert signed.code == BAD_INPUT
    assert "--out - makes no file" in signed.err
    assert signed.out == ""


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("explain", ""), "PLAN.YAML"),
        (("calibrate", ""), "FILE.CSV"),
        (("audit", ""), "FILE"),
        (("plan", *SMALL, "--hosts", ""), "--hosts"),
        (("plan", *SMALL, "--config-dir", ""), "--config-dir"),
        (("whatif", "{plan}", "gpus=8,16", "--out", ""), "--out"),
        (("profile", *SMALL, "--for", ""), "--for"),
        (("keygen", "--out", ""), "--out"),
    ],
)
def test_an_empty_path_is_not_the_current_folder(
    words: tuple[str, ...],
    named: str,
    plan: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run(*(str(plan) if word == "{plan}" else word for word in words))
    assert done.code == BAD_INPUT
    assert done.err.startswith(f"error: {named} = '': it is empty")
    assert ("or leave it out" in done.err) == (words[0] not in ("explain", "keygen"))
    assert not [*tmp_path.iterdir()]


def test_of_two_plans_with_one_output_the_later_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "plan.yaml"

    def planned(request: Request, on_progress: Progress | None = None) -> object:
        out.write_text("schema: 2\nchecksum: 0123456789abcdef\n", encoding="utf-8")
        return find_plan(request, on_progress)

    monkeypatch.setattr("nest_megatron.api.jobs.find_plan", planned)
    done = run("plan", *SMALL, f"out={out}")
    assert done.code == BAD_INPUT
    assert "File exists" in done.err
    assert out.read_text(encoding="utf-8").endswith("0123456789abcdef\n")
    assert run("plan", *SMALL, f"out={out}").code == 0


def test_a_command_that_is_proposed_quotes_the_file(tmp_path: Path) -> None:
    out = tmp_path / "of ada.yaml"
    said = run("plan", *SMALL, f"out={out}").out + run("verify", str(out)).err
    said += run("plan", *SMALL, "--for-nodes", "1", f"out={tmp_path / 'a table.yaml'}").out
    said += run("pin", str(out), "--note", "x").out
    nemo = tmp_path / "of bob.yaml"
    assert run("plan", *SMALL, "target=nemo_2.7", f"out={nemo}").code == 0
    said += run("pin", str(nemo)).out
    words = "".join(said.split())
    named = {"explain": out, "pin": out, "nest.plan=": out, "run.plugins.plan=": nemo}
    for verb, name in named.items():
        assert f"{verb}'{name}'".replace(" ", "") in words
    assert f"pin'{tmp_path / 'a table.yaml'}'".replace(" ", "") in words


def test_what_is_no_plan_is_not_told_to_be_pinned(plan: Path, tmp_path: Path) -> None:
    other = tmp_path / "notes.txt"
    other.write_text("hello\n", encoding="utf-8")
    for path, fix in {plan: f"nest-megatron pin {plan}", other: "It is no plan"}.items():
        done = run("verify", str(path))
        assert (done.code, fix in done.err) == (10, True), done.err


def test_a_plan_that_cannot_be_written_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    done = run("plan", *SMALL, *LIMITS, f"out={tmp_path / 'plan.yaml'}")
    assert done.code == BAD_INPUT
    assert "--tensor-model-parallel-size" in done.out
    assert "Name a place where there is space" in done.err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_to_make_is_quoted(tmp_path: Path) -> None:
    done = run("plan", *SMALL, f"out='{tmp_path}/a b/plan.yaml'")
    assert f"mkdir -p '{tmp_path}/a b'" in done.err


def test_a_text_on_standard_output_is_called_no_file(tmp_path: Path) -> None:
    racks = tmp_path / "racks.txt"
    racks.write_text("n1 a\nn2 a\n")
    listed = ("--hosts", str(racks))
    commands = (
        ("cluster", "discover", *listed, "--cluster", "dgx_h100", "--out"),
        ("cluster", "discover", *listed, "--cluster", "dgx_h100", "--hosts-out"),
        ("network", "import", str(NODE), "--cluster", "dgx_h100", "--out"),
        ("network", "import", str(NODE), "--profile"),
        ("nest", "solve", str(LLAMA2), "--out"),
        ("plan", *SMALL[:2], "train.global_batch_size=64", *LIMITS, *listed, "--write-hostfile"),
    )
    for words in commands:
        done = run(*words, "-")
        assert done.code == 0
        assert done.out
        assert not re.search(r"Wrote -|=\./-|=- | - ", done.out + done.err), words
