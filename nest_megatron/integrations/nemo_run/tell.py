"""What is printed of a planned task."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from nest_megatron.integrations.launched import fields_report
from nest_megatron.integrations.plan_output import told_where
from nest_megatron.parallel.diff import Change
from nest_megatron.parallel.plan import ParallelPlan
from nest_megatron.report.console import say, show


def say_task(
    plan: ParallelPlan, changes: Iterable[Change], path: Path, told: Iterable[str] = ()
) -> None:
    """The plan in a few lines, every changed field with its reason, and where the plan lies.

    Args:
        told: what became of the environment, one sentence each.
    """
    show(fields_report(plan, changes))
    for sentence in told:
        say(f"nest: {sentence}")
    say(told_where(path))


def say_factory(plan: ParallelPlan, changes: Iterable[Change]) -> None:
    """The same on standard error: the task's own YAML may go to standard output."""
    with contextlib.redirect_stdout(sys.stderr):
        show(fields_report(plan, changes))


def say_script(path: str, words: Sequence[str]) -> None:
    """What a script is given."""
    say(f"nest: {path} plans as it starts: {' '.join(words)}")
