"""A comparison as one HTML page: the picture, the table, the reasons."""

from __future__ import annotations

import base64
from collections.abc import Sequence

from nest_megatron.files import MARK
from nest_megatron.report.canvas import as_svg
from nest_megatron.report.markup import Markup, element, table
from nest_megatron.report.style import CSS
from nest_megatron.research.comparison import Compared
from nest_megatron.research.report.comparison import fastest_first, layout_words, tokens_per_s, why
from nest_megatron.research.report.comparison_chart import comparison_canvas
from nest_megatron.units import format_gib, format_seconds

#: The page may show what it holds and load nothing.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_HEAD = (
    "Planner",
    "What it is",
    "Layout",
    "Why",
    "Step",
    "Tokens/s",
    "Of nest",
    "Memory",
    "Search",
)


def comparison_page(rows: Sequence[Compared], title: str) -> str:
    """The whole page; it loads nothing from anywhere."""
    ordered = fastest_first(rows)
    svg = as_svg(comparison_canvas(ordered, title)).encode("utf-8")
    source = f"data:image/svg+xml;base64,{base64.b64encode(svg).decode('ascii')}"
    picture = Markup(f'<img src="{source}" alt="Steps of each plan by term" style="width:100%">')
    note = "Times and memory are predictions of one cost model for all planners."
    body = element(
        "main",
        element("h1", title),
        element("p", note, class_="soft"),
        element("figure", picture),
        table(
            _HEAD, map(_row, ordered), "Planners from the fastest plan to the slowest", numeric=5
        ),
    )
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="generator", content=MARK),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
        element("title", title),
        element("style", Markup(CSS)),
    )
    return f"<!doctype html>\n{element('html', head, element('body', body), lang='en')}\n"


def _row(row: Compared) -> list[str]:
    search = f"{row.search_s:.2f} s"
    if row.plan is None:
        return [row.name, row.title, "-", why(row), "-", "-", "-", "-", search]
    predicted, share = row.plan.predicted, row.relative_throughput
    return [
        row.name,
        row.title,
        ", ".join(layout_words(row.plan)),
        why(row),
        format_seconds(predicted.iteration_time_s),
        f"{tokens_per_s(row.plan):,.0f}",
        "-" if share is None else f"{100 * share:.1f} %",
        format_gib(predicted.peak_memory_bytes),
        search,
    ]
