"""Fits the figures of the link technologies to public measurements of collectives.

All technologies at once, because a call across nodes waits for the links inside them too: bounded
least squares on the logarithm of predicted over measured time, with a loss that outliers do not
rule. Technologies of one family (the generations of NVLink; the networks between nodes) are pulled
to their mean, which is fitted as well: what no row of a technology determines, its family tells.
Cross-validation leaves out one cluster at a time and so says how wrong an unseen one is. What no
row speaks of keeps its value in ``hydra_configs/calibration/links.yaml``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nest_megatron.cluster.records import CollectiveKind, NetworkLevel
from nest_megatron.validation.machines import LinkTechnology, link_of_level
from tools.calibration.collectives import CollectiveRow, row_time
from tools.calibration.constants import LogErrors

Links = Mapping[str, LinkTechnology]

#: Messages that errors are told of: below, the choice of protocol rules, not the link.
LEAST_BYTES = 1_000_000

_KINDS = {
    "ring": (
        CollectiveKind.ALL_REDUCE,
        CollectiveKind.ALL_GATHER,
        CollectiveKind.REDUCE_SCATTER,
    ),
    "exchange": (CollectiveKind.ALL_TO_ALL,),
    "send": (CollectiveKind.SEND_RECV,),
    "all": tuple(CollectiveKind),
}
#: Weight of the usual value, and of a family's mean, against a row's error.
_PULL, _POOL = 0.15, 0.2
#: Weight of a row of a smaller message.
_SMALL = 0.25
#: A start on a bound would not move.
_INSIDE = 1e-3
_STEP = 1e-3
#: Evaluations of a fit, and of one that starts from another one's end.
_EVALUATIONS, _REFIT_EVALUATIONS = 60, 15


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkParameter:
    """One number to fit, which several technologies may share.

    Args:
        field: a field of ``LinkTechnology``, or a key of the efficiencies (``ring`` is all but
            all-to-alls).
        low, usual, high: bounds, and the value that it is pulled to.
        family: parameters with the same one are pulled to its mean, and that to the usual value.
    """

    field: str
    links: tuple[str, ...]
    low: float
    usual: float
    high: float
    family: str | None = None

    def put(self, links: Links, value: float) -> dict[str, LinkTechnology]:
        """The technologies with this value in its place."""
        return {**links, **{name: self._put(links[name], value) for name in self.links}}

    def _put(self, link: LinkTechnology, value: float) -> LinkTechnology:
        if self.field not in _KINDS:
            changed: dict[str, Any] = {self.field: value}
            return dataclasses.replace(link, **changed)
        shares = {**link.efficiency, **dict.fromkeys(_KINDS[self.field], value)}
        return dataclasses.replace(link, efficiency=shares)


#: Bounds and usual value by field. Times from NCCL's own tuning constants
#: (truth/comm_nccl_tuning_constants.csv: 3.4 us a hop over NVLink, 14 us over a network). ``ring``
#: of a network: headers and checks leave no more of an adapter's rate.
_BOUNDS = {
    "nvlink": {
        "latency_s": (2e-7, 3.4e-6, 1e-4),
        "startup_s": (1e-6, 2e-5, 3e-4),
        "ramp": (0.05, 0.7, 4.0),
        "ring": (0.05, 0.78, 0.98),
        "exchange": (0.05, 0.7, 0.98),
        "send": (0.05, 0.75, 0.98),
        "reduction_efficiency": (0.05, 0.68, 0.98),
    },
    "network": {
        "latency_s": (1e-6, 1.4e-5, 1e-3),
        "startup_s": (1e-6, 2e-5, 1e-3),
        "ramp": (0.02, 0.1, 4.0),
        "ring": (0.05, 0.95, 0.98),
        "exchange": (0.05, 0.9, 0.98),
        "send": (0.05, 0.8, 0.98),
        "chain_share": (0.05, 0.6, 0.98),
        "tree_efficiency": (0.05, 0.9, 0.98),
        "all": (0.05, 0.5, 0.98),
    },
}


def _family(name: str, *lines: str) -> tuple[LinkParameter, ...]:
    """From lines like ``latency_s: nvlink3, nvlink4 nvlink5``: a comma parts, a blank ties."""
    found = []
    for line in lines:
        field, _, groups = line.partition(": ")
        ties = [tuple(group.split()) for group in groups.split(",")]
        low, usual, high = _BOUNDS[name][field]
        found += [
            LinkParameter(
                field=field,
                links=tie,
                low=low,
                usual=usual,
                high=high,
                family=f"{name}.{field}" if len(ties) > 1 else None,
            )
            for tie in ties
        ]
    return tuple(found)


#: What the rows determine. EFA and TCPXO both go through the host, and share their times.
LINK_PARAMETERS = (
    *_family(
        "nvlink",
        "latency_s: nvlink2 nvlink2_mesh, nvlink3, nvlink4 nvlink5 nvlink5_rack",
        "startup_s: nvlink2 nvlink2_mesh, nvlink3, nvlink4, nvlink5 nvlink5_rack",
        "ramp: nvlink2 nvlink2_mesh, nvlink3, nvlink4 nvlink5 nvlink5_rack",
        "ring: nvlink2 nvlink2_mesh, nvlink3, nvlink4, nvlink5 nvlink5_rack, pcie",
        "exchange: nvlink2 nvlink3, nvlink4, nvlink5 nvlink5_rack, pcie",
        "send: nvlink2 nvlink3 nvlink4 nvlink5 nvlink5_rack",
        "reduction_efficiency: nvlink4, nvlink5, nvlink5_rack",
    ),
    *_family(
        "network",
        "latency_s: infiniband roce slingshot, infiniband_rack, efa tcpxo",
        "startup_s: infiniband roce slingshot infiniband_rack, efa tcpxo",
        "ramp: infiniband roce slingshot infiniband_rack efa tcpxo",
        "ring: infiniband roce slingshot infiniband_rack efa tcpxo",
        "exchange: infiniband roce slingshot infiniband_rack efa tcpxo",
        "send: infiniband roce slingshot infiniband_rack efa tcpxo",
        "chain_share: infiniband roce slingshot infiniband_rack efa tcpxo",
        "tree_efficiency: infiniband roce slingshot infiniband_rack efa tcpxo",
        "all: omni_path",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSample:
    """A row for fitting.

    Args:
        cluster: machine that it was measured on; cross-validation leaves out all of its rows.
        weight: against that of a row that says all.
    """

    row: CollectiveRow
    source: str
    cluster: str
    weight: float = 1.0

    @property
    def measured_s(self) -> float:
        """Seconds of the call."""
        return self.row.measured_s

    @property
    def crossed(self) -> frozenset[str]:
        """Technologies that its group crosses."""
        pairs = zip(self.row.shape, self.row.levels, strict=True)
        return frozenset(link_of_level(level) for fan_out, level in pairs if fan_out > 1)

    @property
    def is_large(self) -> bool:
        """Whether errors are told of it."""
        return self.row.message_bytes >= LEAST_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Mean absolute errors of some rows: fitted, and by a fit without their cluster."""

    rows: int
    fitted: float
    left_out: float

    def document(self) -> dict[str, float | None]:
        """For ``--json``."""
        left_out = None if math.isnan(self.left_out) else self.left_out
        return {"rows": self.rows, "error": self.fitted, "left_out": left_out}


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFit:
    """What a fit gives.

    Args:
        errors: predicted over measured time, less 1, by sample.
        left_out: the same, each sample by a fit without its cluster.
    """

    links: Links
    samples: tuple[CollectiveSample, ...]
    errors: tuple[float, ...]
    left_out: tuple[float, ...]

    def by(self, kind: str) -> dict[str, Errors]:
        """Errors of large messages by ``source`` or by ``cluster``."""
        names = sorted({getattr(sample, kind) for sample in self.samples if sample.is_large})
        return {name: self._means(lambda s, at=name: getattr(s, kind) == at) for name in names}  # type: ignore[misc]

    def by_link(self, name: str) -> Errors:
        """Errors of the large messages that cross a technology."""
        return self._means(lambda sample: name in sample.crossed)

    def overall(self) -> Errors:
        """Errors of all large messages."""
        return self._means(lambda _: True)

    def sources_of(self, name: str) -> dict[str, int]:
        """Number of rows of each source that cross a technology."""
        return dict(sorted(Counter(s.source for s in self.samples if name in s.crossed).items()))

    def document(self) -> dict[str, object]:
        """For ``--json``: errors of messages of 1 MB and more."""
        return {
            "collectives": {n: each.document() for n, each in self.by("source").items()},
            "collectives_by_cluster": {
                n: each.document() for n, each in self.by("cluster").items()
            },
            "collectives_overall": self.overall().document(),
        }

    def _means(self, wanted: Callable[[CollectiveSample], bool]) -> Errors:
        places = [i for i, s in enumerate(self.samples) if s.is_large and wanted(s)]
        return Errors(
            rows=len(places),
            fitted=_mean([abs(self.errors[i]) for i in places]),
            left_out=_mean([abs(self.left_out[i]) for i in places]),
        )


