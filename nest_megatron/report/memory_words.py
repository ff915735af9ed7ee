"""What is said of a layout's memory (whether it fits, with which chance) and of its price."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nest_megatron.cost_model.memory import PEAK_ERROR, within_error
from nest_megatron.cost_model.peak_limit import MOST_OOM_CHANCE
from nest_megatron.layout.estimate import PricedLayout
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.planner.request import NoPlan
from nest_megatron.units import Bytes, format_chance, format_count, format_duration, format_gib

#: Chance to run out of memory from which on it is a warning.
_WORTH_A_WARNING = 0.1


def memory_verdict(needed: Bytes, limit: Bytes, not_modelled: Sequence[str] = ()) -> str:
    """What can be said of a predicted peak beside its limit; nothing where it simply fits.

    Args:
        not_modelled: flags of the job whose effect on memory is not known.

    >>> memory_verdict(70 << 30, 74 << 30)
    ''
    >>> memory_verdict(70 << 30, 74 << 30, ["--use-nccl-ub"])
    'may fit, not modelled: --use-nccl-ub'
    >>> memory_verdict(75 << 30, 74 << 30)
    'may fit: 1.0 GiB over the limit, less than the error of such predictions (3.1 %)'
    >>> memory_verdict(80 << 30, 74 << 30)
    'does not fit, as predicted: 6.0 GiB missing'
    """
    over = f"{format_gib(needed - limit)} over the limit"
    if not_modelled:
        unknown = f"not modelled: {', '.join(not_modelled)}"
        return f"may fit, {unknown}" if needed <= limit else f"may not fit: {over}; {unknown}"
    if needed <= limit:
        return ""
    if within_error(needed, limit):
        error = f"{100 * PEAK_ERROR:.1f} %"
        return f"may fit: {over}, less than the error of such predictions ({error})"
    return f"does not fit, as predicted: {format_gib(needed - limit)} missing"


def plan_verdict(plan: ParallelPlan) -> str:
    """What ``memory_verdict`` says of a plan."""
    found = plan.predicted
    unknown = plan.search.not_modelled
    return memory_verdict(found.peak_memory_bytes, found.capacity_bytes, unknown)


def no_plan_verdict(refusal: NoPlan) -> str:
    """What can be said where no plan was found, of the nearest that is known."""
    if unknown := ", ".join(refusal.search.not_modelled):
        return f"no plan fits in what is modelled of memory; not modelled: {unknown}"
    limit = refusal.capacity_bytes
    if within_error(limit + refusal.missing_bytes, limit):
        return (
            f"no plan is predicted to fit, but the nearest lacks less than the error of such "
            f"predictions ({100 * PEAK_ERROR:.1f} %), so it may fit"
        )
    return "no plan is predicted to fit in memory"


def memory_level(plan: PricedLayout | ParallelPlan, not_modelled: Sequence[str] = ()) -> str:
    """How serious what is known of a layout's memory is: ``bad``, ``warning``, or nothing.

    Args:
        not_modelled: as of ``memory_verdict``.
    """
    chance = plan.uncertainty.out_of_memory
    if not plan.predicted.fits or chance > MOST_OOM_CHANCE:
        return "bad"
    return "warning" if chance >= _WORTH_A_WARNING or not_modelled else ""


def risk_words(plan: PricedLayout | ParallelPlan, which: str) -> str:
    """The chance that a layout runs out of memory, in a sentence; nothing where it is small."""
    if (chance := plan.uncertainty.out_of_memory) < _WORTH_A_WARNING:
        return ""
    likely = "more likely than not runs" if chance > MOST_OOM_CHANCE else "may run"
    return f"{which} {likely} out of memory: the chance is {format_chance(chance)}."


def price_rows(plan: ParallelPlan) -> Iterator[tuple[str, str]]:
    """Rows of a plan's summary: what a dollar buys, and the whole run."""
    found = plan.price
    if not found:
        return
    kept = ", failures and checkpoints included" if plan.goodput else ""
    if found.tokens_per_dollar is not None:
        words = f"{format_count(found.tokens_per_dollar)} tokens for a dollar"
        yield "Cost", f"{words}, at ${found.gpu_hour:,.2f} for an hour of a GPU{kept}"
    if found.run_s is not None and found.tokens is not None:
        words = f"{format_count(found.tokens)} tokens in {format_duration(found.run_s)}"
        if found.run_dollars is not None:
            words += f", ${format_count(found.run_dollars)}"
        if found.run_mwh is not None:
            words += f", {found.run_mwh:,.4g} MWh at {found.gpu_watts:,g} W for each GPU"
        yield "Run", words + kept


def price_cells(plan: PricedLayout | ParallelPlan) -> dict[str, str]:
    """Cells of what a plan costs, by the heads of their columns; none for what is not known."""
    if not (price := plan.price):
        return {}
    figures = {"Tokens/$": price.tokens_per_dollar, "Run $": price.run_dollars}
    cells = {name: format_count(n) for name, n in figures.items() if n is not None}
    return cells if price.run_mwh is None else {**cells, "MWh": f"{price.run_mwh:,.4g}"}
