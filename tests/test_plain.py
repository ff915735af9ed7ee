"""Records from plain data: numbers that no float can hold are refused where they enter."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from nest_megatron.errors import UserInputError
from nest_megatron.plain import from_plain


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    count: int
    seconds: float


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("name", ["count", "seconds"])
def test_an_integer_beyond_floats_is_refused_by_its_name(name: str, sign: int) -> None:
    fields: dict[str, object] = {"count": 1, "seconds": 1.0, name: sign * 10**400}
    with pytest.raises(UserInputError, match=rf"{name} = .*finite number"):
        from_plain(Sizes, fields)


def test_large_counts_are_kept() -> None:
    assert from_plain(Sizes, {"count": 2**61, "seconds": 3}) == Sizes(count=2**61, seconds=3.0)
