"""The HTML report of a plan: what each section of ``templates/plan.html`` shows."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from math import prod
from typing import Any, NamedTuple, cast

from nest_megatron.catalogue_files import default_setting
from nest_megatron.cluster.records import Accelerator, Cluster, Precision
from nest_megatron.cost_model.compute import sixteen_bit_format
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.pipeline import evaluate
from nest_megatron.cost_model.settings import OF_EXPERTS, CostSettings, restored_settings
from nest_megatron.cost_model.stage_problems import stage_problem
from nest_megatron.errors import UserInputError
from nest_megatron.layout import plan_file
from nest_megatron.layout.diff import plan_values, reason
from nest_megatron.layout.layout import Layout, layout_arguments
from nest_megatron.layout.plan import LaunchCommand, ParallelPlan, SearchRecord, launch_words
from nest_megatron.layout.rank_order import GroupKind, group_of_rank, group_shape
from nest_megatron.model.layer_pattern import LayerKind
from nest_megatron.model.parameters import active_parameters, total_parameters
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.plain import to_plain
from nest_megatron.profile.lookup import LayerTimes
from nest_megatron.report import words
from nest_megatron.report.console import LINE, command_lines
from nest_megatron.report.layout_tables import (
    before_after_section,
    degree_cells,
    plan_and_alternatives,
    same_price,
    shortlist_words,
    term_differences,
)
from nest_megatron.report.memory_words import memory_level, memory_verdict, plan_verdict, risk_words
from nest_megatron.report.page import render_page
from nest_megatron.report.schedule_view import schedule_view
from nest_megatron.report.site import site_rows
from nest_megatron.report.terminal import provenance_rows, summary_rows
from nest_megatron.report.timeline import schedule
from nest_megatron.units import GB, Bytes, Seconds, format_gib, to_seconds, to_ticks

_LAYOUT = "pipeline_model_parallel_layout"
#: Kinds of groups: short name, word for people, kind.
_GROUPS = (
    ("tp", "tensor", GroupKind.TP),
    ("cp", "context", GroupKind.CP),
    ("ep", "expert", GroupKind.EP),
    ("pp", "pipeline", GroupKind.PP),
    ("dp", "data", GroupKind.DP_CP),
    ("expert_dp", "expert data", GroupKind.EDP),
)
#: A setting of ``CostSettings`` in its documentation.
_ENTRY = re.compile(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)


def html_report(
    plan: ParallelPlan, times: LayerTimes | None = None, *, flags: Iterable[str] = ()
) -> str:
    """The report of a plan as one self-contained page.

    Args:
        times: the measured layer times that the plan was made with.
        flags: Megatron-LM's for the layout, shown where the plan holds no launch command.
    """
    meanings = setting_meanings()
    return render_page(
        "plan.html",
        f"{plan.model.name} on {plan.cluster.describe()}",
        script="plan.js",
        plan=plan,
        words=words,
        facts=summary_rows(plan),
        model=_model_words(plan.model),
        verdict=_verdict(plan),
        level=memory_level(plan, plan.search.not_modelled)
        or ("warning" if words.incomplete_ranking(plan.search) else ""),
        kinds=[kind_of_layers(plan, kind, 1) for kind in dict.fromkeys(plan.model.layer_kinds())],
        chunks=partial(chunks, plan),
        terms={name: s for name, s in plan.predicted.terms.items() if to_ticks(s) > 0},
        schedule=schedule(plan, schedule_view(plan, times)),
        groups=groups(plan),
        choices=choices(plan),
        runners_up=runners_up(plan, times),
        shortlist_words=shortlist_words,
        search_steps=search_steps(plan.search),
        launches=[  # of a plan without a command its flags
            (name, _command(plan, each), (*plan.notes, *each.notes))
            for name, each in plan.launch.items()
        ]
        or [("", command_lines([*flags], indent="", width=LINE), plan.notes)],
        today=plan.today and before_after_section(plan.today, plan),
        sensitivity=sensitivity(plan, times),
        site=plan.provenance.site and site_rows(plan.provenance.site),
        provenance=[*provenance_rows(plan), ("plan", plan_file.checksum(plan))],
        settings=[
            (name, words.setting_value(name, value), meanings.get(name, "").replace("``", ""))
            for name, value in plan.provenance.settings.items()
            if plan.model.is_moe or name not in OF_EXPERTS  # which say nothing of the model
        ],
    )


def _verdict(plan: ParallelPlan) -> str:
    """What to beware of: a search that time ended, and memory that the certificate leaves out."""
    verdict = plan_verdict(plan)
    told = not verdict or words.proof(plan).startswith("May fit")
    memory = "" if told else f"In memory this layout {verdict}."
    early, risk = words.early_words(plan.search), risk_words(plan, "This layout")
    return " ".join(filter(None, (early and f"{early}.", memory, risk)))


def _model_words(spec: TransformerSpec) -> str:
    """A model's shape in one line."""
    shape = [f"{total_parameters(spec) / 1e9:.3g} billion parameters"]
    if spec.is_moe:
        shape.append(f"{active_parameters(spec) / 1e9:.3g} billion of them active for a token")
    encoder = spec.encoder_num_layers
    layers = f"{encoder} layers of an encoder and {spec.num_layers} of a decoder"
    shape.append(f"{spec.num_layers} layers" if encoder is None else layers)
    shape.append(f"hidden size {spec.hidden_size:,}")
    if spec.is_moe:
        shape.append(f"{spec.num_experts} experts, {spec.moe_router_topk} for each token")
    decoded = "" if encoder is None else f" and, in the decoder, of {spec.decoder_seq_length:,}"
    shape.append(f"sequences of {spec.seq_length:,} tokens{decoded}")
    if spec.adapters:
        shape.append(f"all weights frozen but those of adapters ({spec.adapters.words()})")
    return ", ".join(shape)


