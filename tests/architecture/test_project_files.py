"""What keeps the project together: workflows, scripts, owners, the version and its changelog."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from nest_megatron.version import __version__
from tests.architecture.imports import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
SCRIPTS = [*(ROOT / ".ci").iterdir(), ROOT / "tests" / "run.sh"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def jobs_of(path: Path) -> dict[str, Any]:
    jobs: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    return jobs


def steps() -> list[tuple[str, dict[str, Any]]]:
    return [
        (f"{path.name} {name}", step)
        for path in WORKFLOWS
        for name, job in jobs_of(path).items()
        for step in job.get("steps", ())
    ]


def test_workflows_are_what_github_reads() -> None:
    pytest.importorskip("check_jsonschema")
    command = ["check-jsonschema", "--builtin-schema", "vendor.github-workflows", *WORKFLOWS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_tests_run_on_every_python_that_is_promised() -> None:
    tested = jobs_of(ROOT / ".github/workflows/checks.yml")["tests"]["strategy"]["matrix"]["python"]
    head = "Programming Language :: Python :: "
    promised = [c.removeprefix(head) for c in PROJECT["project"]["classifiers"] if head in c]
    assert tested == promised
    built = PROJECT["tool"]["cibuildwheel"]["build"]
    assert built == [f"cp{version.replace('.', '')}-*" for version in promised]


@pytest.mark.parametrize(("where", "step"), steps(), ids=lambda each: str(each)[:40])
def test_a_step_names_what_is_there(where: str, step: dict[str, Any]) -> None:
    for name in re.findall(r"(?:bash|python) ((?:\.ci|tests|docs)/[\w./]+)", step.get("run", "")):
        assert (ROOT / name).is_file(), f"{where}: {name}"
    action = step.get("uses", "")
    assert not action or "@" in action or ":" in action, f"{where}: {action} has no version"
    checked = subprocess.run(
        ["bash", "-n"], input=step.get("run", ""), text=True, capture_output=True, check=False
    )
    assert checked.returncode == 0, checked.stderr


def test_nothing_that_is_committed_is_a_link() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--stage"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a checkout of git")
    links = [line for line in listed.stdout.splitlines() if line.startswith("120000")]
    assert not links, "a link to this machine's folders breaks every other checkout"


def test_jobs_end() -> None:
    for path in WORKFLOWS:
        for name, job in jobs_of(path).items():
            assert "timeout-minutes" in job or "uses" in job, f"{path.name} {name}"


def test_scripts_are_shell() -> None:
    for path in SCRIPTS:
        if path.is_file() and path.read_text(encoding="utf-8").startswith("#!/usr/bin/env bash"):
            assert subprocess.run(["bash", "-n", path], check=False).returncode == 0, path


def test_owners_own_something() -> None:
    lines = (ROOT / ".github" / "CODEOWNERS").read_text(encoding="utf-8").splitlines()
    for line in lines:
        if line.startswith("/"):
            assert (ROOT / line.split()[0].strip("/")).exists(), line


def test_the_changelog_has_the_version() -> None:
    script = ROOT / ".ci" / "release_notes"
    notes = subprocess.run(["bash", script, __version__], capture_output=True, check=False)
    assert notes.returncode == 0, notes.stderr
    assert (
        subprocess.run(["bash", script, "9.9.9"], capture_output=True, check=False).returncode == 1
    )


def test_the_markers_that_are_left_out_are_run_elsewhere() -> None:
    assert '-m "not slow"' in (ROOT / "tests" / "run.sh").read_text(encoding="utf-8")
    run = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "bash tests/run.sh" in run
    assert "-m slow" in run
    nightly = jobs_of(ROOT / ".github/workflows/nightly.yml")["everything"]["steps"]
    assert nightly[-1]["run"] == "bash .ci/run --all"
