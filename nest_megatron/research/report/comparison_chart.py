"""A chart of a comparison: each planner's step as a bar, by what its time goes into."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nest_megatron.report.charts import SOFT, TERM_COLOURS, ink_on, write_chart
from nest_megatron.report.words import TERM_WORDS
from nest_megatron.research.comparison import Compared
from nest_megatron.research.report.comparison import fastest_first, layout_words, tokens_per_s
from nest_megatron.units import format_seconds

#: Terms that are at least this share of some step are in the legend.
_SEEN = 0.002
#: Inches: the whole width, the widest bar, a row, and an estimate of a character of a figure.
_WIDTH, _BAR, _ROW, _CHARACTER = 11.0, 7.2, 0.5, 0.065
_EXPLAINED = "A step of each plan by what all GPUs do in it; its throughput as a share of nest's"


def write_comparison(rows: Sequence[Compared], path: Path, title: str) -> None:
    """Draw planners from the fastest to the slowest into a ``.png`` or ``.svg`` file.

    Raises:
        UserInputError: for another suffix, a file that cannot be written, or without matplotlib.
    """
    size = (_WIDTH, 1.6 + _ROW * len(rows))
    write_chart(lambda figure: draw_comparison(figure, rows, title), size, path, "--chart")


def seen_terms(rows: Sequence[Compared]) -> list[str]:
    """Terms that a bar of some planner shows, in the order of the palette."""
    seen = {
        name
        for row in rows
        for name, seconds in row.terms.items()
        if seconds > _SEEN * sum(row.terms.values())
    }
    return [name for name in TERM_COLOURS if name in seen]


def draw_comparison(figure: Any, rows: Sequence[Compared], title: str) -> None:
    """Fill a matplotlib figure."""
    from matplotlib.patches import Patch

    ordered = fastest_first(rows)
    longest = max((sum(row.terms.values()) for row in ordered), default=0.0) or 1.0
    figure.set_layout_engine("constrained")
    figure.suptitle(title, x=0.02, ha="left", fontweight="bold", fontsize=11)
    axes = figure.subplots()
    axes.set_title(_EXPLAINED, loc="left", fontsize=8, color=SOFT)
    for at, row in enumerate(ordered):
        _draw_row(axes, row, at, _BAR / longest)
    axes.set(xlim=(0, _WIDTH - 1.2), ylim=(len(ordered) - 0.3, -0.5))
    axes.set_yticks(range(len(ordered)), [row.name for row in ordered], fontweight="bold")
    axes.tick_params(left=False, bottom=False, labelbottom=False, labelsize=9)
    axes.spines[:].set_visible(False)
    patches = [Patch(color=TERM_COLOURS[n], label=TERM_WORDS[n]) for n in seen_terms(ordered)]
    place = {"loc": "outside lower center", "ncols": 6, "fontsize": 8, "frameon": False}
    figure.legend(handles=patches, **place)


def _draw_row(axes: Any, row: Compared, at: int, scale: float) -> None:
    """A bar with the time of each term that is wide enough; behind it the step, under it why."""
    if row.plan is None:
        axes.text(0.05, at, f"no plan: {row.reason}", va="center", fontsize=8, color=SOFT)
        return
    left = 0.0
    for name in TERM_COLOURS:
        width = scale * row.terms.get(name, 0.0)
        axes.barh(at, width, 0.5, left=left, color=TERM_COLOURS[name])
        words = format_seconds(row.terms.get(name, 0.0))
        if width > _CHARACTER * (len(words) + 1):
            place = {"ha": "center", "va": "center", "fontsize": 7}
            axes.text(left + width / 2, at, words, color=ink_on(TERM_COLOURS[name]), **place)
        left += width
    share, step = row.relative_throughput, format_seconds(row.plan.predicted.iteration_time_s)
    told = step if share is None else f"{step}   {100 * share:.1f} %"
    axes.text(left + 0.08, at, told, va="center", fontsize=8, fontweight="bold")
    parts = (f"{tokens_per_s(row.plan):,.0f} tokens/s", *layout_words(row.plan))
    under = ", ".join((*parts, f"found in {row.search_s:.2f} s"))
    axes.text(0, at + 0.3, under, va="top", fontsize=6.5, color=SOFT)
