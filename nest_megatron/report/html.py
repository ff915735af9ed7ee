"""The HTML report of a plan: what each section of ``templates/plan.html`` shows."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nest_megatron.parallel.plan import LaunchCommand, ParallelPlan
from nest_megatron.profile.lookup import LayerTimes
from nest_megatron.report.charts import (
    MEMORY_COLOURS,
    OTHER_COLOUR,
    PAGE_COLOURS,
    TERM_COLOURS,
    ink_on,
)
from nest_megatron.report.html_layout import choices, groups, runners_up, stages
from nest_megatron.report.page import render_page
from nest_megatron.report.plan_facts import (
    funnel_steps,
    launch_size,
    model_words,
    setting_meanings,
    setting_value,
)
from nest_megatron.report.schedule_view import ScheduleView, schedule_view, windows
from nest_megatron.report.terminal import summary_rows
from nest_megatron.report.timeline import legend, timeline_svg
from nest_megatron.report.words import (
    MEMORY_WORDS,
    TERM_WORDS,
    certificate,
    memory_verdict,
    proof,
    range_words,
)
from nest_megatron.units import GIB, format_chance, format_gib, format_seconds, to_ticks

#: Of the summary, what the page shows as figures at its top.
_FIGURES = ("Iteration", "Range")


def html_report(
    plan: ParallelPlan, times: LayerTimes | None = None, *, flags: Iterable[str] = ()
) -> str:
    """The report of a plan as one self-contained page.

    Args:
        times: the measured layer times that the plan was made with.
        flags: Megatron-LM's for the layout, shown where the plan holds no launch command.

    Raises:
        UserInputError: if the plan was made with settings that this version does not know, or
            without matplotlib.
    """
    train = plan.train
    return render_page(
        "plan.html",
        f"{plan.model.name} on {plan.cluster.describe()}",
        plan=plan,
        job=f"{model_words(plan.model)}; global batch {train.global_batch_size:,}, "
        f"{train.precision.value}. Cluster {plan.cluster.name}.",
        figures=_figures(plan),
        verdict=_verdict(plan),
        facts=[row for row in summary_rows(plan) if row[0] not in _FIGURES],
        stages=stages(plan),
        terms=_terms(plan),
        memory=_memory(plan),
        timeline=_timeline(plan, schedule_view(plan, times)),
        groups=groups(plan),
        choices=choices(plan),
        runners_up=runners_up(plan, times),
        shortlist=_shortlist(plan),
        search=_search(plan),
        launches=_launches(plan, flags),
        assumptions=_assumptions(plan),
        provenance=_provenance(plan),
    )


def _figures(plan: ParallelPlan) -> Mapping[str, str]:
    predicted, known = plan.predicted, plan.uncertainty
    figures = {
        "one step": format_seconds(predicted.iteration_time_s),
        **({} if known is None else {"9 of 10 runs": range_words(known)}),
        "tokens/s per GPU": f"{predicted.tokens_per_s_per_gpu:,.0f}",
        "MFU": f"{100 * predicted.mfu:.1f} %",
        "TFLOP/s per GPU": f"{predicted.model_tflops_per_gpu:,.0f}",
        "peak memory per GPU": format_gib(predicted.peak_memory_bytes),
        **({} if known is None else {"runs out of memory": format_chance(known.out_of_memory)}),
        "GPUs used": f"{plan.placement.num_gpus:,}",
    }
    if plan.goodput is not None:
        figures["goodput"] = f"{100 * plan.goodput.share:.1f} %"
    return figures


def _verdict(plan: ParallelPlan) -> str:
    predicted = plan.predicted
    memory = memory_verdict(
        predicted.peak_memory_bytes, predicted.capacity_bytes, plan.search.not_modelled
    )
    return f"In memory this layout {memory}. {proof(plan)}" if memory else proof(plan)


def _terms(plan: ParallelPlan) -> Sequence[Mapping[str, Any]]:
    predicted = plan.predicted
    return [
        {
            "name": TERM_WORDS.get(name, name),
            "value": format_seconds(seconds),
            "share": seconds / predicted.iteration_time_s,
            "colour": (colour := TERM_COLOURS.get(name, OTHER_COLOUR)),
            "ink": ink_on(colour),
        }
        for name, seconds in predicted.terms.items()
        if to_ticks(seconds) > 0
    ]


def _memory(plan: ParallelPlan) -> Mapping[str, Any]:
    """Bars of all pipeline ranks on one scale, and the table of the one with the highest peak."""
    predicted = plan.predicted
    held = [stage.memory_bytes for stage in predicted.stages]
    peaks = [sum(each.values()) for each in held]
    highest, scale = peaks.index(max(peaks)), 100 / max(predicted.capacity_bytes, *peaks)
    ranks = [
        {
            "number": number,
            "total": format_gib(peaks[number]),
            "parts": [
                {**_memory_part(name), "value": _gib(size), "percent": scale * max(0, size)}
                for name, size in each.items()
            ],
        }
        for number, each in enumerate(held)
    ]
    table = [(MEMORY_WORDS.get(name, name), _gib(size)) for name, size in held[highest].items()]
    table += [("together", _gib(peaks[highest])), ("capacity", _gib(predicted.capacity_bytes))]
    return {
        "ranks": ranks,
        "legend": [_memory_part(name) for name in dict.fromkeys(n for each in held for n in each)],
        "limit_percent": scale * predicted.capacity_bytes,
        "capacity": format_gib(predicted.capacity_bytes),
        "highest": highest,
        "table": table,
    }


def _memory_part(name: str) -> Mapping[str, str]:
    colour = MEMORY_COLOURS.get(name, OTHER_COLOUR)
    return {"name": MEMORY_WORDS.get(name, name), "colour": colour}


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f} GiB"


def _timeline(plan: ParallelPlan, view: ScheduleView) -> Mapping[str, Any]:
    words = (
        f"{view.num_microbatches} micro batches; a number in a bar is that of its micro batch. "
        "A pass holds the transfers that its rank waits for."
    )
    if len(windows(view)) > 1:
        words += (
            " The step is long, so its beginning, a stretch of its middle and its end are drawn."
        )
    if abs(view.iteration_time_s / plan.predicted.iteration_time_s - 1) > 1e-6:
        words += (
            f" This version's cost model says {format_seconds(view.iteration_time_s)} a step; the "
            f"plan was made by version {plan.provenance.nest_megatron_version} with another result."
        )
    named = [(name, PAGE_COLOURS.get(colour, colour)) for name, colour in legend(view)]
    title = f"Predicted schedule of {len(view.ranks)} pipeline ranks"
    return {"picture": timeline_svg(view, title), "legend": named, "words": words}


def _shortlist(plan: ParallelPlan) -> Sequence[tuple[str, str]]:
    """Which of the plan and its runners-up could be the fastest, where that was asked."""
    found = plan.shortlist
    if found is None:
        return ()
    return [
        (f"runner-up {number}" if number else "this plan", f"{100 * share:.0f} %")
        for number, share in zip(found.numbers, found.chances, strict=True)
    ]


def _search(plan: ParallelPlan) -> Mapping[str, Any]:
    search = plan.search
    if search.certificate == "fixed" or not search.candidates:
        return {"steps": (), "words": certificate(search)}
    refused = {**search.infeasible, **{f"rule: {k}": v for k, v in search.illegal.items()}}
    steps = funnel_steps(search)
    digits = max(len(str(count)) for _, count in steps)
    return {
        "steps": [(name, count, _log_percent(count, digits)) for name, count in steps],
        "refused": [(name, f"{count:,}") for name, count in refused.items()],
    }


def _log_percent(count: int, digits: int) -> float:
    """A bar's width that grows with the logarithm of a count of so many digits at most."""
    length = len(str(count))
    return 100 * min(1.0, (length - 1 + count / 10**length) / digits) if count else 0.0


