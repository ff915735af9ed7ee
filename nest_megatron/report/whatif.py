"""A plan's job on changed clusters: the best plan of each, and the present layout there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nest_megatron.parallel.plan import ParallelPlan
from nest_megatron.report.price import price_cells
from nest_megatron.report.sweep import SweepRow, short_key, without_effect
from nest_megatron.units import format_gib, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

_UNCHANGED = "unchanged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A plan's job with some settings changed.

    Args:
        row: what planning it came to.
        kept: the present layout, priced there; ``None`` if that cannot run, as ``told`` says.
    """

    row: SweepRow
    kept: ParallelPlan | None = None
    told: str = ""

    def words(self, between: str = ", ") -> str:
        """What is changed."""
        settings = self.row.settings.items()
        return between.join(f"{short_key(k)}={v}" for k, v in settings) or _UNCHANGED


def step_s(plan: ParallelPlan) -> float:
    """The predicted step."""
    return plan.predicted.iteration_time_s


def layout_of(plan: ParallelPlan) -> tuple[object, ...]:
    """All that a plan chooses."""
    return plan.parallel, plan.train.micro_batch_size, plan.placement.rank_order, plan.execution


def percent(found: float, before: float) -> float:
    """By how much a step is longer than another; below 0 it is shorter."""
    return 100 * (found / before - 1)


def variants_report(plan: ParallelPlan, variants: Sequence[Variant]) -> Iterator[RenderableType]:
    """The table of ``whatif``, and what is to be said of its rows."""
    from nest_megatron.report.tables import FittingTable, figure_columns, word_columns
    from nest_megatron.report.terminal import notes_report

    before = variants[0].row.plan
    rows = [_cells(variant, before) for variant in variants]
    prices = [head for head in ("Tokens/$", "Run $", "MWh") if any(head in row for row in rows)]
    table = FittingTable(
        *word_columns("Change", "Best layout"),
        *figure_columns("Step", "vs plan", "Tok/s/GPU", *prices),
        *word_columns("Present layout"),
    )
    for row in rows:
        table.add_row(*(row.get(str(column.header), "-") for column in table.columns))
    yield table
    yield notes_report(tuple(_notes(plan, variants)))


def _cells(variant: Variant, before: ParallelPlan | None) -> dict[str, str]:
    shown, found = variant.row.shown(), variant.row.plan
    cells = {
        "Change": variant.words("\n"),
        "Best layout": shown.get("Layout") or variant.row.status,
    }
    cells["Present layout"] = _kept_words(variant)
    if found is None:
        return cells
    cells["Step"] = format_seconds(step_s(found))
    cells["Tok/s/GPU"] = f"{found.predicted.tokens_per_s_per_gpu:,.0f}"
    if before is not None and variant.row.settings:
        cells["vs plan"] = f"{percent(step_s(found), step_s(before)):+.1f} %"
    return cells | price_cells(found)


def _kept_words(variant: Variant) -> str:
    """The step of the present layout, and how much longer than the best one's."""
    kept, best = variant.kept, variant.row.plan
    if kept is None:
        return f"cannot run: {variant.told}"
    missing = kept.predicted.peak_memory_bytes - kept.predicted.capacity_bytes
    if missing > 0:
        return f"does not fit: {format_gib(missing)} missing"
    if best is not None and layout_of(best) == layout_of(kept):
        return "is the best"
    more = "" if best is None else f" ({percent(step_s(kept), step_s(best)):+.1f} %)"
    return format_seconds(step_s(kept)) + more


def _notes(plan: ParallelPlan, variants: Sequence[Variant]) -> Iterator[str]:
    first, *others = variants
    again = first.row.plan
    if again is None:
        yield f"Planned again, unchanged, the job {_ending(first.row)}: nothing is compared."
        return
    if layout_of(again) != layout_of(plan) or step_s(again) != step_s(plan):
        now, then = format_seconds(step_s(again)), format_seconds(step_s(plan))
        same = "the same" if layout_of(again) == layout_of(plan) else "another"
        yield (
            f"Planned again, unchanged, the job takes {now} with {same} layout, and {then} in the "
            "file: it was made with other settings, profiles or another version."
        )
    for variant in others:
        found = variant.row.plan
        if found is not None and step_s(found) == step_s(again):
            yield f"{variant.words()} changes nothing: the step takes as long as unchanged."
    for key in without_effect([variant.row for variant in others]):
        if len({variant.row.settings[key] for variant in others}) > 1:
            yield f"{short_key(key)} makes no difference: its values give the same step."
    if any(v.row.plan and step_s(v.row.plan) > step_s(again) for v in others):
        yield (
            "A plan is chosen for its expected step with the price of memory risk, so that its "
            "predicted step can be longer on a better cluster; search.objective=nominal compares "
            "predicted steps alone."
        )


def _ending(row: SweepRow) -> str:
    return f"{row.status} ({row.told})" if row.told else row.status


def variants_document(variants: Sequence[Variant]) -> dict[str, Any]:
    """What ``whatif --json`` prints."""
    before = variants[0].row.plan
    return {"rows": [_fields(variant, before) for variant in variants]}


def _fields(variant: Variant, before: ParallelPlan | None) -> dict[str, Any]:
    row, found, kept = variant.row, variant.row.plan, variant.kept
    own = {name: value for name, value in row.fields().items() if name not in row.settings}
    longer = None if found is None or before is None else percent(step_s(found), step_s(before))
    present = kept and {
        "iteration_time_s": step_s(kept),
        "fits": kept.predicted.fits,
        "peak_memory_bytes": kept.predicted.peak_memory_bytes,
        "is_best": found is not None and layout_of(found) == layout_of(kept),
    }
    own |= {
        "longer_percent": longer,
        "present_layout": present,
        "present_layout_told": variant.told,
    }
    return {"changes": dict(row.settings), **own}
