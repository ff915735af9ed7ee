"""Fits the figures of network levels to timed collectives.

Level by level from the node outwards: the samples whose group reaches a level and no further fit
that level, with the levels inside it as they were found, by ``cluster.communication``. What is
least is the sum of the squares of log(predicted / measured), softened for outliers. Where the
samples leave two figures undecided (a startup and a latency that always come together), a weak pull
holds them near the cluster's description, or near an even split of the shortest time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from nest_megatron.cluster.communication import DEFAULT_EFFICIENCY, collective_time, num_hops
from nest_megatron.cluster.records import CollectiveKind, NetworkLevel
from nest_megatron.errors import ProfileError
from nest_megatron.packages import require_package
from nest_megatron.profile.network import CollectiveSample, LevelFit, kinds_of

#: Least that fits a level: this many samples, of this many sizes, over this range.
MIN_SAMPLES, MIN_SIZES, MIN_RANGE = 4, 3, 8
#: Weight of the first value of a figure.
_PULL = 0.1
#: A residual that a reader is warned of: public measurements of quiet machines stay below it.
_LOOSE = 0.3
#: Residuals beyond this count by their size, those below by its square.
_SOFT = 0.1
#: Change of a time's logarithm with a bandwidth's, below which a time tells nothing of it.
_TELLS = 0.3
#: Where a fit ends, and by how much a number is moved to see what tells of it.
_TOLERANCE, _STEP = 1e-12, 1e-5
#: Smallest and largest value.
_BOUNDS = {
    "latency_s": (2e-7, 1e-1),
    "startup_s": (2e-7, 1e-1),
    "ramp": (0.0, 2.0),
    "chain_share": (0.05, 1.0),
}
#: Of a share of the bandwidth: ``cluster.NetworkLevel`` takes no more, and rounding keeps off it.
_MOST = 1.5
_SHARE = (1e-6, _MOST * (1 - 1e-6))
#: An unknown level's bandwidth over what the fastest sample shows, latency and all.
_HEADROOM = 100.0


#: Fields that a level and its fit share.
_SHARED = ("latency_s", "startup_s", "ramp", "bandwidth_bytes_per_s", "chain_share")
#: Fields of both that samples need not tell: an all-reduce that is no ring.
_SUMS = ("reduction_efficiency", "tree_efficiency")


class _Figure(NamedTuple):
    """One number to fit: a field of the level, or a kind of its efficiencies.

    ``ramp`` is fitted as it is, all others by their logarithm, as their size is unknown.
    """

    field: str
    start: float
    low: float
    high: float

    @property
    def is_rate(self) -> bool:
        return self.field not in _BOUNDS

    def value(self, number: float) -> float:
        return number if self.field == "ramp" else math.exp(number)


def _figure(field: str, first: float) -> _Figure:
    scaled = float if field == "ramp" else math.log
    low, high = map(scaled, _BOUNDS.get(field, _SHARE))
    return _Figure(field, min(max(scaled(first), low), high), low, high)


class Fitted(NamedTuple):
    """All levels with their new figures, the fits of those that samples reach, and notes."""

    levels: tuple[NetworkLevel, ...]
    fits: tuple[LevelFit, ...]
    notes: tuple[str, ...]


def fit_levels(samples: Sequence[CollectiveSample], levels: Sequence[NetworkLevel]) -> Fitted:
    """Fit every level that samples reach, whose shapes have a fan-out for each level.

    Bandwidths of the description stay, and shares of them are fitted as far as samples tell.

    Raises:
        ProfileError: if a level has too few samples, or no bandwidth can be read from any.
    """
    if not samples:
        raise _too_few("any level", "there are no samples")
    known, fits, notes = list(levels), list[LevelFit](), list[str]()
    for index, level in enumerate(levels):
        mine = [each for each in samples if outermost(each.shape) == index]
        if mine:
            _require_enough(level.name, mine)
            known[index], fit, said = _fit_level(index, mine, known)
            notes += said
            fits += [] if fit is None else [fit]
    if not fits:
        raise _too_few(levels[0].name if len(notes) == 1 else "any level", notes[0])
    measured = {fit.name for fit in fits}
    for inner, outer in pairwise(range(len(known))):
        if measured.intersection(level.name for level in levels[: inner + 1]) and (
            known[outer].name not in measured
        ):
            slower = _no_faster(known[outer], known[inner])
            if slower != known[outer]:
                known[outer] = slower
                notes.append(
                    f"{slower.name} was not measured: it is taken to be no faster than "
                    f"{known[inner].name}, through whose adapters its traffic goes."
                )
    return Fitted(levels=tuple(known), fits=tuple(fits), notes=tuple(notes))


def _no_faster(outer: NetworkLevel, inner: NetworkLevel) -> NetworkLevel:
    """A level whose rates are no higher than those of the level inside it."""
    scale = inner.bandwidth_bytes_per_s / outer.bandwidth_bytes_per_s
    shares = {
        kind: min(share, scale * inner.efficiency.get(kind, DEFAULT_EFFICIENCY))
        for kind, share in outer.efficiency.items()
    }
    changed: dict[str, Any] = {"efficiency": shares}
    for name in _SUMS:
        rate, most = getattr(outer, name), getattr(inner, name)
        if rate is not None and most is not None:
            changed[name] = min(rate, scale * most)
    return dataclasses.replace(outer, **changed)


def fit_hosts(samples: Sequence[CollectiveSample]) -> Fitted:
    """Fit the inside of a host (``node``) and what joins hosts (``network``), both unknown.

    Bandwidths are what the fastest kind of collective reaches, efficiencies shares of that.
    """
    levels = (_unknown("node", 0, samples), _unknown("network", 1, samples))
    fitted = fit_levels(samples, levels)
    fits, notes = list[LevelFit](), fitted.notes
    for fit in fitted.fits:
        fastest = max(fit.efficiency.values())
        shares = {kind: share / fastest for kind, share in fit.efficiency.items()}
        bandwidth = fit.bandwidth_bytes_per_s * fastest
        fits.append(dataclasses.replace(fit, bandwidth_bytes_per_s=bandwidth, efficiency=shares))
    if fits[0].name != "node" and any(each.shape[0] > 1 for each in samples):
        words = "No sample stays inside one host; what its ranks spend there counts as network's."
        notes = (*notes, words)
    return fitted._replace(fits=tuple(fits), notes=notes)


def predicted(sample: CollectiveSample, levels: Sequence[NetworkLevel]) -> float:
    """Predicted seconds of a sample, as ``cluster.communication`` prices it."""
    return collective_time(sample.kind, sample.message_bytes, sample.shape, levels)


def outermost(shape: Sequence[int]) -> int:
    """Index of the last level that a group crosses."""
    return max(index for index, fan_out in enumerate(shape) if fan_out > 1)


def _fit_level(
    index: int, mine: Sequence[CollectiveSample], levels: Sequence[NetworkLevel]
) -> tuple[NetworkLevel, LevelFit | None, list[str]]:
    level = levels[index]
    sends = {each.shape[index] > 2 for each in mine if each.kind is CollectiveKind.SEND_RECV}
    if sends == {True}:  # what a chain loses against a single send is not known
        level = dataclasses.replace(level, chain_share=1.0)
    figures = [*_figures(level, index, mine)]
    if sends == {True, False}:
        figures.append(_figure("chain_share", level.chain_share))

    def logs(numbers: Sequence[float]) -> list[float]:
        changed = (*levels[:index], _put(level, figures, numbers), *levels[index + 1 :])
        return [math.log(predicted(each, changed) / each.seconds) for each in mine]

    def residuals(numbers: Sequence[float]) -> list[float]:
        pull = [_PULL * (n - f.start) for n, f in zip(numbers, figures, strict=True)]
        return [_softened(log) for log in logs(numbers)] + pull

    numbers = _least_squares(residuals, figures)
    changes = {
        figure.field: _sensitivity(logs, numbers, at, figure.high)
        for at, figure in enumerate(figures)
        if figure.is_rate
    }
    unknown = {name for name, change in changes.items() if change < _TELLS}
    if unknown == changes.keys():
        largest = max(each.message_bytes for each in mine)
        note = (
            f"{level.name}: even the largest message of {largest} bytes spends most of its time "
            "elsewhere than on this level's bandwidth, so nothing of it was fitted"
        )
        return level, None, [note]
    numbers = [
        figure.start if figure.field in unknown else number
        for figure, number in zip(figures, numbers, strict=True)
    ]
    _require_possible(level, figures, numbers)
    new = _put(level, figures, numbers)
    fit = _record(new, mine, logs(numbers), {*changes} - unknown)
    return new, fit, list(_notes(fit, mine))


def _notes(fit: LevelFit, mine: Sequence[CollectiveSample]) -> Iterator[str]:
    for kind in kinds_of(mine):
        if kind not in fit.measured_kinds:
            most = max(each.message_bytes for each in mine if each.kind is kind)
            yield (
                f"{fit.name}: {kind} up to {most} bytes does not tell its bandwidth, which stays "
                "as it was."
            )
    if fit.residual > _LOOSE:
        worst = max(fit.residuals, key=lambda kind: fit.residuals[kind])
        yield (
            f"{fit.name}: predicted and measured times differ by {100 * fit.residual:.0f} %, most "
            f"for {worst}; measure again on a quiet machine before you rely on it."
        )


def require_least_squares(what: str, otherwise: str = "") -> None:
    """Refuse a fit, before its samples are measured, where the library for it is not installed.

    Args:
        otherwise: what does without a fit.
    """
    limit = "the figures of a network are fitted by SciPy, which is not installed"
    require_package("scipy", "calibrate", what, limit, otherwise)


def _least_squares(
    residuals: Callable[[Sequence[float]], list[float]], figures: Sequence[_Figure]
) -> list[float]:
    require_least_squares("network")
    from scipy.optimize import least_squares

    found = least_squares(
        lambda numbers: residuals(numbers.tolist()),
        [figure.start for figure in figures],
        bounds=([figure.low for figure in figures], [figure.high for figure in figures]),
        method="dogbox",  # a figure may lie on its bound
        ftol=_TOLERANCE,
        xtol=_TOLERANCE,
        gtol=_TOLERANCE,
    )
    return [float(number) for number in found.x]


def _sensitivity(
    logs: Callable[[Sequence[float]], list[float]], numbers: Sequence[float], at: int, high: float
) -> float:
    """Largest change of a time's logarithm with one number; below its upper bound."""
    step = _STEP if numbers[at] + _STEP <= high else -_STEP
    moved = logs([*numbers[:at], numbers[at] + step, *numbers[at + 1 :]])
    return max(abs(new - old) / _STEP for new, old in zip(moved, logs(numbers), strict=True))


