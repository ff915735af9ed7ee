"""A plan's job on changed clusters: the best plan of each, and the present layout there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.plain import frozen
from nest_megatron.report.charts import IDLE, INK, PAPER, blended
from nest_megatron.report.console import Shown
from nest_megatron.report.plan_rows import (
    PlanRow,
    RowsTable,
    plan_cells,
    price_heads,
    short_key,
    steps_of,
    tokens_per_s,
    value_at,
    without_effect,
)
from nest_megatron.report.words import narrow_words, range_words
from nest_megatron.units import format_chance, format_count, format_gib, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

#: Of the cell with the most, in a heat map.
_DARK = "#1d4f8c"


@frozen
class Variant:
    """A plan's job with some settings changed.

    Args:
        row: what planning it came to.
        kept: the present layout, priced there; ``None`` if that cannot run.
        refusal: why it cannot.
    """

    row: PlanRow
    kept: ParallelPlan | None = None
    refusal: str = ""

    def words(self, between: str = ", ") -> str:
        """What is changed."""
        return self.row.words(between) or "unchanged"


def step_s(plan: ParallelPlan) -> float:
    """The predicted step."""
    return plan.predicted.iteration_time_s


def fastest_s(plan: ParallelPlan) -> float:
    """The step of the fastest layout, with which the plan may tie."""
    return steps_of(plan)[1]


def layout_of(plan: ParallelPlan) -> tuple[object, ...]:
    """All that a plan chooses."""
    layout = plan.layout
    return plan.arguments, layout.micro_batch_size, layout.dims.rank_order, layout.execution


def percent(found: float, before: float) -> float:
    """By how much a step is longer than another; below 0 it is shorter."""
    return 100 * (found / before - 1)


def _cells(variant: Variant, before: ParallelPlan | None) -> dict[str, str]:
    found, best = variant.row.plan, variant.row.cells()["Layout"]
    cells = {"Change": variant.words("\n"), "Chosen layout": _kept_words(variant)}
    if not found:
        return {**cells, "Best layout": best}
    if before and variant.row.settings:
        cells["vs plan"] = f"{percent(fastest_s(found), fastest_s(before)):+.1f} %"
    cells |= {"9 of 10 runs": range_words(found.uncertainty)}
    return {**cells, **plan_cells(found), "Best layout": f"{best}, {risk_of(found)}"}


def _kept_words(variant: Variant) -> str:
    """The step of the present layout, and how much longer than the best one's."""
    kept, best = variant.kept, variant.row.plan
    if not kept:
        return f"cannot run: {variant.refusal}"
    missing = kept.predicted.peak_memory_bytes - kept.predicted.capacity_bytes
    if missing > 0:
        return f"does not fit: {format_gib(missing)} missing"
    if best and layout_of(best) == layout_of(kept):
        return f"is the best{' found' * best.search.ended_early}"
    more = f" ({percent(step_s(kept), step_s(best)):+.1f} %)" if best else ""
    return f"{format_seconds(step_s(kept))}{more}, {risk_of(kept)}"


def risk_of(plan: ParallelPlan) -> str:
    """The chance that a plan runs out of memory."""
    return f"{format_chance(plan.uncertainty.out_of_memory)} risk"


def _is_safer(variant: Variant) -> bool:
    """Whether another plan was taken although the present layout fits and has a shorter step."""
    found, kept = variant.row.plan, variant.kept
    fits = found and found.choice and kept and kept.predicted.fits
    return bool(found and kept and fits and step_s(kept) < step_s(found))


def _fields(variant: Variant, before: ParallelPlan | None) -> dict[str, Any]:
    row, found, kept = variant.row, variant.row.plan, variant.kept
    own = {name: value for name, value in row.fields().items() if name not in row.settings}
    longer = found and before and percent(fastest_s(found), fastest_s(before))
    present = kept and {
        "iteration_time_s": step_s(kept),
        "fits": kept.predicted.fits,
        "peak_memory_bytes": kept.predicted.peak_memory_bytes,
        "is_best": found is not None and layout_of(found) == layout_of(kept),
    }
    return {
        "changes": dict(row.settings),
        **own,
        "longer_percent": longer,
        "present_layout": present,
        "present_layout_told": variant.refusal,
    }


def _heat_maps(changed: Sequence[Variant]) -> Iterator[Mapping[str, Any]]:
    """Throughput and cost over the first two settings that vary, a map for each of the others.

    Without a price, and with several numbers of GPUs, the throughput of one GPU stands for cost.
    """
    plans = [variant.row.plan for variant in changed if variant.row.plan]
    figures: dict[str, Callable[[ParallelPlan], float | None]] = {"Tokens/s": tokens_per_s}
    per_dollar = partial(value_at, path="price.tokens_per_dollar")
    if any(map(per_dollar, plans)):
        figures["Tokens/$"] = per_dollar
    elif len({plan.layout.num_gpus for plan in plans}) > 1:
        figures["Tokens/s/GPU"] = partial(value_at, path="predicted.tokens_per_s_per_gpu")
    axes = _axes(changed)
    panels: defaultdict[str, dict[tuple[str, ...], Variant]] = defaultdict(dict)
    for variant in changed:
        settings = variant.row.settings
        others = ", ".join(f"{short_key(key)}={settings[key]}" for key in axes[2:])
        panels[others][tuple(settings[key] for key in axes[:2])] = variant
    for figure, read in figures.items():
        most = max((read(plan) or 0.0 for plan in plans), default=0.0)
        for others, panel in panels.items():
            yield {
                "figure": figure,
                "others": others,
                "axes": [short_key(key) for key in axes[:2]],
                "rows": dict.fromkeys(place[:-1] for place in panel),
                "columns": dict.fromkeys(place[-1] for place in panel),
                "panel": panel,
                "read": read,
                "most": most,
            }


