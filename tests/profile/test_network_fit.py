"""Fits: known levels are found again, and what samples do not tell is said."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nest_megatron.cluster.records import CollectiveKind, NetworkLevel
from nest_megatron.errors import ProfileError
from nest_megatron.profile.network_fit import fit_hosts, fit_levels, predicted
from tests.profile.networks import LEVELS, NETWORK, NODE, SIZES, priced, samples

KINDS = tuple(CollectiveKind)


def rates(level: NetworkLevel) -> dict[CollectiveKind, float]:
    return {kind: level.bandwidth_bytes_per_s * level.efficiency[kind] for kind in KINDS}


def test_two_unknown_levels_are_found_again() -> None:
    fitted = fit_hosts(samples())
    assert [fit.name for fit in fitted.fits] == ["node", "network"]
    for fit, level, true in zip(fitted.fits, fitted.levels, LEVELS, strict=True):
        assert fit.latency_s == pytest.approx(true.latency_s, rel=0.02)
        assert fit.startup_s == pytest.approx(true.startup_s, rel=0.02)
        assert rates(level) == pytest.approx(rates(true), rel=0.02)
        assert max(fit.efficiency.values()) == 1.0
        assert fit.residual < 0.005
    assert fitted.notes == ()


def test_the_cost_model_reproduces_the_samples_on_the_fitted_levels() -> None:
    found = samples()
    levels = fit_hosts(found).levels
    for each in found:
        seconds = priced(each.kind, each.message_bytes, each.shape, levels)
        assert seconds == pytest.approx(each.seconds, rel=0.02)
        assert seconds == pytest.approx(predicted(each, levels))


@settings(deadline=None, max_examples=25)
@given(
    latency=st.floats(5e-7, 1e-4),
    startup=st.floats(1e-6, 2e-4),
    ramp=st.floats(0, 1.5),
    bandwidth=st.floats(1e9, 1e12),
)
def test_any_level_is_found_again(
    latency: float, startup: float, ramp: float, bandwidth: float
) -> None:
    true = dataclasses.replace(
        NODE, latency_s=latency, startup_s=startup, ramp=ramp, bandwidth_bytes_per_s=bandwidth
    )
    sizes = [*SIZES, 2**32, 2**34]
    found = samples((true, NETWORK), [(2, 1), (8, 1)], sizes=sizes)
    fit = fit_hosts(found).fits[0]
    assert fit.residual < 0.02
    level = dataclasses.replace(NODE, bandwidth_bytes_per_s=fit.bandwidth_bytes_per_s)
    level = dataclasses.replace(level, efficiency=fit.efficiency)
    assert rates(level) == pytest.approx(rates(true), rel=0.05)


def test_a_described_level_keeps_its_bandwidth_and_gets_shares_of_it() -> None:
    described = tuple(
        dataclasses.replace(
            level, bandwidth_bytes_per_s=1.25 * level.bandwidth_bytes_per_s, latency_s=5e-6
        )
        for level in LEVELS
    )
    fitted = fit_levels(samples(), described)
    for fit, true in zip(fitted.fits, LEVELS, strict=True):
        assert fit.bandwidth_bytes_per_s == 1.25 * true.bandwidth_bytes_per_s
        assert fit.efficiency[CollectiveKind.ALL_REDUCE] == pytest.approx(
            true.efficiency[CollectiveKind.ALL_REDUCE] / 1.25, rel=0.02
        )


def test_a_switch_that_sums_and_a_tree_are_fitted_apart_from_rings() -> None:
    node = dataclasses.replace(NODE, reduction_efficiency=0.8)
    net = dataclasses.replace(NETWORK, tree_efficiency=0.6)
    start = (
        dataclasses.replace(node, reduction_efficiency=0.6),
        dataclasses.replace(net, tree_efficiency=0.75),
    )
    fitted = fit_levels(samples((node, net), [(2, 1), (4, 1), (8, 1), (1, 4), (1, 16)]), start)
    assert fitted.fits[0].reduction_efficiency == pytest.approx(0.8, rel=0.02)
    assert fitted.fits[1].tree_efficiency == pytest.approx(0.6, rel=0.05)


def test_the_residual_is_the_noise_of_the_samples() -> None:
    noise = random.Random(7)
    found = [
        dataclasses.replace(s, seconds=s.seconds * noise.lognormvariate(0, 0.1)) for s in samples()
    ]
    for fit, true in zip(fit_hosts(found).fits, LEVELS, strict=True):
        assert fit.residual == pytest.approx(0.1, abs=0.02)
        assert set(fit.residuals) == set(KINDS)
        best = max(rates(true).values())
        assert fit.bandwidth_bytes_per_s == pytest.approx(best, rel=0.12)


def test_a_noisy_machine_is_said_to_be_one() -> None:
    noise = random.Random(7)
    found = [
        dataclasses.replace(s, seconds=s.seconds * noise.lognormvariate(0, 0.8)) for s in samples()
    ]
    assert "measure again on a quiet machine" in fit_hosts(found).notes[0]


def test_an_outlier_does_not_rule() -> None:
    found = list(samples(shapes=[(2, 1), (8, 1)]))
    found[5] = dataclasses.replace(found[5], seconds=100 * found[5].seconds)
    fit = fit_hosts(found).fits[0]
    assert fit.latency_s == pytest.approx(NODE.latency_s, rel=0.15)


def test_levels_and_kinds_without_samples_stay_as_they_are() -> None:
    fitted = fit_levels(samples(shapes=[(8, 1)], kinds=[CollectiveKind.ALL_REDUCE]), LEVELS)
    assert [fit.name for fit in fitted.fits] == ["node"]
    assert fitted.levels[1] == NETWORK
    kept = fitted.levels[0].efficiency[CollectiveKind.ALL_TO_ALL]
    assert kept == NODE.efficiency[CollectiveKind.ALL_TO_ALL]


def test_a_level_that_was_not_measured_is_no_faster_than_the_one_inside_it() -> None:
    leaf = dataclasses.replace(NETWORK, name="leaf", num_devices=32)
    spine = dataclasses.replace(NETWORK, name="spine")
    slow = dataclasses.replace(leaf, bandwidth_bytes_per_s=1e10)
    found = samples((NODE, slow, spine), [(1, 4, 1), (8, 4, 1)])
    fitted = fit_levels(found, (NODE, leaf, spine))
    inner, outer = (rates(level) for level in fitted.levels[1:])
    assert all(outer[kind] <= inner[kind] for kind in KINDS)
    assert outer[CollectiveKind.ALL_GATHER] == pytest.approx(
        rates(slow)[CollectiveKind.ALL_GATHER], rel=0.02
    )
    assert fitted.notes[-1].startswith("spine was not measured: it is taken to be no faster")


def test_sends_in_a_chain_alone_are_no_faster_than_they_were_measured() -> None:
    """What a chain loses beside a single send cannot be told from them."""
    described = dataclasses.replace(NETWORK, chain_share=0.5)
    kinds = [CollectiveKind.SEND_RECV]
    found = samples((NODE, NETWORK), [(1, 4), (8, 4)], kinds)
    level = fit_levels(found, (NODE, described)).levels[1]
    assert level.chain_share == 1.0
    rate = level.bandwidth_bytes_per_s * level.efficiency[CollectiveKind.SEND_RECV]
    true = NETWORK.bandwidth_bytes_per_s * NETWORK.efficiency[CollectiveKind.SEND_RECV]
    assert rate == pytest.approx(true, rel=0.05)


def test_what_hosts_spend_inside_is_said_to_count_as_the_networks() -> None:
    fitted = fit_hosts(samples(shapes=[(8, 4)]))
    assert [fit.name for fit in fitted.fits] == ["network"]
    assert "No sample stays inside one host" in fitted.notes[0]


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ([], "no samples"),
        ([2**20], "1 sizes are too few"),
        ([2**20, 2**21, 2**22], "sizes range from 1048576 to 4194304 bytes only"),
        ([1, 2, 4, 8, 16], "spends most of its time elsewhere"),
    ],
)
def test_too_few_samples_say_what_to_measure(sizes: list[int], words: str) -> None:
    with pytest.raises(ProfileError, match=words) as caught:
        fit_hosts(samples(shapes=[(2, 1), (8, 1)], sizes=sizes))
    assert "at least 4 samples of 3 sizes" in caught.value.fix


def test_what_is_asked_for_is_enough() -> None:
    kinds = [CollectiveKind.ALL_REDUCE]
    few = samples(shapes=[(8, 1)], kinds=kinds, sizes=[2**20, 2**24, 2**27])
    with pytest.raises(ProfileError, match=r"3 samples of 3 sizes .* at least 4 samples of 3"):
        fit_levels(few, LEVELS)
    more = samples(shapes=[(8, 1)], kinds=kinds, sizes=[2**28])
    assert fit_levels((*few, *more), LEVELS).fits


def test_a_kind_whose_bandwidth_is_not_told_is_left_out() -> None:
    small = samples(shapes=[(8, 1)], kinds=[CollectiveKind.ALL_TO_ALL], sizes=[64, 128, 256])
    found = (*samples(shapes=[(8, 1)], kinds=[CollectiveKind.ALL_REDUCE]), *small)
    fitted = fit_levels(found, LEVELS)
    assert set(fitted.fits[0].efficiency) == {CollectiveKind.ALL_REDUCE}
    assert "all_to_all" in fitted.notes[0]
    assert "up to 256 bytes" in fitted.notes[0]


def test_an_all_reduce_that_the_switch_sums_tells_nothing_of_rings() -> None:
    node = dataclasses.replace(NODE, reduction_efficiency=0.8)
    found = samples((node, NETWORK), [(8, 1)], [CollectiveKind.ALL_REDUCE])
    fitted = fit_levels(found, (dataclasses.replace(node, reduction_efficiency=0.7), NETWORK))
    fit = fitted.fits[0]
    assert fit.efficiency == {}
    assert fit.measured_kinds == (CollectiveKind.ALL_REDUCE,)
    assert fit.reduction_efficiency == pytest.approx(0.8, rel=0.02)
    assert fitted.notes == ()


def test_a_faster_machine_than_described_is_refused() -> None:
    slow = dataclasses.replace(NODE, bandwidth_bytes_per_s=1e11)
    with pytest.raises(ProfileError, match=r"more than 1\.5 times"):
        fit_levels(samples(shapes=[(8, 1)]), (slow, NETWORK))
