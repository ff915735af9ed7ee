"""What is predicted of a layout: time, memory, price, how sure that is, and how it compares."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from nest_megatron.errors import UserInputError
from nest_megatron.layout.batch_schedule import PredictedBatch
from nest_megatron.layout.layout import Layout, PartialLayout
from nest_megatron.plain import added, frozen
from nest_megatron.units import Bytes, Seconds


@frozen
class Rates:
    """What the user pays, and how long the run is; what is ``None`` is not known.

    Args:
        gpu_hour: dollars for an hour of one GPU, with its share of host and network.
        gpu_watts: power that one GPU takes while it trains, with the same share.
        tokens: of the whole run.
    """

    gpu_hour: float | None = None
    gpu_watts: float | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        examples = {"cost.gpu_hour": 2.5, "cost.gpu_watts": "1.2kW", "train.tokens": "15T"}
        for key, example in examples.items():
            value = getattr(self, key.partition(".")[2])
            if value is not None and not 0 < value < math.inf:
                raise UserInputError(
                    key, value, "it must be above 0 and finite", f"For example {key}={example}."
                )


@frozen
class Price:
    """What a plan costs; what is ``None`` is not known.

    Args:
        gpu_hour: dollars.
        tokens_per_dollar: at the plan's batch.
        tokens: of the whole run.
        run_s: of the whole run; failures, and checkpoints, where the plan knows its goodput.
        run_dollars: for the time of all GPUs that the plan uses.
        run_mwh: that these take.
    """

    gpu_hour: float | None
    gpu_watts: float | None
    tokens_per_dollar: float | None
    tokens: int | None
    run_s: Seconds | None
    run_dollars: float | None
    run_mwh: float | None


def price(
    rates: Rates,
    *,
    layout: PartialLayout,
    seq_length: int,
    step_s: Seconds,
    kept: float = 1.0,
    batches: Sequence[PredictedBatch] = (),
) -> Price:
    """What a layout costs that takes so long for a step.

    Args:
        kept: share of the time that goes into steps that are kept.
        batches: the run's parts, where its batch grows: they say how long it is.
    """
    step_tokens = layout.global_batch_size * seq_length
    tokens = rates.tokens
    working_s = None if tokens is None else -(-tokens // step_tokens) * step_s
    if batches:
        parts = [(batch.steps, batch) for batch in batches if batch.steps is not None]
        if len(parts) < len(batches):
            tokens = working_s = None
        else:
            tokens = sum(steps * each.global_batch_size * seq_length for steps, each in parts)
            working_s = sum(steps * each.iteration_time_s for steps, each in parts)
    run_s = None if working_s is None or not kept else working_s / kept
    hours = None if run_s is None else layout.num_gpus * run_s / 3600
    per_dollar = None
    if rates.gpu_hour is not None:
        per_dollar = kept * 3600 * step_tokens / (step_s * layout.num_gpus * rates.gpu_hour)
    return Price(
        gpu_hour=rates.gpu_hour,
        gpu_watts=rates.gpu_watts,
        tokens_per_dollar=per_dollar,
        tokens=tokens,
        run_s=run_s,
        run_dollars=_times(hours, rates.gpu_hour),
        run_mwh=_times(hours, rates.gpu_watts, 1e-6),
    )


def _times(*factors: float | None) -> float | None:
    known = [factor for factor in factors if factor is not None]
    return math.prod(known) if len(known) == len(factors) else None


#: Chance from which one of two plans counts as the faster one; below it they tie.
SURE = 0.9


@frozen
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


@frozen
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


@frozen
class MemoryPart:
    """What runs of a site say of one part of the error of a plan's peak.

    Args:
        part: one of ``peak_posterior.PARTS``: the site, a term of the peak, the job, its layout.
        peak_percent: by how much it alone moves the peak that half of the runs stay below.
    """

    part: str
    peak_percent: float


@frozen
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


@frozen
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


@frozen
class RiskierLayout:
    """The fastest layout that rather starts than not, where all allowed ones are slower.

    Args:
        out_of_memory: chance that it runs out of memory.
    """

    layout: Layout
    iteration_time_s: Seconds
    out_of_memory: float


@frozen
class Choice:
    """How a plan was chosen: the simplest of those that tie with the fastest of the allowed risk.

    Args:
        max_oom_chance: to run out of memory; what has more is not in the space.
        tie_percent: plans so close to the fastest count as equal.
        num_tied: layouts that do.
        fastest_s: the shortest predicted step.
        riskier: what the limit on the risk costs; ``None`` where that is no more than a tie, or no
            runner-up is requested.
    """

    max_oom_chance: float
    tie_percent: float
    num_tied: int
    fastest_s: Seconds
    riskier: RiskierLayout | None = added(None)


@frozen
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


@frozen
class Placement:
    """Where ranks lie.

    Args:
        stage_ranks: first and last global rank of each pipeline rank (of its first replica, where
            the rank order spreads a pipeline rank over the cluster).
        group_levels: outermost network level that each kind of group crosses.
        rank_permutation: global rank that each launched rank takes; ``None`` leaves them as the
            launcher gives them out, as long as it keeps each host's together.
    """

    stage_ranks: tuple[tuple[int, ...], ...]
    group_levels: Mapping[str, str]
    rank_permutation: tuple[int, ...] | None = None


@frozen
class StageEstimate:
    """One pipeline rank; passes are those of all its chunks for one micro batch.

    ``layers`` is a short text of what each of its virtual stages holds, ``memory_bytes`` bytes by
    term, at its peak.
    """

    layers: tuple[str, ...]
    forward_s: Seconds
    backward_s: Seconds
    busy_share: float
    parameters: int
    memory_bytes: Mapping[str, Bytes]

    @property
    def peak_memory_bytes(self) -> Bytes:
        """All terms together."""
        return sum(self.memory_bytes.values())


@frozen
class Estimate:
    """The prediction for a layout.

    ``terms`` are seconds by what they go into, work and waiting of ``critical_rank``, the pipeline
    rank that is busy longest; they add up to ``iteration_time_s``.
    """

    iteration_time_s: Seconds
    tokens_per_s_per_gpu: float
    model_tflops_per_gpu: float
    mfu: float
    terms: Mapping[str, Seconds]
    critical_rank: int
    peak_memory_bytes: Bytes
    capacity_bytes: Bytes
    fits: bool
    binding_constraint: str
    stages: tuple[StageEstimate, ...]


@frozen
class PricedLayout:
    """A layout of a job with its estimate, and what it costs.

    Args:
        not_modelled: flags of the job whose effect on memory is not known.
    """

    layout: Layout
    predicted: Estimate
    uncertainty: Uncertainty
    price: Price | None
    not_modelled: tuple[str, ...]


@frozen
class Alternative:
    """A runner-up: another layout at its best, and how much slower it is.

    Args:
        slower_percent: below 0 for one that is predicted to be faster than the plan.
        chance_slower: that it is slower than the plan.
    """

    layout: Layout
    iteration_time_s: Seconds
    slower_percent: float
    uncertainty: Uncertainty | None = added(None)
    peak_memory_bytes: Bytes | None = added(None)
    chance_slower: float | None = added(None)


@frozen
class Difference:
    """By how much a layout's step is longer than another's of the same job.

    Args:
        seconds: of the predicted steps.
        percent: of the other's median step; 9 of 10 runs of both differ by ``low_percent`` to
            ``high_percent``. Errors that both predictions share are not in that interval.
        chance_faster: that it is the faster one of the two.
    """

    seconds: Seconds
    percent: float
    low_percent: float
    high_percent: float
    chance_faster: float

    @property
    def is_sure(self) -> bool:
        """Whether predictions tell which of the two is the faster one."""
        return max(self.chance_faster, 1.0 - self.chance_faster) >= SURE


@frozen
class ChoiceChange:
    """One choice by Megatron's name, or by a recipe's field, with what it was and is."""

    name: str
    before: str
    after: str


@frozen
class LayoutChange:
    """Choices that are changed together, and what that does.

    Args:
        rule: of Megatron, for which one choice is not changed by itself; empty for none.
        step_s: the predicted step with it; ``None`` where Megatron refuses the layout.
        difference: to the layout that it changes.
    """

    choices: tuple[ChoiceChange, ...]
    rule: str = ""
    step_s: Seconds | None = None
    difference: Difference | None = None
    peak_memory_bytes: Bytes | None = None
    fits: bool | None = None


@frozen
class Changes:
    """From one layout to another.

    Args:
        alone: each choice by itself, from the first layout.
        in_order: one after another, every layout between legal; the last is the second layout, so
            the differences add up to the whole one.
        whole: the difference of the two.
    """

    alone: tuple[LayoutChange, ...]
    in_order: tuple[LayoutChange, ...]
    whole: Difference


@frozen
class BeforeAfter:
    """A job as it runs today, compared with its plan.

    Args:
        before: what runs today, priced; ``None`` where it does not start.
        refused: why it does not.
        changes: what each change brings; ``None`` without ``before``.
        needs: what has to be done for them, one sentence each.
    """

    before: PricedLayout | None
    refused: str = ""
    changes: Changes | None = None
    needs: tuple[str, ...] = ()
