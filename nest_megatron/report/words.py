"""What a plan says, in sentences; without any terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from nest_megatron.cost_model.device_memory import FRAGMENTATION
from nest_megatron.cost_model.memory import PEAK_ERROR, PUBLIC_PEAK_ERROR
from nest_megatron.errors import typed_setting
from nest_megatron.layout.batch_schedule import PredictedBatch
from nest_megatron.layout.dims import SHORT_DEGREES
from nest_megatron.layout.estimate import SURE, Alternative, Choice, SiteChange, Uncertainty
from nest_megatron.layout.layout import Layout, PartialLayout
from nest_megatron.layout.plan import (
    Goodput,
    ParallelPlan,
    SearchRecord,
)
from nest_megatron.layout.stage_layout import is_uniform
from nest_megatron.model.layer_pattern import LayerBlock
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.planner.request import EndedEarly
from nest_megatron.profile.records import ANALYTIC_NAME
from nest_megatron.units import (
    GIB,
    Seconds,
    format_chance,
    format_duration,
    format_gib,
    format_range,
    format_seconds,
)

#: The cost model's terms for people.
TERM_WORDS = {
    "compute": "compute",
    "recompute": "recomputation",
    "tp_communication": "tensor parallel",
    "cp_communication": "context parallel",
    "ep_communication": "expert parallel",
    "pp_communication": "pipeline transfers",
    "dp_communication": "gradient sync",
    "pipeline_bubble": "pipeline bubble",
    "optimizer": "optimizer step",
    "embedding_sync": "embedding sync",
    "stragglers": "slowest ranks",
    "host": "CPU overhead",
}
#: What a GPU's memory holds, for people.
MEMORY_WORDS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations",
    "working": "working memory",
}

#: Blocks of layers for people whose own names do not say it, and the size that one may have.
_NAMES = {
    LayerBlock.ENCODER: "encoder of images",
    LayerBlock.WINDOW_ATTENTION: "sliding-window attention",
    LayerBlock.MAMBA: "Mamba",
    LayerBlock.ENCODER_ATTENTION: "attention of the encoder",
    LayerBlock.DENSE: "MLP",
    LayerBlock.LINEAR_FOR_ATTENTION: "linear layer for attention",
    LayerBlock.LINEAR_FOR_MLP: "linear layer for an MLP",
    LayerBlock.ENCODER_DENSE: "MLP of the encoder",
    LayerBlock.MTP: "multi-token prediction",
    LayerBlock.HEAD: "loss head",
}
_SIZES = {
    LayerBlock.ATTENTION: "{} query groups",
    LayerBlock.DENSE: "ffn_hidden_size {:,}",
}
#: Said of every prediction that no measured profile stands behind.
MAX_SECONDS = "search.max_seconds"
UNMEASURED = "published measurements of other clusters (docs/accuracy.md), no profile of this one"


def certificate(record: SearchRecord, *, counts: bool = True) -> str:
    """What the search proved, and how it got there.

    Args:
        counts: say how many candidates it looked at.
    """
    if record.certificate == "fixed":
        return "Nothing was searched: the layout was given, and priced."
    which = "this plan" if record.solved else "this plan, the best of a dozen rules of thumb,"
    percent = f"{record.gap_percent:.2f} %"
    said = _VERDICTS.get(record.certificate, _VERDICTS["infeasible"]).format(
        percent=percent,
        gap=f"{which} is proven to be at most {percent} slower than the best",
        limit=typed_setting(MAX_SECONDS),
    )
    if record.not_modelled and record.certificate != "ended-early":
        unknown = f"not modelled: {', '.join(record.not_modelled)}"
        if record.certificate == "infeasible":
            said = f"Not proven, memory is {unknown}: what is modelled fits nowhere in the space."
        else:
            said = f"May fit, {unknown}. As far as memory is modelled: {said}"
    return f"{said} {_counts(record)}" if counts else said


def proof(plan: ParallelPlan) -> str:
    """What the search proved, and how the plan was chosen among those that it kept."""
    record, choice = plan.search, plan.choice
    if not choice or not _is_proven(record):
        said = certificate(record)
    else:
        gap = record.gap_percent
        said = f"Proven: among {_allowed(choice)} none is faster than {_bound(plan)} under this "
        said += "cost model; this one "
        if record.certificate == "optimal":
            simple = ", and is the simplest that ties with it" if choice.num_tied > 1 else ""
            said += f"takes that{simple}. {_counts(record)}"
        else:
            said += f"is within {gap:.1f} % and the simplest. {_counts(record)}"
        if record.space.get("virtual_pipeline_model_parallel_size") != "= 1":
            said += f" {_FAMILY}"
    if choice and record.certificate not in ("optimal", "chosen"):
        said += f" Searched: {_allowed(choice)}."
    if choice and plan.provenance.site:
        said += " The search ordered plans by the catalogue's constants; those that it kept are "
        said += "compared by this site's calibration."
    margin = float(plan.provenance.settings.get("memory_margin", 0.0))
    if margin > FRAGMENTATION:
        said = (
            f"{said} Plans that leave less than {100 * margin:g} % of a GPU free "
            "(memory.margin) are not in the space."
        )
    return said


#: What of virtual stages is searched (``solver.chunk_space``).
_FAMILY = (
    "With virtual stages, those layouts of stages are candidates that docs/solver.md declares, and "
    "not every division of the layers."
)


def _allowed(choice: Choice) -> str:
    percent = f"{100 * choice.max_oom_chance:g} %"
    return f"layouts with at most {percent} risk to run out of memory"


def _is_proven(record: SearchRecord) -> bool:
    return record.certificate in ("optimal", "chosen") and not record.not_modelled


def _bound(plan: ParallelPlan) -> str:
    """The step that no allowed layout is faster than."""
    step_s, gap = plan.predicted.iteration_time_s, plan.search.gap_percent
    return format_seconds(step_s / (1 + gap / 100))


def short_proof(plan: ParallelPlan) -> str:
    """What the search proved, in a sentence."""
    record, choice = plan.search, plan.choice
    if not choice or not _is_proven(record):
        return certificate(record, counts=False)
    risk = f"{100 * choice.max_oom_chance:g} % risk"
    return f"proven: none searched within {risk} is faster than {_bound(plan)}"


#: Gain from which on a faster layout is shown, per cent.
_WORTH_TELLING_PCT = 0.05
#: Risk from which on a smaller one is shown, and the share of it that is left there at most.
_WORTH_LESS_RISK, _SAFER = 0.01, 0.5


def other_layouts(plan: ParallelPlan) -> Iterator[tuple[str, str]]:
    """The next faster layouts and the next safer one by name, each with its price."""
    choice, others = plan.choice, plan.alternatives
    if choice and others and others[0].slower_percent < -_WORTH_TELLING_PCT:
        fastest, risk = others[0], _smaller_risk(plan, others[0])
        yield "Faster", _other_words(plan, fastest.iteration_time_s, fastest.layout, risk)
        others = others[1:] if risk is None else ()
    if choice and (found := choice.riskier):
        risk = found.out_of_memory
        yield "Faster", _other_words(plan, found.iteration_time_s, found.layout, risk)
    for other in others:
        if (risk := _smaller_risk(plan, other)) is not None:
            yield "Safer", _other_words(plan, other.iteration_time_s, other.layout, risk)
            return


def _smaller_risk(plan: ParallelPlan, other: Alternative) -> float | None:
    """The risk of a runner-up, where it is so much smaller that it is shown."""
    own, known = plan.uncertainty.out_of_memory, other.uncertainty
    if own < _WORTH_LESS_RISK or not known or known.out_of_memory > _SAFER * own:
        return None
    return known.out_of_memory


def _other_words(
    plan: ParallelPlan, step_s: Seconds, layout: Layout, risk: float | None = None
) -> str:
    """Another layout by what differs (DP follows), with its step, and its risk where it counts."""
    own, percent = plan.layout, 100 * (step_s / plan.predicted.iteration_time_s - 1)
    at = "" if risk is None else f" at {format_chance(risk)} risk"
    sizes, others = ({**degrees(each), "MBS": each.micro_batch_size} for each in (own, layout))
    changed = [
        f"{name} {size} -> {others[name]}"
        for name, size in sizes.items()
        if name != "DP" and size != others[name]
    ]
    if own.zero != layout.zero:
        changed.append(f"ZeRO-{int(layout.zero)}")
    if own.recompute != layout.recompute:
        changed.append(f"recompute {layout.recompute.label()}")
    if is_uniform(plan.model, own.partition) and not is_uniform(plan.model, layout.partition):
        changed.append("uneven stages")
    words = ", ".join(changed) or layout_words(layout)
    return f"{format_seconds(step_s)} ({percent:+.1f} %){at}: {words}"


def early_words(record: SearchRecord) -> str:
    """How far from the best a plan can be that time left; nothing where the search ended."""
    if not record.ended_early:
        return ""
    return f"Search ended early: within {record.gap_percent:.1f} % of the best"


def present_words(plan: ParallelPlan) -> str:
    """What became of the layout that the job runs today."""
    own, step_s = plan.present, plan.predicted.iteration_time_s
    if not own:
        return ""
    if own.is_kept:
        tie = plan.choice and f", a tie (search.tie_percent={plan.choice.tie_percent:g})"
        other = f"the best other layout is {abs(own.next_percent or 0.0):.1f} %"
        if own.next_percent is None:
            other = "no other layout is known that fits"
        elif own.next_percent >= 0:
            other += " slower"
        else:
            other += f" faster{tie or ''}"
        kept = f"keep what you have: the plan is the present layout; {other}"
        return f"{kept}, of those found in the time" if plan.search.ended_early else kept
    if not own.fits:
        needed, there = map(format_gib, (own.peak_memory_bytes, own.capacity_bytes))
        return f"the present layout is not predicted to fit: {needed} of {there}"
    percent = 100.0 * (own.iteration_time_s / step_s - 1.0)
    chance = format_chance(own.out_of_memory)
    return (
        f"the present layout takes {format_seconds(own.iteration_time_s)}, {percent:+.1f} %; "
        f"{chance} chance to run out of memory"
    )


def range_words(known: Uncertainty) -> str:
    """Between which steps 9 of 10 runs lie.

    >>> known = Uncertainty(mean_s=0.031, low_s=0.0279, high_s=0.0323, percentile_90_s=0.03,
    ...     confidence="high", kind="dense bf16", runs=64, error_percent=6.2, out_of_memory=0.02)
    >>> range_words(known), confidence_words(known)
    ('27.9 to 32.3 ms', 'high: dense bf16, tested on 64 runs like it, 6 % off in the mean')
    """
    return format_range(known.low_s, known.high_s)


def narrow_words(own_runs: int) -> str:
    """What is known of ranges that rest on one run of their job; nothing of others.

    Args:
        own_runs: plans of the job whose runs they rest on.
    """
    if own_runs != 1:
        return ""
    return (
        "likely too narrow after one run of the job: of published runs fewer than 9 in 10 lay "
        "inside, in the mean over sources (docs/tuning_published.md)"
    )


def ranged_words(known: Uncertainty, own_runs: int) -> str:
    """The same, in words."""
    narrow = narrow_words(own_runs)
    return f"{range_words(known)} in 9 of 10 runs{narrow and f', {narrow}'}"


def confidence_words(
    known: Uncertainty, site: SiteChange | None = None, *, kind: bool = True
) -> str:
    """How far to trust a prediction, and why; its range rests on the site's runs, too.

    Args:
        kind: say of which kind the job is, and on what it was tested.
    """
    runs = "no run" if not known.runs else "1 run" if known.runs == 1 else f"{known.runs:,} runs"
    off = f", {known.error_percent:.0f} % off" if known.runs else ""
    said = f"{known.confidence}: {runs} like it{off}"
    if kind:
        mean = " in the mean" if known.runs else ""
        said = f"{known.confidence}: {known.kind}, tested on {runs} like it{off}{mean}"
    if not site or not site.runs:
        return said
    return f"{said}, before this site's runs; the range rests on its calibration, too ({site.name})"


def ties(plan: ParallelPlan) -> str:
    """Which runners-up may be as fast as the plan; nothing where that is not known."""
    open_ = [
        number
        for number, other in enumerate(plan.alternatives, start=1)
        if other.chance_slower is not None and 1 - SURE < other.chance_slower < SURE
    ]
    if not open_:
        return ""
    which = "runners-up {} are" if len(open_) > 1 else "runner-up {} is"
    return (
        f"A tie within the error of predictions: whether {which.format(_numbers(open_))} slower "
        f"than the plan is less than {100 * SURE:.0f} % sure."
    )


def _numbers(numbers: Sequence[int]) -> str:
    """Numbers, neighbours joined.

    >>> _numbers([1, 2, 3, 5])
    '1 to 3, 5'
    """
    runs = groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    ends = [(found[0][1], found[-1][1]) for found in (list(run) for _, run in runs)]
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in ends)


def sequence_words(plan: ParallelPlan) -> str:
    """How long the data's sequences are, and the rate of the tokens that are no padding."""
    lengths, length = plan.train.sequence_lengths, plan.train.seq_length
    assert lengths
    mean = f"{lengths.mean:,.0f} tokens on average ({lengths.source})"
    if lengths.packed:
        return f"{mean}, packed; a token attends within {lengths.attended:,.0f} of them"
    share = lengths.real_share(length)
    real = plan.predicted.tokens_per_s_per_gpu * share
    return f"{mean}; {100 * (1 - share):.0f} % is padding, {real:,.0f} real tokens/s/GPU"


