"""Which plans of a job could be the fastest, and what measurement would tell most.

The predictive distributions of a job's plans, together, are one distribution of several dimensions
(``uncertainty.covariance``). Chances are counted over seeded draws from it. Plans that no
measurement tells apart, because their steps differ by less than two runs of one plan do, count as
equally fast: one of them stands for all.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterator, Sequence
from operator import mul, or_

from nest_megatron.cost_model.distributions import JITTER, Matrix, cholesky, dot
from nest_megatron.cost_model.mechanisms import Mechanism
from nest_megatron.cost_model.uncertainty import (
    DEVIATION,
    RUN_NOISE,
    Predictive,
    covariance,
    price_effects,
)
from nest_megatron.plain import frozen

#: Plans whose steps differ by less are as fast as each other: two runs of one plan differ by that.
AS_FAST = 2 * RUN_NOISE
#: Draws; a chance of one half is counted to within two per cent.
_DRAWS = 2_000
#: Outcomes of a measurement that are tried, in standard deviations, with their weights: Gauss and
#: Hermite's rule of five points for a normal distribution.
_OUTCOMES = (
    (-2.856970, 0.011257),
    (-1.355626, 0.222076),
    (0.0, 0.533333),
    (1.355626, 0.222076),
    (2.856970, 0.011257),
)
#: Draws for each of them.
_OUTCOME_DRAWS = 500
#: Outcomes along several axes, drawn, of which as many again have the other sign: for a gain, and
#: for the plans that are left.
_GAIN_OUTCOMES, _SIZE_OUTCOMES = 1_000, 25
#: What ``nest-megatron profile`` measures: layers, and with several ranks the network between them.
LAYERS = frozenset(
    {Mechanism.GEMM, Mechanism.ATTENTION, Mechanism.GROUPED_GEMM, Mechanism.MEMORY_BOUND}
)
NETWORK = frozenset(
    {
        Mechanism.TENSOR,
        Mechanism.CONTEXT,
        Mechanism.EXPERT,
        Mechanism.EXPERT_NETWORK,
        Mechanism.REPLICAS,
        Mechanism.FSDP,
    }
)
#: Scale of the error that a measured network leaves: fitted levels are within 10 % of what they
#: were fitted to (docs/accuracy.md).
_NETWORK_NOISE = 0.1 / DEVIATION
#: Runs that are named after profiles, and the least gain: a tenth of a per cent is printed.
_MOST_RUNS, _LEAST_GAIN = 2, 5e-4


@frozen
class LikelyFastest:
    """Few plans that hold one as fast as the fastest with a ``chance``, the likeliest first.

    ``chances`` are those of each plan, to be as fast as the fastest of them.
    """

    plans: tuple[int, ...]
    chances: tuple[float, ...]
    chance: float


@frozen
class Measurement:
    """Something to measure before a plan is chosen: mechanisms by a profile, or a plan by a run.

    Args:
        profile: its number, of those that can be made.
        gain_percent: by how much the choice after it is expected to be faster than without.
        shortlist_size: expected plans on the shortlist after it.
    """

    profile: int | None
    plan: int | None
    gain_percent: float
    shortlist_size: float


def shortlist(plans: Sequence[Predictive], level: float = 0.9) -> LikelyFastest:
    """Few plans of which one is as fast as the fastest, but for noise, with a chance of a level."""
    draws = _as_fast(*moments(plans), _DRAWS)
    chances = tuple(each.bit_count() / _DRAWS for each in draws)
    chosen = _cover(draws, math.ceil(level * _DRAWS))
    return LikelyFastest(
        plans=tuple(sorted(chosen, key=lambda plan: -chances[plan])),
        chances=chances,
        chance=functools.reduce(or_, (draws[plan] for plan in chosen), 0).bit_count() / _DRAWS,
    )


def measurements(
    plans: Sequence[Predictive],
    level: float = 0.9,
    profiles: Sequence[frozenset[Mechanism]] = (LAYERS, NETWORK),
) -> tuple[Measurement, ...]:
    """What could be measured to tell the plans apart, the most useful first.

    Each is judged by the expected gain of choosing after it (the knowledge gradient of Frazier,
    Powell and Dayanik, 2009).

    Args:
        profiles: mechanisms that one profile measures, for each profile that can be made.
    """
    if len(plans) < 2:
        return ()
    logs, covariances = moments(plans)
    effects = [*_profiles(plans, profiles), *_runs(covariances)]
    found = [(_gain(logs, axes), profile, plan, axes) for profile, plan, axes in effects]
    found = sorted((each for each in found if each[0] >= _LEAST_GAIN), key=lambda each: -each[0])
    runs = [plan for _, _, plan, _ in found if plan is not None][:_MOST_RUNS]
    return tuple(
        Measurement(
            profile=profile,
            plan=plan,
            gain_percent=100.0 * gain,
            shortlist_size=_size_after(logs, covariances, axes, level),
        )
        for gain, profile, plan, axes in found
        if plan is None or plan in runs
    )


def run_gains(plans: Sequence[Predictive]) -> tuple[float, ...]:
    """By how much the choice after a run of each plan is expected to be faster than without.

    As a share of the step; as in ``measurements``.
    """
    logs, covariances = moments(plans)
    return tuple(_gain(logs, axes) for _, _, axes in _runs(covariances))


#: For each plan, by how much a standard deviation along each axis of an outcome moves it.
_Axes = Sequence[Sequence[float]]
#: A measurement: the number of a profile or of a plan that runs, and what it moves.
_Effect = tuple[int | None, int | None, _Axes]


def _profiles(
    plans: Sequence[Predictive], profiles: Sequence[frozenset[Mechanism]]
) -> Iterator[_Effect]:
    spent = {mechanism for plan in plans for mechanism in plan.shares}
    for number, profile in enumerate(profiles):
        if mechanisms := sorted(profile & spent):
            of_layers = profile <= LAYERS
            noise = plans[0].scales.mechanisms[Mechanism.PROFILED] if of_layers else _NETWORK_NOISE
            yield number, None, [price_effects(plan, mechanisms, noise) for plan in plans]


def _runs(covariances: Matrix) -> Iterator[_Effect]:
    for plan, row in enumerate(covariances):
        yield None, plan, [(value / math.sqrt(row[plan] + JITTER),) for value in row]


def _outcomes(num_axes: int, draws: int) -> list[tuple[tuple[float, ...], float]]:
    """Outcomes of a measurement along so many axes, with weights that add up to one."""
    if num_axes == 1:
        return [((outcome,), weight) for outcome, weight in _OUTCOMES]
    drawn = _drawn(num_axes, draws)
    return [(tuple(sign * at for at in each), 0.5 / draws) for each in drawn for sign in (1, -1)]


def _after(logs: Sequence[float], axes: _Axes, outcome: Sequence[float]) -> list[float]:
    """The plans' logarithms after an outcome."""
    return [log + sum(map(mul, moved, outcome)) for log, moved in zip(logs, axes, strict=True)]