def _axes(changed: Sequence[Variant]) -> list[str]:
    """Settings that have several values, as they were given; of one change its first."""
    keys = list(changed[0].row.settings) if changed else []
    several = [key for key in keys if len({each.row.settings[key] for each in changed}) > 1]
    return several or keys[:1]


@frozen
class Variants(Shown):
    """The rows of a job on changed clusters, as a table and as a page.

    Attributes:
        present: the plan of the file; ``None`` of a command, whose layout is priced as it is typed.
        variants: the job unchanged, then a row for each change: ``row.plan``, ``row.settings``,
            and ``kept``, the present layout there.
    """

    present: ParallelPlan | None
    variants: tuple[Variant, ...]

    @property
    def _before(self) -> ParallelPlan | None:
        """The plan of the job unchanged."""
        return self.variants[0].row.plan

    def _title(self) -> str:
        """The job, unchanged."""
        plan = self.present or self._before or self.variants[0].kept
        if not plan:
            return "a job that has no plan unchanged"
        where = f"{plan.cluster.describe()}, {plan.cluster.name}"
        return f"{plan.model.name} on {where}; global batch {plan.layout.global_batch_size:,}"

    def to_dict(self) -> dict[str, Any]:
        """The rows as numbers, text, lists and dicts: what ``--json`` prints."""
        return {"rows": [_fields(variant, self._before) for variant in self.variants]}

    def report(self) -> Iterator[RenderableType]:
        """The table that ``nest-megatron whatif`` prints."""
        from rich.text import Text

        yield Text(self._title())
        rows = [_cells(variant, self._before) for variant in self.variants]
        figures = ("Step", "vs plan", "Tok/s/GPU", *price_heads(rows))
        heads = ("Change", "Best layout", *figures, "Chosen layout")
        yield from RowsTable(heads=heads, cells=rows, notes=[*self._notes()]).report()

    def to_html(self) -> str:
        """One self-contained page: heat maps of throughput and cost, and the table."""
        from nest_megatron.report.page import render_page

        before, changed = self._before, self.variants[1:]
        cells = [_cells(variant, before) for variant in self.variants]
        figures = ["Step", "9 of 10 runs", "vs plan", "Tok/s/GPU", *price_heads(cells)]
        head = ["Change", "Best layout", "Chosen layout", *figures]
        choices = {}  # what a reader picks a row by: values of each setting that has several
        for key in _axes(changed):
            values = [*dict.fromkeys(each.row.settings[key] for each in changed)]
            if len(values) > 1:
                choices[key] = values
        step = f": {cells[0]['Step']} a step" if before else ""
        return render_page(
            "whatif.html",
            f"What if: {self._title()}",
            script="pick.js",
            headline=f"Unchanged: {cells[0]['Best layout']}{step}",
            before=before,
            narrow=before and narrow_words(before.provenance.own_runs),
            maps=_heat_maps(changed),
            nothing=(IDLE, INK),
            shade=partial(blended, PAPER, _DARK),
            format_count=format_count,
            plan_cells=plan_cells,
            head=head,
            rows=[
                {
                    "cells": [each.get(name, "-").replace("\n", ", ") for name in head],
                    "place": ",".join(
                        str(values.index(variant.row.settings[key]))
                        for key, values in choices.items()
                        if key in variant.row.settings  # those of the unchanged job are not
                    ),
                }
                for each, variant in zip(cells, self.variants, strict=True)
            ],
            choices=[(short_key(key), values) for key, values in choices.items()],
            numeric=len(figures),
            notes=self._notes(),
        )

    def _notes(self) -> Iterator[str]:
        first, *others = self.variants
        again, present = self._before, self.present
        if not again:
            why = first.row.reason or first.row.status
            yield f"The unchanged job has no plan ({why}): nothing is compared."
            return
        if present and (layout_of(again), step_s(again)) != (
            layout_of(present),
            step_s(present),
        ):
            now, then = format_seconds(step_s(again)), format_seconds(step_s(present))
            same = "the same" if layout_of(again) == layout_of(present) else "another"
            yield (
                f"Planned again, unchanged, the job takes {now} with {same} layout, and {then} in "
                "the file: given, or found with other settings, profiles, policy or version."
            )
        old, site = present and present.provenance.site, again.provenance.site
        if old and not site:
            yield f"Planned again, the job lacks the site's calibration ({old.name}) of its file."
        elif old and site and old.digest != site.digest:
            yield f"The calibration of the site ({site.name}) has changed since the plan was made."
        plans = [(each.row.plan, each) for each in others if each.row.plan]
        names = [each.words() for plan, each in plans if plan.provenance.site is None]
        if site and names:
            where = "; ".join(names)
            yield f"The site's calibration is of the unchanged cluster, and not of {where}."
        for plan, variant in plans:
            if steps_of(plan) == steps_of(again):
                yield f"{variant.words()} changes nothing: the step takes as long as unchanged."
        for key in without_effect([variant.row for variant in others]):
            if len({variant.row.settings[key] for variant in others}) > 1:
                yield f"{short_key(key)} makes no difference: its values give the same step."
        if any(map(_is_safer, others)):
            yield (
                "The chosen layout is faster where it has a larger chance to run out of memory "
                "than memory.max_oom_chance allows, or where a simpler plan ties with it."
            )
        if plans and any(fastest_s(p) < step_s(p) for p in (again, *(plan for plan, _ in plans))):
            yield (
                '"vs plan" compares the fastest layouts; the best layout is the simplest within '
                "search.tie_percent of it."
            )