def _launches(plan: ParallelPlan, flags: Iterable[str]) -> Sequence[Mapping[str, Any]]:
    if not plan.launch:
        return [{"name": "", "command": _continued(_lines(flags)), "notes": ()}]
    return [
        {"name": name, "command": _command(plan, command), "notes": command.notes}
        for name, command in plan.launch.items()
    ]


def _command(plan: ParallelPlan, command: LaunchCommand) -> str:
    """A shell command: environment, torchrun with the plan's size, script and flags."""
    nodes, per_node = launch_size(plan)
    unset = [f"unset {name}" for name, value in command.environment.items() if value is None]
    given = [
        f"export {name}={shlex.quote(value)}"
        for name, value in command.environment.items()
        if value is not None
    ]
    start = f"torchrun --nnodes {nodes} --nproc-per-node {per_node} {shlex.quote(command.script)}"
    return "\n".join([*unset, *given, _continued([start, *_lines(command.argv)])])


def _lines(argv: Iterable[str]) -> list[str]:
    """Flags with their values, a line each."""
    lines: list[str] = []
    for word in argv:
        if word.startswith("--") or not lines:
            lines.append(shlex.quote(word))
        else:
            lines[-1] += f" {shlex.quote(word)}"
    return lines


def _continued(lines: list[str]) -> str:
    return " \\\n  ".join(lines)


def _assumptions(plan: ParallelPlan) -> Mapping[str, Any]:
    meanings = setting_meanings()
    accelerator = plan.cluster.accelerator
    sources = [("accelerator", accelerator.name, accelerator.source)]
    sources += [
        (f"level {lv.name}", f"{lv.latency_s * 1e6:g} us", lv.source) for lv in plan.cluster.levels
    ]
    return {
        "settings": [
            (name, setting_value(name, value), meanings.get(name, ""))
            for name, value in plan.provenance.settings.items()
        ],
        "sources": [*sources, ("model", plan.model.name, plan.model.source)],
    }


def _provenance(plan: ParallelPlan) -> Sequence[tuple[str, str]]:
    made = plan.provenance
    return [
        ("nest-megatron", made.nest_megatron_version),
        ("made", made.created),
        ("profile", made.profile),
        ("cluster", made.cluster_hash),
        ("model", made.model_hash),
        ("plan", made.checksum),
    ]
