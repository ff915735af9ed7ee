"""The solver's clock at its edges, and numbers with units."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nest_megatron.config.catalogue import named_cluster
from nest_megatron.errors import ProfileError, UserInputError
from nest_megatron.units import (
    MAX_SECONDS,
    dimension_of,
    is_quantity,
    read_quantity,
    to_seconds,
    to_ticks,
)
from tests.cli.runs import run

SI = {"k": 3, "M": 6, "G": 9, "T": 12, "P": 15}
IEC = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50}
FIELDS = (
    *("bandwidth_bytes_per_s", "peak_flops_per_s", "memory_bytes", "latency_s", "max_seconds"),
    *("gpu_watts", "mtbf_hours", "seq_length"),
)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1e-9, 2 * MAX_SECONDS])
def test_a_time_that_is_no_time_is_refused(bad: float) -> None:
    with pytest.raises(ProfileError, match="layer 3 forward"):
        to_ticks(bad, what="layer 3 forward")


def test_ticks_are_picoseconds() -> None:
    assert to_ticks(1e-12) == 1
    assert to_ticks(0.0) == 0
    assert to_seconds(to_ticks(26.634)) == 26.634


@given(st.integers(0, 10**6), st.sampled_from(sorted(SI)), st.sampled_from(sorted(IEC)))
def test_prefixes_are_exact(number: int, decimal: str, binary: str) -> None:
    size, rate = "memory_bytes", "bandwidth_bytes_per_s"
    assert read_quantity(f"{number}{decimal}B", size) == number * 10 ** SI[decimal]
    assert read_quantity(f"{number} {binary}B", size) == number * 2 ** IEC[binary]
    assert read_quantity(f"{number}{decimal}", "seq_length") == number * 10 ** SI[decimal]
    assert read_quantity(f"{number}{binary}", "seq_length") == number * 2 ** IEC[binary]
    for bits in ("b/s", "bit/s", "bps"):
        found = read_quantity(f"{8 * number}{decimal}{bits}", rate)
        assert found == read_quantity(f"{number}{decimal}B/s", rate) == number * 10 ** SI[decimal]


@given(
    st.decimals(0, 10**6, places=4),
    st.sampled_from([("ns", -9), ("us", -6), ("\N{MICRO SIGN}s", -6), ("ms", -3), ("s", 0)]),
)
def test_a_time_is_the_float_nearest_to_what_is_written(
    number: object, unit: tuple[str, int]
) -> None:
    name, power = unit
    exact = Fraction(str(number)) * Fraction(10) ** power
    assert read_quantity(f"{number:f}{name}", "latency_s") == float(exact)


@given(st.sampled_from(FIELDS), st.sampled_from(FIELDS))
def test_a_unit_of_something_else_is_refused(field: str, other: str) -> None:
    units = dimension_of(field).units
    for unit in dimension_of(other).units.keys() - units:
        with pytest.raises(UserInputError, match=r"is not a unit of it.*for example") as refused:
            read_quantity(f"1{unit}", field, "it")
        assert (refused.value.what, refused.value.value) == ("it", f"1{unit}")


@given(st.text(max_size=50))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        read_quantity(text, "memory_bytes")
    except UserInputError:
        return
    assert is_quantity(text)


@pytest.mark.parametrize(
    "text", ["1e999GB", "80", "GB", "80gb", "80KB", "1e5", "fp8", "1" * 50 + "B"]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UserInputError, match="80GB, or 141GiB"):
        read_quantity(text, "memory_bytes")


@pytest.mark.parametrize("number", ["3e-05", "5e10", "4.5E11", "100GB/s"])
def test_numbers_of_a_cluster_are_written_as_people_do(number: str, tmp_path: Path) -> None:
    """YAML 1.1 takes one with an exponent and without a point for a text."""
    path = tmp_path / "mine.yaml"
    name = "bandwidth_bytes_per_s" if number != "3e-05" else "latency_s"
    assert run("cluster", "new", "--out", str(path)).code == 0
    text = re.sub(rf"(?m)^( +{name}): \S+", rf"\1: {number}", path.read_text(), count=1)
    path.write_text(text)
    level = named_cluster(str(path)).levels[0]
    assert getattr(level, name) == (1e11 if number == "100GB/s" else float(number))
    path.write_text(text.replace(f": {number}", ": fast"))
    with pytest.raises(UserInputError, match="it must be a number"):
        named_cluster(str(path))


def test_hours_and_watts() -> None:
    assert read_quantity("2d", "mtbf_hours") == 48
    assert read_quantity("1.2kW", "gpu_watts") == 1200
    assert read_quantity("15T", "tokens") == read_quantity("15000B", "tokens") == 15 * 10**12
