"""The HTML report's section on what a plan's step follows: figures of its cluster, assumptions."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

from nest_megatron.catalogue_files import default_setting
from nest_megatron.cluster.records import Accelerator, Cluster, Precision
from nest_megatron.cost_model.compute import sixteen_bit_format
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.pipeline import evaluate
from nest_megatron.cost_model.settings import OF_EXPERTS, CostSettings, restored_settings
from nest_megatron.cost_model.stage_problems import stage_problem
from nest_megatron.errors import UserInputError
from nest_megatron.layout.layout import Layout
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.profile.lookup import LayerTimes
from nest_megatron.report.memory_words import memory_verdict
from nest_megatron.report.runners_up import same_price
from nest_megatron.report.words import setting_value
from nest_megatron.units import GB, Bytes, Seconds, format_gib, to_seconds

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
        layouts = [plan.layout, *(other.layout for other in plan.alternatives)]
        model = CostModel(plan.model, plan.cluster, settings, times)
        price = partial(_priced, model, layouts)
        now = price((plan.cluster, settings))
    except UserInputError:
        return None
    steps = [plan.predicted.iteration_time_s]
    steps += [other.iteration_time_s for other in plan.alternatives]
    if not all(map(same_price, (each.step_s for each in now), steps)):
        return None
    rows, without, job = [], [], (plan.cluster, settings)
    for figure in (*_figures(plan), *_assumptions(plan, settings)):
        jobs = {words: figure.times(job, factor) for factor, words in _FACTORS.items()}
        changed = {words: job and price(job) for words, job in jobs.items()}
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
    return usual if plan.choice is None else plan.choice.tie_percent


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
            yield _Figure(f"{name} (cost.{field})", setting_value(field, value), (1, field))
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
    overtaken = {words: _overtaken(now, then, tie) for words, then in changed.items() if then}
    told = [f"{words}: {said}" for words, said in overtaken.items() if said]
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