def search_steps(search: SearchRecord) -> tuple[tuple[str, int], ...]:
    """How the search narrowed the candidates down, from all of them to the answer."""
    fitting = search.candidates - sum(search.infeasible.values())
    left = [("not refuted by memory", fitting)] if search.infeasible else []
    met = ", before time ran out" if search.certificate == "gap" else ""
    return (
        (f"legal combinations of degrees, batch, recompute, ZeRO{met}", search.candidates),
        *left,
        (f"not refuted by a bound: stage layouts searched{met}", search.solved),
        ("chosen", 1),
    )


def _command(plan: ParallelPlan, command: LaunchCommand) -> str:
    """A shell command: what must not be set, the environment, torchrun, script and flags."""
    variables = command.environment.items()
    unset = "".join(f"unset {name}\n" for name, value in variables if value is None)
    return unset + command_lines(launch_words(plan, command), variables, indent="", width=LINE)


def setting_meanings() -> dict[str, str]:
    """What each setting of the cost model means, from its own documentation."""
    _, _, rest = (inspect.getdoc(CostSettings) or "").partition("Args:\n")
    entries = _ENTRY.findall(rest.partition("\n\n")[0])
    return {name: " ".join(meaning.split()) for name, meaning in entries}


def choices(plan: ParallelPlan) -> Sequence[tuple[str, str, str]]:
    """Every parallel field with its value and the reason."""
    return [(name, _shown(value), reason(plan, name)) for name, value in plan_values(plan).items()]


def _shown(value: object) -> str:
    """A field's value as text; an unset one is a dash."""
    plain = to_plain(value)
    if plain is None or plain == []:
        return "–"
    if isinstance(plain, bool):
        return "yes" if plain else "no"
    return ", ".join(map(str, plain)) if isinstance(plain, list) else str(plain)


def kind_of_layers(plan: ParallelPlan, kind: LayerKind, count: int) -> Mapping[str, Any]:
    """Neighbouring layers of one kind."""
    letter, name = kind.letter, " and ".join(map(words.block_name, kind.blocks)) or "nothing"
    count *= plan.model.num_mtp_layers if kind is LayerKind.MTP else 1
    classes = " ".join(f"u-{block.base}" for block in kind.blocks)
    return {"classes": classes, "letter": letter, "name": name, "count": count}


