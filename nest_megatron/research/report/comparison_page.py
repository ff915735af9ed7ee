"""A comparison as one HTML page: bars, the table, the reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nest_megatron.report.charts import TERM_COLOURS, ink_on
from nest_megatron.report.page import render_page
from nest_megatron.report.words import TERM_WORDS
from nest_megatron.research.comparison import Compared
from nest_megatron.research.report.comparison import cells, fastest_first, why
from nest_megatron.research.report.comparison_chart import seen_terms
from nest_megatron.units import format_seconds


def comparison_page(rows: Sequence[Compared], title: str) -> str:
    """The whole page; it loads nothing from anywhere."""
    ordered = fastest_first(rows)
    longest = max((sum(row.terms.values()) for row in ordered), default=0.0) or 1.0
    return render_page(
        "comparison.html",
        title,
        package="nest_megatron.research.report",
        bars=[_bar(row, longest) for row in ordered],
        legend_entries=[(TERM_WORDS[name], TERM_COLOURS[name]) for name in seen_terms(ordered)],
        rows=[_cells(row) for row in ordered],
    )


def _bar(row: Compared, longest: float) -> Mapping[str, Any]:
    whole = sum(row.terms.values())
    parts = [
        {
            "name": TERM_WORDS[name],
            "value": format_seconds(row.terms[name]),
            "share": row.terms[name] / whole,
            "colour": TERM_COLOURS[name],
            "ink": ink_on(TERM_COLOURS[name]),
        }
        for name in TERM_COLOURS
        if row.terms.get(name, 0.0) > 0
    ]
    step = "no plan" if row.plan is None else format_seconds(row.plan.predicted.iteration_time_s)
    return {"name": row.name, "parts": parts, "percent": 100 * whole / longest, "step": step}


def _cells(row: Compared) -> list[str]:
    """What the terminal says of a planner, with what it is and why it is there."""
    name, step, tokens, share, layout, gib, search = cells(row)
    layout = layout.replace("\n", ", ")
    return [name, row.title, layout, why(row), step, tokens, share, gib, search]