def _figures(
    level: NetworkLevel, index: int, mine: Sequence[CollectiveSample]
) -> Iterator[_Figure]:
    quickest = min(mine, key=lambda each: each.seconds)
    half = quickest.seconds / 2
    hops = num_hops(quickest.kind, quickest.shape)
    yield _figure("latency_s", level.latency_s or half / hops)
    yield _figure("startup_s", level.startup_s or half)
    yield _figure("ramp", level.ramp)
    kinds = kinds_of(mine)
    for kind in kinds:
        yield _figure(kind, level.efficiency.get(kind, DEFAULT_EFFICIENCY))
    if CollectiveKind.ALL_REDUCE in kinds:  # in the switch, or else by a tree between nodes
        if level.reduction_efficiency is not None:
            yield _figure("reduction_efficiency", level.reduction_efficiency)
        elif level.tree_efficiency is not None and index:
            yield _figure("tree_efficiency", level.tree_efficiency)


def _put(level: NetworkLevel, figures: Sequence[_Figure], numbers: Sequence[float]) -> NetworkLevel:
    values = {f.field: f.value(n) for f, n in zip(figures, numbers, strict=True)}
    shares = {kind: values.pop(kind) for kind in CollectiveKind if kind in values}
    changed: dict[str, Any] = {**values, "efficiency": {**level.efficiency, **shares}}
    return dataclasses.replace(level, **changed)


