"""What is printed of a planned task."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.text import Text

from nest_megatron.parallel.diff import Change
from nest_megatron.parallel.plan import ParallelPlan
from nest_megatron.report.launched import fields_report


def say_task(plan: ParallelPlan, changes: Iterable[Change], path: Path) -> None:
    """The plan in a few lines, every changed field with its reason, and where the plan lies."""
    kept = f"nest: the full plan is in {path} (`nest-megatron explain` shows it)"
    _print(fields_report(plan, changes), Text(kept))


def say_factory(plan: ParallelPlan, changes: Iterable[Change]) -> None:
    """The same on standard error: the task's own YAML may go to standard output."""
    _print(fields_report(plan, changes), to_stderr=True)


def say_script(path: str, words: Sequence[str]) -> None:
    """What a script is given."""
    _print(Text(f"nest: {path} plans as it starts: {' '.join(words)}"))


def _print(*parts: RenderableType, to_stderr: bool = False) -> None:
    file = sys.stderr if to_stderr else sys.stdout
    console = Console(
        file=file,
        markup=False,
        highlight=False,
        emoji=False,
    )
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, Text))
