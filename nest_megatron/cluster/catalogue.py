"""From a plain mapping, as a catalogue file holds it, to a ``Cluster``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from nest_megatron.cluster.records import Accelerator, Cluster
from nest_megatron.errors import UserInputError
from nest_megatron.plain import Source, from_plain, without_unit

_SOURCE = Source(
    correct="Correct the cluster's description.",
    add="Add {name}; `nest-megatron cluster new` writes a file that explains each field.",
    whole_floats=True,
    has_units=True,
)


def cluster_from_mapping(mapping: Mapping[str, object], *, num_gpus: int | None = None) -> Cluster:
    """Check a cluster description and build its record.

    Args:
        mapping: fields of ``Cluster``, levels from the node outwards; null is the same as absent.
            Numbers may have a unit (``100GB/s``). ``oversubscription`` divides the bandwidth of the
            outermost level: how many times more the devices can send than it carries.
        num_gpus: size of the job; the mapping's own ``num_gpus`` if not given.

    Raises:
        UserInputError: for an unknown or missing key, a value of the wrong type (numbers written as
            text without a unit included), a unit of something else, a number that is NaN, infinite
            or not positive, or an impossible shape.
    """
    fields = _without_nulls(mapping)
    what = f"cluster {fields.get('name', '(no name)')}:"
    size = fields.get("num_gpus") if num_gpus is None else num_gpus
    size = without_unit(size, "num_gpus", "cluster.num_gpus")
    fields["num_gpus"] = from_plain(int, size, "cluster.num_gpus", _SOURCE)
    name = f"{what} oversubscription"
    oversubscription = from_plain(float, fields.pop("oversubscription", 1.0), name, _SOURCE)
    if oversubscription < 1.0:
        limit = "it must be at least 1"
        raise UserInputError(name, oversubscription, limit, fix=_SOURCE.correct)
    if isinstance(fields.get("levels"), list | tuple):
        # num_devices may be left out of the outermost one
        levels = map(_without_nulls, fields["levels"])
        fields["levels"] = [
            {"num_devices": None, **level} if isinstance(level, Mapping) else level
            for level in levels
        ]
    if "accelerator" in fields:
        fields["accelerator"] = _without_nulls(fields["accelerator"])
    cluster = from_plain(Cluster, fields, what, _SOURCE)
    _require_same_precisions(cluster.accelerator)
    *inner, outermost = cluster.levels
    bandwidth = outermost.bandwidth_bytes_per_s / oversubscription
    outermost = dataclasses.replace(outermost, bandwidth_bytes_per_s=bandwidth)
    return dataclasses.replace(cluster, levels=(*inner, outermost))


def accelerator_from_mapping(mapping: Mapping[str, object]) -> Accelerator:
    """Check an accelerator description and build its record.

    Raises:
        UserInputError: as for ``cluster_from_mapping``.
    """
    fields = _without_nulls(mapping)
    what = f"accelerator {fields.get('name', '(no name)')}:"
    accelerator = from_plain(Accelerator, fields, what, _SOURCE)
    _require_same_precisions(accelerator)
    return accelerator


def _require_same_precisions(accelerator: Accelerator) -> None:
    peaks, shares = accelerator.peak_flops_per_s, accelerator.gemm_efficiency
    if not peaks or peaks.keys() != shares.keys():
        what = f"accelerator {accelerator.name}: gemm_efficiency"
        limit = f"it needs one share for each number format of peak_flops_per_s {sorted(peaks)}"
        fix = _SOURCE.correct
        raise UserInputError(what, sorted(shares), limit, fix)


def _without_nulls(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {key: item for key, item in value.items() if item is not None}
