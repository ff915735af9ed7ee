"""Plans as tables for a terminal: pure functions from records to what rich can print.

Everything reads well at 80 columns and as plain text; colour only repeats what the words say.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Column, Table
from rich.text import Text

from nest_megatron.errors import typed_setting
from nest_megatron.layout.estimate import BeforeAfter
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.stage_layout import layout_string
from nest_megatron.layout.zero import STRATEGIES, DataParallelSharding
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.planner import EndedEarly, NoPlan, describe_grid
from nest_megatron.profile.records import ANALYTIC_NAME
from nest_megatron.report.console import command_lines
from nest_megatron.report.layout_tables import (
    alternatives_table,
    difference_words,
    refused_words,
    shortlist_report,
    verdict,
)
from nest_megatron.report.memory_words import (
    memory_level,
    no_plan_verdict,
    plan_verdict,
    price_rows,
)
from nest_megatron.report.site import memory_rows, site_rows, site_words
from nest_megatron.report.tables import (
    Bar,
    FittingTable,
    Pair,
    figure_columns,
    heading,
    indented,
    name_columns,
    pairs,
    word_columns,
)
from nest_megatron.report.words import (
    MAX_SECONDS,
    TERM_WORDS,
    certificate,
    confidence_words,
    cost_source,
    degrees,
    goodput_words,
    layout_words,
    other_layouts,
    present_words,
    proof,
    ranged_words,
    schedule_words,
    sequence_words,
    short_proof,
    stage_legend,
    term_words,
)
from nest_megatron.units import GIB, counted, format_chance, format_gib, format_seconds

#: By what is known of memory.
_STYLES = {"bad": "bold red", "warning": "yellow", "": ""}
#: How the flag, or the field, of a stage layout ends.
_STAGES_FLAG = ("pipeline-model-parallel-layout", "pipeline_model_parallel_layout")
#: Pipeline ranks that the short table shows before it leaves some out.
_SHORT_ROWS = 8
_MEMORY_HEADS = {
    "weights": "Weights",
    "gradients": "Grads",
    "optimizer": "Optim",
    "activations": "Acts",
    "working": "Work",
    "rounding": "Round",
}


def plan_report(plan: ParallelPlan) -> RenderableType:
    """What ``plan`` and ``estimate`` print."""
    parts = _opening(plan, short=True)
    if plan.alternatives:
        parts += [heading("Runners-up"), alternatives_table(plan)]
    return Group(*parts, heading("Certificate"), indented(proof(plan)))


def explain_report(
    plan: ParallelPlan, differences: Sequence[Mapping[str, float] | None]
) -> RenderableType:
    """What ``explain`` prints, the launch command apart; ``term_differences`` of the runners-up."""
    parts = _opening(plan, short=False)
    spans = [f"{ranks[0]}-{ranks[-1]}" for ranks in plan.placement.stage_ranks]
    shown = ", ".join([*spans[:4], "..."] if len(spans) > 5 else spans)
    groups = pairs([*plan.placement.group_levels.items(), ("stage ranks", shown)])
    parts += [heading("Communication groups by network level"), groups]
    if plan.alternatives:
        parts += [heading("Why this one: what each runner-up loses"), alternatives_table(plan)]
        unknown = "cannot be priced by this version"
        lost = (unknown if terms is None else term_words(terms) for terms in differences)
        parts.append(pairs(((str(n), words) for n, words in enumerate(lost, start=1)), style=""))
    if plan.shortlist:
        parts.append(shortlist_report(plan))
    if plan.provenance.site:
        parts.append(heading("What this site's calibration changes"))
        parts.append(pairs(site_rows(plan.provenance.site)))
    parts += [heading("Certificate"), indented(proof(plan))]
    space = plan.search.space
    parts += [heading("The space that was searched"), pairs(space.items())] if space else [Text()]
    return Group(*parts, heading("Provenance"), pairs(provenance_rows(plan)))


def _opening(plan: ParallelPlan, *, short: bool) -> list[RenderableType]:
    rank, of_several = plan.predicted.critical_rank, len(plan.predicted.stages) > 1
    time = f"Where the time goes{f', on pipeline rank {rank}*' if of_several else ''}"
    memory = heading("Memory of each pipeline rank, GiB"), _memory_table(plan, short=short)
    return [title(plan), pairs(summary_rows(plan)), heading(time), _time_bars(plan), *memory]


def title(plan: ParallelPlan) -> Text:
    """The job: its model and where it runs."""
    used, there = plan.layout.num_gpus, plan.cluster.num_gpus
    where = f"{used} of {plan.cluster.describe()}" if used < there else plan.cluster.describe()
    found = Text.assemble((plan.model.name, "bold"), " on ", (where, "bold"))
    return found.append(f", {plan.cluster.name}")


def summary_rows(plan: ParallelPlan) -> list[Pair]:
    """What a plan is, by name: its figures, its layout, and why this one."""
    predicted, layout = plan.predicted, plan.layout
    number = layout.num_microbatches
    batches = f"{number} micro batch{'es' if number > 1 else ''}"
    step = Text(format_seconds(predicted.iteration_time_s), style="bold green")
    rows: list[Pair] = [
        ("Step", step.append(f"   {rates(plan)}", style="not bold default")),
        *job_rows(plan),
        ("Range", ranged_words(plan.uncertainty, plan.provenance.own_runs)),
        ("Confidence", confidence_words(plan.uncertainty, plan.provenance.site)),
        *today_rows(plan),
        ("Layout", _layout(plan)),
        (
            "Batch",
            f"{layout.global_batch_size} sequences of {plan.train.seq_length:,} tokens: {batches} "
            f"of {layout.micro_batch_size} on each replica",
        ),
        ("Memory", memory_text(plan)),
        *memory_rows(plan),
        ("Recompute", layout.recompute.label()),
        ("Sharding", _sharding_words(plan)),
        ("Rank order", str(plan.layout.dims.rank_order)),
    ]
    if execution := plan.layout.execution.words(experts=plan.model.is_moe):
        rows.append(("Execution", execution))
    if layout.dims.pipeline_model_parallel_size > 1:
        stages = layout_string(plan.model, layout.partition)
        rows.append(("Stages", f"{stages}  ({stage_legend(plan.model)})"))
    rows += other_layouts(plan)
    rows += [_binding(predicted.binding_constraint), ("Cost source", cost_source(plan))]
    return rows + [("Suggestion", offer) for offer in plan.offers]


def job_rows(plan: ParallelPlan) -> Iterator[Pair]:
    """What is known of a job beside its step: cost, goodput, a growing batch, sequences, site."""
    train, step_s = plan.train, plan.predicted.iteration_time_s
    if train.precision.value != "bf16":
        yield "Precision", train.precision.value
    yield from price_rows(plan)
    if plan.goodput:
        yield "Goodput", goodput_words(plan.goodput, plan.layout.num_gpus, step_s)
    if plan.batches:
        yield "Schedule", schedule_words(plan.batches)
    if train.sequence_lengths:
        yield "Sequences", sequence_words(plan)
    if plan.provenance.site:
        yield "This site", site_words(plan.provenance.site, plan.uncertainty)


def today_rows(plan: ParallelPlan) -> Iterator[Pair]:
    """What became of the present layout, where no table of both stands above."""
    if plan.present and (plan.present.is_kept or plan.today is None):
        yield "Today", Text(present_words(plan), style="bold" if plan.present.is_kept else "")


def _binding(constraint: str) -> tuple[str, str]:
    """What binds a plan, by name.

    >>> _binding("memory: pipeline rank 1 has 5.2 GiB to spare")
    ('Memory limit', 'pipeline rank 1 has 5.2 GiB to spare')
    >>> _binding("pipeline_bubble: 42 % of the iteration")
    ('Largest term', 'pipeline bubble, 42 % of the iteration')
    """
    what, _, rest = constraint.partition(": ")
    if what == "memory":
        return "Memory limit", rest
    return "Largest term", f"{TERM_WORDS.get(what, what)}, {rest}"


def rates(plan: ParallelPlan) -> str:
    """How fast a step is, by three measures."""
    found = plan.predicted
    return (
        f"{found.tokens_per_s_per_gpu:,.0f} tokens/s/GPU   "
        f"{found.model_tflops_per_gpu:,.0f} TFLOP/s/GPU   MFU {100 * found.mfu:.1f} %"
    )


def _layout(plan: ParallelPlan) -> Text:
    layout = plan.layout
    left_out = set() if plan.model.is_moe else {"EP", "ETP"}
    left_out |= set() if layout.dims.virtual_pipeline_model_parallel_size > 1 else {"VPP"}
    words = [f"{name} {size}" for name, size in degrees(layout).items() if name not in left_out]
    words += ["SP on"] if layout.sequence_parallel else []
    idle = plan.cluster.num_gpus - plan.layout.num_gpus
    text = Text("  ".join(words), style="bold")
    return text.append(f"   ({idle} GPUs idle)", style="yellow") if idle else text


def memory_text(plan: ParallelPlan) -> Text:
    """The predicted peak beside its limit, and the risk."""
    found = plan.predicted
    peak, capacity = found.peak_memory_bytes, found.capacity_bytes
    text = Text(f"{format_gib(peak)} of {format_gib(capacity)}, peak memory per GPU")
    style = _STYLES[memory_level(plan, plan.search.not_modelled)]
    if verdict := plan_verdict(plan):
        text.append(f"   {verdict}", style=style)
    chance = format_chance(plan.uncertainty.out_of_memory)
    return text.append(f"; {chance} risk to run out", style=style)


def _sharding_words(plan: ParallelPlan) -> str:
    layout = plan.layout
    if layout.sharding is DataParallelSharding.TORCH_FSDP2:
        return "ZeRO-3 (PyTorch FSDP2)"
    if layout.uses_megatron_fsdp:
        return f"Megatron-FSDP {STRATEGIES[layout.zero]}"
    if layout.shards_optimizer:
        return "ZeRO-1 (distributed optimizer)"
    return "none (every replica keeps all)"


def _time_bars(plan: ParallelPlan) -> RenderableType:
    total = plan.predicted.iteration_time_s
    columns = (*name_columns("", min_width=18), Column(), *figure_columns("", ""))
    table = Table.grid(*columns, padding=(0, 2, 0, 0))
    for name, seconds in plan.predicted.terms.items():
        if seconds >= 5e-5 * total:
            share = seconds / total
            table.add_row(
                TERM_WORDS.get(name, name),
                Bar(share=share, style="green" if name == "compute" else "yellow"),
                format_seconds(seconds),
                f"{100 * share:.1f} %",
            )
    return indented(table)


def _memory_table(plan: ParallelPlan, *, short: bool) -> RenderableType:
    """Memory of each pipeline rank by term; the short form leaves the middle ones out."""
    stages = plan.predicted.stages
    parts = [n for n in _MEMORY_HEADS if any(stage.memory_bytes.get(n) for stage in stages)]
    table = FittingTable(
        "Rank",
        *word_columns("Holds", max_width=22),
        *figure_columns(*(_MEMORY_HEADS[name] for name in parts), "Total", "Free", "Busy"),
    )
    shown = _shown_ranks(plan) if short else range(len(stages))
    for previous, rank in pairwise((-1, *shown)):
        if rank > previous + 1:
            table.add_row(f"({rank - previous - 1} more)", *[""] * (len(table.columns) - 1))
        stage, is_critical = stages[rank], rank == plan.predicted.critical_rank
        total = stage.peak_memory_bytes
        free = plan.predicted.capacity_bytes - total
        table.add_row(
            f"{rank}{'*' if is_critical else ''}",
            _runs(stage.layers),
            *(f"{stage.memory_bytes.get(name, 0) / GIB:.1f}" for name in parts),
            Text(f"{total / GIB:.1f}", style="bold"),
            Text(f"{free / GIB:.1f}", style="red" if free < 0 else "default"),
            f"{100 * stage.busy_share:.0f}%",
        )
    return table


def _shown_ranks(plan: ParallelPlan) -> list[int]:
    stages = plan.predicted.stages
    if len(stages) <= _SHORT_ROWS:
        return list(range(len(stages)))
    last, totals = len(stages) - 1, [stage.peak_memory_bytes for stage in stages]
    highest = totals.index(max(totals))
    return sorted({0, 1, 2, highest, plan.predicted.critical_rank, last - 1, last})


def _runs(layers: Iterable[str]) -> str:
    """Equal neighbours once.

    >>> _runs(["Et*2", "t*2", "t*2", "t*2"])
    'Et*2, 3 x t*2'
    """
    runs = ((text, len(list(run))) for text, run in groupby(layers))
    return ", ".join(f"{count} x {text}" if count > 1 else text for text, count in runs)


def provenance_rows(plan: ParallelPlan) -> list[Pair]:
    """Where a plan comes from, by name."""
    made = plan.provenance
    framework = " ".join(filter(None, (made.framework, made.framework_version)))
    made_for = "no framework is named: from a model and a cluster, with the target's defaults"
    if made.framework is not None:
        made_for = f"{framework}, by {made.made_by}"
    rows = {
        "version": f"nest-megatron {made.nest_megatron_version}, {made.created}",
        "made for": made_for,
        "profile": made.profile,
        "hashes": f"model {made.model_hash}, cluster {made.cluster_hash}",
        "assumptions": ", ".join(f"{name} {value}" for name, value in made.settings.items()),
    }
    if made.defaults:
        rows["defaults of the site"] = "; ".join(made.defaults)
    return [*rows.items()]


def notes_report(notes: Iterable[str]) -> RenderableType:
    """Assumptions and warnings, one a line."""
    return Group(*(Text(f"note: {note}", style="yellow") for note in notes))


def changes_table(
    changes: Sequence[tuple[str, str | None, str | None, str]], spec: TransformerSpec
) -> RenderableType:
    """Flags before and after, the reason under each, and what the letters of stages stand for."""
    rows = []
    for flag, *values, reason in changes:
        before, after = ("absent" if value is None else value or "set" for value in values)
        told = Text.assemble((before, "red"), " -> ", (after, "green"))
        rows.append((flag, told.append(f"\n{reason}", "dim") if reason else told))
    has_stages = any(flag.endswith(_STAGES_FLAG) for flag, *_ in changes)
    return Group(pairs(rows, style=""), *([indented(stage_legend(spec))] if has_stages else []))


def no_plan_report(refusal: NoPlan) -> RenderableType:
    """Nothing fits: by how much, where, and what helps."""
    most = "" if refusal.complete else "at most "
    nearest = "Nearest plan" if refusal.complete else "Nearest seen"
    rows: list[Pair] = [
        ("Binding", "peak memory per GPU, of the plan that lacks least"),
        ("Missing", Text(f"{most}{format_gib(refusal.missing_bytes)}", style="bold red")),
        (
            "Needed",
            f"{most}{format_gib(refusal.shortage.needed_bytes)}; "
            f"{format_gib(refusal.capacity_bytes)} are usable on each GPU",
        ),
        (nearest, describe_grid(refusal.shortage.grid)),
    ]
    verdict = no_plan_verdict(refusal)
    incomplete = (
        "Time ended the search for the nearest: another plan may lack less. Raise "
        f"{typed_setting(MAX_SECONDS)} to have it."
    )
    return Group(
        Text(f"{verdict[0].upper()}{verdict[1:]}.", style="bold red"),
        pairs(rows),
        heading("Changes that help, with a plan that fits then, not always the fastest"),
        pairs(("-", remedy.words()) for remedy in refusal.remedies),
        *([] if refusal.complete else [indented(incomplete)]),
        heading("What was tried"),
        indented(certificate(refusal.search)),
    )


def ended_report(ended: EndedEarly) -> RenderableType:
    """Time ended the search before it had a plan: what is known, and what to do."""
    limit = typed_setting(MAX_SECONDS)
    rows = [
        ("Limit", f"{limit}={ended.max_seconds:g}"),
        ("Lower bound", f"no plan has a step below {format_seconds(ended.lower_bound_s)}"),
    ]
    advice = [
        ("-", f"a larger {limit}"),
        ("-", "fewer choices: fix a degree (parallel.tensor_model_parallel_size=8)"),
    ]
    return Group(
        Text("The search ended before it found a plan.", style="bold yellow"),
        pairs(rows),
        heading("What helps"),
        pairs(advice),
        heading("What was tried"),
        indented(certificate(ended.search)),
    )


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
    rows, more = [*_prediction(plan)], list[Pair](other_layouts(plan))
    if plan.offers:
        changes = counted(len(plan.offers), "change")
        more.append(("Suggestions", f"{changes} would gain time or memory at a price: see explain"))
    if plan.search.certificate != "fixed":
        more.append(("Search", short_proof(plan)))
    if not flags:
        return Group(title(plan), pairs(rows + more))
    variables = (environment or {}).items()
    given = [f"{name}={value}" for name, value in variables if value is not None]
    unset = [name for name, value in variables if value is None]
    said = [f"with {' '.join(given)}"] if given else []
    said += [f"without {' '.join(unset)}"] if unset else []
    if any("pipeline-model-parallel-layout" in flag for flag in flags):
        said.append(stage_legend(plan.model))
    notes = [indented(Text("; ".join(said), style="dim"))] if said else []
    return Group(title(plan), pairs(rows), Text(), _Flags(flags), *notes, pairs(more))


class _Flags:
    """Words to paste, broken between flags at the width that there is; each flag stays whole."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = command_lines(self._words, width=options.max_width - 2)
        yield Text(lines, no_wrap=True, overflow="ignore")


def _prediction(plan: ParallelPlan) -> Iterator[Pair]:
    """The step, the layout and the memory; beside today's where that is known."""
    known, predicted = plan.uncertainty, plan.predicted
    today = plan.today
    if today and today.changes and today.changes.whole.seconds:
        yield from _changed(plan, today)
    else:
        if today and today.before is None:
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


def _changed(plan: ParallelPlan, found: BeforeAfter) -> Iterator[Pair]:
    """What a job runs today and the plan, in four lines."""
    before, changes, predicted = found.before, found.changes, plan.predicted
    assert before
    assert changes
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