def _softened(log: float) -> float:
    """Its square grows as the residual itself where that is large: one bad sample does not rule."""
    return math.copysign(_SOFT * math.sqrt(2 * (math.hypot(1, log / _SOFT) - 1)), log)


def _record(
    level: NetworkLevel,
    mine: Sequence[CollectiveSample],
    logs: Sequence[float],
    found: set[str],
) -> LevelFit:
    kinds = kinds_of(mine)
    pairs = list(zip(mine, logs, strict=True))
    sizes = [each.message_bytes for each in mine]
    told = (*_SHARED, *found.intersection(_SUMS))
    return LevelFit(
        name=level.name,
        efficiency={kind: level.efficiency[kind] for kind in kinds if kind in found},
        residual=_rms(logs),
        residuals={k: _rms([log for each, log in pairs if each.kind is k]) for k in kinds},
        num_samples=len(mine),
        smallest_bytes=min(sizes),
        largest_bytes=max(sizes),
        **{name: getattr(level, name) for name in told},
    )


def _unknown(name: str, index: int, samples: Sequence[CollectiveSample]) -> NetworkLevel:
    """A level of which only the samples tell: as fast as if the fastest were all bandwidth.

    One without samples takes no time.
    """
    nothing = NetworkLevel(
        name=name,
        num_devices=None if index else max((s.shape[0] for s in samples), default=1),
        bandwidth_bytes_per_s=1e18,
        latency_s=0.0,
        efficiency=dict.fromkeys(CollectiveKind, 1.0),
    )
    mine = [each for each in samples if outermost(each.shape) == index]
    rates = (_least_rate(each, index, nothing) for each in mine)
    if not mine:
        return nothing
    return dataclasses.replace(
        nothing,
        bandwidth_bytes_per_s=_HEADROOM * max(rates),
        efficiency=dict.fromkeys(CollectiveKind, 1 / _HEADROOM),
    )


