"""A plan beside another layout of its job, term by term and part by part of memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import Group, RenderableType
from rich.text import Text

from nest_megatron.layout.before_after import Difference
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.report.before_after import difference_words
from nest_megatron.report.memory_words import plan_verdict
from nest_megatron.report.tables import (
    FittingTable,
    figure_columns,
    heading,
    indented,
    name_columns,
)
from nest_megatron.report.words import MEMORY_WORDS, TERM_WORDS, degrees
from nest_megatron.units import GIB, Bytes, Seconds, format_chance, format_gib, format_seconds

#: Shorter times are rounding.
_LEAST_S = 5e-7


def versus_report(
    plan: ParallelPlan,
    other: ParallelPlan,
    difference: Difference,
    terms: Mapping[str, Seconds],
    memory: Mapping[str, Bytes],
) -> RenderableType:
    """Both layouts, where time and memory differ, and how sure that is."""
    return Group(
        heading("Layouts"),
        indented(Text(f"plan    {layout_words(plan)}")),
        indented(Text(f"other   {layout_words(other)}")),
        heading("Step by term (of each layout's busiest pipeline rank)"),
        _terms(plan, other, terms),
        indented(f"The other layout's step: {difference_words(difference)}."),
        heading("Memory of the GPU with the highest peak, GiB"),
        _memory(plan, other, memory),
        *(indented(each) for each in _verdicts(plan, other)),
    )


def layout_words(plan: ParallelPlan) -> str:
    """A layout in one line."""
    sizes = [f"{name} {n}" for name, n in degrees(plan.layout).items() if n > 1 or name == "TP"]
    layout = plan.layout
    words = [*sizes, f"micro batch {layout.micro_batch_size}", f"ZeRO-{int(layout.zero)}"]
    words += [f"recompute {layout.recompute.label()}"]
    execution = plan.layout.execution.words(experts=plan.model.is_moe)
    return ", ".join([*words, *([execution] if execution else [])])


def _terms(plan: ParallelPlan, other: ParallelPlan, terms: Mapping[str, Seconds]) -> RenderableType:
    table = FittingTable(*name_columns(""), *figure_columns("Plan", "Other", "Difference"))
    mine, theirs = plan.predicted, other.predicted
    for name, seconds in terms.items():
        own, its = mine.terms.get(name, 0.0), theirs.terms.get(name, 0.0)
        if max(own, its) >= _LEAST_S:
            figures = (format_seconds(own), format_seconds(its), _signed(seconds))
            table.add_row(TERM_WORDS.get(name, name), *figures)
    steps = mine.iteration_time_s, theirs.iteration_time_s
    total = _signed(steps[1] - steps[0])
    table.add_row("step", *map(format_seconds, steps), total, style="bold")
    return table


def _signed(seconds: Seconds) -> str:
    sign = "" if abs(seconds) < _LEAST_S else "-" if seconds < 0 else "+"
    return f"{sign}{format_seconds(abs(seconds) if sign else 0.0)}"


def _memory(plan: ParallelPlan, other: ParallelPlan, memory: Mapping[str, Bytes]) -> RenderableType:
    table = FittingTable(*name_columns(""), *figure_columns("Plan", "Other", "Difference"))
    mine, theirs = peak_stage(plan), peak_stage(other)
    for name, more in memory.items():
        own, its = mine.get(name, 0), theirs.get(name, 0)
        if own or its:
            word = MEMORY_WORDS.get(name, name)
            table.add_row(word, f"{own / GIB:.1f}", f"{its / GIB:.1f}", _signed_gib(more))
    own, its = sum(mine.values()), sum(theirs.values())
    figures = f"{own / GIB:.1f}", f"{its / GIB:.1f}", _signed_gib(its - own)
    table.add_row("peak", *figures, style="bold")
    limits = plan.predicted.capacity_bytes, other.predicted.capacity_bytes
    table.add_row("limit", *(f"{limit / GIB:.1f}" for limit in limits), "")
    return table


def _signed_gib(num_bytes: Bytes) -> str:
    rounded = round(num_bytes / GIB, 1)
    return f"{rounded:+.1f}" if rounded else "0.0"


def peak_stage(plan: ParallelPlan) -> Mapping[str, Bytes]:
    """Memory of the pipeline rank with the highest peak, by part."""
    return max((each.memory_bytes for each in plan.predicted.stages), key=lambda m: sum(m.values()))


def _verdicts(plan: ParallelPlan, other: ParallelPlan) -> Iterator[str]:
    own, others = (format_chance(each.uncertainty.out_of_memory) for each in (plan, other))
    yield f"Chance to run out: plan {own}, other {others}."
    for name, each in (("plan", plan), ("other layout", other)):
        if said := plan_verdict(each):
            yield f"The {name}: {said}."


def stages_table(plan: ParallelPlan) -> RenderableType:
    """What each pipeline rank needs against the limit."""
    table = FittingTable(*figure_columns("Rank", "Needs", "Limit", "Missing"))
    for rank, stage in enumerate(plan.predicted.stages):
        needed, limit = sum(stage.memory_bytes.values()), plan.predicted.capacity_bytes
        lacks = format_gib(needed - limit) if needed > limit else "-"
        table.add_row(str(rank), format_gib(needed), format_gib(limit), lacks)
    return table
