"""Collectives: closed forms in simple places, and sense in all places."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nest_megatron.cluster.records import CollectiveKind, NetworkLevel
from nest_megatron.cost_model.communication import (
    collective_time,
    ring_step_time,
    send_time,
)

EFFICIENCY = dict.fromkeys(CollectiveKind, 0.5)
NODE = NetworkLevel(
    name="node", num_devices=8, bandwidth_bytes_per_s=400e9, latency_s=1e-6, efficiency=EFFICIENCY
)
SPINE = NetworkLevel(
    name="spine",
    num_devices=None,
    bandwidth_bytes_per_s=50e9,
    latency_s=1e-5,
    efficiency=EFFICIENCY,
)
LEVELS = (NODE, SPINE)
kinds = st.sampled_from([kind for kind in CollectiveKind if kind is not CollectiveKind.SEND_RECV])
fan_outs = st.sampled_from([1, 2, 4, 8])


def test_a_group_of_one_says_nothing() -> None:
    assert collective_time(CollectiveKind.ALL_REDUCE, 1e9, (1, 1), LEVELS) == 0.0


def test_ring_inside_a_node() -> None:
    expected = 2 * (7 / 8 * 1e9 / 200e9 + 7 * 1e-6)
    assert collective_time(CollectiveKind.ALL_REDUCE, 1e9, (8, 1), LEVELS) == pytest.approx(
        expected
    )


def test_each_gpu_of_a_node_uses_its_own_adapter() -> None:
    """With 8 members in each of 4 nodes, a device sends an eighth of the message between nodes."""
    alone = collective_time(CollectiveKind.ALL_GATHER, 1e9, (1, 4), LEVELS)
    together = collective_time(CollectiveKind.ALL_GATHER, 1e9, (8, 4), LEVELS)
    assert alone == pytest.approx(3 / 4 * 1e9 / 25e9 + 3e-5)
    assert together == pytest.approx(max(3 / 4 * 1e9 / 8 / 25e9, 31 / 32 * 1e9 / 200e9) + 3.7e-5)


def test_exchange_pays_for_peers_beyond_the_node() -> None:
    time = collective_time(CollectiveKind.ALL_TO_ALL, 1e9, (8, 2), LEVELS)
    assert time == pytest.approx(8 / 16 * 1e9 / 25e9 + 7e-6 + 1e-5)


@given(kind=kinds, inner=fan_outs, outer=fan_outs, size=st.floats(1e3, 1e10))
def test_more_bytes_never_take_less(
    kind: CollectiveKind, inner: int, outer: int, size: float
) -> None:
    shape = (inner, outer)
    assert collective_time(kind, size, shape, LEVELS) <= collective_time(
        kind, 2 * size, shape, LEVELS
    )


@given(kind=kinds, size=st.floats(1e6, 1e10))
def test_a_group_across_nodes_is_slower_than_inside(kind: CollectiveKind, size: float) -> None:
    inside = collective_time(kind, size, (8, 1), LEVELS)
    assert collective_time(kind, size, (1, 8), LEVELS) > inside


def test_what_goes_further_out_passes_the_same_adapter() -> None:
    """On three tiers, the middle one carries the outermost one's traffic too."""
    levels = (NODE, SPINE, SPINE)
    exchange = collective_time(CollectiveKind.ALL_TO_ALL, 1e9, (8, 4, 2), levels)
    assert exchange == pytest.approx(56 / 64 * 1e9 / 25e9 + 7e-6 + 2e-5 + 1e-5)
    gather = collective_time(CollectiveKind.ALL_GATHER, 8e9, (8, 4, 2), levels)
    assert gather == pytest.approx(max(63 / 64 * 8 / 200, 7 / 8 / 25) + 7e-6 + 3e-5 + 1e-5)


@pytest.mark.parametrize("shape", [(1, 4), (2, 2), (8, 2)])
def test_a_ring_crosses_nodes_on_one_adapter(shape: tuple[int, int]) -> None:
    assert ring_step_time(1e8, shape, LEVELS) == send_time(1e8, SPINE)
    assert ring_step_time(1e8, (4, 1), LEVELS) == send_time(1e8, NODE)
    assert ring_step_time(1e8, (1, 1), LEVELS) == 0.0


def test_sending_through_the_spine_is_slower() -> None:
    assert send_time(1e8, SPINE) > send_time(1e8, NODE) > 0
