"""Measured networks: timed collectives, the level figures fitted to them, and their file."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import field
from pathlib import Path

import yaml

from nest_megatron.cluster.records import CollectiveKind
from nest_megatron.errors import ProfileError
from nest_megatron.files import read_text, write_text
from nest_megatron.layout.plan_file import digest
from nest_megatron.plain import Name, added, frozen, to_plain
from nest_megatron.profile.records import require_number
from nest_megatron.profile.store import read_fields, record_of
from nest_megatron.units import Bytes, Seconds

#: Share of the time for a profile that the network has, where layers are timed as well.
NETWORK_SHARE = 0.25
#: Version of the file's fields.
SCHEMA = 1

_AGAIN = "Measure or import it again."


class NetworkBackend(Name):
    """What ran the collectives."""

    NCCL = "nccl"
    GLOO = "gloo"
    IMPORTED = "imported"


@frozen
class CollectiveSample:
    """One timed collective.

    Args:
        shape: ranks on one host, and hosts; after ``network_import.placed`` the fan-out at each of
            a cluster's levels, innermost first.
        message_bytes: the whole tensor, as ``cluster.communication`` means it: what is reduced
            or gathered in all, what one rank exchanges in all, what one rank passes on. The
            ``size`` column of nccl-tests is the same for all five kinds.
        seconds: of one call; with several ranks timed, of the slowest.
        spread: range of the middle half of the repetitions over their median, where known.
    """

    kind: CollectiveKind
    num_ranks: int
    shape: tuple[int, ...]
    message_bytes: Bytes
    seconds: Seconds
    spread: float | None = None
    repetitions: int = 1

    def __post_init__(self) -> None:
        what = f"sample {self.kind} of {self.message_bytes} bytes"
        _require(what, "seconds", self.seconds, above_zero=True)
        _require(what, "message_bytes", self.message_bytes, above_zero=True)
        _require(what, "repetitions", self.repetitions, above_zero=True)
        if self.spread is not None:
            _require(what, "spread", self.spread)
        if self.num_ranks < 2 or min(self.shape, default=0) < 1:
            limit = "a group has two ranks or more"
            raise ProfileError(f"{what}: shape", self.shape, limit, _AGAIN)
        if math.prod(self.shape) != self.num_ranks:
            limit = f"it must multiply to {self.num_ranks}"
            raise ProfileError(f"{what}: shape", self.shape, limit, _AGAIN)


@frozen
class LevelFit:
    """Figures of one network level, fitted to samples; ``cluster.NetworkLevel`` explains them.

    Args:
        bandwidth_bytes_per_s: the nominal bandwidth where a cluster's description gave one, else
            what the fastest kind of collective reaches.
        efficiency: share of it by kind, for the kinds that the samples determine.
        residual: root mean square of log(predicted / measured): 0.1 is about 10 %.
        smallest_bytes: of the messages that were measured.
        reduction_efficiency: where the samples tell it; so the tree's.
    """

    name: str
    latency_s: Seconds
    startup_s: Seconds
    ramp: float
    bandwidth_bytes_per_s: float
    efficiency: Mapping[CollectiveKind, float]
    residual: float
    residuals: Mapping[CollectiveKind, float]
    num_samples: int
    smallest_bytes: Bytes
    largest_bytes: Bytes
    reduction_efficiency: float | None = None
    tree_efficiency: float | None = None
    chain_share: float = 1.0

    def __post_init__(self) -> None:
        what = f"fit of level {self.name}"
        for name in ("latency_s", "startup_s", "ramp", "residual"):
            _require(what, name, getattr(self, name))
        _require(what, "bandwidth_bytes_per_s", self.bandwidth_bytes_per_s, above_zero=True)
        _require(what, "num_samples", self.num_samples, above_zero=True)
        for kind, share in self.efficiency.items():
            _require(what, f"efficiency.{kind}", share, above_zero=True)

    @property
    def measured_kinds(self) -> tuple[CollectiveKind, ...]:
        """Kinds that have a bandwidth from the samples, an all-reduce however it was done."""
        summed = self.reduction_efficiency or self.tree_efficiency
        known = {*self.efficiency, *([CollectiveKind.ALL_REDUCE] if summed else [])}
        return tuple(kind for kind in CollectiveKind if kind in known)


@frozen
class NetworkProfile:
    """A measured network; ``source`` says in words where its samples come from, ``created`` when.

    ``fits`` are levels that the samples determine, innermost first: ``node`` (one host) and
    ``network`` (between hosts). ``notes`` are what a reader of the samples must know, ``fit_notes``
    what one of the fits must. ``devices`` are names of the GPUs, where the logs say them.
    """

    name: str
    created: str
    source: str
    backend: NetworkBackend
    versions: Mapping[str, str]
    samples: tuple[CollectiveSample, ...]
    fits: tuple[LevelFit, ...] = ()
    not_measured: Mapping[CollectiveKind, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    fit_notes: tuple[str, ...] = added(())
    devices: tuple[str, ...] = added(())
    schema: int = SCHEMA
    checksum: str = ""


def sealed(profile: NetworkProfile) -> NetworkProfile:
    """The profile with its checksum set."""
    blank = dataclasses.replace(profile, checksum="")
    return dataclasses.replace(profile, checksum=digest(blank))


def dump(profile: NetworkProfile) -> str:
    """The text of a profile's file."""
    fields = {"schema": profile.schema, **to_plain(sealed(profile))}
    style = {"width": 100, "allow_unicode": True, "default_flow_style": None}
    return str(yaml.safe_dump(fields, sort_keys=False, **style))


def load(text: str, name: str = "network profile") -> NetworkProfile:
    """Read the text of a profile's file.

    Raises:
        ProfileError: if it is truncated, edited, from a newer schema, or no network profile.
    """
    fields = read_fields(text, name, "network profile", SCHEMA)
    profile = record_of(NetworkProfile, fields, name)
    if sealed(profile).checksum != profile.checksum:
        raise ProfileError(
            f"{name}: checksum",
            profile.checksum,
            "it does not match the contents, so the file was cut short or edited",
            _AGAIN,
        )
    return profile


def write(profile: NetworkProfile, path: Path) -> None:
    """Write a profile's file, whole or not at all."""
    write_text(path, dump(profile))


def read(path: Path) -> NetworkProfile:
    """Read a profile's file; a ``ProfileError`` if it is no sound profile."""
    return load(read_text(path, "network profile"), str(path))


def is_profile(text: str) -> bool:
    """Whether a text is meant as a profile's file, rather than as a benchmark's output."""
    return text.lstrip().startswith("schema:")


def kinds_of(samples: Iterable[CollectiveSample]) -> tuple[CollectiveKind, ...]:
    """The kinds among samples, in the order of their enumeration."""
    found = {sample.kind for sample in samples}
    return tuple(kind for kind in CollectiveKind if kind in found)


def _require(what: str, name: str, value: float, *, above_zero: bool = False) -> None:
    require_number(f"{what}: {name}", value, above_zero=above_zero, fix=_AGAIN)
