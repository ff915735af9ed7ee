"""The machines: one kind of accelerator under a hierarchy of network levels, and their files."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from typing import Any

from nest_megatron.errors import UserInputError, require_at_least
from nest_megatron.plain import Name, Source, added, from_plain, frozen, is_number, without_unit
from nest_megatron.units import format_gib

#: What `cluster discover` adds to the name of the cluster that stands in for what was not seen.
DISCOVERED = "_discovered"


class Precision(Name):
    """Number format of the GEMMs; float32 runs on the matrix units as TF32."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"
    NVFP4 = "nvfp4"

    @property
    def is_quantized(self) -> bool:
        """GEMMs of layers run below 16 bits, on operands that are cast for them."""
        return self in (Precision.FP8, Precision.NVFP4)


class CollectiveKind(Name):
    """Kinds of communication that a training step issues."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    SEND_RECV = "send_recv"


@frozen
class Accelerator:
    """One device: peaks from its data sheet, and what share of each peak real kernels reach.

    Args:
        memory_bytes: that a framework can allocate from.
        peak_flops_per_s: dense matrix peak for each number format.
        gemm_efficiency: largest share of that peak that a well-shaped GEMM reaches.
        attention_efficiency: share of the bf16 peak that the products of fused attention reach on
            long sequences.
        exponentials_per_s: that the softmax of fused attention can take (0: not counted).
        scan_share: what a scan (Mamba-2, gated delta nets) reaches of the rates of attention's
            arithmetic and of streaming kernels' traffic.
        grouped_gemm_ramp_rows: rows (tokens) of each product with which a grouped GEMM reaches
            half of that.
        attention_ramp_rows: query rows (tokens times heads) with which it reaches half of that.
        memory_efficiency: share of the device-memory bandwidth that streaming kernels reach.
        kernel_floor_s: shortest time one kernel takes, launch included.
        host_kernel_s: time that the host of such a device takes to launch one operator (0: CUDA
            graphs everywhere, or not known).
        host_bandwidth_bytes_per_s: payload that crosses the link to the host's memory in one
            direction, for each device while all do the same (0: not known).
        flash_attention: fused attention that keeps no score matrix runs on it.
        source: where each figure comes from.
    """

    name: str
    memory_bytes: int
    peak_flops_per_s: Mapping[Precision, float]
    gemm_efficiency: Mapping[Precision, float]
    attention_efficiency: float
    memory_bandwidth_bytes_per_s: float
    memory_efficiency: float
    kernel_floor_s: float
    flash_attention: bool = True
    grouped_gemm_ramp_rows: float = 0.0
    scan_share: float = added(1.0)
    host_kernel_s: float = added(0.0)
    host_bandwidth_bytes_per_s: float = added(0.0)
    attention_ramp_rows: float = 0.0
    exponentials_per_s: float = added(0.0)
    source: str = ""

    def __post_init__(self) -> None:
        _check_numbers(self, "accelerator")

    def supports(self, precision: Precision) -> bool:
        """Whether the device has matrix units for this number format."""
        return precision in self.peak_flops_per_s


@frozen
class NetworkLevel:
    """One level of the network; level 0 joins the devices of one node.

    Args:
        name: ``node``, ``leaf``, ``spine``, ...
        num_devices: devices in one group of this level, or ``None`` for the outermost level, which
            takes in the whole cluster however large.
        bandwidth_bytes_per_s: what one device can send through this level, in one direction, while
            every other device does the same.
        latency_s: time of one hop through this level.
        efficiency: share of the bandwidth that each kind of collective reaches for large messages.
        startup_s: time that every call takes before its first byte moves.
        ramp: how far messages of middling size fall short: a transfer of ``t`` seconds after
            latencies of ``a`` takes ``ramp * sqrt(a * t)`` longer (2 for pieces of the best size).
        reduction_efficiency: share of the bandwidth that an all-reduce reaches by in-network
            reduction (NVLS, SHARP); ``None`` where the switch cannot.
        tree_efficiency: share of the bandwidth that an all-reduce reaches over a tree of groups;
            that of ``efficiency`` if ``None``.
        chain_share: what is left of the rate of a transfer in a ring that crosses more than two
            groups of this level, where a device sends to one and receives from another.
        max_rails: most adapters of an inner group that one reduction or gather uses; ``None`` all.
        ring_shares: where the links are no full mesh, the share of them that rings through 2, 3,
            ... members use; 1 for more than it names.
        source: where the figures come from.
    """

    name: str
    num_devices: int | None
    bandwidth_bytes_per_s: float
    latency_s: float
    efficiency: Mapping[CollectiveKind, float] = field(default_factory=dict)
    startup_s: float = 0.0
    ramp: float = 0.0
    reduction_efficiency: float | None = None
    tree_efficiency: float | None = None
    chain_share: float = 1.0
    max_rails: int | None = None
    ring_shares: tuple[float, ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        _check_numbers(self, "network level")

    def ring_share(self, members: int) -> float:
        """Share of a device's links that rings through so many members use."""
        named = 0 <= members - 2 < len(self.ring_shares)
        return self.ring_shares[members - 2] if named else 1.0


