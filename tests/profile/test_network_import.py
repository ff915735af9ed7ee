"""Samples in a described cluster, and the cluster with what they tell."""

from __future__ import annotations

import dataclasses

import pytest

from nest_megatron.cluster.records import CollectiveKind
from nest_megatron.errors import ProfileError
from nest_megatron.profile.network import CollectiveSample
from nest_megatron.profile.network_import import fit_network, placed
from tests.profile.networks import NETWORK, NODE, cluster_of, priced, profile_of, samples

LEAF = dataclasses.replace(NETWORK, name="leaf", num_devices=32)
SPINE = dataclasses.replace(NETWORK, name="spine", source="a data sheet")


def place_of(shape: tuple[int, int], *level_sizes: int, **more: int) -> tuple[int, ...]:
    inner = (
        dataclasses.replace(NETWORK, name=f"level{i}", num_devices=size)
        for i, size in enumerate(level_sizes)
    )
    sample = CollectiveSample(
        kind=CollectiveKind.ALL_REDUCE,
        num_ranks=shape[0] * shape[1],
        shape=shape,
        message_bytes=8,
        seconds=1.0,
    )
    return placed([sample], cluster_of(*inner, SPINE, **more))[0].shape


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((8, 1), (8, 1, 1)),
        ((8, 4), (8, 4, 1)),
        ((1, 4), (1, 4, 1)),
        ((8, 8), (8, 4, 2)),
        ((2, 3), (2, 3, 1)),
        ((8, 10), (8, 2, 5)),  # leaves of four nodes: 4, 4 and 2
    ],
)
def test_hosts_are_neighbours(shape: tuple[int, int], expected: tuple[int, ...]) -> None:
    assert place_of(shape, 8, 32) == expected


def test_a_rack_of_trays_is_one_level() -> None:
    rack = {"num_gpus": 144, "gpus_per_host": 4}
    assert place_of((4, 1), 72, **rack) == (4, 1)
    assert place_of((4, 18), 72, **rack) == (72, 1)
    assert place_of((4, 36), 72, **rack) == (72, 2)


def test_more_ranks_than_a_host_has_are_refused() -> None:
    with pytest.raises(ProfileError, match="have 8 GPUs"):
        place_of((16, 1), 8)


def test_a_cluster_gets_the_measured_figures_and_says_so() -> None:
    true = cluster_of(NODE, LEAF, SPINE)
    described = cluster_of(
        dataclasses.replace(NODE, latency_s=1e-6, source="guessed"),
        dataclasses.replace(LEAF, bandwidth_bytes_per_s=6e10),
        SPINE,
    )
    found = samples(true.levels, [(2, 1), (8, 1), (1, 2), (1, 4)])
    measured = fit_network(profile_of(found), described).cluster
    assert measured is not None
    for sample in placed(found, measured):
        seconds = priced(sample.kind, sample.message_bytes, sample.shape, measured.levels)
        assert seconds == pytest.approx(sample.seconds, rel=0.03)
    node, leaf, spine = measured.levels
    assert node.source.startswith("measured: a test, 2026-01-02, 110 samples of 1024 to 10737418")
    assert node.source.endswith("residual 0 %; described: guessed")
    assert leaf.bandwidth_bytes_per_s == 6e10
    assert leaf.source.startswith("measured: ")
    assert spine == dataclasses.replace(
        SPINE, source="not measured (test); described: a data sheet"
    )


def test_kinds_that_were_not_measured_are_named() -> None:
    found = samples((NODE, SPINE), [(2, 1), (8, 1)], [CollectiveKind.ALL_REDUCE])
    fitted = fit_network(profile_of(found), cluster_of(NODE, SPINE)).cluster
    assert fitted is not None
    node = fitted.levels[0]
    assert "as described: all_gather, reduce_scatter, all_to_all, send_recv" in node.source
    assert node.efficiency[CollectiveKind.ALL_GATHER] == NODE.efficiency["all_gather"]
