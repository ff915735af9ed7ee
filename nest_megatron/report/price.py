"""What a plan costs, in words."""

from __future__ import annotations

from collections.abc import Iterator

from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.price import Price
from nest_megatron.units import format_count, format_duration


def price_rows(plan: ParallelPlan) -> Iterator[tuple[str, str]]:
    """Rows of a plan's summary: what a dollar buys, and the whole run."""
    found = plan.price
    if found is None:
        return
    kept = "" if plan.goodput is None else ", failures and checkpoints included"
    if found.tokens_per_dollar is not None:
        words = f"{format_count(found.tokens_per_dollar)} tokens for a dollar"
        yield "Cost", f"{words}, at ${found.gpu_hour:,.2f} for an hour of a GPU{kept}"
    if found.run_s is not None and found.tokens is not None:
        time = f"{format_count(found.tokens)} tokens in {format_duration(found.run_s)}"
        yield "Run", ", ".join([time, *run_words(found)]) + kept


def run_words(found: Price) -> list[str]:
    """Dollars and energy of the whole run, as far as they are known."""
    words = []
    if found.run_dollars is not None:
        words.append(f"${format_count(found.run_dollars)}")
    if found.run_mwh is not None:
        words.append(f"{found.run_mwh:,.4g} MWh at {found.gpu_watts:,g} W for each GPU")
    return words


def price_cells(plan: ParallelPlan) -> dict[str, str]:
    """Cells of what a plan costs, by the heads of their columns; none for what is not known."""
    if (price := plan.price) is None:
        return {}
    figures = {"Tokens/$": price.tokens_per_dollar, "Run $": price.run_dollars}
    cells = {name: format_count(n) for name, n in figures.items() if n is not None}
    return cells if price.run_mwh is None else {**cells, "MWh": f"{price.run_mwh:,.4g}"}
