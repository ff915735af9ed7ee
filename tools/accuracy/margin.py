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
from nest_megatron.validation.report import RiskBin, risk_bin

#: Margins of the curve.
MARGINS = tuple(step / 100 for step in range(0, 31))
#: Share of the runs that ran which may be refused.
TOLERATED = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class MarginSample:
    """A run as the margin sees it; fill: its predicted peak and the reserve over its device."""

    source: str
    fill: float
    out_of_memory: bool


def margin_samples(runs: Iterable[RowOutcome], reserve: Bytes) -> tuple[MarginSample, ...]:
    """What the margin can learn from, of runs with a predicted need and a known device."""
    return tuple(
        MarginSample(
            source=each.source,
            fill=((each.needed_bytes or 0) + reserve) / (each.device_bytes or 1),
            out_of_memory=each.out_of_memory,
        )
        for each in runs
    )


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


#: Bounds of the bins.
RISKS = (0.0, 0.01, 0.05, 0.2, 0.5, 0.9, 1.0)


def risk_bins(runs: Sequence[RowOutcome]) -> tuple[RiskBin, ...]:
    """Runs by their predicted chance."""
    return tuple(risk_bin(runs, low, high) for low, high in pairwise(RISKS))


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