def chunks(plan: ParallelPlan, rank: int) -> list[list[Mapping[str, Any]]]:
    """The layers of a pipeline rank, chunk by chunk, neighbours of one kind together."""
    kinds = plan.model.layer_kinds()
    return [
        [
            kind_of_layers(plan, kind, len(list(run)))
            for kind, run in groupby(kinds[unit] for unit in units)
        ]
        for units in plan.layout.partition.chunks_of_rank(rank)
    ]


def groups(plan: ParallelPlan) -> Mapping[str, Any]:
    """For each kind of group, how its members spread over the network levels."""
    dims, cluster = plan.layout.dims, plan.cluster
    sizes, reached = cluster.group_sizes(), reached_levels(cluster)
    rows: list[dict[str, Any]] = []
    for name, kind_words, kind in _GROUPS:
        if "expert" in kind_words and plan.model.num_experts is None:
            continue
        shape, size = group_shape(dims, kind, sizes), len(group_of_rank(dims, kind, 0))
        rows.append(
            {
                "name": kind_words,
                "size": size,
                "levels": [(_reach(level, shape), shape[level] > 1) for level in reached],
                "farthest": plan.placement.group_levels[name] if size > 1 else "no communication",
            }
        )
    drawn = []
    for place, number in enumerate(reached):
        level, size = cluster.levels[number], sizes[number]
        members = [(row["name"], *row["levels"][place]) for row in rows]
        drawn.append(
            {
                "name": level.name,
                "words": f"{size:,} GPUs, {level.bandwidth_bytes_per_s / GB:g} GB/s per GPU",
                "gpus": size,
                "groups": [f"{name} {reach}" for name, reach, is_linked in members if is_linked],
            }
        )
    return {"drawn": drawn[::-1], "rows": rows}


def _reach(level: int, shape: tuple[int, ...]) -> str:
    """Members of a group inside one group of a level: of several, that it links, as a product."""
    inner, fan_out = prod(shape[:level]), shape[level]
    if inner == prod(shape):
        return "–"
    return f"{fan_out} × {inner}" if level and fan_out > 1 else str(fan_out * inner)


def runners_up(plan: ParallelPlan, times: LayerTimes | None = None) -> Mapping[str, Any]:
    """The plan and its runners-up, what they lose, and the columns in which they differ."""
    plans = plan_and_alternatives(plan)
    cells = [
        degree_cells(each) | {"Stages": _shown(layout_arguments(plan.model, each.layout)[_LAYOUT])}
        for each in plans
    ]
    lost = [
        words.term_words(terms, most=3) if terms else "priced otherwise by this version"
        for terms in term_differences(plan, times)
    ]
    return {
        "rows": list(zip(range(len(plans)), plans, cells, ("", *lost), strict=True)),
        "differ": [name for name in cells[0] if len({each[name] for each in cells}) > 1],
    }


#: What each figure is multiplied by, and how that is said.
_FACTORS = {0.5: "half", 0.8: "20 % less", 1.25: "25 % more", 2.0: "twice"}
#: Changes of a step that are not told, in per cent: they print as 0.0.
_LEAST = 0.05
_SAME, _IMPOSSIBLE = "0.0\N{NO-BREAK SPACE}%", "not possible"
#: What the cost model assumes, by the setting that changes it; 0 is nothing to change.
_ASSUMED = {
    "expert_imbalance": "load of the busiest experts over the mean",
    "tp_overlap": "share of tensor-parallel traffic beside GEMMs",
    "ep_overlap": "share of expert traffic beside other work",
    "dp_overlap": "share of compute that hides traffic between replicas",
    "overlap_slowdown": "compute lost for a second of hidden traffic",
    "straggler_delay_s": "delay of a rank after a second of work, standard deviation",
}

_Job = tuple[Cluster, CostSettings]


class _Figure(NamedTuple):
    """What a step depends on.

    Args:
        path: to it from a job: names of fields and places in tuples.
        most: how many times as much there can be.
    """

    name: str
    value: str
    path: tuple[str | int, ...]
    most: float = math.inf

    def times(self, job: _Job, factor: float) -> _Job | None:
        """The job with so many times as much; nothing where that is not possible."""
        if factor > self.most:
            return None
        with contextlib.suppress(UserInputError):
            return cast(_Job, _scaled(job, self.path, factor))
        return None


