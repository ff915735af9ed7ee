"""Plans, printed commands, arguments of launches and errors are what they were, to the digit."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import freeze

#: Planned in the default run; jobs of the other clusters, and of more GPUs, take minutes.
CLUSTER, MAX_GPUS = "gb200_nvl72", 64
digests = functools.cache(freeze.read)


def is_slow(name: str) -> bool:
    """Whether a row waits for the run at night."""
    if name not in freeze.JOBS:
        return False
    recipe, cluster = freeze.JOBS[name]
    return cluster != CLUSTER or recipe.job.num_gpus[cluster] > MAX_GPUS


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if is_slow(name) else ())
        for name in freeze.names()
    ],
)
def test_nothing_has_changed(name: str) -> None:
    digest, text = freeze.judge(name)
    said = f"{text}\nWhere this is meant: python -m tests.freeze --write"
    assert digest == digests().get(name), said


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["0", "3"])
def test_no_seed_of_hashes_changes_a_search(seed: str) -> None:
    """This job's counts depended on the order in which a set was read."""
    job = "jobs megatron_bridge nemotron_3_nano dgx_h100"
    done = subprocess.run(
        [sys.executable, "-m", "tests.freeze", "--only", job],
        cwd=freeze.ROOT,
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_every_row_is_of_something() -> None:
    assert list(digests()) == freeze.names()


def test_kinds_are_covered() -> None:
    kinds = [name.partition(" ")[0] for name in freeze.names()]
    assert kinds.count(freeze.ERRORS) >= 100
    assert kinds.count(freeze.COMMANDS) >= 40
    assert kinds.count(freeze.NAMESPACES) >= 10
    errors = [row for name, row in digests().items() if name.startswith(freeze.ERRORS)]
    assert {row.exit_code for row in errors}.isdisjoint({"0", "70"})


def test_what_differs_from_run_to_run_is_masked() -> None:
    text = "/x/plan.yaml of 2026-11-27T06:45:51+00:00, in 0.5 s with the kernel; 0123456789abcdef"
    masked = freeze.masked(text, Path("/x"))
    assert masked == "FOLDER/plan.yaml of DATE, in SECONDS with the kernel; HASH"
