"""How sure the prediction of a plan is, and how the plan was chosen."""

from __future__ import annotations

from dataclasses import dataclass

from nest_megatron.layout.layout import Layout
from nest_megatron.plain import added
from nest_megatron.units import Bytes, Seconds

#: Chance from which one of two plans counts as the faster one; below it they tie.
SURE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Uncertainty:
    """How far a prediction can be off.

    Args:
        low_s, high_s: 9 of 10 runs lie between them.
        percentile_90_s: 9 of 10 runs take less.
        confidence: ``high``, ``medium`` or ``low``.
        kind: what the plan has in common with the runs that such predictions were tested on.
        runs: their number.
        error_percent: mean error of those predictions.
        out_of_memory: chance that the job runs out of memory.
        median_s: the step that half of the runs stay below, where a site's calibration makes it
            another than the predicted one.
    """

    mean_s: Seconds
    low_s: Seconds
    high_s: Seconds
    percentile_90_s: Seconds
    confidence: str
    kind: str
    runs: int
    error_percent: float
    out_of_memory: float
    median_s: Seconds | None = added(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class MechanismChange:
    """What runs of a site say of one mechanism.

    Args:
        price_percent, deviation_percent: by how much it is dearer than predicted, and the standard
            deviation of that.
        step_percent: what that adds to the plan's step.
    """

    mechanism: str
    price_percent: float
    deviation_percent: float
    step_percent: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPart:
    """What runs of a site say of one part of the error of a plan's peak.

    Args:
        part: one of ``peak_posterior.PARTS``: the site, a term of the peak, the job, its layout.
        peak_percent: by how much it alone moves the peak that half of the runs stay below.
    """

    part: str
    peak_percent: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryChange:
    """What runs of a site say of a plan's peak memory.

    Args:
        peaks, ran_out: runs whose peak was measured, and runs that ran out of memory.
        own: plans of this very job among them.
        peak_bytes: the peak that half of the runs stay below.
        low_bytes, high_bytes: 9 of 10 peaks lie between them.
        without_out_of_memory: chance to run out of memory without these runs.
        parts: what moves the peak most first.
    """

    peaks: int
    ran_out: int
    own: int
    peak_bytes: Bytes
    low_bytes: Bytes
    high_bytes: Bytes
    without_out_of_memory: float
    parts: tuple[MemoryPart, ...] = added(())


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteChange:
    """What a site's calibration changes of a plan's prediction.

    Args:
        name, digest: of its file, and of what it holds.
        runs, jobs: that it rests on; runs whose step was measured.
        own_runs: plans of this very job among them.
        first, last: dates of the runs.
        without_s, without_low_s, without_high_s: the step without it, and its range.
        changed_versions: names of versions that are not those of its last run.
        mechanisms: what adds or takes most first.
        memory: of its peak; ``None`` where no run says anything of it.
    """

    name: str
    digest: str
    runs: int
    jobs: int
    own_runs: int
    first: str
    last: str
    without_s: Seconds
    without_low_s: Seconds
    without_high_s: Seconds
    changed_versions: tuple[str, ...]
    mechanisms: tuple[MechanismChange, ...]
    memory: MemoryChange | None = added(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RiskierLayout:
    """The fastest layout that rather starts than not, where all allowed ones are slower.

    Args:
        out_of_memory: chance that it runs out of memory.
    """

    layout: Layout
    iteration_time_s: Seconds
    out_of_memory: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How a plan was chosen: the simplest of those that tie with the fastest of the allowed risk.

    Args:
        max_oom_chance: to run out of memory; what has more is not in the space.
        tie_percent: plans so close to the fastest count as equal.
        num_tied: layouts that do.
        fastest_s: the shortest predicted step.
        riskier: what the limit on the risk costs; ``None`` where that is no more than a tie, or no
            runner-up is asked for.
    """

    max_oom_chance: float
    tie_percent: float
    num_tied: int
    fastest_s: Seconds
    riskier: RiskierLayout | None = added(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortlist:
    """Few plans of which one is as fast as the fastest, with a chance of 90 %.

    Plans are as fast as each other if two runs of one plan may differ by as much.

    Args:
        numbers: of runners-up, from 1; 0 is the plan itself. The likeliest first.
        chances: of each of them, to be as fast as the fastest of the plan and its runners-up.
        measurements: what would tell most which of them is the fastest, the most useful first.
        chance: that one of them is.
    """

    numbers: tuple[int, ...]
    chances: tuple[float, ...]
    measurements: tuple[str, ...]
    chance: float