#: Sizes of a growing batch that are shown before some are left out.
_MOST_SIZES = 6


def schedule_words(batches: Sequence[PredictedBatch]) -> str:
    """The step at each size of a batch that grows, and the whole run where its length is known.

    Args:
        batches: at least one.
    """
    told = [f"{b.global_batch_size}: {format_seconds(b.iteration_time_s)}" for b in batches]
    if len(told) > _MOST_SIZES:
        told[2:-2] = [f"{len(told) - 4} more"]
    text = f"step at each size {', '.join(told)}"
    if any(batch.steps is None for batch in batches):
        return text
    counted = [(batch, batch.steps or 0) for batch in batches]
    steps = sum(number for _, number in counted)
    run_s = sum(batch.iteration_time_s * number for batch, number in counted)
    return f"{text}; {steps:,} steps in {run_s / 3600:,.1f} h, {format_seconds(run_s / steps)} each"


def goodput_words(found: Goodput, num_gpus: int, step_s: Seconds) -> str:
    """What failures and checkpoints leave of the time."""
    steps = found.save_interval
    every = "every step" if steps == 1 else f"every {steps:,} steps"
    return (
        f"{100 * found.share:.1f} % of the time goes into steps that are kept: "
        f"{format_duration(found.checkpoint_s)} for a checkpoint {every} "
        f"({format_duration(steps * step_s)}), a failure of the {num_gpus:,} GPUs every "
        f"{format_duration(found.mtbf_s)}, {format_duration(found.restart_s)} to restart"
    )


