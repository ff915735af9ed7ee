"""An experiment of the paper as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from nest_megatron.report.tables import EdgelessTable, figure_columns, name_columns, word_columns
from nest_megatron.research.paper.outcome import FigureRow, Gain, Report
from nest_megatron.research.paper.published import RULES
from nest_megatron.research.report.paper_notes import notes

#: Columns that may wrap.
_WIDE = {"layout", "ours", "paper"}
_COLUMNS = ("ours", "artifact", "paper")


def paper_report(report: Report) -> RenderableType:
    """The table, the gains of a figure, and why the columns differ."""
    parts: list[RenderableType] = [Text(report.title, style="bold")]
    if report.rows:
        heading = Text("\nGeometric-mean gain of nest over each planner\n")
        parts += [_figure(report.rows), heading, gains(report.gains)]
    else:
        columns = [
            (word_columns if name in _WIDE else name_columns)(name)[0] for name in report.head
        ]
        table = EdgelessTable(*columns)
        for cells in report.cells:
            table.add_row(*cells, style="bold" if "nest" in cells else "")
        parts.append(table)
    parts.append(Text("\nWhy they differ\n"))
    parts += [Padding(Text(note), (0, 2, 1, 2)) for note in notes(report)]
    return Group(*parts)


def _figure(rows: Sequence[FigureRow]) -> RenderableType:
    """The rows of a figure, a block a job."""
    columns = (*name_columns("planner"), *word_columns("layout"), *figure_columns(*_COLUMNS))
    table = EdgelessTable(*columns)
    for job, group in groupby(rows, key=lambda row: row.job):
        size = f", micro batch {job.micro_batch_size}" if job.micro_batch_size else ""
        table.add_row("", Text(f"{job.model}, {job.num_gpus} GPUs{size}", style="underline"))
        for row in group:
            ratios = ("" if v is None else f"{v:.2f}x" for v in (row.ours, row.artifact, row.paper))
            style = "bold" if row.planner == "nest" else ""
            table.add_row(row.planner, row.outcome.layout, *ratios, style=style)
    return table


def gains(rows: Iterable[Gain]) -> RenderableType:
    """A row a baseline: ours, the artifact's by its own pricing and by one rule, the paper's."""
    heads = ("jobs", "ours", "least", "artifact", "one rule", "best cuts", "paper")
    columns = (*name_columns("planner"), *figure_columns(*heads))
    table = EdgelessTable(*columns)
    for gain in rows:
        recorded = (gain.artifact.get(rule) for rule in RULES)
        values = (gain.ours, gain.least, *recorded, gain.paper)
        jobs = str(gain.jobs) + (f" (+{gain.only_ours})" if gain.only_ours else "")
        table.add_row(gain.planner, jobs, *("" if v is None else f"{v:.2f}x" for v in values))
    return table
