"""Without the libraries of the extras: what works, and the error that names the extra."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from nest_megatron.errors import BAD_INPUT, OK
from tests.cli.runs import LIMITS, ROOT, SMALL, Run, environment
from tests.cli.test_network import NODE
from tests.cli.test_validate import RUN, table

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
#: Modules of the extras that a plan does without.
MODULES = ("matplotlib", "minisign", "nicegui", "numpy", "pyarrow", "scipy")
COMMAND = f"""
import sys
sys.modules |= dict.fromkeys({MODULES!r})
from nest_megatron.cli import main
sys.exit(main(sys.argv[1:]))
"""


def bare(folder: Path, *words: str, **variables: str) -> Run:
    """Run a command where none of the extras is installed."""
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *words],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment(**variables),
        check=False,
        timeout=600,
    )
    return Run(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a plan and a table of measured runs."""
    found = tmp_path_factory.mktemp("bare")
    planned = bare(found, "plan", *SMALL, *LIMITS, "out=plan.yaml")
    assert planned.code == OK, planned.err
    table(found / "runs.csv", RUN)
    return found


@pytest.mark.parametrize(
    "words",
    [
        ("models",),
        ("estimate", *SMALL, "parallel.tensor_model_parallel_size=8"),
        ("explain", "plan.yaml", "--html", "plan.html", "--timeline", "trace.json"),
        ("extract", *SMALL, "--closed-form"),
        ("compare", *SMALL, *LIMITS, "planners=[manual]", "--chart", "planners.html"),
        ("validate", "runs.csv"),
    ],
    ids=lambda words: words[0],
)
def test_what_works_without_any_extra(words: tuple[str, ...], folder: Path) -> None:
    done = bare(folder, *words)
    assert done.code == OK, done.err


def test_the_page_of_a_plan_has_its_pictures(folder: Path) -> None:
    assert bare(folder, "explain", "plan.yaml", "--html", "page.html").code == OK
    assert "<svg" in (folder / "page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ("pictures", ("explain", "plan.yaml", "--timeline", "x.svg", "--html", "x.html")),
        ("pictures", ("compare", *SMALL, "--chart", "x.svg")),
        ("pictures", ("paper", "figure5", "--chart", "x.svg")),
        ("pictures", ("extract", *SMALL, "--closed-form", "--draw", "x.svg")),
        ("pictures", ("validate", "runs.csv", "--docs", ".")),
        ("calibrate", ("calibrate", "runs.csv")),
        ("calibrate", ("network", "import", NODE)),
        ("sign", ("keygen", "--out", "x.key", "--no-password")),
        ("sign", ("verify", "plan.yaml", "--key", "RW" + 54 * "A")),
        ("app", ("app",)),
    ],
    ids=lambda each: each if isinstance(each, str) else each[0],
)
def test_the_extra_is_named(extra: str, words: tuple[str, ...], folder: Path) -> None:
    before = sorted(folder.iterdir())
    done = bare(folder, *words)
    assert (done.code, done.out) == (BAD_INPUT, "")
    assert f"pip install 'nest-megatron[{extra}]'" in done.err
    assert "Traceback" not in done.err
    assert sorted(folder.iterdir()) == before


def test_ranks_measure_no_network_that_cannot_be_fitted(folder: Path) -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    done = bare(folder, "profile", *SMALL, RANK="0", WORLD_SIZE="2")
    assert (done.code, done.out) == (BAD_INPUT, "")
    assert "pip install 'nest-megatron[calibrate]'" in done.err
    assert "--no-collectives times the layers alone" in done.err


def test_a_sweep_names_the_tables_that_it_leaves_out(folder: Path) -> None:
    done = bare(folder, "plan", "-m", *SMALL[:-1], "cluster.num_gpus=8,16", *LIMITS, "out=sweep")
    assert done.code == OK
    for name, package in (("sweep.parquet", "pyarrow"), ("sweep.svg", "matplotlib")):
        assert f"{name} needs {package}: pip install 'nest-megatron[sweep]'" in done.err
    assert (folder / "sweep" / "sweep.csv").exists()
    assert not (folder / "sweep" / "sweep.svg").exists()


def test_extras_that_errors_name_are_there() -> None:
    named = set()
    for path in (ROOT / "nest_megatron").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        named |= set(re.findall(r"install_command\(['\"](\w+)['\"]\)", text))
        named |= set(re.findall(r"require_package\(\s*[\w\"]+,\s*\"(\w+)\"", text))
    assert {"app", "calibrate", "megatron", "pictures", "sign", "sweep"} <= named <= EXTRAS.keys()


def test_the_tests_install_what_the_commands_need() -> None:
    for extra in ("calibrate", "pictures", "sign"):
        assert set(EXTRAS[extra]) <= set(EXTRAS["test"])


def test_an_installation_without_extras_is_small() -> None:
    found: set[str] = set()
    left = [Requirement(each) for each in PROJECT["dependencies"]]
    while left:
        wanted = left.pop()
        name = canonicalize_name(wanted.name)
        if name in found or not (wanted.marker is None or wanted.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        left += map(Requirement, importlib.metadata.requires(name) or ())
    assert not found & {"matplotlib", "numpy", "scipy", "torch"}
    assert len(found) < 20


def test_a_library_that_is_broken_is_no_fault_of_ours(folder: Path, tmp_path: Path) -> None:
    """A plan needs none of them, a sweep does without, and a picture says what does not load."""
    for name in ("matplotlib", "pyarrow"):
        package = tmp_path / name
        package.mkdir()
        text = 'raise ImportError("multiarray failed to import")\n'
        (package / "__init__.py").write_text(text, encoding="utf-8")
    start = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from nest_megatron.cli import main"

    def beside(*words: str) -> Run:
        done = subprocess.run(
            [sys.executable, "-c", f"{start}; sys.exit(main(sys.argv[1:]))", *words],
            capture_output=True,
            text=True,
            cwd=folder,
            env=environment(),
            check=False,
        )
        return Run(done.returncode, done.stdout, done.stderr)

    drawn = beside("explain", "plan.yaml", "--timeline", "timeline.png")
    assert drawn.code == BAD_INPUT
    assert "multiarray failed to import. `pip install nest-megatron`" in drawn.err
    swept = beside("plan", "-m", *SMALL, "train.global_batch_size=8,16", "out=of_broken")
    assert swept.code == OK
    for name in ("sweep.parquet needs pyarrow", "sweep.svg needs matplotlib"):
        assert name in swept.err
    assert (folder / "of_broken" / "sweep.csv").is_file()
