"""The HTML report's section on the figures of the cluster that a plan's step follows."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from nest_megatron.cluster.records import Cluster
from nest_megatron.cost_model.compute import sixteen_bit
from nest_megatron.cost_model.estimate import Estimate, estimate
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.settings import restored_settings
from nest_megatron.errors import UserInputError
from nest_megatron.parallel.grid import Grid
from nest_megatron.parallel.partition import StagePartition
from nest_megatron.parallel.plan import ParallelPlan
from nest_megatron.planner.request import TIE_PERCENT
from nest_megatron.profile.lookup import LayerTimes
from nest_megatron.report.html_layout import reached_levels
from nest_megatron.report.runners_up import layout_of, same_price
from nest_megatron.report.words import memory_verdict
from nest_megatron.units import GB, format_gib

#: What each figure is multiplied by, and how that is said.
_FACTORS = {0.5: "half", 0.8: "20 % less", 1.25: "25 % more", 2.0: "twice"}
#: Changes of a step that are not told, in per cent: they print as 0.0.
_LEAST = 0.05
_SAME = "0.0 %"

_Priced = list[Estimate]
_Layouts = Sequence[tuple[Grid, StagePartition]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Figure:
    """A figure of a cluster: its name, its value, and the cluster with so many times as much."""

    name: str
    value: str
    times: Callable[[float], Cluster]


def sensitivity(plan: ParallelPlan, times: LayerTimes | None = None) -> Mapping[str, Any] | None:
    """The plan and its runners-up priced again, each time with one figure changed.

    Args:
        times: the measured layer times that the plan was made with.

    Returns:
        ``None`` where this version prices them otherwise than the plan says.
    """
    try:
        layouts = [(plan.grid(), plan.partition())]
        layouts += [layout_of(plan, other) for other in plan.alternatives]
        now = _priced(plan, plan.cluster, layouts, times)
    except UserInputError:
        return None
    steps = [plan.predicted.iteration_time_s]
    steps += [other.iteration_time_s for other in plan.alternatives]
    if not all(map(same_price, (each.iteration_time_s for each in now), steps)):
        return None
    rows, without = [], []
    for figure in _figures(plan):
        changed = {
            words: _priced(plan, figure.times(factor), layouts, times)
            for factor, words in _FACTORS.items()
        }
        row = _row(plan, figure, now, changed)
        rows.append(row) if row else without.append(figure.name)
    runners_up = ("runners-up",) if plan.alternatives else ()
    return {
        "head": ("figure", "now", *_FACTORS.values(), *runners_up),
        "rows": rows,
        "without": ", ".join(without),
        "notes": [*_notes(plan, times)],
    }


def _tie_percent(plan: ParallelPlan) -> float:
    """Plans that differ by less count as equal."""
    return TIE_PERCENT if plan.choice is None else plan.choice.tie_percent


def _notes(plan: ParallelPlan, times: LayerTimes | None) -> Iterator[str]:
    if plan.alternatives:
        yield f"Steps that differ by less than {_tie_percent(plan):g} % count as equal."
    if plan.provenance.site is not None:
        yield "Steps are those that are predicted without this site's calibration."
    if times is not None:
        yield "Layer times of the profile stay as they are."


def _priced(
    plan: ParallelPlan, cluster: Cluster, layouts: _Layouts, times: LayerTimes | None
) -> _Priced:
    settings = restored_settings(plan.provenance.settings)
    model = CostModel(plan.model, cluster, settings, times)
    return [estimate(model, grid, partition) for grid, partition in layouts]


def _figures(plan: ParallelPlan) -> Iterator[_Figure]:
    cluster, device = plan.cluster, plan.cluster.accelerator
    for number in reached_levels(cluster):
        level = cluster.levels[number]
        yield _Figure(
            name=f"bandwidth of level {level.name}",
            value=f"{level.bandwidth_bytes_per_s / GB:g} GB/s per GPU",
            times=partial(_with_level, cluster, number, "bandwidth_bytes_per_s"),
        )
        yield _Figure(
            name=f"latency of level {level.name}",
            value=f"{1e6 * level.latency_s:g} us",
            times=partial(_with_level, cluster, number, "latency_s"),
        )
    precision, peaks = plan.train.precision, device.peak_flops_per_s
    used = precision if device.supports(precision) else sixteen_bit(device)
    for name, value, field in (
        ("arithmetic", f"{peaks[used] / 1e12:,.0f} TFLOP/s in {used}", "peak_flops_per_s"),
        (
            "memory bandwidth",
            f"{device.memory_bandwidth_bytes_per_s / GB:,.0f} GB/s",
            "memory_bandwidth_bytes_per_s",
        ),
        ("memory", format_gib(device.memory_bytes), "memory_bytes"),
    ):
        yield _Figure(
            name=f"{name} of a GPU", value=value, times=partial(_with_device, cluster, field)
        )


def _with_level(cluster: Cluster, number: int, field: str, factor: float) -> Cluster:
    levels = [*cluster.levels]
    level = levels[number]
    levels[number] = dataclasses.replace(level, **{field: factor * getattr(level, field)})
    return dataclasses.replace(cluster, levels=tuple(levels))


def _with_device(cluster: Cluster, field: str, factor: float) -> Cluster:
    value = getattr(cluster.accelerator, field)
    if isinstance(value, Mapping):
        scaled: Any = {name: factor * peak for name, peak in value.items()}
    else:
        scaled = type(value)(factor * value)
    device = dataclasses.replace(cluster.accelerator, **{field: scaled})
    return dataclasses.replace(cluster, accelerator=device)


def _row(
    plan: ParallelPlan, figure: _Figure, now: _Priced, changed: Mapping[str, _Priced]
) -> tuple[str, ...] | None:
    """What a figure changes; nothing where it changes neither the step nor what fits."""
    cells = [_cell(now[0], then[0], plan.search.not_modelled) for then in changed.values()]
    tie = _tie_percent(plan)
    overtaken = {words: _overtaken(now, then, tie) for words, then in changed.items()}
    told = [f"{words}: {said}" for words, said in overtaken.items() if said]
    if not told and {*cells} == {_SAME}:
        return None
    return (figure.name, figure.value, *cells, *(["; ".join(told) or "–"] if now[1:] else []))


def _cell(now: Estimate, then: Estimate, unknown: Sequence[str]) -> str:
    """By how much the plan's step is longer, or what is said of its memory where that is news."""
    if (said := _memory(then, unknown)) != _memory(now, unknown):
        return said or "fits"
    percent = 100 * (then.iteration_time_s / now.iteration_time_s - 1)
    return f"{percent:+.1f} %" if abs(percent) >= _LEAST else _SAME


def _memory(found: Estimate, unknown: Sequence[str]) -> str:
    """The first words of what is said of its peak."""
    peak = max(stage.peak_memory_bytes for stage in found.stages)
    return re.split("[:,]", memory_verdict(peak, found.capacity_bytes, unknown))[0]


def _overtaken(now: _Priced, then: _Priced, tie_percent: float) -> str:
    """The fastest runner-up of those that fit, where it is news that it is faster than the plan."""
    plan, before = then[0], now[0]
    fitting = [(each.iteration_time_s, n) for n, each in enumerate(then) if n and each.fits]
    if not plan.fits:
        fits = f"runner-up {min(fitting)[1]} fits" if fitting else "none of them fits"
        return fits if before.fits else ""
    tie = 1 - tie_percent / 100
    passing = [
        (step, n)
        for step, n in fitting
        if step < tie * plan.iteration_time_s
        and now[n].iteration_time_s >= tie * before.iteration_time_s
    ]
    if not passing:
        return ""
    step, number = min(passing)
    return f"runner-up {number} is {100 * (1 - step / plan.iteration_time_s):.1f} % faster"