def incomplete_ranking(record: SearchRecord) -> str:
    """What a list of runners-up lacks where the search did not finish; nothing where it did."""
    if record.certificate not in ("gap", "node-limit"):
        return ""
    return "The search did not finish: layouts faster than some of these may be missing."


def stage_legend(spec: TransformerSpec) -> str:
    """What the letters of a layout of a pipeline stand for."""
    if spec.hybrid_layer_pattern:
        kinds = [kind for kind in dict.fromkeys(spec.layer_kinds()) if kind.is_layer]
        letters = [f"{kind.letter} {' and '.join(map(block_name, kind.blocks))}" for kind in kinds]
        return f"{', '.join(letters)}, | next stage"
    mtp = "m MTP layer, " if spec.num_mtp_layers else ""
    return f"E embedding, t layer, {mtp}L output, | next stage, *n n times"


def block_name(block: LayerBlock) -> str:
    """What a block is, and the size that it has for itself."""
    size = f" ({_SIZES[block.base].format(block.size)})" if block.size else ""
    return _NAMES.get(block.base, block.base.value.replace("_", " ")) + size


def layout_words(layout: PartialLayout) -> str:
    """The degrees above 1 and the micro batch size of a layout."""
    return " ".join([*degree_words(layout), f"MBS {layout.micro_batch_size}"])


