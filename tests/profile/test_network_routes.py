"""The profile's algebra of collectives is the cost model's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nest_megatron.cluster.records import CollectiveKind, NetworkLevel
from nest_megatron.cost_model import communication
from nest_megatron.profile import network_routes
from nest_megatron.profile.network_routes import outermost, route_time, routes
from tests.profile.networks import priced

shares = st.floats(0.05, 1.0)
levels = st.builds(
    NetworkLevel,
    name=st.just("level"),
    num_devices=st.none(),
    bandwidth_bytes_per_s=st.floats(1e9, 1e12),
    latency_s=st.floats(0, 1e-4),
    startup_s=st.floats(0, 1e-4),
    ramp=st.sampled_from([0.0, 0.5, 2.0]),
    efficiency=st.dictionaries(st.sampled_from(CollectiveKind), shares),
    reduction_efficiency=st.none() | shares,
    tree_efficiency=st.none() | shares,
    chain_share=shares,
    max_rails=st.none() | st.integers(1, 8),
    ring_shares=st.lists(shares, max_size=4).map(tuple),
)
fan_outs = st.sampled_from([1, 2, 3, 4, 8])


@given(
    kind=st.sampled_from(CollectiveKind),
    places=st.lists(st.tuples(fan_outs, levels), min_size=1, max_size=3),
    size=st.floats(1, 1e11),
)
def test_times_are_those_of_the_cost_model(
    kind: CollectiveKind, places: list[tuple[int, NetworkLevel]], size: float
) -> None:
    shape, given_levels = zip(*places, strict=True)
    if max(shape) > 1:
        found = route_time(kind, routes(kind, shape, given_levels), size, given_levels)
        assert found == pytest.approx(priced(kind, size, shape, given_levels))


@pytest.mark.parametrize("name", ["DEFAULT_EFFICIENCY", "PIECE_BYTES", "OWN_PART", "TREE_INSIDE"])
def test_the_constants_are_the_cost_models(name: str) -> None:
    assert getattr(network_routes, name) == getattr(communication, name)


def test_the_outermost_level_is_the_last_that_is_crossed() -> None:
    assert [outermost(shape) for shape in ((8, 1, 1), (8, 4, 1), (1, 1, 2))] == [0, 1, 2]