def _scaled(part: Any, path: Sequence[str | int], factor: float) -> Any:
    """A record, a tuple or a mapping of numbers with so many times as much at the end of a path."""
    if not path:
        if isinstance(part, Mapping):
            return {name: factor * number for name, number in part.items()}
        return factor * part
    first, *rest = path
    if isinstance(first, int):
        return (*part[:first], _scaled(part[first], rest, factor), *part[first + 1 :])
    value = _scaled(getattr(part, first), rest, factor)
    return dataclasses.replace(part, **{first: int(value) if first == "memory_bytes" else value})


class _Priced(NamedTuple):
    """A layout's step and its peak of memory beside the limit."""

    step_s: Seconds
    peak_bytes: Bytes
    limit_bytes: Bytes

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.limit_bytes


def sensitivity(plan: ParallelPlan, times: LayerTimes | None = None) -> Mapping[str, Any] | None:
    """The plan and its runners-up priced again, each time with one figure changed.

    Args:
        times: the measured layer times that the plan was made with.

    Returns:
        ``None`` where this version prices them otherwise than the plan says.
    """
    try:
        settings = restored_settings(plan.provenance.settings)
        model = CostModel(plan.model, plan.cluster, settings, times)
        plans, own = plan_and_alternatives(plan), (plan.cluster, settings)
        price = partial(_priced, model, [each.layout for each in plans])
        now = price(own)
    except UserInputError:
        return None
    if not all(
        same_price(found.step_s, each.iteration_time_s)
        for found, each in zip(now, plans, strict=True)
    ):
        return None
    rows, without = [], []
    for figure in (*_figures(plan), *_assumptions(plan, settings)):
        jobs = {name: figure.times(own, factor) for factor, name in _FACTORS.items()}
        changed = {name: job and price(job) for name, job in jobs.items()}
        row = _row(plan, figure, now, changed)
        rows.append(row) if row else without.append(figure.name)
    return {
        "factors": [*_FACTORS.values()],
        "rows": rows,
        "without": without,
        "tie_percent": _tie_percent(plan),
        "has_times": times is not None,
    }


def _tie_percent(plan: ParallelPlan) -> float:
    """Plans that differ by less count as equal."""
    usual: float = default_setting("search.tie_percent")
    return plan.choice.tie_percent if plan.choice else usual


def _priced(model: CostModel, layouts: Sequence[Layout], job: _Job) -> list[_Priced]:
    model, found = model.with_figures(*job), []
    for layout in layouts:
        problem = stage_problem(model, layout)
        priced = evaluate(problem, layout.partition.boundaries)
        step_s = to_seconds(priced.iteration)
        peak, limit = max(each.total for each in priced.memory), problem.capacity_bytes
        found.append(_Priced(step_s=step_s, peak_bytes=peak, limit_bytes=limit))
    return found


def reached_levels(cluster: Cluster) -> list[int]:
    """Numbers of the network levels that a cluster of this size has."""
    sizes = cluster.group_sizes()
    return [i for i, size in enumerate(sizes) if i == 0 or size > sizes[i - 1]]


def _figures(plan: ParallelPlan) -> Iterator[_Figure]:
    """Figures of the cluster."""
    cluster, device = plan.cluster, plan.cluster.accelerator
    for number in reached_levels(cluster):
        level = cluster.levels[number]
        bandwidth = f"{level.bandwidth_bytes_per_s / GB:g} GB/s per GPU"
        for name, value, field in (
            ("bandwidth", bandwidth, "bandwidth_bytes_per_s"),
            ("latency", f"{1e6 * level.latency_s:g} us", "latency_s"),
        ):
            yield _Figure(f"{name} of level {level.name}", value, (0, "levels", number, field))
    used = _format(plan, device)
    peak = f"{device.peak_flops_per_s[used] / 1e12:,.0f} TFLOP/s in {used}"
    bandwidth = f"{device.memory_bandwidth_bytes_per_s / GB:,.0f} GB/s"
    for name, value, field in (
        ("arithmetic", peak, "peak_flops_per_s"),
        ("memory bandwidth", bandwidth, "memory_bandwidth_bytes_per_s"),
        ("memory", format_gib(device.memory_bytes), "memory_bytes"),
    ):
        yield _Figure(f"{name} of a GPU", value, (0, "accelerator", field))