def degree_words(
    layout: PartialLayout, names: Iterable[str] = tuple(SHORT_DEGREES.values()), *, least: int = 2
) -> list[str]:
    """The degrees of a layout that are at least so large, by their short names.

    Virtual stages stand beside the stages (``PP 4x7``) where they are not named themselves.
    """
    sizes, names = degrees(layout), list(names)
    virtual = f"x{sizes['VPP']}" if sizes["VPP"] > 1 and "VPP" not in names else ""
    return [
        f"{name} {sizes[name]}{virtual if name == 'PP' else ''}"
        for name in names
        if sizes[name] >= least
    ]


def degrees(layout: PartialLayout) -> dict[str, int]:
    """Every degree of a layout by its short name."""
    return {short: getattr(layout.dims, name) for name, short in SHORT_DEGREES.items()}


#: By certificate; ``gap`` says how far from the best the plan may be.
_VERDICTS = {
    "optimal": "Optimal: no other plan in the searched space is faster under this cost model.",
    "chosen": "The simplest plan that ties with the fastest of the searched space under this cost "
    "model: {percent} slower.",
    "runner-up": "A runner-up, as asked for: {percent} slower than the best plan.",
    "gap": "Time ran out: {gap} in the searched space. Raise {limit} to close the gap.",
    "node-limit": "A stage problem was too large to finish: {gap} in the searched space.",
    "ended-early": "Time ran out before a plan was found: whether there is one is not known.",
    "infeasible": "No candidate in the searched space is predicted to fit. Predicted peaks are "
    f"{100 * PEAK_ERROR:.1f} % off in the mean on Megatron-LM's functional tests and "
    f"{100 * PUBLIC_PEAK_ERROR:.0f} % on all public runs (docs/accuracy.md).",
}


