"""The report's sections on the layout: degrees, stages, communication groups, runners-up."""

from __future__ import annotations

from itertools import groupby
from math import prod

from nest_megatron.model.spec import LayerKind
from nest_megatron.parallel.diff import plan_values, reason
from nest_megatron.parallel.dims import RankOrder
from nest_megatron.parallel.plan import Alternative, ParallelPlan, zero_stage
from nest_megatron.parallel.rank_order import GroupKind, group_of_rank, group_shape
from nest_megatron.plain import to_plain
from nest_megatron.profile.lookup import LayerTimes
from nest_megatron.report.differences import term_differences
from nest_megatron.report.markup import Markup, element, joined, table
from nest_megatron.report.words import incomplete_ranking, term_words, ties
from nest_megatron.units import GB, Seconds, format_gib, format_seconds

_LETTERS = {
    LayerKind.EMBEDDING: ("E", "embedding"),
    LayerKind.DENSE: ("t", "transformer layer"),
    LayerKind.MOE: ("t", "transformer layer with experts"),
    LayerKind.MTP: ("m", "multi-token prediction"),
    LayerKind.HEAD: ("L", "loss head"),
}
_GROUPS = (
    ("tp", "tensor", GroupKind.TP),
    ("cp", "context", GroupKind.CP),
    ("ep", "expert", GroupKind.EP),
    ("pp", "pipeline", GroupKind.PP),
    ("dp", "data", GroupKind.DP_CP),
    ("expert_dp", "expert data", GroupKind.EDP),
)
_DEGREES = (
    ("TP", "tensor_model_parallel_size"),
    ("PP", "pipeline_model_parallel_size"),
    ("VPP", "virtual_pipeline_model_parallel_size"),
    ("CP", "context_parallel_size"),
    ("DP", "data_parallel_size"),
    ("EP", "expert_model_parallel_size"),
    ("ETP", "expert_tensor_parallel_size"),
)


def choices(plan: ParallelPlan) -> Markup:
    """Every parallel field with its value and the reason."""
    rows = [
        (element("code", name), element("code", shown(value)), reason(plan, name))
        for name, value in plan_values(plan).items()
    ]
    return table(
        ("Megatron's name", "value", "why"),
        rows,
        "Megatron's fields as the plan writes them into the job",
    )


def shown(value: object) -> str:
    """A field's value as text; an unset one is a dash."""
    plain = to_plain(value)
    if plain is None or plain == []:
        return "–"
    if isinstance(plain, bool):
        return "yes" if plain else "no"
    return ", ".join(map(str, plain)) if isinstance(plain, list) else str(plain)


def stages(plan: ParallelPlan) -> Markup:
    """Every pipeline rank: its layers, its share of time and its memory against the capacity."""
    predicted, partition = plan.predicted, plan.partition()
    slowest = max(stage.forward_s + stage.backward_s for stage in predicted.stages)
    room = f"min-width:{min(24.0, 2.9 * len(predicted.stages[0].layers)):.1f}em"
    every = plan.placement.rank_order is RankOrder.TP_CP_EP_DP_PP
    rows = []
    for rank, stage in enumerate(predicted.stages):
        memory, spent = sum(stage.memory_bytes.values()), stage.forward_s + stage.backward_s
        chunks = [_chunk(plan, chunk) for chunk in partition.chunks_of_rank(rank)]
        gpus = "–".join(map(str, plan.placement.stage_ranks[rank]))
        share = memory / predicted.capacity_bytes
        rows.append(
            (
                str(rank),
                element("span", gpus, class_="num"),
                element("span", *chunks, class_="chunks", style=room),
                f"{stage.parameters / 1e9:.2f} B",
                metered(spent / slowest, format_seconds(spent)),
                f"{100 * stage.busy_share:.0f} %",
                metered(share, f"{format_gib(memory)} ({100 * share:.1f} %)"),
            )
        )
    head = (
        "rank",
        "GPUs" if every else "GPUs of its first replica",
        "layers, chunk by chunk",
        "parameters per GPU",
        "time per micro batch",
        "busy",
        f"memory of {format_gib(predicted.capacity_bytes)}",
    )
    caption = "Pipeline ranks. The time bar is relative to the slowest rank."
    return joined((_letters(plan), table(head, rows, caption, numeric=4)))


def metered(share: float, words: str) -> Markup:
    """A figure beside a small bar for its share of a whole; beyond the whole the bar turns red."""
    full = element("i", style=f"width:{100 * min(1.0, max(0.0, share)):.1f}%")
    kind = "meter bad" if share > 1 else "meter"
    bar = element("span", full, class_=kind, aria_hidden="true")
    return element("span", bar, words, class_="metered")


def swatches(named: list[tuple[str, str]]) -> Markup:
    """A legend: names with their colours."""
    items = [element("li", swatch(colour), name) for name, colour in named]
    return element("ul", *items, class_="legend")


def swatch(colour: str) -> Markup:
    """A small square of a colour."""
    return element("span", class_="swatch", style=f"background:{colour}")


