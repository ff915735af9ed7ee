"""Comparisons in words and pictures."""

from __future__ import annotations

import dataclasses

import pytest

from nest_megatron.report.canvas import Box, as_svg
from nest_megatron.research.comparison import Compared, compare
from nest_megatron.research.report.comparison import fastest_first, layout_words, why
from nest_megatron.research.report.comparison_chart import comparison_canvas
from nest_megatron.research.report.comparison_page import comparison_page
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
    words = layout_words(rows[0].plan)
    assert words[0].endswith("DP 4") or "DP 8" in words[0]
    assert "CP" not in words[0]
    assert words[1].startswith("MBS ")


def test_everything_drawn_lies_inside_and_bars_are_to_scale(rows: tuple[Compared, ...]) -> None:
    canvas = comparison_canvas(rows, "title")
    for words in canvas.words():
        left, top, right, bottom = words.bounds()
        assert 0 <= left <= right <= canvas.width
        assert 0 <= top <= bottom <= canvas.height
    bars: dict[float, float] = {}
    for shape in canvas.shapes:
        if isinstance(shape, Box) and shape.height == 22.0:
            bars[shape.y] = bars.get(shape.y, 0.0) + shape.width
    lengths = [bars[y] for y in sorted(bars)]
    steps = [r.plan.predicted.iteration_time_s for r in fastest_first(rows) if r.plan]
    assert [length / lengths[0] for length in lengths] == pytest.approx(
        [step / steps[0] for step in steps]
    )


def test_markup_is_escaped(rows: tuple[Compared, ...]) -> None:
    assert "it &lt;failed&gt;" in as_svg(comparison_canvas(rows, "a < b"))
    page = comparison_page(rows, "a < b")
    assert "it &lt;failed&gt;" in page
    assert "a < b" not in page
