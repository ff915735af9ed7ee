"""The HTML report of a plan: one file, no script, nothing fetched from anywhere."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping

from nest_megatron.files import MARK
from nest_megatron.parallel.plan import LaunchCommand, ParallelPlan
from nest_megatron.profile.lookup import LayerTimes
from nest_megatron.report.html_layout import (
    alternatives,
    choices,
    groups,
    metered,
    stages,
    swatch,
    swatches,
)
from nest_megatron.report.markup import Markup, element, joined, table
from nest_megatron.report.palette import MEMORY_COLOURS, OTHER_COLOUR, TERM_COLOURS
from nest_megatron.report.plan_facts import (
    funnel_steps,
    launch_size,
    model_words,
    setting_meanings,
    setting_value,
)
from nest_megatron.report.schedule_view import schedule_view, windows
from nest_megatron.report.style import CSS
from nest_megatron.report.svg import funnel, memory_chart, stacked_bar, timeline_chart
from nest_megatron.report.timeline import WAITING, legend
from nest_megatron.report.words import (
    TERM_WORDS,
    certificate,
    confidence_words,
    fastest_words,
    goodput_words,
    headroom_words,
    memory_verdict,
    proof,
    range_words,
)
from nest_megatron.units import GIB, format_chance, format_gib, format_seconds, to_ticks

#: The page may show what it holds and load nothing.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def html_report(
    plan: ParallelPlan, times: LayerTimes | None = None, *, flags: Iterable[str] = ()
) -> str:
    """The report of a plan as one self-contained page.

    Args:
        times: the measured layer times that the plan was made with.
        flags: Megatron-LM's for the layout, shown where the plan holds no launch command.

    Raises:
        UserInputError: if the plan was made with settings that this version does not know.
    """
    title = f"{plan.model.name} on {plan.cluster.describe()}"
    sections = (
        ("Stages", stages(plan)),
        ("Where the time of a step goes", _time(plan)),
        ("Memory", _memory(plan)),
        ("Timeline", _timeline(plan, times)),
        ("Communication groups by network level", groups(plan)),
        ("What the plan sets, and why", choices(plan)),
        ("Runners-up", joined((alternatives(plan, times), _shortlist(plan)))),
        ("The search", _search(plan)),
        ("Launch", _launch(plan, flags)),
        ("Assumptions", _assumptions(plan)),
        ("Provenance", _provenance(plan)),
    )
    body = element("main", _headline(plan), *(_section(*section) for section in sections))
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="generator", content=MARK),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
        element("title", title),
        element("style", Markup(CSS)),
    )
    page = element("html", head, element("body", body), lang="en")
    return f"<!doctype html>\n{page}\n"


def _section(title: str, content: Markup) -> Markup:
    return element("section", element("h2", title), content)


def _headline(plan: ParallelPlan) -> Markup:
    predicted = plan.predicted
    gpus = plan.placement.num_gpus
    known = plan.uncertainty
    figures = {
        "one step": format_seconds(predicted.iteration_time_s),
        **({} if known is None else {"9 of 10 runs": range_words(known)}),
        "tokens/s per GPU": f"{predicted.tokens_per_s_per_gpu:,.0f}",
        "MFU": f"{100 * predicted.mfu:.1f} %",
        "TFLOP/s per GPU": f"{predicted.model_tflops_per_gpu:,.0f}",
        "peak memory per GPU": format_gib(predicted.peak_memory_bytes),
        **({} if known is None else {"runs out of memory": format_chance(known.out_of_memory)}),
        "GPUs used": f"{gpus:,}",
    }
    if plan.goodput is not None:
        figures["goodput"] = f"{100 * plan.goodput.share:.1f} %"
    cells = [element("div", element("dt", k), element("dd", v)) for k, v in figures.items()]
    train = plan.train
    job = f"global batch {train.global_batch_size:,}, {train.precision.value}"
    bad = None if predicted.fits else " bad"
    verdict = [proof(plan), f" What binds it: {predicted.binding_constraint}."]
    if (fastest := fastest_words(plan)) != "":
        verdict.append(f" Preferred to {fastest}.")
    if plan.headroom is not None:
        verdict.append(f" Memory left free: {headroom_words(plan.headroom)}.")
    verdict += [f" Not taken: {offer}." for offer in plan.offers]
    if plan.goodput is not None:
        words = goodput_words(plan.goodput, gpus, predicted.iteration_time_s)
        verdict.append(f" Goodput: {words}.")
    memory = memory_verdict(
        predicted.peak_memory_bytes, predicted.capacity_bytes, plan.search.not_modelled
    )
    if memory:
        verdict.insert(0, f"In memory this layout {memory}. ")
    return element(
        "header",
        element("h1", f"{plan.model.name} on {plan.cluster.describe()}"),
        element(
            "p", f"{model_words(plan.model)}; {job}. Cluster {plan.cluster.name}.", class_="soft"
        ),
        element("dl", *cells, class_="figures"),
        element("p", *verdict, class_=f"verdict{bad or ''}"),
        element("p", _confidence(plan), class_="soft"),
    )


def _shortlist(plan: ParallelPlan) -> Markup:
    """Which of the plan and its runners-up could be the fastest, where that was asked."""
    found = plan.shortlist
    if found is None:
        return joined(())
    rows = [
        (f"runner-up {number}" if number else "this plan", f"{100 * share:.0f} %")
        for number, share in zip(found.numbers, found.chances, strict=True)
    ]
    caption = "The fewest plans that hold the fastest with 95 %"
    told = element("ul", *(element("li", each) for each in found.measurements))
    parts = [table(("plan", "chance to be the fastest"), rows, caption, numeric=1, narrow=True)]
    if found.measurements:
        parts += [element("p", "What would tell most which of them is the fastest:"), told]
    return joined(parts)


def _confidence(plan: ParallelPlan) -> str:
    said = "Times and memory are predictions of a cost model."
    if plan.uncertainty is None:
        return said
    return f"{said} Confidence in this one is {confidence_words(plan.uncertainty)}."


def _time(plan: ParallelPlan) -> Markup:
    predicted = plan.predicted
    terms = {name: value for name, value in predicted.terms.items() if to_ticks(value) > 0}
    shares = {name: value / predicted.iteration_time_s for name, value in terms.items()}
    rows = [
        (
            joined((swatch(TERM_COLOURS.get(name, OTHER_COLOUR)), TERM_WORDS.get(name, name))),
            metered(share, f"{100 * share:.1f} %"),
            format_seconds(terms[name]),
        )
        for name, share in shares.items()
    ]
    words = (
        f"Pipeline rank {predicted.critical_rank}, which is busy longest, and what it waits for; "
        "the terms add up to the step. Communication counts where it is not hidden under "
        "computation."
    )
    caption = "Terms of a step"
    return joined(
        (
            element("p", words, class_="soft"),
            stacked_bar(terms, TERM_COLOURS, "Share of each term in the time of a step"),
            table(("term", "share", "time"), rows, caption, numeric=2, narrow=True),
        )
    )


def _memory(plan: ParallelPlan) -> Markup:
    terms = list(dict.fromkeys(name for s in plan.predicted.stages for name in s.memory_bytes))
    named = [(name, MEMORY_COLOURS.get(name, OTHER_COLOUR)) for name in terms]
    peaks = [sum(stage.memory_bytes.values()) for stage in plan.predicted.stages]
    fullest = peaks.index(max(peaks))
    held = plan.predicted.stages[fullest].memory_bytes
    rows = [(name, f"{value / GIB:.2f} GiB") for name, value in held.items()]
    rows.append(("together", f"{peaks[fullest] / GIB:.2f} GiB"))
    rows.append(("capacity", f"{plan.predicted.capacity_bytes / GIB:.2f} GiB"))
    caption = f"The fullest pipeline rank, {fullest}, at its peak"
    return joined(
        (
            memory_chart(plan),
            swatches(named),
            table(("what", "memory"), rows, caption, numeric=1, narrow=True),
        )
    )


def _timeline(plan: ParallelPlan, times: LayerTimes | None) -> Markup:
    view = schedule_view(plan, times)
    shown = windows(view)
    title = f"Predicted schedule of {len(view.ranks)} pipeline ranks"
    words = (
        f"{view.num_microbatches} micro batches; a number in a bar is that of its micro batch. "
        "A pass holds the transfers that its rank waits for."
    )
    if len(shown) > 1:
        words += (
            " The step is long, so its beginning, a stretch of its middle and its end are drawn."
        )
    if abs(view.iteration_time_s / plan.predicted.iteration_time_s - 1) > 1e-6:
        words += (
            f" This version's cost model says {format_seconds(view.iteration_time_s)} a step; the "
            f"plan was made by version {plan.provenance.nest_megatron_version} with another result."
        )
    picture = timeline_chart(view, shown, title)
    named = [(n, "var(--idle)" if n == WAITING else c) for n, c in legend(view)]
    return element("figure", picture, swatches(named), element("figcaption", words))


def _search(plan: ParallelPlan) -> Markup:
    search = plan.search
    if search.certificate == "fixed" or not search.candidates:
        return element("p", certificate(search))
    refused = {**search.infeasible, **{f"rule: {k}": v for k, v in search.illegal.items()}}
    parts = [element("figure", funnel(funnel_steps(search)))]
    if refused:
        rows = [(name, f"{count:,}") for name, count in refused.items()]
        parts.append(
            table(("reason", "candidates"), rows, "What was ruled out", numeric=1, narrow=True)
        )
    space = [(element("code", name), limit) for name, limit in search.space.items()]
    parts.append(table(("choice", "allowed"), space, "The space that was searched", narrow=True))
    return joined(parts)


def _launch(plan: ParallelPlan, flags: Iterable[str]) -> Markup:
    if not plan.launch:
        words = "Flags that lay the job over the GPUs, for the Megatron-LM command that starts it:"
        return joined((element("p", words), element("pre", _continued(_lines(flags)))))
    parts: list[Markup] = []
    for name, command in plan.launch.items():
        parts.append(element("h3", name))
        parts.append(element("pre", _command(plan, command)))
        if command.notes:
            parts.append(element("ul", *(element("li", note) for note in command.notes)))
    return joined(parts)


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


def _assumptions(plan: ParallelPlan) -> Markup:
    meanings = setting_meanings()
    rows = [
        (element("code", name), setting_value(name, value), meanings.get(name, ""))
        for name, value in plan.provenance.settings.items()
    ]
    accelerator = plan.cluster.accelerator
    sources = [("accelerator", accelerator.name, accelerator.source)]
    sources += [
        (f"level {lv.name}", f"{lv.latency_s * 1e6:g} us", lv.source) for lv in plan.cluster.levels
    ]
    sources.append(("model", plan.model.name, plan.model.source))
    return joined(
        (
            table(("setting", "value", "meaning"), rows, "What the cost model takes for granted"),
            table(("figure", "value", "source"), sources, "Where its figures come from"),
        )
    )


def _provenance(plan: ParallelPlan) -> Markup:
    made = plan.provenance
    facts: Mapping[str, str] = {
        "nest-megatron": made.nest_megatron_version,
        "made": made.created,
        "profile": made.profile,
        "cluster": made.cluster_hash,
        "model": made.model_hash,
        "plan": made.checksum,
    }
    rows = [(name, element("code", value)) for name, value in facts.items()]
    return table(("what", "value"), rows, "Versions and fingerprints", narrow=True)
