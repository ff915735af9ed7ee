"""``compare``: its table and sentences, a chart of each planner's step, an HTML page."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from nest_megatron.api.jobs import job_of_settings
from nest_megatron.config.compose import Settings, compose
from nest_megatron.config.defaults import with_defaults
from nest_megatron.config.overrides import parse, refuse_sweeps
from nest_megatron.errors import ENDED_EARLY, NOTHING_FITS, UserInputError
from nest_megatron.files import require_folder, write_text
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.plain import to_plain
from nest_megatron.planner import Request
from nest_megatron.report.charts import (
    SOFT,
    TERM_COLOURS,
    check_picture,
    ink_on,
    write_chart,
    write_legend,
)
from nest_megatron.report.console import Shown, say, show, show_json, status_line
from nest_megatron.report.page import render_page
from nest_megatron.report.plan_rows import plan_cells, tokens_per_s
from nest_megatron.report.tables import (
    FittingTable,
    figure_columns,
    heading,
    name_columns,
    pairs,
    word_columns,
)
from nest_megatron.report.terminal import notes_report
from nest_megatron.report.words import TERM_WORDS, degree_words
from nest_megatron.research.comparison import (
    NEST,
    PLANNERS,
    Compared,
    compare,
    split_planners,
)
from nest_megatron.units import GIB, Seconds, format_chance, format_seconds


def run_compare(
    *, overrides: Sequence[str], config_dir: Path | None, chart: Path | None, as_json: bool
) -> int:
    """Compare planners on one job, and print or draw the result."""
    names, rest = split_planners(overrides)
    settings = parse(rest)
    refuse_sweeps(settings)
    if chart is not None:
        check_picture(chart, "--chart", _HTML)
        require_folder(chart, "--chart")
    composed = compose(with_defaults(settings), config_dir)
    if composed.out is not None:
        fix = "Use --chart for a picture, or `nest-megatron plan` for the plan."
        raise UserInputError("out", composed.out, "a comparison writes no plan", fix)
    with status_line("planning") as tell:
        found = compare_composed(composed, names, lambda name: tell(f"planning: {name}"))
    if as_json:
        request = found.request
        show_json(
            {
                "model": request.spec.name,
                "cluster": request.cluster.name,
                "num_gpus": request.cluster.num_gpus,
                "global_batch_size": request.global_batch_size,
                "planners": [*map(_plain_row, found.rows)],
                "notes": list(request.notes),
            }
        )
    else:
        show(*found.report())
    if chart is not None:
        write_comparison(found.rows, chart, found.title, found.request.notes)
        if not as_json:
            say(f"Drawn into {chart}.")
    nest = found.rows[0]
    if nest.plan:
        return ENDED_EARLY * nest.plan.search.may_be_far_off
    return ENDED_EARLY if nest.ended_early else NOTHING_FITS


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannerComparison(Shown):
    """One job by several planners: what ``compare`` prints and draws."""

    request: Request
    rows: tuple[Compared, ...]

    @property
    def title(self) -> str:
        """The job."""
        cluster = self.request.cluster
        return f"{self.request.spec.name} on {cluster.describe()}, {cluster.name}"

    def report(self) -> Iterator[RenderableType]:
        """The table, why each lost, and what was assumed."""
        rates = self.request.rates
        has_price = rates is not None and rates.gpu_hour is not None
        yield from (Text(self.title), comparison_report(self.rows, has_price=has_price), "")
        if self.request.notes:
            yield notes_report(self.request.notes)

    def to_html(self) -> str:
        """The page of ``compare --chart page.html``."""
        return comparison_page(self.rows, self.title, self.request.notes)


def compare_composed(
    composed: Settings,
    names: Sequence[str] = PLANNERS,
    on_planner: Callable[[str], None] = lambda name: None,
) -> PlannerComparison:
    """Compare planners on a composed job; arguments as of ``compare``."""
    request = job_of_settings(composed)  # as plan asks for it
    if (site := request.site) is not None:  # every planner searches by the catalogue's constants
        note = f"Planners are compared without the calibration of this site ({site.name})."
        request = replace(request, site=None, notes=(*request.notes, note))
    return PlannerComparison(request=request, rows=compare(request, names, on_planner))


def _plain_row(row: Compared) -> dict[str, Any]:
    """One planner for programs; what it has no plan for is null."""
    found, worst = row.plan, row.worst_term
    return {
        "name": row.name,
        "title": row.title,
        "iteration_time_s": found and found.predicted.iteration_time_s,
        "tokens_per_s": found and tokens_per_s(found),
        "price": found and to_plain(found.price),
        "relative_throughput": row.relative_throughput,
        "chance_slower": row.chance_slower,
        "tie": None if row.chance_slower is None else row.is_tie,
        "peak_memory_bytes": found and found.predicted.peak_memory_bytes,
        "out_of_memory": found and found.uncertainty.out_of_memory,
        "micro_batch_size": found and found.layout.micro_batch_size,
        "parallel": found and to_plain(found.arguments),
        "rank_order": found and str(found.layout.dims.rank_order),
        "terms": found and row.terms,
        "worst_term": worst and {"term": worst, "seconds": row.differences[worst]},
        "why": why(row),
        "reason": row.reason,
        "candidates": row.candidates,
        "search_s": row.search_s,
    }


_TRAFFIC = ("tp_communication", "cp_communication", "ep_communication")
#: Below this share of the throughput of ``nest`` a planner is slower.
_EQUAL = 0.9995
_HTML = ".html"
#: Columns of the page; the figures are behind the reasons.
_HEAD = (
    *("Planner", "What it is", "Layout", "Why"),
    *("Step", "Tokens/s", "Of nest", "GiB", "P(OOM)", "Search"),
)
#: Terms that are at least this share of some step are in the legend.
_SEEN = 0.002
#: Inches: the whole width, the widest bar, a row, and an estimate of a character of a figure.
_WIDTH, _BAR, _ROW, _CHARACTER = 11.0, 7.2, 0.5, 0.065


def comparison_report(rows: Sequence[Compared], *, has_price: bool = False) -> RenderableType:
    """A row a planner, and why each lost."""
    ordered = fastest_first(rows)
    table = FittingTable(
        *name_columns("Planner", min_width=max((len(row.name) for row in rows), default=0)),
        *figure_columns("Step", "Tokens/s", "Of nest"),
        *word_columns("Layout", min_width=len("recompute")),
        *figure_columns("GiB", "P(OOM)", "Search", *(["Tokens/$"] if has_price else [])),
        pad_edge=False,
    )
    for row in ordered:
        cells = _cells(row)
        shown = (cells.get(str(column.header), "-") for column in table.columns)
        table.add_row(*shown, style="bold" if row.name == NEST else "")
    reasons = pairs((row.name, why(row)) for row in ordered)
    return Group(table, heading("Why each is where it is"), reasons)


def fastest_first(rows: Sequence[Compared]) -> list[Compared]:
    """Planners with a plan by its step, ``nest`` first among equals; then those without."""
    steps = {row.name: row.plan.predicted.iteration_time_s for row in rows if row.plan}
    return sorted(rows, key=lambda row: (steps.get(row.name, math.inf), row.name != NEST))


def _cells(row: Compared) -> dict[str, str]:
    """A planner by the heads of the columns; what it has no plan for is left out."""
    cells = {"Planner": row.name, "Search": f"{row.search_s:.2f} s"}
    if row.plan is None:
        return {**cells, "Layout": "no plan"}
    cells |= plan_cells(row.plan)
    if (share := row.relative_throughput) is not None:
        cells["Of nest"] = f"{100 * share:.1f}%{' tie' if row.is_tie else ''}"
    return {
        **cells,
        "Layout": "\n".join(layout_lines(row.plan)),
        "GiB": f"{row.plan.predicted.peak_memory_bytes / GIB:.1f}",
        "P(OOM)": format_chance(row.plan.uncertainty.out_of_memory),
    }


def layout_lines(plan: ParallelPlan) -> list[str]:
    """A plan's layout in two or three short texts; a degree of 1 is left out.

    Example: ``TP 4 PP 4x7 DP 32``, ``MBS 1 ZeRO-1``, ``recompute full block 2``.
    """
    grid = plan.layout
    shown = " ".join(degree_words(grid, ("TP", "PP", "CP", "EP", "DP")))
    batch = f"MBS {grid.micro_batch_size} ZeRO-{int(grid.zero)}"
    recompute = grid.recompute.label()
    parts = (shown, batch, "" if recompute == "none" else f"recompute {recompute}")
    return [part for part in parts if part]


def why(row: Compared) -> str:
    """Why a planner is where it is, in plain sentences."""
    if row.plan is None:
        return f"No plan: {row.reason}."
    worst, share = row.worst_term, row.relative_throughput
    if row.name == NEST or share is None:
        return f"{row.reason[:1].upper()}{row.reason[1:]}."
    if share < _EQUAL and row.lost_s <= 0:
        chance = row.plan.uncertainty.out_of_memory
        shorter = f"Its step is {format_seconds(-row.lost_s)} shorter"
        risk = f"but it runs out of memory in {format_chance(chance)} of starts"
        return f"{shorter}, {risk}. Chosen as {row.reason}."
    if worst is None or share >= _EQUAL:
        return f"As fast as {NEST}. Chosen as {row.reason}."
    tie = "A tie within the error of predictions. " if row.is_tie else ""
    term = TERM_WORDS[worst] + (" traffic" if worst in _TRAFFIC else "")
    lost, most = format_seconds(row.lost_s), format_seconds(row.differences[worst])
    return f"{tie}Loses {lost} a step, most in {term}: +{most}. Chosen as {row.reason}."


def write_comparison(
    rows: Sequence[Compared], path: Path, title: str, notes: Sequence[str] = ()
) -> None:
    """Draw planners from the fastest to the slowest: a picture, or a page with picture and table.

    Raises:
        UserInputError: if the file cannot be written, or without matplotlib.
    """
    if path.suffix.lower() == _HTML:
        write_text(path, comparison_page(rows, title, notes))
        return
    size = (_WIDTH, 1.6 + _ROW * len(rows))
    write_chart(lambda figure: draw_comparison(figure, rows, title), size, path, "--chart")


def _legend(rows: Sequence[Compared]) -> list[tuple[str, str]]:
    """Words and colours of terms that a bar of some planner shows, in the order of the palette."""
    seen = {
        name
        for row in rows
        for name, seconds in row.terms.items()
        if seconds > _SEEN * sum(row.terms.values())
    }
    return [(TERM_WORDS[name], colour) for name, colour in TERM_COLOURS.items() if name in seen]


def _longest(rows: Sequence[Compared]) -> Seconds:
    return max((sum(row.terms.values()) for row in rows), default=0.0) or 1.0


def draw_comparison(figure: Any, rows: Sequence[Compared], title: str) -> None:
    """Fill a matplotlib figure."""
    ordered = fastest_first(rows)
    figure.set_layout_engine("constrained")
    figure.suptitle(title, x=0.02, ha="left", fontweight="bold", fontsize=11)
    axes = figure.subplots()
    title = "A step of each plan by what all GPUs do in it; its throughput as a share of nest's"
    axes.set_title(title, loc="left", fontsize=8, color=SOFT)
    for at, row in enumerate(ordered):
        _draw_row(axes, row, at, _BAR / _longest(rows))
    axes.set(xlim=(0, _WIDTH - 1.2), ylim=(len(ordered) - 0.3, -0.5))
    axes.set_yticks(range(len(ordered)), [row.name for row in ordered], fontweight="bold")
    axes.tick_params(left=False, bottom=False, labelbottom=False, labelsize=9)
    axes.spines[:].set_visible(False)
    write_legend(figure, _legend(ordered), "center", ncols=6)


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
    words = step if share is None else f"{step}   {100 * share:.1f} %"
    axes.text(left + 0.08, at, words, va="center", fontsize=8, fontweight="bold")
    parts = (f"{tokens_per_s(row.plan):,.0f} tokens/s", *layout_lines(row.plan))
    under = ", ".join((*parts, f"found in {row.search_s:.2f} s"))
    axes.text(0, at + 0.3, under, va="top", fontsize=6.5, color=SOFT)


def comparison_page(rows: Sequence[Compared], title: str, notes: Sequence[str] = ()) -> str:
    """The whole page, with notes on what was assumed; it loads nothing from anywhere."""
    ordered = fastest_first(rows)
    cells = ({**_cells(row), "What it is": row.title, "Why": why(row)} for row in ordered)
    return render_page(
        "comparison.html",
        title,
        package="nest_megatron.research",
        bars=[_bar(row, _longest(rows)) for row in ordered],
        legend_entries=_legend(ordered),
        head=_HEAD,
        rows=[[each.get(name, "-").replace("\n", ", ") for name in _HEAD] for each in cells],
        notes=notes,
    )


def _bar(row: Compared, longest: float) -> Mapping[str, Any]:
    whole = sum(row.terms.values())
    terms = {name: row.terms[name] for name in TERM_COLOURS if row.terms.get(name, 0.0) > 0}
    step = "no plan" if row.plan is None else format_seconds(row.plan.predicted.iteration_time_s)
    percent = 100 * whole / longest
    return {"name": row.name, "terms": terms, "whole": whole, "percent": percent, "step": step}
