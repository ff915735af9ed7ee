"""The boot line: nothing without ``+nest``, everything with it, never a broken interpreter."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

import pytest

from nest_megatron import boot
from tests.cli.runs import ROOT, environment

LINE = (ROOT / "nest_megatron" / "boot.pth").read_text(encoding="utf-8")
SEEN = "import sys; print('nest_megatron.boot' in sys.modules, sys.argv[1:])"


def run_line(line: str, code: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the line as ``site`` does, twice as in a virtual environment, then some code."""
    twice = f"exec({line!r})\n" * 2
    return subprocess.run(
        [sys.executable, "-c", twice + code, *words],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )


def test_the_line_is_one_import_line() -> None:
    """``site`` runs only lines that begin with ``import``."""
    assert LINE.startswith("import ")
    assert LINE.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--bf16",),
        ("nest=auto",),
        ("x+nest=auto",),
        ("nest.cluster=dgx_h100",),
        ("+nest.dry_run=true", "++nest.plan=x"),
        ("nest.py",),
        ("+nest",),
    ],
)
def test_nothing_is_loaded_without_the_word(words: tuple[str, ...]) -> None:
    done = run_line(LINE, SEEN, *words)
    assert done.stdout.strip() == f"False {list(words)}"
    assert not done.stderr


@pytest.mark.parametrize("word", ["+nest=auto", "++nest=pinned"])
def test_the_word_loads_the_boot_and_stays(word: str) -> None:
    done = run_line(LINE, SEEN, "--bf16", word)
    assert done.stdout.strip() == f"True {['--bf16', word]}"


def test_the_line_is_installed_beside_the_package() -> None:
    """Editable installations included; without it only the runner plans."""
    site = Path(sysconfig.get_path("purelib"))
    if not list(site.glob("nest_megatron-*.dist-info")):
        pytest.skip("nest-megatron is not installed in this environment, only imported")
    assert (site / "nest_megatron.pth").read_text(encoding="utf-8") == LINE


@pytest.mark.parametrize(("variable", "is_there"), [("0", True), ("1", False)])
def test_an_installation_may_leave_the_line_out(
    tmp_path: Path, variable: str, is_there: bool
) -> None:
    words = ["build_py", "--build-lib", str(tmp_path / "lib")]
    info = ["egg_info", "--egg-base", str(tmp_path)]
    subprocess.run(
        [sys.executable, "setup.py", "-q", *info, *words],
        cwd=ROOT,
        env=environment(NEST_MEGATRON_NO_BOOT=variable),
        capture_output=True,
        check=True,
    )
    assert (tmp_path / "lib" / "nest_megatron.pth").exists() == is_there
    assert (tmp_path / "lib" / "nest_megatron" / "boot.py").exists()


def test_installed_twice_it_watches_once() -> None:
    count = "import sys; print([type(f).__name__ for f in sys.meta_path].count('MegatronWatcher'))"
    assert run_line(LINE, count, "+nest=auto").stdout.strip() == "1"


def test_a_broken_package_breaks_no_process_without_the_word(tmp_path: Path) -> None:
    broken = LINE.replace("nest_megatron.boot", "nest_that_is_not_there.boot")
    done = run_line(broken, "print('fine')", "--bf16")
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")


def test_the_line_and_the_boot_look_for_the_same_words() -> None:
    assert str(boot.TOKENS).replace("'", '"') in LINE


def test_handlers_exist() -> None:
    import importlib

    module = importlib.import_module(boot.HANDLERS)
    assert all(callable(getattr(module, n)) for n in (*boot.BEFORE.values(), *boot.AFTER.values()))


FAKE = {
    "megatron/training/__init__.py": "import megatron.training.arguments",
    "megatron/training/arguments.py": "def validate_args(args, defaults={}): pass",
    "megatron/core/__init__.py": "__version__ = '0.16.1'",
    "megatron/core/parallel_state.py": "def initialize_model_parallel(): print('groups made')",
}


