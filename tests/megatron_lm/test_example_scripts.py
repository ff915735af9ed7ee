"""The shell scripts of Megatron-LM's ``examples``: what they launch, as bash itself has it.

Set ``MEGATRON_LM_HOME`` to a Megatron-LM checkout (core_v0.16.1 or main at 0.20). What stands for
programs in the comparison writes its words down; ``PATH`` holds nothing else.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from nest_megatron.errors import UserInputError
from nest_megatron.integrations.dry_run import RecordedLaunch, script_launch
from tests.integrations.test_dry_run import BASH, run_by_bash
from tests.megatron_lm.training import HOME

pytestmark = [
    pytest.mark.megatron_lm,
    pytest.mark.skipif(not HOME, reason="MEGATRON_LM_HOME is not set to a Megatron-LM checkout"),
    pytest.mark.skipif(BASH is None, reason="bash is not installed"),
]
EXAMPLES = Path(HOME or "/nowhere", "examples")
#: Words behind the name of a script that asks for them.
ARGUMENTS = tuple(f"/given/{n}" for n in range(1, 9))
#: Examples that train and are read in both releases.
READ = ("bert", "gpt3", "llama", "mixtral", "t5", "mamba", "multimodal")


def scripts() -> list[str]:
    return sorted(str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.sh"))


def without_numbers(words: list[str]) -> list[str]:
    """Words of which some hold a random seed."""
    return [re.sub(r"\d+", "0", word) for word in words]


def launch_of(name: str, *args: str) -> RecordedLaunch | str:
    """A script's launch, or why there is none."""
    try:
        return script_launch(["bash", str(EXAMPLES / name), *args])
    except UserInputError as error:
        return str(error)


@pytest.fixture(autouse=True)
def _in_the_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "environ", {"HOME": str(tmp_path), "PATH": os.environ["PATH"]})
    monkeypatch.chdir(HOME)


@pytest.mark.parametrize("name", scripts())
def test_the_launch_is_the_one_that_bash_would_start(name: str, tmp_path: Path) -> None:
    found = launch_of(name, *ARGUMENTS)
    if isinstance(found, str):
        assert "launches no" in found or "jobs, and one is planned" in found
        return
    if found.header or "modelopt" in name:  # plain bash reads no batch script, nor their settings
        return
    theirs = run_by_bash(EXAMPLES / name, ARGUMENTS, tmp_path, cwd=Path(HOME))
    at = next(n for n, word in enumerate(found.words) if "=" not in word)
    ours = [Path(found.words[at]).name, *found.words[at + 1 :]]
    assert without_numbers(ours) in map(without_numbers, theirs)


@pytest.mark.parametrize("folder", READ)
def test_training_examples_launch(folder: str) -> None:
    found = [launch_of(name) for name in scripts() if name.startswith(f"{folder}/")]
    assert any(isinstance(each, RecordedLaunch) for each in found)
