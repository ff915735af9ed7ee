"""The shell scripts of Megatron-LM's ``examples``: what they launch, as bash itself has it.

Set ``MEGATRON_LM_HOME`` to a Megatron-LM checkout (core_v0.16.1 or main at 0.20). Programs are
stubs that write their words down; ``PATH`` holds nothing else.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from nest_megatron.errors import UserInputError
from nest_megatron.integrations.shell_script.launch import ScriptLaunch, script_launch
from tests.integrations.test_shell_script import BASH, PROGRAMS, run_by_bash
from tests.megatron_lm.training import HOME

pytestmark = [
    pytest.mark.megatron_lm,
    pytest.mark.skipif(not HOME, reason="MEGATRON_LM_HOME is not set to a Megatron-LM checkout"),
    pytest.mark.skipif(BASH is None, reason="bash is not installed"),
]
EXAMPLES = Path(HOME or "/nowhere", "examples")
#: Words behind the name of a script that asks for them.
ARGUMENTS = tuple(f"/given/{n}" for n in range(1, 9))
#: Why a script has no launch of its own.
NO_LAUNCH = (
    "launches nothing",  # settings that another script reads
    "launches no job of Megatron-LM that trains",
    "launches 2 jobs",
    "process substitution",  # no text of bash's either: <PLACEHOLDER (...)>
    "unexpected '('",
    "is not set",
    "does not end",  # nor does it in bash, with words that it does not know
    "succeeds decides",
    "must be set",
    "depends on",
    "which is not there",
    "is not on this host",
    "is expected after",
)
#: Examples that train and are read in both releases.
READ = ("bert", "gpt3", "llama", "mixtral", "t5", "mamba", "multimodal")


def scripts() -> list[str]:
    return sorted(str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.sh"))


def clean(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(os, "environ", {"HOME": str(folder), "PATH": os.environ["PATH"]})
    monkeypatch.chdir(HOME)


def launch_of(path: Path, *args: str) -> ScriptLaunch | str:
    """A script's launch, or why there is none."""
    try:
        found = script_launch([str(path), *args])
    except UserInputError as error:
        return str(error)
    assert found is not None
    return found


@pytest.mark.parametrize("name", scripts())
def test_the_launch_is_the_one_that_bash_would_start(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = EXAMPLES / name
    clean(monkeypatch, tmp_path)
    found = launch_of(path, *ARGUMENTS)
    if isinstance(found, str):
        assert any(reason in found for reason in NO_LAUNCH), found
        return
    if "sbatch <<" in path.read_text(encoding="utf-8"):  # bash itself does not look inside
        assert any(Path(word).name in PROGRAMS for word in found.words)
        return
    at = next(n for n, word in enumerate(found.words) if Path(word).name in PROGRAMS)
    theirs = run_by_bash(path, ARGUMENTS, tmp_path, cwd=Path(HOME))
    ours = [w if n else Path(w).name for n, w in enumerate(found.words[at:])]
    open_words = [n for n, w in enumerate(ours) if "$(" in w or "`" in w or "$1" in w]
    if not open_words:
        assert ours == theirs
    rest = iter(theirs)  # what only a run would tell may be any number of words
    assert all(word in rest for n, word in enumerate(ours) if n not in open_words)


def test_most_folders_of_training_examples_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clean(monkeypatch, tmp_path)
    count: Counter[str] = Counter()
    for name in scripts():
        found = launch_of(EXAMPLES / name)
        count[name.partition("/")[0]] += not isinstance(found, str)
    assert set(READ) <= {folder for folder, number in count.items() if number}
