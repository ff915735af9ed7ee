"""Fits the figures of the link technologies to public measurements of collectives.

All technologies at once, because a call across nodes waits for the links inside them too: bounded
least squares on the logarithm of predicted over measured time, with a loss that outliers do not
rule. What no row speaks of keeps its value in ``hydra_configs/calibration/links.yaml``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nest_megatron.cluster.records import CollectiveKind, NetworkLevel
from nest_megatron.validation.collectives import CollectiveRow, row_time
from nest_megatron.validation.links import Link, link_of_level

Links = Mapping[str, Link]

_KINDS = {
    "reduce": (CollectiveKind.ALL_REDUCE,),
    "gather": (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER),
    "ring": (
        CollectiveKind.ALL_REDUCE,
        CollectiveKind.ALL_GATHER,
        CollectiveKind.REDUCE_SCATTER,
    ),
    "exchange": (CollectiveKind.ALL_TO_ALL,),
    "send": (CollectiveKind.SEND_RECV,),
    "all": tuple(CollectiveKind),
}
#: Smallest, first and largest value, where they differ from those of a share.
_BOUNDS = {
    "latency_s": (1e-6, 3e-6, 1e-4),
    "startup_s": (1e-6, 2e-5, 3e-4),
    "ramp": (0.05, 0.7, 2.0),
    "ring": (0.05, 0.7, 0.98),  # headers and checks leave no more of an adapter's rate
}
_SHARE = (0.05, 0.7, 1.0)
#: Weight of the first value, for parameters that no row determines.
_PULL = 0.02
#: A start on a bound would not move.
_INSIDE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One number to fit, which several technologies may share.

    Args:
        field: a field of ``Link``, or a key of the efficiencies (``ring`` is all but exchanges).
    """

    field: str
    links: tuple[str, ...]

    @property
    def bounds(self) -> tuple[float, float, float]:
        """Smallest, first and largest value."""
        return _BOUNDS.get(self.field, _SHARE)

    def put(self, links: Links, value: float) -> dict[str, Link]:
        """The technologies with this value in its place."""
        return {**links, **{name: self._put(links[name], value) for name in self.links}}

    def _put(self, link: Link, value: float) -> Link:
        if self.field not in _KINDS:
            changed: dict[str, Any] = {self.field: value}
            return dataclasses.replace(link, **changed)
        shares = {**link.efficiency, **dict.fromkeys(_KINDS[self.field], value)}
        return dataclasses.replace(link, efficiency=shares)


def _parameters(*lines: str) -> tuple[Parameter, ...]:
    """From lines like ``nvlink4 nvlink5: latency_s ramp``."""
    split = [line.split(": ") for line in lines]
    return tuple(
        Parameter(field=field, links=tuple(names.split()))
        for names, fields in split
        for field in fields.split()
    )


