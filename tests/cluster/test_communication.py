"""Collectives: closed forms in simple places, and sense in all places."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nest_megatron.cluster.communication import (
    OWN_PART,
    PIECE_BYTES,
    collective_time,
    ring_step_time,
    send_time,
)
from nest_megatron.cluster.records import CollectiveKind, NetworkLevel

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
    expected = 2 * ((7 + OWN_PART) / 8 * 1e9 / 200e9 + 7 * 1e-6)
    assert collective_time(CollectiveKind.ALL_REDUCE, 1e9, (8, 1), LEVELS) == pytest.approx(
        expected
    )


def test_each_gpu_of_a_node_uses_its_own_adapter() -> None:
    """With 8 members in each of 4 nodes there are 8 rings, each with an eighth of the message."""
    alone = collective_time(CollectiveKind.ALL_GATHER, 1e9, (1, 4), LEVELS)
    together = collective_time(CollectiveKind.ALL_GATHER, 1e9, (8, 4), LEVELS)
    assert alone == pytest.approx((3 + OWN_PART) / 4 * 1e9 / 25e9 + 3e-5)
    share = (31 + OWN_PART) / 32
    assert together == pytest.approx(
        max(share * 1e9 / 8 / 25e9, share * 7 / 8 * 1e9 / 200e9) + 4 * 7e-6 + 3e-5
    )


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
    assert exchange == pytest.approx(56 / 64 * 1e9 / 25e9 + 7e-6 + 3e-5 + 1e-5)
    gather = collective_time(CollectiveKind.ALL_GATHER, 8e9, (8, 4, 2), levels)
    hops = 8 * 7e-6 + 2 * 3e-5 + 1e-5
    share = (63 + OWN_PART) / 64
    assert gather == pytest.approx(max(share * 7 / 8 * 8 / 200, share / 25) + hops)


@pytest.mark.parametrize("shape", [(1, 4), (2, 2), (8, 2)])
def test_a_ring_crosses_nodes_on_one_adapter(shape: tuple[int, int]) -> None:
    assert ring_step_time(1e8, shape, LEVELS) == send_time(1e8, SPINE)
    assert ring_step_time(1e8, (4, 1), LEVELS) == send_time(1e8, NODE)
    assert ring_step_time(1e8, (1, 1), LEVELS) == 0.0


def test_sending_through_the_spine_is_slower() -> None:
    assert send_time(1e8, SPINE) > send_time(1e8, NODE) > 0


def test_an_all_reduce_takes_the_faster_of_ring_and_tree() -> None:
    """Between two nodes a tree sends 1/2 of the message, a ring 15/16; a bad tree is not taken."""
    fast = (dataclasses.replace(NODE, bandwidth_bytes_per_s=1e12), SPINE)
    tree = collective_time(CollectiveKind.ALL_REDUCE, 1e9, (8, 2), fast)
    assert tree == pytest.approx(1e9 / 8 / 25e9 + 2 * PIECE_BYTES / 25e9 + 2 * (7e-6 + 1e-5))
    slow = (NODE, dataclasses.replace(SPINE, tree_efficiency=0.05))
    ring = 2 * collective_time(CollectiveKind.ALL_GATHER, 1e9, (8, 2), slow)
    assert collective_time(CollectiveKind.ALL_REDUCE, 1e9, (8, 2), slow) == pytest.approx(ring)


def test_a_switch_that_sums_is_faster_from_three_members_on() -> None:
    """Twice ``1 - 0.9/n`` of the message by a ring against ``1 + 1/n`` by the switch."""
    summing = (dataclasses.replace(NODE, reduction_efficiency=0.5, latency_s=0.0), SPINE)
    plain = (dataclasses.replace(NODE, latency_s=0.0), SPINE)
    for members, better in [(2, 1.0), (3, 4 / 4.2), (4, 5 / 6.2), (8, 9 / 14.2)]:
        shape = (members, 1)
        ring = collective_time(CollectiveKind.ALL_REDUCE, 1e9, shape, plain)
        switch = collective_time(CollectiveKind.ALL_REDUCE, 1e9, shape, summing)
        assert switch == pytest.approx(better * ring)


def test_rails_limit_what_a_group_sends_outwards() -> None:
    four = (NODE, dataclasses.replace(SPINE, max_rails=4))
    reached = collective_time(CollectiveKind.ALL_GATHER, 1e10, (8, 4), four)
    assert reached == pytest.approx((31 + OWN_PART) / 32 * 1e10 / 4 / 25e9 + 4 * 7e-6 + 3e-5)


def test_a_mesh_lends_a_small_ring_fewer_links() -> None:
    mesh = (dataclasses.replace(NODE, ring_shares=(0.25, 0.5)), SPINE)
    kind, size = CollectiveKind.REDUCE_SCATTER, 1e9
    assert [
        round(
            collective_time(kind, size, (n, 1), mesh) / collective_time(kind, size, (n, 1), LEVELS)
        )
        for n in (2, 3, 4)
    ] == [4, 2, 1]


def test_startup_and_ramp_slow_a_call() -> None:
    level = dataclasses.replace(NODE, startup_s=1e-4, ramp=2.0)
    time = collective_time(CollectiveKind.ALL_GATHER, 8e8, (8,), (level,))
    assert time == pytest.approx(1e-4 + (7e-6**0.5 + ((7 + OWN_PART) * 1e8 / 200e9) ** 0.5) ** 2)
    sent = send_time(2e8, level)
    assert sent == pytest.approx(1e-4 + (1e-6**0.5 + 1e-3**0.5) ** 2)


def test_a_chain_through_three_nodes_is_slower_than_a_pair() -> None:
    chained = (NODE, dataclasses.replace(SPINE, chain_share=0.5))
    pair = ring_step_time(1e9, (8, 2), chained)
    assert pair == send_time(1e9, SPINE)
    assert ring_step_time(1e9, (8, 3), chained) == pytest.approx(1e-5 + 2 * (pair - 1e-5))


def test_the_pieces_of_a_tree_stop_growing() -> None:
    """From 1 to 8 MiB an adapter, a hop takes longer; from then on larger messages hide it."""
    level = dataclasses.replace(SPINE, latency_s=0.0)
    times = [
        collective_time(CollectiveKind.ALL_REDUCE, size * 2**20, (1, 16), (NODE, level))
        for size in (1, 8, 80)
    ]
    tree = [2 * 15 / 16 * size * 2**20 / 25e9 for size in (1, 8, 80)]
    pieces = [8 * min(size * 2**20, PIECE_BYTES) / 25e9 for size in (1, 8, 80)]
    ring = [2 * (15 + OWN_PART) / 16 * size * 2**20 / 25e9 for size in (1, 8, 80)]
    assert times == pytest.approx(
        [min(r, t + p) for r, t, p in zip(ring, tree, pieces, strict=True)]
    )


def test_a_ring_leaves_a_node_by_one_of_its_members() -> None:
    """Of eight rings through a node of eight, a member passes seven on to its neighbour inside."""
    slow = (dataclasses.replace(NODE, latency_s=0.0), dataclasses.replace(SPINE, latency_s=0.0))
    wide = (slow[0], dataclasses.replace(slow[1], bandwidth_bytes_per_s=1e12))
    time = collective_time(CollectiveKind.ALL_GATHER, 1e9, (8, 2), wide)
    assert time == pytest.approx((15 + OWN_PART) / 16 * 7 / 8 * 1e9 / 200e9)