def _least_rate(sample: CollectiveSample, index: int, level: NetworkLevel) -> float:
    """Bytes per second that must have passed the level at least, all others taking no time."""
    faster = dataclasses.replace(level, bandwidth_bytes_per_s=1e6 * level.bandwidth_bytes_per_s)
    levels = [level if each == index else faster for each in range(len(sample.shape))]
    large = 1e6 * level.bandwidth_bytes_per_s  # so that pieces of a tree take no time
    seconds = collective_time(sample.kind, large, sample.shape, levels)
    return sample.message_bytes * seconds / 1e6 / sample.seconds


def _require_enough(level: str, mine: Sequence[CollectiveSample]) -> None:
    sizes = sorted({each.message_bytes for each in mine})
    if len(mine) < MIN_SAMPLES or len(sizes) < MIN_SIZES:
        raise _too_few(level, f"{len(mine)} samples of {len(sizes)} sizes are too few to fit it")
    if sizes[-1] < MIN_RANGE * sizes[0]:
        raise _too_few(level, f"its sizes range from {sizes[0]} to {sizes[-1]} bytes only")


def _require_possible(
    level: NetworkLevel, figures: Sequence[_Figure], numbers: Sequence[float]
) -> None:
    for figure, number in zip(figures, numbers, strict=True):
        if figure.is_rate and number >= figure.high:
            raise ProfileError(
                f"level {level.name}: bandwidth_bytes_per_s",
                level.bandwidth_bytes_per_s,
                f"the {figure.field} samples reach more than {_MOST} times as much",
                "Name the cluster that was measured, or correct its description.",
            )


def _too_few(level: str, limit: str) -> ProfileError:
    return ProfileError(
        f"level {level}",
        "samples",
        limit,
        f"Give at least {MIN_SAMPLES} samples of {MIN_SIZES} sizes of which the largest is "
        f"{MIN_RANGE} times the smallest, better all powers of two from 1 KiB to 1 GiB, of "
        "all_reduce and all_gather: in one host, and over hosts.",
    )


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / len(values))