def _gain(logs: Sequence[float], axes: _Axes) -> float:
    """Expected gain of choosing after a measurement over choosing before."""
    outcomes = _outcomes(len(axes[0]), _GAIN_OUTCOMES)
    after = math.fsum(weight * min(_after(logs, axes, outcome)) for outcome, weight in outcomes)
    # What moves all plans alike moves no choice: the mean over outcomes of any one plan is its log.
    return max(0.0, min(logs) - after)


def _size_after(logs: Sequence[float], covariances: Matrix, axes: _Axes, level: float) -> float:
    left = [
        [value - dot(a, b) for value, b in zip(row, axes, strict=True)]
        for row, a in zip(covariances, axes, strict=True)
    ]
    sizes = []
    for outcome, weight in _outcomes(len(axes[0]), _SIZE_OUTCOMES):
        draws = _as_fast(_after(logs, axes, outcome), left, _OUTCOME_DRAWS)
        sizes.append(weight * len(_cover(draws, math.ceil(level * _OUTCOME_DRAWS))))
    return math.fsum(sizes)


def moments(plans: Sequence[Predictive]) -> tuple[list[float], Matrix]:
    """Means and covariances of the plans' logarithms."""
    logs = [math.log(plan.median_s) for plan in plans]
    return logs, [[covariance(a, b) for b in plans] for a in plans]


def _as_fast(logs: Sequence[float], covariances: Matrix, draws: int) -> list[int]:
    """Draws from a normal distribution, as bits: set where a plan is as fast as the fastest."""
    root = cholesky(covariances)
    found = [0] * len(logs)
    for number, normals in enumerate(_drawn(len(logs), draws)):
        steps = [log + sum(map(mul, row, normals)) for log, row in zip(logs, root, strict=True)]
        most = min(steps) + AS_FAST
        for plan, step in enumerate(steps):
            if step <= most:
                found[plan] |= 1 << number
    return found


@functools.lru_cache(maxsize=8)
def _drawn(size: int, draws: int) -> tuple[tuple[float, ...], ...]:
    rng = random.Random(size)
    return tuple(tuple(rng.gauss(0.0, 1.0) for _ in range(size)) for _ in range(draws))


def _cover(draws: Sequence[int], needed: int) -> tuple[int, ...]:
    """Plans that together are as fast as the fastest in so many draws.

    Each time the plan is taken that adds most (the greedy rule for covering); of equal ones the
    first.
    """
    held, chosen = 0, []
    while held.bit_count() < needed:
        added = [(each & ~held).bit_count() for each in draws]
        chosen.append(added.index(max(added)))
        held |= draws[chosen[-1]]
    return tuple(chosen)
