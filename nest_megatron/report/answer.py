"""What ``plan`` and ``estimate`` answer in one screen; all other figures are behind ``--full``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from nest_megatron.layout.estimate import BeforeAfter
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.profile.records import ANALYTIC_NAME
from nest_megatron.report.before_after import difference_words, refused_words, verdict
from nest_megatron.report.console import command_lines
from nest_megatron.report.memory_words import plan_verdict
from nest_megatron.report.tables import indented, pairs
from nest_megatron.report.terminal import job_rows, memory_text, rates, title, today_rows
from nest_megatron.report.words import (
    confidence_words,
    layout_words,
    other_layouts,
    ranged_words,
    short_proof,
    stage_legend,
)
from nest_megatron.units import counted, format_chance, format_gib, format_seconds


def answer_report(
    plan: ParallelPlan,
    flags: Sequence[str] = (),
    environment: Mapping[str, str | None] | None = None,
) -> RenderableType:
    """A plan, or a layout that was priced, in one screen.

    Args:
        flags: the layout in Megatron's own words, where they are to be pasted.
        environment: variables that the launch needs with them.
    """
    rows, more = [*_prediction(plan)], [*_choices(plan)]
    if not flags:
        return Group(title(plan), pairs(rows + more))
    has_stages = any("pipeline-model-parallel-layout" in flag for flag in flags)
    pasted = _Flags(flags), *_flag_notes(plan, environment or {}, has_stages=has_stages)
    return Group(title(plan), pairs(rows), Text(), *pasted, pairs(more))


class _Flags:
    """Words to paste, broken between flags at the width that there is."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(command_lines(self._words, width=options.max_width - 2))


def _prediction(plan: ParallelPlan) -> Iterator[tuple[str, str | Text]]:
    """The step, the layout and the memory; beside today's where that is known."""
    known, predicted = plan.uncertainty, plan.predicted
    today = plan.today
    if today is not None and today.changes is not None and today.changes.whole.seconds:
        yield from _changed(plan, today)
    else:
        if today is not None and today.before is None:
            yield "Today", Text(refused_words(today), style="yellow")
        yield from today_rows(plan)
        step = Text(format_seconds(predicted.iteration_time_s), style="bold green")
        yield "Step", step.append(f", {ranged_words(known, plan.provenance.own_runs)}", "default")
        yield "Layout", Text(layout_words(plan.layout), style="bold")
        yield "Memory", memory_text(plan)
    yield "Speed", rates(plan)
    yield from job_rows(plan)
    profile, _, _ = plan.provenance.profile.partition(": ")
    measured = "no profile of this cluster"
    if profile != ANALYTIC_NAME:
        measured = f"layer times of {profile}"
    yield "Confidence", f"{confidence_words(known, plan.provenance.site, kind=False)}; {measured}"


def _changed(plan: ParallelPlan, found: BeforeAfter) -> Iterator[tuple[str, str | Text]]:
    """What a job runs today and the plan, in four lines."""
    before, changes, predicted = found.before, found.changes, plan.predicted
    assert before is not None
    assert changes is not None
    was, whole = before.predicted, changes.whole
    times = (
        f"{format_seconds(was.iteration_time_s)} -> {format_seconds(predicted.iteration_time_s)}"
    )
    yield "Step", Text(f"{times}, {difference_words(whole)}", style="bold green")
    peaks = (format_gib(each.peak_memory_bytes) for each in (was, predicted))
    risks = (format_chance(each.uncertainty.out_of_memory) for each in (before, plan))
    limit = format_gib(predicted.capacity_bytes)
    memory = f"{' -> '.join(peaks)} of {limit}; risk to run out {' -> '.join(risks)}"
    yield "Memory", "; ".join(filter(None, (memory, plan_verdict(plan))))
    yield "Layout", " -> ".join(map(layout_words, (before.layout, plan.layout)))
    yield "Verdict", verdict(before, whole)
    for needed in found.needs:
        words = needed.removeprefix("Checkpoint: ")
        yield "Needs" if words == needed else "Checkpoint", words


def _flag_notes(
    plan: ParallelPlan, environment: Mapping[str, str | None], *, has_stages: bool
) -> Iterator[RenderableType]:
    """What is said of flags that are to be pasted."""
    given = [f"{name}={value}" for name, value in environment.items() if value is not None]
    unset = [name for name, value in environment.items() if value is None]
    said = [f"with {' '.join(given)}"] if given else []
    said += [f"without {' '.join(unset)}"] if unset else []
    if has_stages:
        said.append(stage_legend(plan.model))
    if said:
        yield indented(Text("; ".join(said), style="dim"))


def _choices(plan: ParallelPlan) -> Iterator[tuple[str, str | Text]]:
    """Faster and safer layouts with their price, what may be changed, and what is proven."""
    yield from other_layouts(plan)
    if plan.offers:
        changes = counted(len(plan.offers), "change")
        yield "Suggestions", f"{changes} would gain time or memory at a price: see explain"
    if plan.search.certificate != "fixed":
        yield "Search", short_proof(plan)
