"""What a plan is chosen for, how sure its prediction is, and what the choice was between."""

from __future__ import annotations

from nest_megatron.names import Name
from nest_megatron.plain import added, frozen_record, written_as
from nest_megatron.units import Bytes, Seconds

#: Chance from which one of two plans counts as the faster one; below it they tie.
SURE = 0.9


class Objective(Name):
    """What the chosen plan has least of."""

    #: The predicted step, as the exact search proves it.
    NOMINAL = "nominal"
    #: The mean step of the predictive distribution over the chance not to run out of memory.
    EXPECTED = "expected"
    #: The step that 9 of 10 runs stay below, over that chance, where memory is likely to suffice.
    CAUTIOUS = "cautious"


@frozen_record
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


@frozen_record
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


@frozen_record
class MemoryPart:
    """What runs of a site say of one part of the error of a plan's peak.

    Args:
        part: one of ``peak_posterior.PARTS``: the site, a term of the peak, the job, its layout.
        peak_percent: by how much it alone moves the peak that half of the runs stay below.
    """

    part: str
    peak_percent: float


@frozen_record
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


@frozen_record
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


@frozen_record
class Choice:
    """How a plan was chosen among those that the search kept.

    Args:
        tie_percent: plans so close to the best under the objective count as equal.
        num_layouts: fastest layouts that were compared.
        num_neighbours: plans near them that were compared too: with even stages, fewer virtual
            stages or less memory.
        value_s: the plan's value under the objective.
        bound_s: no plan of the space has a smaller one, proven.
        slower_percent: the plan's predicted step over that of the fastest one.
        separates: what the plan has that the fastest one has not; empty where it is the fastest.
        max_out_of_memory_percent: the largest chance to run out of memory with which a plan is
            taken while another has less; ``None`` in older files whose plan keeps it.
        ended_early: time ended the search for plans to compare; more of it may prefer another.
    """

    objective: Objective
    tie_percent: float
    num_layouts: int
    num_neighbours: int = written_as("num_relatives")
    value_s: Seconds
    bound_s: Seconds
    slower_percent: float
    separates: tuple[str, ...]
    max_out_of_memory_percent: float | None = None
    ended_early: bool = added(False)

    @property
    def is_proven(self) -> bool:
        """Whether no plan of the space can be better by more than a tie."""
        return self.value_s <= self.bound_s * (1 + self.tie_percent / 100)


@frozen_record
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