def fit_links(
    start: Links, samples: Sequence[CollectiveSample], *, cross_validate: bool = True
) -> LinkFit:
    """Fit all technologies, and cross-validate by leaving out one cluster at a time."""
    whole = _Problem(start, samples)
    values = whole.solve(whole.usual, _EVALUATIONS)
    left_out = [math.nan] * len(samples)
    for cluster in sorted({sample.cluster for sample in samples}) if cross_validate else ():
        others = [sample for sample in samples if sample.cluster != cluster]
        others_only = _Problem(start, others)
        refitted = others_only.links(others_only.solve(values, _REFIT_EVALUATIONS))
        for i, sample in enumerate(samples):
            if sample.cluster == cluster:
                left_out[i] = _error(refitted, sample)
    links = whole.links(values)
    return LinkFit(
        links=links,
        samples=tuple(samples),
        errors=tuple(_error(links, sample) for sample in samples),
        left_out=tuple(left_out),
    )


def _error(links: Links, sample: CollectiveSample) -> float:
    return _predicted(links, sample) / sample.measured_s - 1


def _predicted(links: Links, sample: CollectiveSample) -> float:
    levels = tuple(_with_link(level, links) for level in sample.row.levels)
    return row_time(sample.row, levels)


def _with_link(level: NetworkLevel, links: Links) -> NetworkLevel:
    """A level with a technology's figures; a switch that does not sum still does not."""
    link = links[link_of_level(level)]
    sums = link.reduction_efficiency or link.tree_efficiency
    return dataclasses.replace(
        link.level(level.name, level.num_devices, level.bandwidth_bytes_per_s),
        reduction_efficiency=None if level.reduction_efficiency is None else sums,
    )


