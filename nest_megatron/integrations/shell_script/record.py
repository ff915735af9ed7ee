"""What a walk through a script has seen, and what counts as a launch."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nest_megatron.integrations.shell_script.values import MAX_SECONDS, plain

_LAUNCHER = re.compile(
    r"(torchrun|pytorchrun|srun|mpirun|mpiexec|deepspeed|accelerate|python[\d.]*|uv)"
)
_PROGRAM = re.compile(r"[^\s]\.py(\s|$|\"|')")


@dataclass(frozen=True, slots=True)
class Launched:
    """A command that would start Python programs.

    Args:
        exported: variables that the script exports or sets for it.
        header: Slurm's options of a script in this one.
    """

    line: int
    words: tuple[str, ...]
    exported: Mapping[str, str]
    header: tuple[str, ...] = ()


@dataclass(slots=True)
class Record:
    """What a walk has seen, shared by all shells of it; numbers are lines.

    Args:
        not_run: programs that were left out.
        not_set: variables that are empty because nothing sets them.
        not_found: files and folders that are not on this host.
        said: what the script prints.
        until_s: when the walk has to be at its end (``time.monotonic``).
    """

    launched: list[Launched] = field(default_factory=list)
    not_run: dict[str, int] = field(default_factory=dict)
    not_set: dict[str, int] = field(default_factory=dict)
    not_found: dict[str, int] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    steps: int = 0
    until_s: float = field(default_factory=lambda: time.monotonic() + MAX_SECONDS)


def is_launch(words: Sequence[str]) -> bool:
    """Whether a command starts a Python program.

    >>> is_launch(["torchrun", "--nnodes", "2", "train.py"]), is_launch(["python3", "-c", "1"])
    (True, False)
    """
    names = [plain(word).rpartition("/")[2] for word in words]
    found = next((n for n, name in enumerate(names) if _LAUNCHER.fullmatch(name)), None)
    if found is None:
        return False
    if names[found].startswith("python") and names[found + 1 : found + 2] == ["-c"]:
        return False
    return "-m" in names[found:] or any(_PROGRAM.search(word) for word in words[found:])
