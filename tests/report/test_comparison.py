"""Comparisons in words and pictures."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from nest_megatron.research.comparison import Compared, compare
from nest_megatron.research.comparison_run import (
    comparison_page,
    draw_comparison,
    fastest_first,
    layout_lines,
    why,
    write_comparison,
)
from tests.test_comparison import request


@pytest.fixture(scope="module")
def rows() -> tuple[Compared, ...]:
    found = compare(request(), ["alpa_e", "manual"])
    lost = Compared(
        name="mist", title="t", plan=None, reason="it <failed>", candidates=1, search_s=0.1
    )
    return (*found, lost)


def test_order_is_by_step_and_failures_come_last(rows: tuple[Compared, ...]) -> None:
    ordered = fastest_first([*rows[::-1]])
    assert (ordered[0].name, ordered[-1].name) == ("nest", "mist")
    times = [row.plan.predicted.iteration_time_s for row in ordered if row.plan]
    assert times == sorted(times)


def test_sentences(rows: tuple[Compared, ...]) -> None:
    assert why(rows[0]) == "Proven optimal in its space."
    assert why(rows[-1]) == "No plan: it <failed>."
    slower = next(row for row in rows[1:] if row.worst_term)
    assert why(slower).startswith("Loses ")
    same = dataclasses.replace(slower, differences={"compute": 0.0}, relative_throughput=1.0)
    assert why(same).startswith("As fast as nest.")
    alone = dataclasses.replace(slower, differences={}, relative_throughput=None)
    assert why(alone) == f"{slower.reason[0].upper()}{slower.reason[1:]}."


def test_layouts_leave_ones_out(rows: tuple[Compared, ...]) -> None:
    assert rows[0].plan is not None
    words = layout_lines(rows[0].plan)
    assert words[0].endswith("DP 4") or "DP 8" in words[0]
    assert "CP" not in words[0]
    assert words[1].startswith("MBS ")


def drawn(rows: tuple[Compared, ...], title: str) -> Figure:
    """The chart, laid out as it is saved."""
    figure = Figure(figsize=(11, 1.6 + 0.5 * len(rows)), dpi=110)
    draw_comparison(figure, rows, title)
    figure.draw_without_rendering()
    return figure


def test_everything_drawn_lies_inside_and_bars_are_to_scale(rows: tuple[Compared, ...]) -> None:
    figure = drawn(rows, "title")
    texts = [text for text in figure.findobj(Text) if text.get_text() and text.get_visible()]
    for text in texts:
        box = text.get_window_extent()
        assert 0 <= box.x0 <= box.x1 <= figure.bbox.width, text.get_text()
        assert 0 <= box.y0 <= box.y1 <= figure.bbox.height, text.get_text()
    bars: dict[float, float] = {}
    for bar in figure.axes[0].patches:
        bars[bar.get_y()] = bars.get(bar.get_y(), 0.0) + bar.get_width()
    lengths = [bars[y] for y in sorted(bars)]
    steps = [r.plan.predicted.iteration_time_s for r in fastest_first(rows) if r.plan]
    assert [length / lengths[0] for length in lengths] == pytest.approx(
        [step / steps[0] for step in steps]
    )


def test_markup_is_escaped(rows: tuple[Compared, ...], tmp_path: Path) -> None:
    path = tmp_path / "chart.svg"
    write_comparison(rows, path, "a < b")
    assert "it &lt;failed&gt;" in path.read_text(encoding="utf-8")
    page = comparison_page(rows, "a < b")
    assert "it &lt;failed&gt;" in page
    assert "a < b" not in page


def test_the_page_loads_nothing(rows: tuple[Compared, ...]) -> None:
    page = comparison_page(rows, "planners")
    assert "default-src 'none'; style-src 'unsafe-inline'\"" in page
    assert "<img" not in page
    assert "url(" not in page