def groups(plan: ParallelPlan) -> Markup:
    """For each kind of group, how its members spread over the network levels."""
    dims, cluster = plan.grid().dims, plan.cluster
    levels, sizes = cluster.levels, cluster.group_sizes()
    reached = [i for i, size in enumerate(sizes) if i == 0 or size > sizes[i - 1]]
    head = ["group", "GPUs in it"]
    for i in reached:
        rate = f"{levels[i].bandwidth_bytes_per_s / GB:g} GB/s per GPU"
        head.append(f"{levels[i].name}: {sizes[i]} GPUs, {rate}")
    rows = []
    for name, words, kind in _GROUPS:
        if "expert" in words and plan.model.num_experts is None:
            continue
        shape = group_shape(dims, kind, sizes)
        size = len(group_of_rank(dims, kind, 0))
        cells = [_reach(level, shape) for level in reached]
        far = plan.placement.group_levels[name] if size > 1 else "no communication"
        rows.append((words, str(size), *cells, far))
    head.append("farthest level crossed")
    caption = (
        "Members of one group inside one node and inside each wider level; 4 × 2 are four inner "
        f"groups with two members each. Rank order {plan.placement.rank_order.value}."
    )
    return table(head, rows, caption)


def alternatives(plan: ParallelPlan, times: LayerTimes | None = None) -> Markup:
    """Runners-up: what they lose, and what they do differently."""
    if not plan.alternatives:
        return element("p", "The plan names no runners-up.", class_="soft")
    best, others = _best(plan), [_described(other) for other in plan.alternatives]
    same = {name for name, text in best.items() if all(o[name] == text for o in others)}
    best = {name: text for name, text in best.items() if name not in same}
    told = any(other.chance_slower is not None for other in plan.alternatives)
    sure = ["this plan is faster"] if told else []
    head = ["slower by", *sure, "step", *best, "where the time goes"]
    rows = []
    lost = term_differences(plan, times)
    for other, described, terms in zip(plan.alternatives, others, lost, strict=True):
        cells = [
            element("span", described[name], class_=None if described[name] == text else "differs")
            for name, text in best.items()
        ]
        why = term_words(terms, most=3) if terms else "priced otherwise by this version"
        by = f"{other.slower_percent:.2f} %"
        odds = "" if other.chance_slower is None else f"{100 * other.chance_slower:.0f} % sure"
        rows.append((by, *[odds][: len(sure)], _time(other.iteration_time_s), *cells, why))
    step = _time(plan.predicted.iteration_time_s)
    own = ("this plan", *[""][: len(sure)], step, *best.values(), "")
    caption = "Other layouts at their best. What differs is marked, what all share is left out."
    caption = " ".join(filter(None, (caption, ties(plan), incomplete_ranking(plan.search))))
    return table(head, [own, *rows], caption)


def _time(seconds: Seconds) -> Markup:
    return element("span", format_seconds(seconds), class_="num")


def _chunk(plan: ParallelPlan, units: range) -> Markup:
    kinds = plan.model.layer_kinds()
    runs = [(kind, len(list(run))) for kind, run in groupby(kinds[unit] for unit in units)]
    return element("span", *(_run(plan, kind, count) for kind, count in runs), class_="chunk")


def _run(plan: ParallelPlan, kind: LayerKind, count: int) -> Markup:
    letter, name = _LETTERS[kind]
    count *= plan.model.num_mtp_layers if kind is LayerKind.MTP else 1
    text = f"{letter}×{count}" if count > 1 else letter
    return element("span", text, class_=f"u-{kind.value}", title=f"{count} × {name}")


def _letters(plan: ParallelPlan) -> Markup:
    used = list(dict.fromkeys(plan.model.layer_kinds()))
    items = [
        element(
            "li",
            element(
                "span", element("span", _LETTERS[kind][0], class_=f"u-{kind.value}"), class_="chunk"
            ),
            f" {_LETTERS[kind][1]}",
        )
        for kind in used
    ]
    return element("ul", *items, class_="legend")


def _reach(level: int, shape: tuple[int, ...]) -> Markup:
    """Members of a group inside one group of a level; marked where the level links them."""
    inner, fan_out = prod(shape[:level]), shape[level]
    if inner == prod(shape):
        return element("span", "–")
    if fan_out == 1 or level == 0:
        return element("span", str(inner * fan_out))
    return element("span", f"{fan_out} × {inner}", class_="differs")


def _best(plan: ParallelPlan) -> dict[str, str]:
    chosen, grid = plan.parallel, plan.grid()
    return {
        "GPUs": str(plan.placement.num_gpus),
        **{short: shown(getattr(chosen, name)) for short, name in _DEGREES},
        "micro batch": str(plan.train.micro_batch_size),
        "ZeRO": str(int(zero_stage(chosen))),
        "recompute": grid.recompute.label().replace("+", " + "),
        "rank order": plan.placement.rank_order.value,
        "stage layout": shown(chosen.pipeline_model_parallel_layout),
    }


def _described(other: Alternative) -> dict[str, str]:
    return {
        "GPUs": str(other.num_gpus),
        **{short: shown(getattr(other, name)) for short, name in _DEGREES},
        "micro batch": str(other.micro_batch_size),
        "ZeRO": str(other.zero_stage),
        "recompute": other.recompute.replace("+", " + "),
        "rank order": other.rank_order.value,
        "stage layout": shown(other.pipeline_model_parallel_layout),
    }
