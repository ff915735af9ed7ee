"""Networks with known figures, samples of them, and the logs beside this file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from nest_megatron.cluster.communication import collective_time
from nest_megatron.cluster.records import Accelerator, Cluster, CollectiveKind, NetworkLevel
from nest_megatron.profile.network import CollectiveSample, NetworkBackend, NetworkProfile

DATA = Path(__file__).parent / "data"
SIZES = tuple(4**n * 2**10 for n in range(11))
NODE = NetworkLevel(
    name="node",
    num_devices=8,
    bandwidth_bytes_per_s=4e11,
    latency_s=2.5e-6,
    startup_s=9e-6,
    ramp=0.4,
    efficiency={kind: 0.6 + 0.05 * i for i, kind in enumerate(CollectiveKind)},
)
NETWORK = NetworkLevel(
    name="network",
    num_devices=None,
    bandwidth_bytes_per_s=5e10,
    latency_s=1.5e-5,
    startup_s=2.5e-5,
    ramp=0.1,
    efficiency={kind: 0.95 - 0.05 * i for i, kind in enumerate(CollectiveKind)},
)
LEVELS = (NODE, NETWORK)
DEVICE = Accelerator(
    name="test",
    memory_bytes=80 * 2**30,
    peak_flops_per_s={},
    gemm_efficiency={},
    attention_efficiency=0.5,
    memory_bandwidth_bytes_per_s=3e12,
    memory_efficiency=0.9,
    kernel_floor_s=2e-6,
)
SHAPES = ((2, 1), (8, 1), (1, 2), (1, 4), (8, 4))


def priced(
    kind: CollectiveKind, size: float, shape: Sequence[int], levels: Sequence[NetworkLevel]
) -> float:
    """Seconds by the cost model itself."""
    return collective_time(kind, size, shape, levels)


def samples(
    levels: Sequence[NetworkLevel] = LEVELS,
    shapes: Iterable[tuple[int, ...]] = SHAPES,
    kinds: Iterable[CollectiveKind] = CollectiveKind,
    sizes: Iterable[int] = SIZES,
) -> tuple[CollectiveSample, ...]:
    """What measuring these levels gives, without noise."""
    return tuple(_samples(levels, tuple(shapes), tuple(kinds), tuple(sizes)))


def _samples(
    levels: Sequence[NetworkLevel],
    shapes: Sequence[tuple[int, ...]],
    kinds: Sequence[CollectiveKind],
    sizes: Sequence[int],
) -> Iterator[CollectiveSample]:
    for shape in shapes:
        # levels beyond those of a two-part shape are not crossed
        whole = (*shape, *[1] * (len(levels) - len(shape)))
        for kind in kinds:
            for size in sizes:
                yield CollectiveSample(
                    kind=kind,
                    num_ranks=math.prod(shape),
                    shape=shape,
                    message_bytes=size,
                    seconds=priced(kind, size, whole, levels),
                )


def profile_of(found: Iterable[CollectiveSample]) -> NetworkProfile:
    """A profile of samples."""
    return NetworkProfile(
        name="test",
        created="2026-01-02T03:04:05+00:00",
        source="a test",
        backend=NetworkBackend.NCCL,
        versions={"nccl": "2.29.2"},
        samples=tuple(found),
    )


def cluster_of(
    *levels: NetworkLevel, num_gpus: int = 64, gpus_per_host: int | None = None
) -> Cluster:
    """A cluster with these levels."""
    return Cluster(
        name="test",
        num_gpus=num_gpus,
        accelerator=DEVICE,
        levels=levels,
        gpus_per_host=gpus_per_host,
    )
