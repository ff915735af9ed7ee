"""Tables of a plan's runners-up: all of them, and those that could be the fastest."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.text import Text

from nest_megatron.cost_model.estimate import estimate
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.settings import restored_settings
from nest_megatron.cost_model.shortlist import AS_FAST
from nest_megatron.errors import UserInputError
from nest_megatron.layout.estimate import Alternative
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.profile.lookup import LayerTimes
from nest_megatron.report.tables import (
    FittingTable,
    figure_columns,
    heading,
    indented,
    name_columns,
    word_columns,
)
from nest_megatron.report.words import degrees, incomplete_ranking, narrow_words, range_words, ties
from nest_megatron.units import GIB, Seconds, format_chance, format_seconds

#: Columns that the runners-up always have, and what another says where nothing is unusual; a
#: degree is 1.
_ALWAYS = ("#", "Step", "Slower", "TP", "PP", "DP")
_USUAL = {"Order": "dp-pp", "Recompute": "none"}
_SHORT = {
    "core_attn": "attn",
    "moe_act": "act",
    "layernorm": "norm",
    "mla_up_proj": "mla",
    "shared_experts": "shared",
}


def alternatives_table(plan: ParallelPlan) -> RenderableType:
    """Runners-up under the plan itself; columns that say the usual throughout are left out.

    "P(slower)" is the chance that a runner-up is the slower one of the two.
    """
    rows = [
        {
            "#": str(number) if number else "plan",
            "Step": format_seconds(each.iteration_time_s),
            "Slower": f"{each.slower_percent:.2f} %" if number else "-",
            "P(slower)": "" if each.chance_slower is None else f"{100 * each.chance_slower:.0f} %",
            **degree_cells(each),
        }
        for number, each in enumerate((as_alternative(plan), *plan.alternatives))
    ]
    usual = {"GPUs": str(plan.cluster.num_gpus), "P(slower)": "", **_USUAL}
    table = FittingTable()
    heads = []
    for head in rows[0]:
        cells = {row[head] for row in rows}
        if head in _ALWAYS or cells - {usual.get(head, "1")}:
            # Recomputed modules are the one text that gives way on a narrow terminal.
            last = head == "Recompute"
            table.add_column(
                head,
                justify="left" if last or head == "#" else "right",
                no_wrap=True,
                min_width=6 if last else max(map(len, (head, *cells))),
            )
            heads.append(head)
    for row in rows:
        style = "bold" if row["#"] == "plan" else None
        table.add_row(*(row[head] for head in heads), style=style)
    said = filter(None, (ties(plan), incomplete_ranking(plan.search)))
    return Group(table, *map(indented, said))


def shortlist_report(plan: ParallelPlan) -> RenderableType:
    """Which of a plan and its runners-up could be the fastest, and what would tell."""
    found = plan.shortlist
    assert found is not None, "a shortlist was asked for"
    table = FittingTable(
        *name_columns("#"),
        *figure_columns("Best", "Step", "9 of 10 runs", "GiB", "P(OOM)"),
        *word_columns("Layout"),
    )
    usual = {"GPUs": str(plan.cluster.num_gpus), **_USUAL}
    for number, share in zip(found.numbers, found.chances, strict=True):
        other = plan.alternatives[number - 1] if number else as_alternative(plan)
        known, layout = other.uncertainty, degree_cells(other).items()
        assert known is not None
        table.add_row(
            str(number) if number else "plan",
            f"{100 * share:.0f} %",
            format_seconds(other.iteration_time_s),
            range_words(known),
            f"{(other.peak_memory_bytes or 0) / GIB:.1f}",
            format_chance(known.out_of_memory),
            " ".join(f"{name} {cell}" for name, cell in layout if cell != usual.get(name, "1")),
            style=None if number else "bold",
        )
    parts = [heading("Which plans could be the fastest"), indented(shortlist_words(plan)), table]
    if found.measurements:
        parts.append(Text("What would tell most which of them is", style="bold cyan"))
        parts += [indented(f"- {each}") for each in found.measurements]
    return Group(*parts)


def shortlist_words(plan: ParallelPlan) -> str:
    """With which chance the shortlist has one as fast as the fastest."""
    found = plan.shortlist
    assert found is not None, "a shortlist was asked for"
    narrow = narrow_words(plan.provenance.own_runs)
    return (
        f"With a chance of {100 * found.chance:.0f} % one of these is as fast as the fastest of "
        f"the plan and its {len(plan.alternatives)} runners-up, but for the "
        f"{100 * AS_FAST:.0f} % by which two runs of one plan may differ. Best: the chance of each."
        f"{f' Ranges are {narrow}.' if narrow else ''}"
    )


def degree_cells(other: Alternative) -> dict[str, str]:
    """The layout of a runner-up by column."""
    layout = other.layout
    return {
        "GPUs": str(layout.num_gpus),
        **{name: str(size) for name, size in degrees(layout).items()},
        "MBS": str(layout.micro_batch_size),
        "ZeRO": str(int(layout.zero)),
        "Order": str(layout.dims.rank_order).removeprefix("tp-cp-ep-"),
        "Recompute": "+".join(
            _SHORT.get(name, name) for name in layout.recompute.label().split("+")
        ),
    }


def as_alternative(plan: ParallelPlan) -> Alternative:
    """A plan as a runner-up to itself."""
    return Alternative(
        layout=plan.layout,
        iteration_time_s=plan.predicted.iteration_time_s,
        slower_percent=0.0,
        uncertainty=plan.uncertainty,
        peak_memory_bytes=plan.predicted.peak_memory_bytes,
    )


def term_differences(
    plan: ParallelPlan, times: LayerTimes | None = None
) -> tuple[Mapping[str, float] | None, ...]:
    """For each runner-up, seconds that each term takes more than in the plan.

    Args:
        times: the measured layer times that the plan was made with.

    Returns:
        One mapping a runner-up; ``None`` where this version prices it otherwise than the plan says.
    """
    try:
        settings = restored_settings(plan.provenance.settings)
    except UserInputError:
        return (None,) * len(plan.alternatives)
    model = CostModel(plan.model, plan.cluster, settings, times)
    return tuple(_differences(plan, other, model) for other in plan.alternatives)


def _differences(
    plan: ParallelPlan, other: Alternative, model: CostModel
) -> Mapping[str, float] | None:
    try:
        found = estimate(model, other.layout)
    except UserInputError:
        return None
    if not same_price(found.iteration_time_s, other.iteration_time_s):
        return None
    return {name: s - plan.predicted.terms.get(name, 0.0) for name, s in found.terms.items()}


def same_price(found_s: Seconds, told_s: Seconds) -> bool:
    """Whether this version prices a layout as a plan file says."""
    return abs(found_s - told_s) <= 1e-6 * told_s
