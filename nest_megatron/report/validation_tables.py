"""Scores of predictions as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from nest_megatron.report.fitting import FittingTable
from nest_megatron.validation.report import FileScores, Scores
from nest_megatron.validation.scores import ErrorScores

_HEADS = ("rows", "MAPE", "med", "p90", "mem", "jobs", "rank", "regret")
_LONGEST = 24
_LEGEND = """
rows: predicted of all. MAPE, med, p90, mem: errors in per cent of what was
measured (mean size, median with sign, 90th percentile; mean size for memory).
jobs: measured in several layouts. rank: Spearman's correlation over them.
regret: by how many per cent our choice was slower than the best layout (mean,
and largest)."""


def validation_report(files: Sequence[FileScores]) -> RenderableType:
    """One table for each file, then what was refused and how memory was judged."""
    parts: list[RenderableType] = []
    for file in files:
        parts += [Text(f"\n{file.path} ({file.kind})", style="bold"), _table(file)]
        parts += [Text(line) for line in _notes(file.total)]
    parts.append(Text(_LEGEND, style="dim"))
    return Group(*parts)


def _table(file: FileScores) -> Table:
    table = FittingTable(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("source", no_wrap=True, max_width=_LONGEST)
    for head in _HEADS:
        table.add_column(head, justify="right", no_wrap=True)
    for each in (*file.sources, file.total):
        table.add_row(*_cells(each), style="bold" if each is file.total else "")
    return table


def _cells(each: Scores) -> tuple[str, ...]:
    return (
        each.source,
        f"{each.predicted}/{each.rows}",
        *_error_cells(each.errors),
        f"{each.memory.mape_pct:.1f}" if each.memory else "",
        str(len(each.groups) or ""),
        _figure(each.spearman_mean, 2),
        _regret(each),
    )


def _error_cells(errors: ErrorScores | None) -> tuple[str, str, str]:
    if errors is None:
        return "", "", ""
    return (
        f"{errors.mape_pct:.1f}",
        f"{errors.median_signed_pct:+.1f}",
        f"{errors.p90_abs_pct:.1f}",
    )


def _regret(each: Scores) -> str:
    if each.regret_mean_pct is None or each.regret_max_pct is None:
        return ""
    return f"{each.regret_mean_pct:.1f} {each.regret_max_pct:.0f}"


def _figure(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _notes(total: Scores) -> list[str]:
    lines = [f"  refused {count:4d}: {reason}" for reason, count in total.refused.items()]
    ended, caught = total.out_of_memory
    ran, wrong = total.ran
    if ended:
        lines.append(f"  of {ended} runs that ended out of memory, {caught} are called infeasible")
    if ran:
        lines.append(f"  of {ran} runs that ran, {wrong} are called infeasible")
    return lines
