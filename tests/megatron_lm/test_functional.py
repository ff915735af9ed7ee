"""Every functional test that trains of a Megatron-LM checkout: what we write, Megatron accepts.

Set ``MEGATRON_LM_HOME`` to a checkout (core_v0.16.1 or main at 0.20); one minute to plan them all,
nothing freed, and half of one to ask. ``benchmarks/functional_tests.py`` writes the counts into
``docs/functional_tests.md``.
"""

from __future__ import annotations

import pytest

from tests.megatron_lm.functional import DECODERS, FAMILIES, Survey, home, survey

pytestmark = [
    pytest.mark.megatron_lm,
    pytest.mark.skipif(not home(), reason="MEGATRON_LM_HOME is not set to a Megatron-LM checkout"),
]


@pytest.fixture(scope="module")
def surveyed() -> Survey:
    checkout = home()
    assert checkout is not None
    return survey(checkout)


@pytest.mark.parametrize(("families", "least"), [(DECODERS, 0.95), (FAMILIES, 0.9)])
def test_nearly_all_are_planned_and_accepted(
    surveyed: Survey, families: tuple[str, ...], least: float
) -> None:
    possible = surveyed.possible(families)
    assert len(surveyed.accepted.intersection(possible)) >= least * len(possible)


def test_megatron_accepts_what_it_accepts_without_us(surveyed: Survey) -> None:
    broken = {
        name: said
        for name, said in surveyed.refused.items()
        if name not in surveyed.refused_as_they_stand
    }
    assert broken == {}


def test_what_was_typed_is_there(surveyed: Survey) -> None:
    assert surveyed.faults == {}
