"""How much device memory to leave free, from runs that ran and runs that did not fit.

A plan is called infeasible where its predicted peak exceeds ``(1 - margin) * memory - reserve``.
A larger margin catches more of the runs that ended out of memory and refuses more that ran.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from nest_megatron.units import Bytes
from nest_megatron.validation.outcome import RowOutcome
from nest_megatron.validation.row_settings import states_recompute

#: Margins of the curve.
MARGINS = tuple(step / 100 for step in range(0, 31))
#: Share of the runs that ran which may be refused.
TOLERATED = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class MarginSample:
    """A run as the margin sees it.

    Args:
        fill: predicted peak and reserve together over the memory of the device.
        risk: predicted chance that the run ends out of memory.
    """

    source: str
    fill: float
    risk: float
    out_of_memory: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MarginPoint:
    """What one margin does: runs refused, of those that ran and of those that did not fit."""

    margin: float
    ran: int
    ran_refused: int
    out_of_memory: int
    out_of_memory_refused: int

    @property
    def ran_share(self) -> float:
        """Share of the runs that ran which is refused; smaller is better."""
        return self.ran_refused / self.ran if self.ran else 0.0

    @property
    def out_of_memory_share(self) -> float:
        """Share of the runs that did not fit which is refused; larger is better."""
        return self.out_of_memory_refused / self.out_of_memory if self.out_of_memory else 0.0


def samples(
    outcomes: Iterable[RowOutcome], reserve: Bytes, *, stated: bool = True
) -> tuple[MarginSample, ...]:
    """What the margin can learn from: runs with a predicted need and a known device.

    A run that ran and does not say what it recomputed is predicted with a setting that fits,
    so that its verdict follows from the margin instead of testing it; such rows are left out.

    Args:
        outcomes: rows of throughput and memory; ``needed_bytes`` and ``device_bytes`` are used.
        reserve: ``CostSettings.memory_reserve_bytes``.
        stated: ``False`` for the rows that are left out.
    """
    return tuple(
        MarginSample(
            source=outcome.source,
            fill=(outcome.needed_bytes + reserve) / outcome.device_bytes,
            risk=outcome.risk,
            out_of_memory=outcome.out_of_memory,
        )
        for outcome in outcomes
        if outcome.needed_bytes is not None
        and outcome.device_bytes
        and outcome.risk is not None
        and (outcome.out_of_memory or states_recompute(outcome.row)) is stated
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RiskBin:
    """Runs whose chance to run out of memory lies between two bounds; expected: its sum."""

    low: float
    high: float
    runs: int
    out_of_memory: int
    expected: float

    @property
    def mean_chance_pct(self) -> float:
        """Mean predicted chance."""
        return 100.0 * self.expected / self.runs

    @property
    def ran_out_pct(self) -> float:
        """Share of the runs that did run out."""
        return 100.0 * self.out_of_memory / self.runs


#: Bounds of the bins.
RISKS = (0.0, 0.01, 0.05, 0.2, 0.5, 0.9, 1.0)


def risk_bin(data: Iterable[MarginSample], low: float = 0.0, high: float = 1.0) -> RiskBin:
    """The runs of one range of chances, and how many of them did run out of memory."""
    own = [each for each in data if low <= each.risk < high or each.risk == high == 1.0]
    return RiskBin(
        low=low,
        high=high,
        runs=len(own),
        out_of_memory=sum(each.out_of_memory for each in own),
        expected=sum(each.risk for each in own),
    )


def risk_bins(data: Sequence[MarginSample]) -> tuple[RiskBin, ...]:
    """Runs by their predicted chance."""
    return tuple(risk_bin(data, low, high) for low, high in pairwise(RISKS))


def margin_point(data: Iterable[MarginSample], margin: float) -> MarginPoint:
    """Count what one margin refuses."""
    verdicts = [(each.out_of_memory, each.fill > 1.0 - margin) for each in data]
    return MarginPoint(
        margin=margin,
        ran=sum(not short for short, _ in verdicts),
        ran_refused=sum(refused and not short for short, refused in verdicts),
        out_of_memory=sum(short for short, _ in verdicts),
        out_of_memory_refused=sum(refused and short for short, refused in verdicts),
    )


def margin_curve(data: Sequence[MarginSample]) -> tuple[MarginPoint, ...]:
    """The trade-off over all margins of ``MARGINS``."""
    return tuple(margin_point(data, margin) for margin in MARGINS)


def best_margin(data: Sequence[MarginSample]) -> MarginPoint:
    """The margin that catches the most while it refuses at most ``TOLERATED`` of what ran.

    Where even the smallest margin refuses more, the smallest is taken; of equal ones the largest,
    because what fits by a hair does not run.
    """
    curve = margin_curve(data)
    allowed = [each for each in curve if each.ran_share <= TOLERATED] or [curve[0]]
    return max(allowed, key=lambda each: (each.out_of_memory_share, each.margin))


def left_out(data: Sequence[MarginSample]) -> dict[str, MarginPoint]:
    """By source, what the margin that all other sources ask for does to it."""
    return {
        name: margin_point(
            [each for each in data if each.source == name],
            best_margin([each for each in data if each.source != name]).margin,
        )
        for name in dict.fromkeys(each.source for each in data)
    }
