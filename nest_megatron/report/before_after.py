"""A job as it runs today beside its plan, as tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from nest_megatron.parallel.dims import SHORT_DEGREES
from nest_megatron.parallel.plan import ParallelPlan
from nest_megatron.planner.changes import BeforeAfter, Changes, ChoiceChange, LayoutChange
from nest_megatron.planner.layouts import Difference
from nest_megatron.report.tables import (
    FittingTable,
    figure_columns,
    heading,
    indented,
    name_columns,
    word_columns,
)
from nest_megatron.report.words import degrees, plan_verdict
from nest_megatron.units import GIB, format_chance, format_count, format_gib, format_seconds


def before_after_report(found: BeforeAfter, plan: ParallelPlan) -> RenderableType:
    """Both side by side, what each change brings, and what it needs."""
    if found.before is None or found.changes is None:
        refused = Text(f"What runs today cannot be priced: {found.refused}", style="yellow")
        return Group(Text("Today", style="bold cyan"), indented(refused), Text())
    parts = [
        Text("Today and planned", style="bold cyan"),
        _side_by_side(found.before, plan, found.changes.whole),
        indented(verdict(found.before, found.changes.whole)),
        Text(),
    ]
    if found.changes.in_order:
        parts += _changes_report(found.before, found.changes)
    if found.needs:
        parts += [
            heading("What the change needs"),
            *(indented(f"- {each}") for each in found.needs),
        ]
    return Group(*parts, Text())


def verdict(before: ParallelPlan, whole: Difference) -> str:
    """What a difference means for who has a job that runs."""
    misfit = "" if before.predicted.fits else f" The present layout: {plan_verdict(before)}."
    if whole.seconds == 0:
        return f"The plan is what runs today.{misfit}"
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


def _side_by_side(before: ParallelPlan, plan: ParallelPlan, whole: Difference) -> RenderableType:
    table = FittingTable(*name_columns(""), *figure_columns("Today", "Plan"), *word_columns(""))
    rows = zip(_figures(before), _figures(plan), strict=True)
    for (name, today), (_, planned) in rows:
        table.add_row(name, today, planned, difference_words(whole) if name == "Step" else "")
    for name, size in degrees(before.parallel).items():
        if max(size, chosen := degrees(plan.parallel)[name]) > 1:
            table.add_row(name, str(size), str(chosen), "")
    micro = (str(each.train.micro_batch_size) for each in (before, plan))
    table.add_row("Micro batch", *micro, "")
    return table


def _figures(plan: ParallelPlan) -> Iterator[tuple[str, str]]:
    found, gpus = plan.predicted, plan.placement.num_gpus
    yield "Step", format_seconds(found.iteration_time_s)
    yield "Tokens/s", f"{found.tokens_per_s_per_gpu * gpus:,.0f}"
    yield "Tokens/s/GPU", f"{found.tokens_per_s_per_gpu:,.0f}"
    yield "MFU", f"{100 * found.mfu:.1f} %"
    yield "Memory peak", format_gib(found.peak_memory_bytes)
    yield "Limit", format_gib(found.capacity_bytes)
    if plan.uncertainty is not None:
        yield "Runs out", format_chance(plan.uncertainty.out_of_memory)
    if plan.price is not None and plan.price.tokens_per_dollar is not None:
        yield "Tokens/$", format_count(plan.price.tokens_per_dollar)
    if plan.price is not None and plan.price.run_dollars is not None:
        yield "Run $", format_count(plan.price.run_dollars)


def difference_words(found: Difference) -> str:
    """A difference with its interval.

    >>> difference_words(Difference(seconds=-0.5, percent=-10, low_percent=-14.04,
    ...                             high_percent=-5.96, chance_faster=0.99))
    '-10.0 % (-14.0 to -6.0 % in 9 of 10)'
    """
    low, high = found.low_percent, found.high_percent
    return f"{found.percent:+.1f} % ({low:+.1f} to {high:+.1f} % in 9 of 10)"


def _changes_report(before: ParallelPlan, found: Changes) -> list[RenderableType]:
    return [
        heading("What each change brings alone, from what runs today"),
        _change_table(found.alone),
        *_rules(found.alone, "not by itself"),
        heading("One after another, each legal"),
        _change_table(found.in_order, before),
        *_rules(found.in_order, "together"),
    ]


def _change_table(rows: Iterable[LayoutChange], before: ParallelPlan | None = None) -> FittingTable:
    table = FittingTable(
        *name_columns("#"), *word_columns("Change"), *figure_columns("Step", "", "GiB")
    )
    if before is not None:
        peak = f"{before.predicted.peak_memory_bytes / GIB:.1f}"
        step = format_seconds(before.predicted.iteration_time_s)
        table.add_row("", "today", step, "", peak)
    for number, row in enumerate(rows, start=1):
        if row.difference is None or row.step_s is None or row.peak_memory_bytes is None:
            table.add_row(str(number), change_words(row.choices), "refused", "", "")
            continue
        step, percent = format_seconds(row.step_s), f"{row.difference.percent:+.1f} %"
        peak = f"{row.peak_memory_bytes / GIB:.1f}" + ("" if row.fits else " !")
        table.add_row(str(number), change_words(row.choices), step, percent, peak)
    return table


def _rules(rows: Iterable[LayoutChange], what: str) -> Iterator[RenderableType]:
    for number, row in enumerate(rows, start=1):
        if row.rule:
            yield indented(f"{number} {what}: {row.rule}")
        if row.fits is False:
            yield indented(f"{number} !: does not fit, as predicted")


def change_words(choices: Iterable[ChoiceChange]) -> str:
    """Choices by their short names.

    >>> change_words([ChoiceChange(name="tensor_model_parallel_size", before="4", after="2")])
    'TP 4 -> 2'
    """
    return ", ".join(
        f"{SHORT_DEGREES.get(each.name, each.name)} {each.before} -> {each.after}"
        for each in choices
    )
