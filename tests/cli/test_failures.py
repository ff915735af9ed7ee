"""Whatever goes wrong, a command ends with a message and a documented code, never a traceback."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nest_megatron import cli
from nest_megatron.errors import BAD_INPUT, INTERRUPTED, OUR_FAULT
from tests.cli.runs import SMALL, environment, run, spawn

BY_PATH = ("plan", "cluster=dgx_h100", "cluster.num_gpus=8")
JOB = (
    "pretrain_gpt.py --num-layers 8 --hidden-size 1024 --num-attention-heads 8 --seq-length 1024 "
    "--max-position-embeddings 1024 --vocab-size 32000 --bf16 --global-batch-size 64 "
)
NINE = "abcdefghijkl"


def bomb(merge: bool) -> str:
    """Aliases of aliases: 400 bytes that stand for 9**12 values."""
    lines = ["a: &a {k: v}" if merge else "a: &a [x, x, x, x, x, x, x, x, x]"]
    for before, name in itertools.pairwise(NINE):
        nine = ", ".join([f"*{before}"] * 9)
        lines.append(f"{name}: &{name} " + (f"{{<<: [{nine}]}}" if merge else f"[{nine}]"))
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((*BY_PATH, "model=llama3_8b", "memory.margin=$(id)"), "cannot be read"),
        ((*BY_PATH, "model=llama3_8b", "model.num_layers=18446744073709551616"), "at most 2,000"),
        ((*BY_PATH, "model=llama3_8b", "model.num_layers=1000000000"), "at most 2,000"),
        ((*BY_PATH, "model=mixtral_8x7b", "model.num_layers=1000000000"), "at most 2,000"),
        ((*BY_PATH, "model=llama3_8b", "model.vocab_size=1" + "0" * 30), "at most 2,147,483,647"),
        ((*BY_PATH, "model=llama3_8b", "train.seq_length=" + "[" * 5000), "nested"),
        ((*BY_PATH, "model=llama3_8b", "train.seq_length=" + "1" * 50_000), "characters"),
        (("plan", "-m", *SMALL, "train.seq_length=range(1,1000000000)"), "100,000 jobs"),
        ((*BY_PATH, "--from", JOB + "--tensor-model-parallel-size 0"), "at least 1"),
        ((*BY_PATH, "--from", JOB + "--pipeline-model-parallel-size -2"), "at least 1"),
        ((*BY_PATH, "model=/dev/zero"), "a device, not a regular file"),
        (("explain", "/dev/zero"), "a device, not a regular file"),
        (("validate", "/dev/zero"), "a device, not a regular file"),
        ((*BY_PATH, "model=llama3_8b", "out=~nobody-here/x.yaml"), "no user nobody-here"),
        ((*BY_PATH, "model=~nobody-here/x.yaml"), "no user nobody-here"),
        (("plan", "model=llama3_8b", "cluster=~nobody-here/x.yaml"), "no user nobody-here"),
        (("plan", *SMALL, "--config-dir", "~nobody-here/x"), "no user nobody-here"),
        (("plan", *SMALL, "train.sequence_lengths='~nobody-here/x'"), "no user nobody-here"),
        (("plan", "-m", *SMALL, "out=~nobody-here/x"), "no user nobody-here"),
        (
            (
                *BY_PATH,
                "--from",
                JOB + "--tokenizer-type GPT2BPETokenizer --vocab-file ~nobody-here/x",
            ),
            "no user nobody-here",
        ),
    ],
)
def test_impossible_input_is_named(arguments: tuple[str, ...], words: str) -> None:
    done = run(*arguments)
    assert done.code == BAD_INPUT
    assert words in done.err
    assert len(done.err.splitlines()) == 2


FILES = {
    "an interpolation": ("name: ${}\nnum_layers: 8\n", "${}"),
    "a null key": ("? \n: 3\nname: x\n", "key"),
    "a number as a key": ("3: 3\nname: x\n", "no text"),
    "defaults that are no list": ("defaults: 3\nname: x\n", "defaults must be a list"),
    "an alias bomb": (bomb(merge=False), "aliases written out"),
    "a bomb of merged keys": (bomb(merge=True), "aliases written out"),
    "an alias to itself": ("a: &a [*a]\n", "refers to what it is in"),
    "deep lists": ("a: " + "[" * 200_000, "nested"),
    "deep blocks": ("- " * 100_000, "nested"),
    "a long line": ("a: " + "x" * 2**19, "larger than"),
    "a number in base 60": ("a: " + "1:" * 15_000 + "1", ""),
}


@pytest.mark.parametrize("case", FILES)
@pytest.mark.parametrize("group", ["model", "cluster"])
def test_a_hostile_description_is_named(case: str, group: str, tmp_path: Path) -> None:
    text, words = FILES[case]
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    other = {"model": "cluster=dgx_h100", "cluster": "model=llama3_8b"}[group]
    done = run("plan", other, f"{group}={path}")
    assert done.code == BAD_INPUT
    assert words in done.err
    (tmp_path / group).mkdir()
    path.rename(tmp_path / group / "mine.yaml")
    done = run("plan", other, f"{group}=mine", "--config-dir", str(tmp_path))
    assert done.code == BAD_INPUT
    assert words in done.err


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 200_000, '"\\' * 100_000, "9" * 100_000])
def test_hostile_json_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text, encoding="utf-8")
    assert run(*BY_PATH, f"model={path}").code == BAD_INPUT
    assert run("nest", "solve", str(path)).code == BAD_INPUT


def test_a_plan_file_nested_200_000_deep_is_named(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("schema: 1\nmodel: " + "[" * 200_000, encoding="utf-8")
    done = run("explain", str(path))
    assert done.code == BAD_INPUT
    assert "nested" in done.err


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    for arguments in ((*BY_PATH, f"model={pipe}"), ("explain", str(pipe)), ("pin", str(pipe))):
        done = run(*arguments)
        assert done.code == BAD_INPUT
        assert "a pipe, not a regular file" in done.err


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    assert run("plan", *SMALL, f"out={plan}").code == 0
    plan.write_bytes(b"\xef\xbb\xbf" + plan.read_bytes())
    assert run("explain", str(plan)).code == 0


def process(
    *arguments: str, out: int = subprocess.PIPE, **more: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "nest_megatron", *arguments],
        stdout=out,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**more),
        check=False,
        timeout=300,
    )


def test_a_full_disk_behind_standard_output() -> None:
    with Path("/dev/full").open("w") as full:
        done = process("clusters", out=full.fileno())
    assert done.returncode == BAD_INPUT
    assert done.stderr.startswith("error: standard output: it cannot be written to: No space left")


def test_standard_input_that_is_closed_holds_nothing(tmp_path: Path) -> None:
    command = 'exec "$0" -m nest_megatron "$@" <&-'
    for words in (("plan", "--from", "-"), ("keygen", "--out", str(tmp_path / "a.key"))):
        done = subprocess.run(
            ["bash", "-c", command, sys.executable, *words],
            capture_output=True,
            text=True,
            env=environment(),
            check=False,
        )
        assert (done.returncode, "error: " in done.stderr) == (BAD_INPUT, True)
        assert "''" in done.stderr


def test_standard_error_that_takes_nothing_changes_no_exit_code() -> None:
    command = [sys.executable, "-m", "nest_megatron"]
    for words in ((), ("plan", "--foo"), ("models", "no_such")):
        with Path("/dev/full").open("w") as full:
            done = subprocess.run([*command, *words], stderr=full, env=environment(), check=False)
        assert done.returncode == BAD_INPUT


@pytest.mark.parametrize("arguments", [("models", "--json"), ("models", "no_such", "--json")])
def test_json_that_cannot_be_written_is_said_on_standard_error(arguments: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        done = process(*arguments, out=full.fileno())
    assert done.returncode == BAD_INPUT
    said = "model" if "no_such" in arguments else "standard output: it cannot be written to"
    assert done.stderr.startswith(f"error: {said}")


def test_a_terminal_without_unicode() -> None:
    done = process("models", "llama3_8b", PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert done.stdout.isascii()
    old = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = process("plan", *SMALL, "--full", **old)
    assert done.returncode == 0
    assert done.stdout.isascii()
    assert "#####" in done.stdout


@pytest.mark.parametrize("blocked", ["a file", "no permission"])
def test_a_cache_that_cannot_be_used_is_gone_without(
    blocked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    if blocked == "a file":
        cache.write_text("")
    else:
        original = Path.is_dir

        def is_dir(path: Path) -> bool:
            if str(cache) in str(path):
                raise PermissionError(13, "Permission denied", str(path))
            return original(path)

        monkeypatch.setattr(Path, "is_dir", is_dir)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.delenv("NEST_MEGATRON_PROFILES", raising=False)
    done = run("plan", *SMALL)
    assert done.code == 0
    assert "Traceback" not in done.err


def test_a_fault_of_ours_is_said_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> int:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("nest_megatron.cli.planning.run_plan", broken)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    done = run("plan", *SMALL)
    assert done.code == OUR_FAULT
    assert "ZeroDivisionError: division by zero" in done.err
    assert "Traceback" not in done.err
    (kept,) = tmp_path.rglob("fault-*.txt")
    assert str(kept) in done.err
    assert "Traceback" in kept.read_text()
    assert "plan model=llama3_8b" in kept.read_text()
    monkeypatch.setenv("NEST_MEGATRON_DEBUG", "1")
    assert "Traceback" in run("plan", *SMALL).err


@pytest.mark.parametrize("variable", ["DEFAULTS", "HISTORY", "PROFILES"])
def test_a_variable_that_names_the_home_of_nobody(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"NEST_MEGATRON_{variable}", "~nobody-here/x")
    done = run("history") if variable == "HISTORY" else run("estimate", *SMALL)
    assert (done.code, f"NEST_MEGATRON_{variable} = ~nobody-here/x" in done.err) == (
        BAD_INPUT,
        True,
    )


@pytest.mark.usefixtures("homeless")
def test_a_user_without_a_home_plans_and_is_told_of_faults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HISTORY", "PROFILES", "SITES"):
        monkeypatch.delenv(f"NEST_MEGATRON_{name}", raising=False)
    assert run("estimate", *SMALL, "parallel.tensor_model_parallel_size=8").code == 0
    assert run("history").code == 0

    def broken(_: object) -> int:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("nest_megatron.cli.planning.run_plan", broken)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    done = run("plan", *SMALL)
    assert done.code == OUR_FAULT
    (kept,) = tmp_path.iterdir()
    assert str(kept) in done.err


def test_a_fault_that_cannot_be_said_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> int:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("nest_megatron.cli.planning.run_plan", broken)
    monkeypatch.setattr("nest_megatron.report.failure.report", broken)
    assert run("plan", *SMALL).code == OUR_FAULT


@pytest.mark.parametrize("arguments", [None, ["models"]])
def test_time_of_a_process_that_calls_the_command_line_is_no_search_time(
    arguments: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[float] = []
    monkeypatch.setattr(time, "process_time", lambda: 1e6)
    monkeypatch.setattr(sys, "argv", ["notebook", "models"])
    monkeypatch.setattr("nest_megatron.cli._run", lambda _, begun_s: begun.append(begun_s) or 0)
    before = time.monotonic()
    assert cli.main(arguments) == 0
    assert begun[0] >= before
    cli.run_process()  # the command of a process: its start was its own
    assert begun[1] < before


def test_an_interrupt_during_imports_is_no_traceback() -> None:
    code = (
        "import importlib.abc, os, signal, sys\n"
        "class Finder(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'nest_megatron.cli.commands':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from nest_megatron.cli import main\n"
        "sys.exit(main(['models']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
        timeout=300,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert (done.returncode, done.stdout) == (INTERRUPTED, "")
    assert "Traceback" not in done.stderr


def test_an_interrupt_while_a_class_is_made_has_the_same_code(tmp_path: Path) -> None:
    """CPython remembers one that leaves ``exec``, as dataclasses call it, to the end of ``-m``."""
    (tmp_path / "interrupted.py").write_text(
        "import sys, nest_megatron.cli as cli\n"
        "cli._run = lambda *_: exec('raise KeyboardInterrupt')\n"
        "sys.exit(cli.main(['models']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "interrupted"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )
    assert (done.returncode, done.stdout) == (INTERRUPTED, "")


def test_a_reader_that_goes_away() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "nest_megatron", "models"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.close()
        time.sleep(0)
        said = child.stderr.read()
        assert child.wait(timeout=300) == 0
    assert said == b""


def test_a_file_that_names_itself_is_read_once(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    text = "defaults:\n" + 4 * "- cluster: a\n"
    (tmp_path / "cluster" / "a.yaml").write_text(text, encoding="utf-8")
    words = ("plan", "model=llama3_8b", "cluster=a", "--config-dir", str(tmp_path))
    done = spawn(*words, timeout_s=600)
    assert done.code == BAD_INPUT
    assert "a description includes entries of" in done.err


@pytest.mark.parametrize("package", ["rich", "platformdirs", "omegaconf"])
def test_a_package_that_is_not_installed_is_named(package: str) -> None:
    code = (
        f"import sys; sys.modules[{package!r}] = None; from nest_megatron.cli import main; "
        f"sys.exit(main(['plan', *{SMALL!r}]))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert found.returncode == BAD_INPUT
    assert package in found.stderr
    assert "pip install nest-megatron" in found.stderr
