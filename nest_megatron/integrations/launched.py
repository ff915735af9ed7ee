"""What rank 0 prints of a plan that is about to run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from nest_megatron.integrations.fields import shown
from nest_megatron.parallel.diff import Change
from nest_megatron.parallel.plan import ParallelPlan
from nest_megatron.report.terminal import changes_table, notes_report, summary
from nest_megatron.report.words import proof
from nest_megatron.units import Seconds, format_seconds


def launched_report(
    plan: ParallelPlan, changes: Iterable[Change], notes: Sequence[str] = (), what: str = "flags"
) -> RenderableType:
    """The plan in a few lines, what it changes in the job and why, and what was assumed.

    Args:
        what: ``flags`` of a command, or ``fields`` of a configuration.
    """
    rows = change_rows(changes)
    if rows:
        return _report(plan, [Text(f"nest: changes to its {what}"), changes_table(rows)], notes)
    return _report(plan, [Text(f"nest: its {what} are already the plan")], notes)


def values_report(
    plan: ParallelPlan, rows: Iterable[tuple[str, str, str]], notes: Sequence[str]
) -> RenderableType:
    """The same for an application whose fields ask for the plan.

    Args:
        rows: field, value and reason.
    """
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for path, value, why in rows:
        table.add_row(path, Text.assemble((value, "green"), (f"\n{why}", "dim")))
    return _report(plan, [Text("nest: values of its fields"), Padding(table, (0, 2))], notes)


def _report(
    plan: ParallelPlan, changes: Iterable[RenderableType], notes: Sequence[str]
) -> RenderableType:
    lines = (summary(plan), Text(proof(plan)))
    return Group(
        Text("nest: this job runs as"),
        *(Padding(each, (0, 2)) for each in lines),
        *changes,
        *([notes_report(notes)] if notes else []),
    )


def fields_report(
    plan: ParallelPlan, changes: Iterable[Change], notes: Sequence[str] = ()
) -> RenderableType:
    """The same for a job whose configuration has fields instead of flags."""
    return launched_report(plan, changes, notes, "fields")


def change_rows(changes: Iterable[Change]) -> list[tuple[str, str | None, str | None, str]]:
    """Changes as ``changes_table`` takes them."""
    return [(each.field, _shown(each.before), _shown(each.after), each.reason) for each in changes]


def _shown(value: object) -> str | None:
    return None if value is None else shown(value)


_KEPT = "nest: what your flags cost, by shortest predicted steps ({} with all)"


def kept_report(planned_s: Seconds, kept: Iterable[tuple[str, Seconds]]) -> RenderableType:
    """What each kept choice costs, by the shortest predicted steps.

    Args:
        planned_s: the shortest predicted step with everything kept.
        kept: each choice, and the shortest predicted step with it freed; ``all`` is the last.
    """
    table = Table(box=None, padding=(0, 2))
    for head in ("Freed", "Step", "Kept, it costs"):
        table.add_column(head, justify="left" if head == "Freed" else "right")
    for choice, freed_s in kept:
        cost = 100.0 * (planned_s - freed_s) / freed_s
        words = f"{cost:.1f} %" if cost >= 0.05 else "nothing"
        table.add_row(f"nest.free=[{choice}]", format_seconds(freed_s), words)
    return Group(Text(_KEPT.format(format_seconds(planned_s))), table)
