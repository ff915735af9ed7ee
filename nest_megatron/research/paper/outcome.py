"""What an experiment asks of its planners, and what it reports."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from nest_megatron.research.paper.published import PaperJob
from nest_megatron.units import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerResult:
    """What one planner's plan for a job costs on the shared cost model.

    Args:
        iteration_time_s: ``None`` if it found no plan.
        layout: its degrees, or why there is no plan.
        seconds: that its search took.
        worst_term: the term in which it loses most against ours; empty for ours.
        optimal: whether the search proved its plan.
    """

    iteration_time_s: Seconds | None
    layout: str
    seconds: Seconds
    worst_term: str = ""
    optimal: bool = False


#: Plans a job by each of some planners.
Runner = Callable[[PaperJob, Sequence[str]], Mapping[str, PlannerResult]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureRow:
    """One planner on one job; ``None`` is no plan, or no figure.

    Args:
        ours, artifact, paper: throughput over the figure's base.
    """

    job: PaperJob
    planner: str
    ours: float | None
    artifact: float | None
    paper: float | None
    outcome: PlannerResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Geometric-mean throughput of our plan over a baseline's.

    Args:
        ours: over the jobs for which both have a plan, ``jobs`` of them.
        only_ours: jobs for which the baseline has none.
        least: the smallest gain of a job.
        artifact: of the artifact's own plan on its recorded instances, by how the baseline is
            priced: ``as_shipped``, by ``one_rule``, with its ``best_cuts``.
        worst_terms: how often each term is the one in which the baseline loses most.
    """

    planner: str
    jobs: int
    only_ours: int
    ours: float | None
    least: float | None
    artifact: Mapping[str, float]
    instances: int
    paper: float | None
    worst_terms: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """An experiment as run here, beside what was printed.

    Args:
        head: names of the columns of ``cells``; the last three are ours, the artifact's, the
            paper's.
        rows: what a figure draws; empty for a table.
    """

    name: str
    title: str
    head: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]
    rows: tuple[FigureRow, ...] = ()
    gains: tuple[Gain, ...] = ()


def geometric_mean(values: Iterable[float]) -> float | None:
    """The geometric mean, or ``None`` of nothing.

    >>> geometric_mean([1.0, 4.0])
    2.0
    """
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else None
