"""A plan and other layouts as tables: its runners-up, what its job runs today, one by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from nest_megatron.cost_model.estimate import estimate
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.settings import restored_settings
from nest_megatron.cost_model.shortlist import AS_FAST
from nest_megatron.errors import UserInputError
from nest_megatron.layout.dims import SHORT_DEGREES
from nest_megatron.layout.estimate import (
    Alternative,
    BeforeAfter,
    Difference,
    LayoutChange,
    PricedLayout,
)
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.stage_layout import layout_string
from nest_megatron.profile.lookup import LayerTimes
from nest_megatron.report.memory_words import (
    memory_level,
    memory_verdict,
    plan_verdict,
    price_cells,
    risk_words,
)
from nest_megatron.report.tables import (
    FittingTable,
    figure_columns,
    heading,
    indented,
    word_columns,
)
from nest_megatron.report.words import (
    MEMORY_WORDS,
    TERM_WORDS,
    degrees,
    incomplete_ranking,
    narrow_words,
    range_words,
    ties,
)
from nest_megatron.units import GIB, Bytes, Seconds, format_chance, format_gib, format_seconds

#: Columns that the runners-up always have, and what another says where nothing is unusual; a
#: degree is 1.
_ALWAYS = ("#", "Step", "Slower", "TP", "PP", "DP")
_USUAL = {"P(slower)": "", "Order": "dp-pp", "Recompute": "none"}
_SHORT = {
    "core_attn": "attn",
    "moe_act": "act",
    "layernorm": "norm",
    "mla_up_proj": "mla",
    "shared_experts": "shared",
}


def alternatives_table(plan: ParallelPlan) -> RenderableType:
    """Runners-up under the plan itself; columns that say the usual throughout are left out.

    "P(slower)" is the chance that a runner-up is the slower one of the two.
    """
    rows = [
        {
            "#": str(number) if number else "plan",
            "Step": format_seconds(each.iteration_time_s),
            "Slower": f"{each.slower_percent:.2f} %" if number else "-",
            "P(slower)": "" if each.chance_slower is None else f"{100 * each.chance_slower:.0f} %",
            **degree_cells(each),
        }
        for number, each in enumerate(plan_and_alternatives(plan))
    ]
    usual = {"GPUs": str(plan.cluster.num_gpus), **_USUAL}
    table = FittingTable()
    heads = []
    for head in rows[0]:
        cells = {row[head] for row in rows}
        if head in _ALWAYS or cells - {usual.get(head, "1")}:
            # Recomputed modules are the one text that gives way on a narrow terminal.
            last = head == "Recompute"
            table.add_column(
                head,
                justify="left" if last or head == "#" else "right",
                no_wrap=True,
                min_width=6 if last else max(map(len, (head, *cells))),
            )
            heads.append(head)
    for row in rows:
        style = "bold" if row["#"] == "plan" else None
        table.add_row(*(row[head] for head in heads), style=style)
    said = filter(None, (ties(plan), incomplete_ranking(plan.search)))
    return Group(table, *map(indented, said))


def shortlist_report(plan: ParallelPlan) -> RenderableType:
    """Which of a plan and its runners-up could be the fastest, and what would tell."""
    found = plan.shortlist
    assert found, "a shortlist was asked for"
    table = FittingTable(
        "#",
        *figure_columns("Best", "Step", "9 of 10 runs", "GiB", "P(OOM)"),
        *word_columns("Layout"),
    )
    usual, plans = {"GPUs": str(plan.cluster.num_gpus), **_USUAL}, plan_and_alternatives(plan)
    for number, share in zip(found.numbers, found.chances, strict=True):
        other = plans[number]
        known, layout = other.uncertainty, degree_cells(other).items()
        assert known
        table.add_row(
            str(number) if number else "plan",
            f"{100 * share:.0f} %",
            format_seconds(other.iteration_time_s),
            range_words(known),
            f"{(other.peak_memory_bytes or 0) / GIB:.1f}",
            format_chance(known.out_of_memory),
            " ".join(f"{name} {cell}" for name, cell in layout if cell != usual.get(name, "1")),
            style=None if number else "bold",
        )
    parts = [heading("Which plans could be the fastest"), indented(shortlist_words(plan)), table]
    if found.measurements:
        parts.append(Text("What would tell most which of them is", style="bold cyan"))
        parts += [indented(f"- {each}") for each in found.measurements]
    return Group(*parts)


def shortlist_words(plan: ParallelPlan) -> str:
    """With which chance the shortlist has one as fast as the fastest."""
    found = plan.shortlist
    assert found, "a shortlist was asked for"
    narrow = narrow_words(plan.provenance.own_runs)
    return (
        f"With a chance of {100 * found.chance:.0f} % one of these is as fast as the fastest of "
        f"the plan and its {len(plan.alternatives)} runners-up, but for the "
        f"{100 * AS_FAST:.0f} % by which two runs of one plan may differ. Best: the chance of each."
        f"{f' Ranges are {narrow}.' if narrow else ''}"
    )


def degree_cells(other: Alternative) -> dict[str, str]:
    """The layout of a runner-up by column."""
    layout = other.layout
    return {
        "GPUs": str(layout.num_gpus),
        **{name: str(size) for name, size in degrees(layout).items()},
        "MBS": str(layout.micro_batch_size),
        "ZeRO": str(int(layout.zero)),
        "Order": str(layout.dims.rank_order).removeprefix("tp-cp-ep-"),
        "Recompute": "+".join(
            _SHORT.get(name, name) for name in layout.recompute.label().split("+")
        ),
    }


def plan_and_alternatives(plan: ParallelPlan) -> list[Alternative]:
    """A plan as a runner-up to itself, and its runners-up."""
    own = Alternative(
        layout=plan.layout,
        iteration_time_s=plan.predicted.iteration_time_s,
        slower_percent=0.0,
        uncertainty=plan.uncertainty,
        peak_memory_bytes=plan.predicted.peak_memory_bytes,
    )
    return [own, *plan.alternatives]


def term_differences(
    plan: ParallelPlan, times: LayerTimes | None = None
) -> tuple[Mapping[str, float] | None, ...]:
    """For each runner-up, seconds that each term takes more than in the plan.

    Args:
        times: the measured layer times that the plan was made with.

    Returns:
        One mapping a runner-up; ``None`` where this version prices it otherwise than the plan says.
    """
    try:
        settings = restored_settings(plan.provenance.settings)
    except UserInputError:
        return (None,) * len(plan.alternatives)
    model = CostModel(plan.model, plan.cluster, settings, times)
    return tuple(_differences(plan, other, model) for other in plan.alternatives)


def _differences(
    plan: ParallelPlan, other: Alternative, model: CostModel
) -> Mapping[str, float] | None:
    try:
        found = estimate(model, other.layout)
    except UserInputError:
        return None
    if not same_price(found.iteration_time_s, other.iteration_time_s):
        return None
    return {name: s - plan.predicted.terms.get(name, 0.0) for name, s in found.terms.items()}


def same_price(found_s: Seconds, told_s: Seconds) -> bool:
    """Whether this version prices a layout as a plan file says."""
    return abs(found_s - told_s) <= 1e-6 * told_s


def before_after_report(found: BeforeAfter, plan: ParallelPlan) -> RenderableType:
    """Both side by side, what each change brings, and what it needs."""
    title, shown = Text("Today and planned", style="bold cyan"), before_after_section(found, plan)
    if not shown["figures"]:
        return Group(title, indented(Text(shown["verdict"], style="yellow")), Text())
    figures = *figure_columns("Today", "Plan"), *word_columns("")
    table = FittingTable("", *figures, rows=shown["figures"])
    parts: list[RenderableType] = [title, table, indented(shown["verdict"]), Text()]
    for each in shown["tables"]:
        figures = *word_columns("Change"), *figure_columns("Step", "", "GiB")
        table = FittingTable("#", *figures, rows=each["rows"])
        parts += [heading(each["caption"]), table, *map(indented, each["rules"])]
    if shown["tables"]:
        parts.append(indented(shown["sum"]))
    if found.needs:
        parts.append(heading("What the change needs"))
        parts += [indented(f"- {each}") for each in found.needs]
    return Group(*parts, Text())


def before_after_section(found: BeforeAfter, plan: ParallelPlan) -> Mapping[str, Any]:
    """What a terminal and the page of a plan show."""
    before, changes = found.before, found.changes
    if not before or not changes:
        return {"verdict": refused_words(found), "level": "bad", "figures": ()}
    whole = changes.whole
    is_better = whole.seconds == 0 or (whole.is_sure and whole.chance_faster >= 0.5)
    memory = memory_level(before)  # not_modelled is no warning: the job runs with those flags
    alone = "What each change brings alone, beside what runs today"
    in_order = "One after another, each on top of those above it"
    tables = (
        _changes_table(alone, changes.alone, "not by itself"),
        _changes_table(in_order, changes.in_order, "together", before),
    )
    return {
        "verdict": verdict(before, whole),
        "level": memory or ("" if is_better else "warning"),
        "figures": [*side_by_side(before, plan, whole)],
        "tables": tables if changes.in_order else (),
        "sum": sum_words(whole),
        "needs": found.needs,
    }


def refused_words(found: BeforeAfter) -> str:
    """Why what runs today has no figures."""
    return f"What runs today cannot be priced: {found.refused}"


def verdict(before: PricedLayout, whole: Difference) -> str:
    """What a difference means for who has a job that runs."""
    found, misfit = before.predicted, ""
    if not found.fits:
        needs = found.peak_memory_bytes, found.capacity_bytes
        misfit = f" The present layout {memory_verdict(*needs, before.not_modelled)}."
        if "does not fit" in misfit:  # and is not faster
            return misfit.strip()
    if risk := risk_words(before, "The present layout"):
        misfit += f" {risk}"
    if whole.seconds == 0:
        return f"Keep what you have: the plan is what runs today.{misfit}"
    chance = max(whole.chance_faster, 1 - whole.chance_faster)
    sure = f"{100 * chance:.0f} %" if chance < 0.995 else "more than 99 %"
    if not whole.is_sure:
        which = "faster" if whole.chance_faster >= 0.5 else "slower"
        kept = "" if misfit else ", so the present layout may be kept"
        said = f"Not distinguishable: that the plan is {which} is {sure} sure{kept}."
    elif whole.chance_faster >= 0.5:
        said = f"That the plan is faster is {sure} sure."
    else:
        said = f"The present layout is the faster one: that is {sure} sure."
    return said + misfit


def side_by_side(
    before: PricedLayout, plan: ParallelPlan, whole: Difference
) -> Iterator[tuple[str, str, str, str]]:
    """Each figure and each degree today and planned, and the difference of the steps."""
    for (name, today), (_, planned) in zip(_figures(before), _figures(plan), strict=True):
        yield name, today, planned, difference_words(whole) if name == "Step" else ""
    for name, size in degrees(before.layout).items():
        if max(size, chosen := degrees(plan.layout)[name]) > 1:
            yield name, str(size), str(chosen), ""
    micro, planned_micro = (str(each.layout.micro_batch_size) for each in (before, plan))
    yield "Micro batch", micro, planned_micro, ""


def _figures(plan: PricedLayout | ParallelPlan) -> Iterator[tuple[str, str]]:
    found, gpus = plan.predicted, plan.layout.num_gpus
    yield "Step", format_seconds(found.iteration_time_s)
    yield "Tokens/s", f"{found.tokens_per_s_per_gpu * gpus:,.0f}"
    yield "Tokens/s/GPU", f"{found.tokens_per_s_per_gpu:,.0f}"
    yield "MFU", f"{100 * found.mfu:.1f} %"
    yield "Memory peak", format_gib(found.peak_memory_bytes)
    yield "Limit", format_gib(found.capacity_bytes)
    yield "P(OOM)", format_chance(plan.uncertainty.out_of_memory)
    yield from ((name, cell) for name, cell in price_cells(plan).items() if name != "MWh")


def difference_words(found: Difference) -> str:
    """A difference with its interval.

    >>> difference_words(Difference(seconds=-0.5, percent=-10, low_percent=-14.04,
    ...                             high_percent=-5.96, chance_faster=0.99))
    '-10.0 % (-14.0 to -6.0 % in 9 of 10)'
    """
    low, high = found.low_percent, found.high_percent
    return f"{found.percent:+.1f} % ({low:+.1f} to {high:+.1f} % in 9 of 10)"


def sum_words(whole: Difference) -> str:
    """What the changes add up to that are made one after another.

    >>> sum_words(Difference(seconds=-0.5, percent=-10.0, low_percent=-14.0, high_percent=-6.0,
    ...                      chance_faster=0.99))
    'All together: -500.0 ms, -10.0 %. Seconds add up; each % is of the step in the row above.'
    """
    seconds = f"{'-' if whole.seconds < 0 else '+'}{format_seconds(abs(whole.seconds))}"
    return (
        f"All together: {seconds}, {whole.percent:+.1f} %. Seconds add up; each % is of the step "
        "in the row above."
    )


def _changes_table(
    caption: str, changes: Iterable[LayoutChange], refused: str, first: PricedLayout | None = None
) -> Mapping[str, Any]:
    """Number, change, step, difference and GiB of each, below what runs today, if given.

    Args:
        refused: what comes before the rule of a change that is not made by itself.
    """
    rows, rules = [], list[str]()
    if first:
        step = format_seconds(first.predicted.iteration_time_s)
        rows.append(("0", "today", step, "", _gib(first.predicted.peak_memory_bytes)))
    for number, row in enumerate(changes, start=1):
        figures = "refused", "", ""
        if row.difference and row.step_s is not None and row.peak_memory_bytes is not None:
            percent = f"{row.difference.percent:+.1f} %"
            peak = _gib(row.peak_memory_bytes) + ("" if row.fits else " !")
            figures = format_seconds(row.step_s), percent, peak
        named = ((SHORT_DEGREES.get(each.name, each.name), each) for each in row.choices)
        words = ", ".join(f"{name} {each.before} -> {each.after}" for name, each in named)
        rows.append((str(number), words, *figures))
        if row.rule:
            rules.append(f"{number} {refused}: {row.rule}")
        if row.fits is False:
            rules.append(f"{number} !: does not fit, as predicted")
    return {"caption": caption, "rows": rows, "rules": rules}


#: Shorter times are rounding.
_LEAST_S = 5e-7


def versus_report(
    plan: ParallelPlan, other: ParallelPlan, difference: Difference
) -> RenderableType:
    """Both layouts, where time and memory differ, and how sure that is."""
    mine, theirs = plan.predicted, other.predicted
    steps = ("step", mine.iteration_time_s, theirs.iteration_time_s)
    held, others = peak_stage(plan), peak_stage(other)
    peaks = ("peak", sum(held.values()), sum(others.values()))
    of_memory = _differences_table(MEMORY_WORDS, held, others, peaks, _gib, _signed_gib)
    of_memory.add_row("limit", _gib(mine.capacity_bytes), _gib(theirs.capacity_bytes), "")
    chances = (format_chance(each.uncertainty.out_of_memory) for each in (plan, other))
    verdicts, layouts = ["Chance to run out: plan {}, other {}.".format(*chances)], []
    for name, each in (("plan", plan), ("other layout", other)):
        words = f"{layout_words(each)}, stages {layout_string(each.model, each.layout.partition)}"
        layouts.append(indented(f"{name[:5]:8}{words}"))
        if said := plan_verdict(each):
            verdicts.append(f"The {name}: {said}.")
    return Group(
        heading("Layouts"),
        *layouts,
        heading("Step by term (of each layout's busiest pipeline rank)"),
        _differences_table(TERM_WORDS, mine.terms, theirs.terms, steps, format_seconds, _signed),
        indented(f"The other layout's step: {difference_words(difference)}."),
        heading("Memory of the GPU with the highest peak, GiB"),
        of_memory,
        *map(indented, verdicts),
    )


def layout_words(plan: ParallelPlan) -> str:
    """A layout in one line."""
    layout = plan.layout
    words = (
        *(f"{name} {n}" for name, n in degrees(layout).items() if n > 1 or name == "TP"),
        f"micro batch {layout.micro_batch_size}",
        f"ZeRO-{int(layout.zero)}",
        f"recompute {layout.recompute.label()}",
        layout.execution.words(experts=plan.model.is_moe),
    )
    return ", ".join(filter(None, words))


def _differences_table(
    words: Mapping[str, str],
    own: Mapping[str, float],
    others: Mapping[str, float],
    total: tuple[str, float, float],
    shown: Callable[[float], str],
    signed: Callable[[float], str],
) -> FittingTable:
    """Parts that are in either layout, and their sum: of both, and the difference."""
    table = FittingTable("", *figure_columns("Plan", "Other", "Difference"))
    for name in {**own, **others}:
        mine, theirs = own.get(name, 0.0), others.get(name, 0.0)
        if max(mine, theirs) >= _LEAST_S:
            table.add_row(words.get(name, name), shown(mine), shown(theirs), signed(theirs - mine))
    name, mine, theirs = total
    table.add_row(name, shown(mine), shown(theirs), signed(theirs - mine), style="bold")
    return table


def _signed(seconds: Seconds) -> str:
    sign = "" if abs(seconds) < _LEAST_S else "-" if seconds < 0 else "+"
    return f"{sign}{format_seconds(abs(seconds) if sign else 0.0)}"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f}"


def _signed_gib(num_bytes: float) -> str:
    rounded = round(num_bytes / GIB, 1)
    return f"{rounded:+.1f}" if rounded else "0.0"


def peak_stage(plan: ParallelPlan) -> Mapping[str, Bytes]:
    """Memory of the pipeline rank with the highest peak, by part."""
    return max(plan.predicted.stages, key=lambda stage: stage.peak_memory_bytes).memory_bytes


def stages_table(plan: ParallelPlan) -> RenderableType:
    """What each pipeline rank needs against the limit."""
    table = FittingTable(*figure_columns("Rank", "Needs", "Limit", "Missing"))
    for rank, stage in enumerate(plan.predicted.stages):
        needed, limit = stage.peak_memory_bytes, plan.predicted.capacity_bytes
        lacks = format_gib(needed - limit) if needed > limit else "-"
        table.add_row(str(rank), format_gib(needed), format_gib(limit), lacks)
    return table