#: What the rows determine. Technologies share what only some of them were measured for.
PARAMETERS = _parameters(
    "nvlink2 nvlink2_mesh: latency_s startup_s ramp ring",
    "nvlink3: latency_s startup_s ramp ring",
    "nvlink2 nvlink3: exchange",
    "nvlink4: reduce gather exchange reduction_efficiency",
    "nvlink4 nvlink5 nvlink5_rack: latency_s startup_s ramp",
    "nvlink2 nvlink3 nvlink4 nvlink5 nvlink5_rack: send",
    "nvlink5 nvlink5_rack: reduce",
    "nvlink5: reduction_efficiency",
    "nvlink5_rack: reduction_efficiency",
    "infiniband roce slingshot: latency_s ramp",
    "infiniband roce slingshot infiniband_rack: startup_s",
    "infiniband roce slingshot infiniband_rack tcpxo efa: ring exchange send chain_share",
    "infiniband_rack: latency_s ramp tree_efficiency",
    "efa: latency_s ramp",
    "tcpxo: latency_s startup_s ramp tree_efficiency",
    "omni_path: all",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A row for fitting, whence it is, and its weight."""

    row: CollectiveRow
    source: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What a fit gives.

    Args:
        errors: predicted over measured time, less 1, by sample.
        left_out: the same, each sample by a fit without its source.
    """

    links: Links
    samples: tuple[Sample, ...]
    errors: tuple[float, ...]
    left_out: tuple[float, ...]

    def by_source(self) -> dict[str, tuple[float, float]]:
        """Mean absolute error of each source, fitted and left out."""
        sources = sorted({sample.source for sample in self.samples})
        return {source: self._means(lambda s, at=source: s.source == at) for source in sources}

    def by_link(self, name: str) -> tuple[float, float]:
        """Mean absolute error of the samples that cross a technology, fitted and left out."""
        return self._means(lambda s: name in _crossed(s))

    def sources_of(self, name: str) -> dict[str, int]:
        """Number of rows of each source that cross a technology."""
        crossing = [sample.source for sample in self.samples if name in _crossed(sample)]
        return {source: crossing.count(source) for source in sorted(set(crossing))}

    def _means(self, wanted: Any) -> tuple[float, float]:
        places = [i for i, sample in enumerate(self.samples) if wanted(sample)]
        return (
            _mean([abs(self.errors[i]) for i in places]),
            _mean([abs(self.left_out[i]) for i in places]),
        )


def fit_links(start: Links, samples: Sequence[Sample], *, cross_validate: bool = True) -> Fit:
    """Fit all technologies, and cross-validate by leaving out one source at a time."""
    first = [parameter.bounds[1] for parameter in PARAMETERS]
    values = _solve(start, samples, first)
    links = _links_of(start, values)
    left_out = [math.nan] * len(samples)
    for source in sorted({sample.source for sample in samples}) if cross_validate else ():
        others = [sample for sample in samples if sample.source != source]
        refitted = _links_of(start, _solve(start, others, values))
        for i, sample in enumerate(samples):
            if sample.source == source:
                left_out[i] = error(refitted, sample)
    return Fit(
        links=links,
        samples=tuple(samples),
        errors=tuple(error(links, sample) for sample in samples),
        left_out=tuple(left_out),
    )


def error(links: Links, sample: Sample) -> float:
    """Predicted over measured time, less 1."""
    return _predicted(links, sample) / sample.row.measured_s - 1


def _predicted(links: Links, sample: Sample) -> float:
    levels = tuple(_with_link(level, links) for level in sample.row.levels)
    return row_time(sample.row, levels)


def _with_link(level: NetworkLevel, links: Links) -> NetworkLevel:
    """A level with a technology's figures; a switch that does not sum still does not."""
    link = links[link_of_level(level)]
    new = link.level(level.name, level.num_devices, level.bandwidth_bytes_per_s)
    if level.reduction_efficiency is None and link.reduction_efficiency is not None:
        return dataclasses.replace(new, reduction_efficiency=None)
    return new


def _solve(start: Links, samples: Sequence[Sample], first: Sequence[float]) -> list[float]:
    from scipy.optimize import least_squares

    def misses(logs: Any) -> list[float]:
        links = _links_of(start, map(math.exp, logs.tolist()))
        pull = [_PULL * (log - middle) for log, middle in zip(logs.tolist(), usual, strict=True)]
        return pull + [
            sample.weight * math.log(_predicted(links, sample) / sample.row.measured_s)
            for sample in samples
        ]

    low, usual, high = zip(*(map(math.log, p.bounds) for p in PARAMETERS), strict=True)
    logs = [
        min(max(math.log(value), least + _INSIDE), most - _INSIDE)
        for value, least, most in zip(first, low, high, strict=True)
    ]
    done = least_squares(
        misses, logs, bounds=(low, high), loss="soft_l1", f_scale=0.05, diff_step=1e-3, max_nfev=40
    )
    return [math.exp(value) for value in done.x.tolist()]


def _links_of(start: Links, values: Iterable[float]) -> Links:
    links = dict(start)
    for parameter, value in zip(PARAMETERS, values, strict=True):
        links = parameter.put(links, value)
    return links


def _crossed(sample: Sample) -> set[str]:
    pairs = zip(sample.row.shape, sample.row.levels, strict=True)
    return {link_of_level(level) for fan_out, level in pairs if fan_out > 1}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