@frozen
class Cluster:
    """``num_gpus`` equal accelerators, numbered so that neighbours are near in the network.

    Device ``r`` lies in group ``r // level.num_devices`` of each level. The levels grow outwards,
    each a multiple of the one inside it; the last one has ``num_devices=None``.

    Args:
        gpus_per_host: GPUs that one operating system sees, where that is less than the innermost
            level (four in each tray of an NVL72 rack). A job then may leave hosts of it idle.
    """

    name: str
    num_gpus: int
    accelerator: Accelerator
    levels: tuple[NetworkLevel, ...]
    gpus_per_host: int | None = None
    description: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.num_gpus, int) or self.num_gpus < 1:
            raise UserInputError(
                "cluster.num_gpus",
                self.num_gpus,
                "it must be a whole number of at least 1",
                "Give the job's number of GPUs.",
            )
        _check_numbers(self, "cluster")
        self._check_levels()
        if not self.part_of_nodes(self.num_gpus):
            raise self._uneven()

    def _check_levels(self) -> None:
        names = [level.name for level in self.levels]
        if not names or self.levels[-1].num_devices or [*dict.fromkeys(names)] != names:
            raise UserInputError(
                f"cluster {self.name}: levels",
                names,
                "each has a name of its own, and the outermost one num_devices: null",
                "Name each once, and leave num_devices of the last level empty: it takes in all.",
            )
        inner = 1
        for level in self.levels[:-1]:
            size = level.num_devices
            if not size or size % inner or size == inner > 1:
                raise UserInputError(
                    f"cluster {self.name}: level {level.name}: num_devices",
                    size,
                    f"each level but the last holds a multiple of the {inner} devices inside it",
                    "Order the levels from the node outwards.",
                )
            inner = size

    @property
    def gpus_per_node(self) -> int:
        """Devices of the job that share the innermost level.

        All, or where several hosts form it (the 18 trays of an NVL72 rack) the most whole hosts
        that are the same number in every node: 64 of 72 GPUs for a job of 128.
        """
        return self.part_of_nodes(self.num_gpus)

    def part_of_nodes(self, num_gpus: int) -> int:
        """Devices of each node that a job of so many takes, 0 if it cannot be spread evenly."""
        size = self.levels[0].num_devices or num_gpus
        if num_gpus <= size:
            return size
        host = min(self.gpus_per_host or size, size)
        # A job that left more than half of each node idle would rather take fewer nodes.
        parts = range(size - size % host, (size - 1) // 2, -host)
        return next((part for part in parts if num_gpus % part == 0), 0)

    def _uneven(self) -> UserInputError:
        size, host = self.levels[0].num_devices or 1, self.gpus_per_host
        lower = next(n for n in range(self.num_gpus, 0, -1) if self.part_of_nodes(n))
        upper = next(n for n in itertools.count(self.num_gpus) if self.part_of_nodes(n))
        taken = "whole nodes"
        if host is not None and host < size:
            taken = f"the same number of hosts of {host} GPUs, at least half, from each"
        return UserInputError(
            "cluster.num_gpus",
            self.num_gpus,
            f"nodes of {self.name} hold {size} GPUs each and a job takes {taken}",
            f"Use {lower} or {upper}.",
        )

    @property
    def host_size(self) -> int | None:
        """GPUs of a whole host; ``None`` where the description has no hosts."""
        return self.gpus_per_host or self.levels[0].num_devices

    @property
    def launch_gpus_per_host(self) -> int:
        """Processes that a launcher starts on one host."""
        return min(self.gpus_per_host or self.gpus_per_node, self.num_gpus)

    def resized(self, num_gpus: int) -> Cluster:
        """The same cluster with another number of devices."""
        return replace(self, num_gpus=num_gpus)

    def group_sizes(self) -> tuple[int, ...]:
        """Devices in one group of each level, the outermost taken as the whole cluster."""
        total, used = self.num_gpus, self.gpus_per_node
        full = self.levels[0].num_devices or total
        sizes = ((level.num_devices or total) * used // full for level in self.levels[:-1])
        return (*(min(size, total) for size in sizes), total)

    def describe(self) -> str:
        """One line for tables: ``1024 x H100-SXM-80GB (74.5 GiB)``."""
        device = self.accelerator
        return f"{self.num_gpus} x {device.name} ({format_gib(device.memory_bytes)})"


#: Numbers that may be 0; every other one lies above it.
_MAY_BE_ZERO = (
    "kernel_floor_s",
    "host_kernel_s",
    "host_bandwidth_bytes_per_s",
    "attention_ramp_rows",
    "grouped_gemm_ramp_rows",
    "exponentials_per_s",
    "latency_s",
    "startup_s",
    "ramp",
)


def _check_numbers(record: Accelerator | NetworkLevel | Cluster, what: str) -> None:
    """Refuse a number that is none, or lies outside of what its field means."""
    for each in dataclasses.fields(record):
        if is_number(each):
            for place, value in _numbers(getattr(record, each.name)):
                _check_number(f"{what} {record.name}: {each.name}{place}", value, each.name)


def _numbers(value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return ((f".{key}", item) for key, item in value.items())
    if isinstance(value, tuple):
        return (("", item) for item in value)
    return () if value is None else (("", value),)


def _check_number(what: str, value: Any, name: str) -> None:
    may_be_zero = name in _MAY_BE_ZERO
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value < math.inf or not (value or may_be_zero):
        raise UserInputError(
            what,
            value,
            f"it must be a finite number {'of at least' if may_be_zero else 'above'} 0",
            "Correct this value of the cluster.",
        )
    if name.endswith(("efficiency", "share", "shares")) and value > 1.5:
        raise UserInputError(
            what,
            value,
            "a share of a peak lies above 0 and is at most 1.5 (in-network reduction)",
            "Give it as a fraction, for example 0.8.",
        )


_SOURCE = Source(
    correct="Correct this value of the cluster.",
    add="Add {name}; `nest-megatron cluster new` writes a file that explains each field.",
    whole_floats=True,
    has_units=True,
)


def cluster_from_mapping(mapping: Mapping[str, object], *, num_gpus: int | None = None) -> Cluster:
    """Check a cluster description and build its record.

    Args:
        mapping: fields of ``Cluster``, levels from the node outwards; null and an empty text are
            the same as absent. Numbers may have a unit (``100GB/s``). ``oversubscription`` divides
            the bandwidth of the outermost level: how many times more the devices can send than it
            carries.
        num_gpus: size of the job; the mapping's own ``num_gpus`` if not given.

    Raises:
        UserInputError: for an unknown or missing key, a value of the wrong type (numbers written as
            text without a unit included), a unit of something else, a number that is NaN, infinite
            or not positive, or an impossible shape.
    """
    fields = _without_nulls(mapping)
    what = f"cluster {fields.get('name', '(no name)')}:"
    if (size := fields.get("num_gpus") if num_gpus is None else num_gpus) is None:
        raise UserInputError(
            "cluster.num_gpus",
            None,
            "the cluster's description does not say it",
            "Add for example num_gpus: 64.",
        )
    size = without_unit(size, "num_gpus", "cluster.num_gpus")
    fields["num_gpus"] = from_plain(int, size, "cluster.num_gpus", _SOURCE)
    name = f"{what} oversubscription"
    oversubscription = from_plain(float, fields.pop("oversubscription", 1.0), name, _SOURCE)
    require_at_least(name, oversubscription, 1, _SOURCE.correct)
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
    outermost = replace(outermost, bandwidth_bytes_per_s=bandwidth)
    return replace(cluster, levels=(*inner, outermost))


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
        raise UserInputError(
            f"accelerator {accelerator.name}: gemm_efficiency",
            sorted(shares),
            f"it needs one share for each number format of peak_flops_per_s {sorted(peaks)}",
            _SOURCE.correct,
        )


def _without_nulls(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {key: item for key, item in value.items() if item is not None and str(item).strip()}