def _assumptions(plan: ParallelPlan, settings: CostSettings) -> Iterator[_Figure]:
    """Assumptions of the cost model."""
    device = plan.cluster.accelerator
    used = _format(plan, device)
    wide = used if used is Precision.FP32 else sixteen_bit_format(device)
    for name, share, field, of in (
        ("GEMMs", device.gemm_efficiency[used], "gemm_efficiency", used),
        ("attention", device.attention_efficiency, "attention_efficiency", wide),
    ):
        value = f"{100 * share:.0f} % of the peak in {of}"
        yield _Figure(f"efficiency of {name}", value, (0, "accelerator", field), 1 / share)
    for field, name in _ASSUMED.items():
        value = getattr(settings, field)
        if value and (plan.model.is_moe or field not in OF_EXPERTS):
            yield _Figure(f"{name} (cost.{field})", words.setting_value(field, value), (1, field))
    if (tokens := settings.traits.attended_tokens) is not None:
        name, most = "tokens that a token of a pack attends within", plan.model.seq_length / tokens
        yield _Figure(name, f"{tokens:,.0f}", (1, "traits", "attended_tokens"), most)


def _format(plan: ParallelPlan, device: Accelerator) -> Precision:
    """The number format of the plan's GEMMs on a device."""
    precision = plan.train.precision
    return precision if device.supports(precision) else sixteen_bit_format(device)


def _row(
    plan: ParallelPlan,
    figure: _Figure,
    now: Sequence[_Priced],
    changed: Mapping[str, Sequence[_Priced] | None],
) -> tuple[str, ...] | None:
    """What a figure changes; nothing where it changes neither the step nor what fits."""
    unknown, tie = plan.search.not_modelled, _tie_percent(plan)
    cells = [_cell(now[0], then[0], unknown) if then else _IMPOSSIBLE for then in changed.values()]
    overtaken = {name: _overtaken(now, then, tie) for name, then in changed.items() if then}
    told = [f"{name}: {said}" for name, said in overtaken.items() if said]
    if not told and {*cells} <= {_SAME, _IMPOSSIBLE}:
        return None
    return (figure.name, figure.value, *cells, *(["; ".join(told) or "–"] if now[1:] else []))


def _cell(now: _Priced, then: _Priced, unknown: Sequence[str]) -> str:
    """By how much the plan's step is longer, or what is said of its memory where that is news."""
    if (said := _memory(then, unknown)) != _memory(now, unknown):
        return said or "fits"
    percent = 100 * (then.step_s / now.step_s - 1)
    return f"{percent:+.1f}\N{NO-BREAK SPACE}%" if abs(percent) >= _LEAST else _SAME


def _memory(found: _Priced, unknown: Sequence[str]) -> str:
    """The first words of what is said of its peak."""
    return re.split("[:,]", memory_verdict(found.peak_bytes, found.limit_bytes, unknown))[0]


def _overtaken(now: Sequence[_Priced], then: Sequence[_Priced], tie_percent: float) -> str:
    """The fastest runner-up of those that fit, where it is news that it is faster than the plan."""
    plan, before = then[0], now[0]
    fitting = [(each.step_s, n) for n, each in enumerate(then) if n and each.fits]
    if not plan.fits:
        fits = f"runner-up {min(fitting)[1]} fits" if fitting else "none of them fits"
        return fits if before.fits else ""
    tie = 1 - tie_percent / 100
    passing = [
        (step, n)
        for step, n in fitting
        if step < tie * plan.step_s and now[n].step_s >= tie * before.step_s
    ]
    if not passing:
        return ""
    step, number = min(passing)
    return f"runner-up {number} is {100 * (plan.step_s / step - 1):.1f} % faster"