def fake_megatron(folder: Path, **changes: str) -> Path:
    """A package with Megatron's names; a file's text may be changed."""
    for name, text in {**FAKE, **changes}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def run_script(folder: Path, code: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a training script through the runner, beside a fake Megatron."""
    script = folder / "pretrain_gpt.py"
    script.write_text(textwrap.dedent(code), encoding="utf-8")
    return subprocess.run(
        [sys.executable, "-m", "nest_megatron", str(script), *words],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )


SCRIPT = """
    import sys
    import megatron.training
    print(sys.argv[1:])
    print(megatron.training.arguments.validate_args.__name__)
    print(hasattr(megatron.training.arguments.validate_args, "__wrapped__"))
"""


def test_our_words_leave_the_command_line_when_megatron_loads(tmp_path: Path) -> None:
    words = ("--bf16", "+nest=auto", "nest.cluster=dgx_h100", "--swiglu", "nest.free=[all]")
    done = run_script(fake_megatron(tmp_path), SCRIPT, *words)
    assert done.stdout.splitlines() == ["['--bf16', '--swiglu']", "validate_args", "True"]


def test_the_runner_plans_without_being_told(tmp_path: Path) -> None:
    done = run_script(fake_megatron(tmp_path), SCRIPT, "--bf16")
    assert done.stdout.splitlines() == ["['--bf16']", "validate_args", "True"]


def test_off_does_nothing(tmp_path: Path) -> None:
    code = (
        SCRIPT + "\n    import megatron.core.parallel_state as p; p.initialize_model_parallel()\n"
    )
    done = run_script(fake_megatron(tmp_path), code, "--bf16", "+nest=off", "nest.watch=3")
    lines = ["['--bf16']", "validate_args", "False", "groups made"]
    assert done.stdout.splitlines() == lines, done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("+nest=atuo",), "Did you mean auto?"),
        (("+nest=auto", "nest.clusters=dgx_h100"), "Did you mean nest.cluster"),
        (("+nest=auto", "nest.search.max_second=8"), "Did you mean nest.search.max_seconds"),
        (("+nest=auto", "nest.watch=many"), "nest.watch.steps = many"),
        (("+nest=auto", "nest.model=llama3_8b"), "the training job's own"),
        (("+nest=auto", "--yaml-cfg", "x.yaml"), "--yaml-cfg"),
        (("+nest=auto", "nest.ranks=shuffled"), "nest.ranks"),
        (("+nest=auto", "nest.port=99999"), "nest.port = 99999: a port is 1 to 65535"),
        (("+nest=auto", "nest.plan=pinned.yaml"), "+nest=pinned"),
        (("+nest=pinned", "nest.plan=pinned.yaml", "nest.alternative=1"), "nest.alternative = 1"),
    ],
)
def test_wrong_words_end_the_job_before_it_starts(
    tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    done = run_script(fake_megatron(tmp_path), SCRIPT, "--bf16", *words)
    assert done.returncode == 2
    assert said in done.stderr
    assert not done.stdout


def test_a_megatron_without_validate_args_is_refused(tmp_path: Path) -> None:
    moved = {"megatron/training/arguments.py": "def check_args(args): pass"}
    done = run_script(fake_megatron(tmp_path, **moved), SCRIPT, "+nest=auto")
    assert done.returncode == 2
    assert "0.19, 0.20" in done.stderr


@pytest.mark.parametrize("loads", ["import megatron.training", "pass"])
def test_groups_are_not_made_without_a_plan(tmp_path: Path, loads: str) -> None:
    """A Megatron that validates elsewhere, or a program that is none: it must not just train."""
    code = f"""
        {loads}
        import megatron.core.parallel_state as state
        state.initialize_model_parallel()
    """
    done = run_script(fake_megatron(tmp_path), code, "+nest=auto")
    assert done.returncode == 2
    assert "nothing was planned" in done.stderr
    assert "groups made" not in done.stdout


def test_a_missing_script_is_named(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nest_megatron", str(tmp_path / "none.py")],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )
    assert done.returncode == 2
    assert "there is no such file" in done.stderr


@pytest.mark.parametrize("flag", ["-P", "-I"])
def test_the_runner_keeps_to_python_s_safe_path(tmp_path: Path, flag: str) -> None:
    """With it, Python itself does not look beside the script either."""
    (tmp_path / "beside.py").write_text("", encoding="utf-8")
    script = tmp_path / "pretrain_gpt.py"
    script.write_text("import beside", encoding="utf-8")
    plain, ours = (
        subprocess.run(
            [sys.executable, flag, *words, str(script)],
            capture_output=True,
            text=True,
            env=environment(),
            cwd=tmp_path,
            check=False,
        )
        for words in ((), ("-c", RUNNER))
    )
    assert plain.returncode == ours.returncode == 1
    assert "No module named 'beside'" in ours.stderr


RUNNER = f"""
import sys
sys.path.append({str(ROOT)!r})
from nest_megatron.integrations.megatron_lm.runner import run_script
run_script(sys.argv[1:])
"""
