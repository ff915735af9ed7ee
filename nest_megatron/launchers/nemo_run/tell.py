"""What is printed of a planned task, on standard error: its YAML may go to standard output."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from nest_megatron.parallel.diff import Change
from nest_megatron.parallel.plan import ParallelPlan
from nest_megatron.report.terminal import changes_table, summary
from nest_megatron.report.words import certificate


def say_task(plan: ParallelPlan, changes: Iterable[Change], path: Path | None) -> None:
    """The plan in a few lines, every changed field with its reason, and where the plan lies."""
    rows = [(c.field, _shown(c.before), _shown(c.after), c.reason) for c in changes]
    parts: list[RenderableType] = [Text("nest: this task runs as"), Padding(summary(plan), (0, 2))]
    parts.append(Padding(Text(certificate(plan.search)), (0, 2)))
    if rows:
        parts += [Text("nest: changes to its fields"), changes_table(rows)]
    else:
        parts.append(Text("nest: its fields are already the plan"))
    if path is not None:
        parts.append(Text(f"nest: the full plan is in {path} (`nest-megatron explain` shows it)"))
    _console().print(Group(*parts))


def say_script(path: str, words: Sequence[str]) -> None:
    """What a script is given."""
    _console().print(Text(f"nest: {path} plans as it starts: {' '.join(words)}"))


def _shown(value: object) -> str:
    return "None" if value is None else str(value)


def _console() -> Console:
    return Console(file=sys.stderr, markup=False, highlight=False, emoji=False)