def ended_early(ended: EndedEarly) -> str:
    """What is known where time ended the search before it had a plan."""
    limit = typed_setting(MAX_SECONDS)
    return (
        f"{limit}={ended.max_seconds:g} ended the search before it found a plan; "
        "whether there is one is not known, and none has a step below "
        f"{format_seconds(ended.lower_bound_s)}. Raise {limit}, or fix some degrees"
    )


def _counts(record: SearchRecord) -> str:
    if not record.candidates:
        return "No other candidate was looked at."
    misfits = sum(record.infeasible.values())
    work = (
        f"({record.stage_nodes:,} partial partitions, {record.simulations:,} simulated schedules), "
        f"in {record.seconds:.2f} s with the {record.backend}"
    )
    if record.certificate in ("gap", "ended-early"):
        return (
            f"Of {record.candidates:,} candidates met so far {misfits:,} need too much memory and "
            f"{record.solved:,} were solved exactly {work}; the others are undecided, or ruled "
            "out by a lower bound."
        )
    return (
        f"Of {record.candidates:,} candidates {record.bounded:,} were ruled out by a lower bound, "
        f"{misfits:,} do not fit in memory and {record.solved:,} were solved exactly {work}."
    )


def cost_source(plan: ParallelPlan) -> str:
    """What stands behind a plan's times."""
    profile, site = plan.provenance.profile, plan.provenance.site
    said = UNMEASURED
    if profile != ANALYTIC_NAME:
        said = f"layer times of {profile}; the rest from published measurements of other clusters"
    return f"{said}; then the runs of this site ({site.name})" if site else said


def term_words(differences: Mapping[str, float], *, most: int = 4) -> str:
    """Where a runner-up spends more and where less, largest first.

    >>> term_words({"compute": 0.0, "pipeline_bubble": 0.25, "tp_communication": -0.1})
    '+250.0 ms pipeline bubble, -100.0 ms tensor parallel'
    """
    largest = sorted(differences.items(), key=lambda item: -abs(item[1]))[:most]
    words = (
        f"{'+' if seconds > 0 else '-'}{format_seconds(abs(seconds))} {TERM_WORDS.get(name, name)}"
        for name, seconds in largest
        if abs(seconds) >= 5e-5
    )
    return ", ".join(words) or "the same in every term"


def setting_value(name: str, value: float | str) -> str:
    """A setting for people.

    >>> setting_value("memory_reserve_bytes", 2.0 * GIB), setting_value("iteration_floor_s", 0.005)
    ('2 GiB', '5 ms')
    """
    if isinstance(value, str):
        return value
    if name.endswith("_bytes"):
        return f"{value / GIB:g} GiB"
    return f"{1e3 * value:g} ms" if name.endswith("_s") else f"{value:g}"
