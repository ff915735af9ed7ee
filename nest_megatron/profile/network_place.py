"""Where samples lie in a described cluster, and that cluster with the figures they tell."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from nest_megatron.cluster.records import Cluster, NetworkLevel
from nest_megatron.errors import ProfileError
from nest_megatron.profile.network import CollectiveSample, LevelFit, NetworkProfile
from nest_megatron.profile.network_fit import Fitted, fit_levels


def apply(profile: NetworkProfile, cluster: Cluster) -> Cluster:
    """The cluster with the figures that a profile's samples tell.

    Each level's ``source`` says what was measured; levels and kinds of collectives that were not
    keep the description's figures.

    Raises:
        ProfileError: if the samples do not fit the cluster's hosts, or are too few.
    """
    return measured_cluster(profile, cluster, fit_cluster(profile, cluster))


def fit_cluster(profile: NetworkProfile, cluster: Cluster) -> Fitted:
    """The samples fitted to a cluster's levels.

    Raises:
        ProfileError: as ``apply``.
    """
    return fit_levels(placed(profile.samples, cluster), cluster.levels)


def measured_cluster(profile: NetworkProfile, cluster: Cluster, fitted: Fitted) -> Cluster:
    """A cluster with fitted levels, the source of each named."""
    fits = {fit.name: fit for fit in fitted.fits}
    levels = tuple(
        dataclasses.replace(new, source=_source(profile, new, old, fits.get(new.name)))
        for new, old in zip(fitted.levels, cluster.levels, strict=True)
    )
    return dataclasses.replace(cluster, levels=levels)


def placed(samples: Sequence[CollectiveSample], cluster: Cluster) -> tuple[CollectiveSample, ...]:
    """Samples with a fan-out at each of a cluster's levels, their hosts taken as neighbours.

    Raises:
        ProfileError: if a sample has more ranks on a host than the cluster.
    """
    return tuple(dataclasses.replace(s, shape=_fan_outs(s.shape, cluster)) for s in samples)


def _fan_outs(shape: tuple[int, ...], cluster: Cluster) -> tuple[int, ...]:
    """Fan-outs of a group on neighbouring hosts, innermost first.

    Where the hosts do not fill groups of a level evenly (10 hosts over leaves of 4) the level gets
    the most that divides them, 2 here: no rank is put nearer than it is.
    """
    inside, hosts = shape
    per_host = min(cluster.gpus_per_host or cluster.gpus_per_node, cluster.gpus_per_node)
    if inside > per_host:
        raise ProfileError(
            "samples",
            value=f"{inside} ranks on one host",
            limit=f"hosts of {cluster.name} have {per_host} GPUs",
            fix="Name the cluster that was measured.",
        )
    found: list[int] = []
    for level in cluster.levels:
        most = hosts
        if level.num_devices is not None:
            most = max(1, level.num_devices // per_host // math.prod(found))
        together = _largest_divisor(hosts, most)
        found.append(together)
        hosts //= together
    found[0] *= inside
    return tuple(found)


def _largest_divisor(number: int, most: int) -> int:
    return next(d for d in range(min(number, most), 0, -1) if number % d == 0)


def _source(
    profile: NetworkProfile, new: NetworkLevel, old: NetworkLevel, fit: LevelFit | None
) -> str:
    described = f"; described: {old.source}" if old.source else ""
    if fit is None:
        return f"not measured ({profile.name}){described}"
    return f"{'; '.join(_measured_words(profile, new, fit))}{described}"


def _measured_words(profile: NetworkProfile, new: NetworkLevel, fit: LevelFit) -> Iterator[str]:
    yield (
        f"measured: {profile.source}, {profile.created[:10]}, {fit.num_samples} samples of "
        f"{fit.smallest_bytes} to {fit.largest_bytes} bytes, residual {100 * fit.residual:.0f} %"
    )
    kept = [kind.value for kind in new.efficiency if kind not in fit.measured_kinds]
    if kept:
        yield f"as described: {', '.join(kept)}"
