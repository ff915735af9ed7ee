"""From a plain mapping, as a catalogue file holds it, to a ``Cluster``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from nest_megatron.cluster.records import (
    Accelerator,
    Cluster,
    CollectiveKind,
    NetworkLevel,
    Precision,
)
from nest_megatron.errors import UserInputError, nearest
from nest_megatron.names import Name

Kind = TypeVar("Kind", bound=Name)

_FIX = "Correct the cluster's description."
_CLUSTER_KEYS = (
    "name",
    "num_gpus",
    "accelerator",
    "levels",
    "oversubscription",
    "gpus_per_host",
    "description",
)


def cluster_from_mapping(mapping: Mapping[str, object], *, num_gpus: int | None = None) -> Cluster:
    """Check a cluster description and build its record.

    Args:
        mapping: ``name``, ``num_gpus``, ``accelerator``, ``levels`` from the node outwards, and
            optionally ``description`` and ``oversubscription``: how many times more traffic the
            devices can send than the outermost level carries, by which that level's bandwidth is
            divided (1 if absent).
        num_gpus: size of the job; the mapping's own ``num_gpus`` if not given.

    Raises:
        UserInputError: for an unknown or missing key, a value of the wrong type (numbers written as
            text included), a number that is NaN, infinite or not positive, or an impossible shape.
    """
    what = f"cluster {mapping.get('name', '(no name)')}"
    _check_keys(what, mapping, known=_CLUSTER_KEYS, required=("name", "accelerator", "levels"))
    return Cluster(
        name=_text(f"{what}: name", mapping["name"]),
        num_gpus=_whole(
            "cluster.num_gpus", mapping.get("num_gpus") if num_gpus is None else num_gpus
        ),
        accelerator=_accelerator(what, mapping["accelerator"]),
        levels=_levels(what, mapping["levels"], _oversubscription(what, mapping)),
        gpus_per_host=(
            None
            if mapping.get("gpus_per_host") is None
            else _whole(f"{what}: gpus_per_host", mapping["gpus_per_host"])
        ),
        description=_text(f"{what}: description", mapping.get("description", "")),
    )


def accelerator_from_mapping(mapping: Mapping[str, object]) -> Accelerator:
    """Check an accelerator description and build its record.

    Raises:
        UserInputError: as for ``cluster_from_mapping``.
    """
    what = f"accelerator {mapping.get('name', '(no name)')}"
    _check_record_keys(what, mapping, Accelerator)
    peaks = _table(f"{what}: peak_flops_per_s", mapping["peak_flops_per_s"], Precision)
    shares = _table(f"{what}: gemm_efficiency", mapping["gemm_efficiency"], Precision)
    _require_same_precisions(what, peaks, shares)
    return Accelerator(
        name=_text(f"{what}: name", mapping["name"]),
        memory_bytes=_whole(f"{what}: memory_bytes", mapping["memory_bytes"]),
        peak_flops_per_s=peaks,
        gemm_efficiency=shares,
        attention_efficiency=_number(what, "attention_efficiency", mapping),
        memory_bandwidth_bytes_per_s=_number(what, "memory_bandwidth_bytes_per_s", mapping),
        memory_efficiency=_number(what, "memory_efficiency", mapping),
        kernel_floor_s=_number(what, "kernel_floor_s", mapping, zero_allowed=True),
        **{
            name: _number(what, name, {name: 0.0, **mapping}, zero_allowed=True)
            for name in ("host_kernel_s", "host_bandwidth_bytes_per_s")
        },
        flash_attention=_flag(f"{what}: flash_attention", mapping.get("flash_attention", True)),
        grouped_gemm_share=_number(
            what, "grouped_gemm_share", {"grouped_gemm_share": 1.0, **mapping}
        ),
        attention_ramp_rows=_number(
            what, "attention_ramp_rows", {"attention_ramp_rows": 0.0, **mapping}, zero_allowed=True
        ),
        source=_text(f"{what}: source", mapping.get("source", "")),
    )


def _flag(what: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _wrong(what, value, "it must be true or false")
    return value


def _accelerator(what: str, value: object) -> Accelerator:
    return accelerator_from_mapping(_mapping(f"{what}: accelerator", value))


def _levels(what: str, value: object, oversubscription: float) -> tuple[NetworkLevel, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise _wrong(f"{what}: levels", value, "it must be a list of network levels")
    levels = [
        _level(f"{what}: levels[{i}]", _mapping(f"{what}: levels[{i}]", level))
        for i, level in enumerate(value)
    ]
    outermost = levels[-1]
    bandwidth = outermost.bandwidth_bytes_per_s / oversubscription
    levels[-1] = dataclasses.replace(outermost, bandwidth_bytes_per_s=bandwidth)
    return tuple(levels)


def _level(what: str, mapping: Mapping[str, object]) -> NetworkLevel:
    _check_record_keys(what, mapping, NetworkLevel)
    what = f"network level {mapping['name']}"
    size = mapping.get("num_devices")
    return NetworkLevel(
        name=_text(f"{what}: name", mapping["name"]),
        num_devices=None if size is None else _whole(f"{what}: num_devices", size),
        bandwidth_bytes_per_s=_number(what, "bandwidth_bytes_per_s", mapping),
        latency_s=_number(what, "latency_s", mapping, zero_allowed=True),
        efficiency=_table(f"{what}: efficiency", mapping.get("efficiency", {}), CollectiveKind),
        **_refinements(what, mapping),
        source=_text(f"{what}: source", mapping.get("source", "")),
    )


def _refinements(what: str, mapping: Mapping[str, object]) -> dict[str, Any]:
    """Fields of a level that may be left out; null is the same."""
    found: dict[str, Any] = {}
    for key in ("startup_s", "ramp", "reduction_efficiency", "tree_efficiency", "chain_share"):
        if mapping.get(key) is not None:
            zero_allowed = key in ("startup_s", "ramp")
            found[key] = _number(what, key, mapping, zero_allowed=zero_allowed)
    if mapping.get("max_rails") is not None:
        found["max_rails"] = _whole(f"{what}: max_rails", mapping["max_rails"])
    if mapping.get("ring_shares") is not None:
        found["ring_shares"] = _numbers(f"{what}: ring_shares", mapping["ring_shares"])
    return found


def _numbers(what: str, value: object) -> tuple[float, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise _wrong(what, value, "it must be a list of numbers")
    named = {f"[{i}]": item for i, item in enumerate(value)}
    return tuple(_number(what, key, named) for key in named)


def _oversubscription(what: str, mapping: Mapping[str, object]) -> float:
    if mapping.get("oversubscription") is None:
        return 1.0
    factor = _number(what, "oversubscription", mapping)
    if factor < 1.0:
        raise _wrong(f"{what}: oversubscription", factor, "it must be at least 1")
    return factor


def _check_record_keys(what: str, mapping: Mapping[str, object], record: type) -> None:
    """Refuse keys that are no field of the record, and demand those without a default.

    ``num_devices`` may be left out: null and absent both mean the outermost level.
    """
    fields = dataclasses.fields(record)
    absent = dataclasses.MISSING
    required = [
        field.name
        for field in fields
        if field.default is absent
        and field.default_factory is absent
        and field.name != "num_devices"
    ]
    _check_keys(what, mapping, known=[field.name for field in fields], required=required)


def _check_keys(
    what: str, mapping: Mapping[str, object], *, known: Iterable[str], required: Iterable[str]
) -> None:
    known = tuple(known)
    for key, value in mapping.items():
        if key not in known:
            raise UserInputError(
                f"{what}: {key}",
                value=value,
                limit="there is no such field",
                fix=nearest(str(key), known),
            )
    for key in required:
        if mapping.get(key) is None:
            raise UserInputError(
                f"{what}: {key}",
                value=None,
                limit="this field has no default",
                fix=f"Add {key}; cluster=custom is a template that explains each field.",
            )


def _require_same_precisions(
    what: str, peaks: Mapping[Precision, float], shares: Mapping[Precision, float]
) -> None:
    if not peaks or peaks.keys() != shares.keys():
        raise _wrong(
            f"{what}: gemm_efficiency",
            sorted(shares),
            f"it needs one share for each number format of peak_flops_per_s {sorted(peaks)}",
        )


def _table(what: str, value: object, kind: type[Kind]) -> dict[Kind, float]:
    mapping = _mapping(what, value)
    known = [member.value for member in kind]
    _check_keys(what, mapping, known=known, required=())
    return {kind(key): _number(what, key, mapping) for key in mapping}


def _mapping(what: str, value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise _wrong(what, value, "it must be a mapping of names to values")
    return value


def _text(what: str, value: object) -> str:
    if not isinstance(value, str):
        raise _wrong(what, value, "it must be text")
    return value


def _whole(what: str, value: object) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _wrong(what, value, "it must be a whole number of at least 1")
    return value


def _number(
    what: str, key: str, mapping: Mapping[str, object], *, zero_allowed: bool = False
) -> float:
    value = mapping[key]
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _wrong(f"{what}: {key}", value, "it must be a number")
    if math.isfinite(value) and (value > 0 or (value == 0 and zero_allowed)):
        return float(value)
    least = "of at least" if zero_allowed else "above"
    raise _wrong(f"{what}: {key}", value, f"it must be a finite number {least} 0")


def _wrong(what: str, value: object, limit: str) -> UserInputError:
    return UserInputError(what, value=value, limit=limit, fix=_FIX)
