"""The HTML report's sections on the layout: degrees, stages, communication groups, runners-up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from math import prod
from typing import Any

from nest_megatron.cluster.records import Cluster
from nest_megatron.layout.diff import plan_values, reason
from nest_megatron.layout.dims import RankOrder
from nest_megatron.layout.estimate import Alternative
from nest_megatron.layout.layout import layout_arguments
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.rank_order import GroupKind, group_of_rank, group_shape
from nest_megatron.model.layer_pattern import LayerKind
from nest_megatron.plain import to_plain
from nest_megatron.profile.lookup import LayerTimes
from nest_megatron.report.runners_up import as_alternative, degree_cells, term_differences
from nest_megatron.report.words import (
    block_name,
    incomplete_ranking,
    narrow_words,
    range_words,
    term_words,
    ties,
)
from nest_megatron.units import GB, Seconds, format_chance, format_gib, format_seconds

_GROUPS = (
    ("tp", "tensor", GroupKind.TP),
    ("cp", "context", GroupKind.CP),
    ("ep", "expert", GroupKind.EP),
    ("pp", "pipeline", GroupKind.PP),
    ("dp", "data", GroupKind.DP_CP),
    ("expert_dp", "expert data", GroupKind.EDP),
)


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


def stages(plan: ParallelPlan) -> Mapping[str, Any]:
    """Every pipeline rank: its layers, its share of time and its memory against the capacity."""
    predicted = plan.predicted
    every = plan.layout.dims.rank_order is RankOrder.TP_CP_EP_DP_PP
    return {
        "head": (
            "rank",
            "GPUs" if every else "GPUs of its first replica",
            "layers, chunk by chunk",
            "parameters per GPU",
            "time per micro batch",
            "busy",
            f"memory of {format_gib(predicted.capacity_bytes)}",
        ),
        "rows": [_stage(plan, rank) for rank in range(len(predicted.stages))],
        "kinds": [_run(plan, kind, 1) for kind in dict.fromkeys(plan.model.layer_kinds())],
        "width_em": f"{min(24.0, 2.9 * len(predicted.stages[0].layers)):.1f}",
    }


def _stage(plan: ParallelPlan, rank: int) -> Mapping[str, Any]:
    kinds, stage = plan.model.layer_kinds(), plan.predicted.stages[rank]
    slowest = max(each.forward_s + each.backward_s for each in plan.predicted.stages)
    memory, spent = sum(stage.memory_bytes.values()), stage.forward_s + stage.backward_s
    share = memory / plan.predicted.capacity_bytes
    return {
        "rank": rank,
        "gpus": "–".join(map(str, plan.placement.stage_ranks[rank])),
        "chunks": [
            [_run(plan, kind, len(list(run))) for kind, run in groupby(kinds[u] for u in units)]
            for units in plan.layout.partition.chunks_of_rank(rank)
        ],
        "parameters": f"{stage.parameters / 1e9:.2f} B",
        "time": format_seconds(spent),
        "time_share": spent / slowest,
        "busy": f"{100 * stage.busy_share:.0f} %",
        "memory": f"{format_gib(memory)} ({100 * share:.1f} %)",
        "memory_share": share,
    }


def _run(plan: ParallelPlan, kind: LayerKind, count: int) -> Mapping[str, Any]:
    """Neighbouring layers of one kind."""
    letter, name = kind.letter, " and ".join(map(block_name, kind.blocks)) or "nothing"
    count *= plan.model.num_mtp_layers if kind is LayerKind.MTP else 1
    classes = " ".join(f"u-{block.base}" for block in kind.blocks)
    return {"classes": classes, "letter": letter, "name": name, "count": count}


def reached_levels(cluster: Cluster) -> list[int]:
    """Numbers of the network levels that a cluster of this size has."""
    sizes = cluster.group_sizes()
    return [i for i, size in enumerate(sizes) if i == 0 or size > sizes[i - 1]]


def groups(plan: ParallelPlan) -> Mapping[str, Any]:
    """For each kind of group, how its members spread over the network levels."""
    dims, cluster = plan.layout.dims, plan.cluster
    levels, sizes, reached = cluster.levels, cluster.group_sizes(), reached_levels(cluster)
    rows: list[dict[str, Any]] = []
    for name, words, kind in _GROUPS:
        if "expert" in words and plan.model.num_experts is None:
            continue
        shape, size = group_shape(dims, kind, sizes), len(group_of_rank(dims, kind, 0))
        far = plan.placement.group_levels[name] if size > 1 else "no communication"
        reach = [_reach(level, shape) for level in reached]
        links = [level for level in reached if shape[level] > 1]
        rows.append({"name": words, "size": size, "levels": reach, "links": links, "farthest": far})
    rates = [
        f"{sizes[i]:,} GPUs, {levels[i].bandwidth_bytes_per_s / GB:g} GB/s per GPU" for i in reached
    ]
    columns = [f"{levels[i].name}: {said}" for i, said in zip(reached, rates, strict=True)]
    drawn = [
        {
            "name": levels[i].name,
            "words": rates[place],
            "gpus": sizes[i],
            "inside": f"{sizes[i] // sizes[reached[place - 1]]:,}" if place else "",
            "groups": [
                f"{row['name']} {row['levels'][place][0]}" for row in rows if i in row["links"]
            ],
        }
        for place, i in enumerate(reached)
    ]
    return {
        "drawn": drawn[::-1],
        "head": ("group", "GPUs in it", *columns, "farthest level crossed"),
        "rows": rows,
        "caption": "Members of one group inside one node and inside each wider level; 4 × 2 are "
        "four inner groups with two members each. Rank order "
        f"{plan.layout.dims.rank_order.value}.",
    }


def _reach(level: int, shape: tuple[int, ...]) -> tuple[str, bool]:
    """Members of a group inside one group of a level, and whether the level links them."""
    inner, fan_out = prod(shape[:level]), shape[level]
    if inner == prod(shape):
        return "–", False
    if fan_out == 1 or level == 0:
        return str(inner * fan_out), False
    return f"{fan_out} × {inner}", True


def runners_up(plan: ParallelPlan, times: LayerTimes | None = None) -> Mapping[str, Any] | None:
    """Runners-up: what they lose, and what they do differently; columns all share are left out."""
    if not plan.alternatives:
        return None
    own = as_alternative(plan)
    best, others = _described(plan, own), [_described(plan, other) for other in plan.alternatives]
    differ = [name for name in best if any(other[name] != best[name] for other in others)]
    told = any(other.chance_slower is not None for other in plan.alternatives)
    ranges = _ranges([own, *plan.alternatives])
    same = [(best[name], True) for name in differ]
    rows = [_runner_up("plan", "", own, same, "", told, ranges[0])]
    lost = term_differences(plan, times)
    each = zip(plan.alternatives, others, lost, ranges[1:], strict=True)
    for number, (other, described, terms, known) in enumerate(each, start=1):
        degrees = [(described[name], described[name] == best[name]) for name in differ]
        why = term_words(terms, most=3) if terms else "priced otherwise by this version"
        longer = f"{other.slower_percent:+.2f} %"
        rows.append(_runner_up(str(number), longer, other, degrees, why, told, known))
    caption = "Other layouts at their best. What differs is marked, what all share is left out."
    sure = ("chance to be slower",) if told else ()
    within = ("9 of 10 runs",) if any(ranges) else ()
    narrow = narrow_words(plan.provenance.own_runs) if any(ranges) else ""
    said = (
        caption,
        narrow and f"Ranges are {narrow}.",
        ties(plan),
        incomplete_ranking(plan.search),
    )
    return {
        "head": ("#", "step longer by", *sure, "step", *within, *differ, "difference by term"),
        "ranges": any(ranges),
        "rows": rows,
        "caption": " ".join(filter(None, said)),
    }


def _runner_up(
    first: str,
    longer: str,
    other: Alternative,
    degrees: Sequence[tuple[str, bool]],
    why: str,
    told: bool,
    known: Mapping[str, Any] | None,
) -> Mapping[str, Any]:
    odds = "" if other.chance_slower is None else format_chance(other.chance_slower)
    figures = [longer, *([odds] if told else []), format_seconds(other.iteration_time_s)]
    return {"first": first, "figures": figures, "range": known, "degrees": degrees, "why": why}


def _ranges(plans: Sequence[Alternative]) -> list[Mapping[str, Any] | None]:
    """Between which steps 9 of 10 runs of each lie, in per cent of one scale for all."""
    known = [each.uncertainty for each in plans if each.uncertainty is not None]
    low = min((each.low_s for each in known), default=0.0)
    whole = max((each.high_s for each in known), default=0.0) - low
    return [_range(each, low, 100 / whole if whole else 0.0) for each in plans]


def _range(one: Alternative, low: Seconds, scale: float) -> Mapping[str, Any] | None:
    known = one.uncertainty
    if known is None:
        return None
    return {
        "left": scale * (known.low_s - low),
        "width": scale * (known.high_s - known.low_s),
        "mark": min(100.0, max(0.0, scale * (one.iteration_time_s - low))),
        "words": range_words(known),
    }


def _described(plan: ParallelPlan, other: Alternative) -> dict[str, str]:
    stages = layout_arguments(plan.model, other.layout)["pipeline_model_parallel_layout"]
    return {**degree_cells(other), "Stages": _shown(stages)}