class _Problem:
    """Residuals of some samples.

    The variables are the logarithms of the parameters, then of the families' means.
    """

    def __init__(self, start: Links, samples: Sequence[CollectiveSample]) -> None:
        self._start = start
        self._families = sorted({p.family for p in LINK_PARAMETERS if p.family})
        firsts = (next(p for p in LINK_PARAMETERS if p.family == name) for name in self._families)
        bounds = [(p.low, p.usual, p.high) for p in (*LINK_PARAMETERS, *firsts)]
        self._low, self.usual, self._high = (
            [math.log(value) for value in column] for column in zip(*bounds, strict=True)
        )
        counts = Counter(sample.cluster for sample in samples)
        self._weights = [
            3 * s.weight * counts[s.cluster] ** -0.25 * (1 if s.is_large else _SMALL)
            for s in samples
        ]
        mine = [
            [i for i, p in enumerate(LINK_PARAMETERS) if s.crossed.intersection(p.links)]
            for s in samples
        ]
        self._log_errors = LogErrors(samples, mine, self._pricing)

    def _pricing(self, logs: Iterable[float]) -> Callable[[CollectiveSample], float]:
        return functools.partial(_predicted, self.links(logs))

    def links(self, logs: Iterable[float]) -> Links:
        """The technologies with the values of these variables."""
        links = dict(self._start)
        for parameter, log in zip(LINK_PARAMETERS, logs, strict=False):
            links = parameter.put(links, math.exp(log))
        return links

    def solve(self, first: Sequence[float], evaluations: int) -> list[float]:
        """The variables of least squares."""
        from scipy.optimize import least_squares

        inside = [
            min(max(value, low + _INSIDE), high - _INSIDE)
            for value, low, high in zip(first, self._low, self._high, strict=True)
        ]
        done = least_squares(
            self._residuals,
            inside,
            bounds=(self._low, self._high),
            loss="soft_l1",
            f_scale=0.05,
            diff_step=_STEP,
            max_nfev=evaluations,
        )
        return [float(value) for value in done.x]

    def _residuals(self, x: Sequence[float]) -> list[float]:
        """Weighted errors, then the pulls of parameters and of families."""
        weighted = [w * error for w, error in zip(self._weights, self._log_errors(x), strict=True)]
        means = dict(zip(self._families, x[len(LINK_PARAMETERS) :], strict=True))
        pulls = [
            _POOL * (log - means[p.family]) if p.family else _PULL * (log - math.log(p.usual))
            for p, log in zip(LINK_PARAMETERS, x, strict=False)
        ]
        usual = zip(self._families, self.usual[len(LINK_PARAMETERS) :], strict=True)
        return [*weighted, *pulls, *(_PULL * (means[name] - at) for name, at in usual)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
