"""The fitted constants that ship, and what speaks for each."""

from __future__ import annotations

import pytest

from nest_megatron.catalogue_files import catalogue_entry
from tools.calibration.parameters import _NOT_FITTED, AT_PRIOR, CONSTANTS, PARAMETERS, Parameter

ENTRIES = {
    **catalogue_entry("calibration", "devices"),
    **catalogue_entry("calibration", "frameworks"),
}


#: Which a named set of runs needs (``tests/published``).
OF_MEGATRONS_PAPERS = "ampere.memory_efficiency"


@pytest.mark.parametrize("parameter", PARAMETERS, ids=lambda each: each.key)
def test_a_fit_without_a_constant_loses_a_tenth_of_a_point(parameter: Parameter) -> None:
    entry = ENTRIES[parameter.owner]
    assert entry["acts_on"][parameter.name] > 0
    assert entry["loses_pct"][parameter.name] >= (
        0.05 if parameter.key == OF_MEGATRONS_PAPERS else 0.1
    )
    assert parameter.low <= entry["values"][parameter.name] <= parameter.high


def test_the_others_stay_where_separate_measurements_put_them() -> None:
    assert {p.key for p in PARAMETERS}.isdisjoint(AT_PRIOR)
    assert AT_PRIOR.keys() == _NOT_FITTED
    for parameter in CONSTANTS:
        if parameter.key in AT_PRIOR:
            assert ENTRIES[parameter.owner]["values"][parameter.name] == parameter.prior
            assert parameter.name not in ENTRIES[parameter.owner]["loses_pct"]
