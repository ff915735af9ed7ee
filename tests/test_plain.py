"""Records from plain data: numbers that no float can hold are refused where they enter."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import pytest

from nest_megatron.errors import UserInputError
from nest_megatron.plain import Source, added, from_plain, to_plain, written_as


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


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    name: str
    sizes: tuple[int, ...] = ()
    shares: Mapping[Colour, float] = dataclasses.field(default_factory=dict)
    pair: tuple[int, str] | None = None
    is_new: bool = added(False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    parts: tuple[Part, ...]
    either: int | str = 0


def whole(**part: object) -> dict[str, object]:
    return {"parts": [{"name": "a"}, {"name": "b", **part}]}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (whole(sizes=[1, "2"]), r"parts\[1\]\.sizes\[1\] = '2': it must be a whole number\."),
        (whole(sizes=[True]), r"parts\[1\]\.sizes\[0\] = True: it must be a whole number\."),
        (whole(sizes="12"), r"parts\[1\]\.sizes = '12': it must be a list\."),
        (whole(name=3), r"parts\[1\]\.name = 3: it must be text\."),
        (whole(is_new=1), r"parts\[1\]\.is_new = 1: it must be true or false\."),
        (whole(shares={"red": "x"}), r"shares\.red = 'x': it must be a number\."),
        (whole(shares={"rde": 1}), r"shares\.rde = 'rde': it must be one of red, blue\. .*red\?"),
        (whole(shares=[1]), r"shares = \[1\]: it must be a mapping"),
        (whole(pair=[1]), r"pair = \[1\]: it must be a list of 2"),
        (whole(siezs=[1]), r"parts\[1\]\.siezs = \[1\]: there is no such field\. .*sizes"),
        ({"parts": [{}]}, r"parts\[0\]\.name = None: it is missing"),
        ({"parts": [], "either": None}, r"either = None: it must be text"),
        ([], r"file = \[\]: it must be a mapping"),
    ],
)
def test_a_wrong_value_is_named_with_its_whole_place(fields: object, words: str) -> None:
    with pytest.raises(UserInputError, match=words):
        from_plain(Whole, fields)


def test_what_is_written_is_read_again_and_defaults_of_added_fields_are_not_written() -> None:
    part = Part(name="a", sizes=(1, 2), shares={Colour.RED: 0.5}, pair=(1, "x"))
    record = Whole(parts=(part, Part(name="b", is_new=True)), either="word")
    plain = to_plain(record)
    assert "is_new" not in plain["parts"][0]
    assert plain["parts"][0]["shares"] == {"red": 0.5}
    assert from_plain(Whole, plain) == record


def test_a_description_may_write_whole_numbers_as_floats() -> None:
    fields = {"name": "a", "sizes": [8e10]}
    with pytest.raises(UserInputError, match="whole number"):
        from_plain(Part, fields)
    source = Source(whole_floats=True)
    assert from_plain(Part, fields, source=source).sizes == (8 * 10**10,)
    with pytest.raises(UserInputError, match=r"part a: sizes\[0\] = 0\.5: it must be a whole"):
        from_plain(Part, {"name": "a", "sizes": [0.5]}, "part a:", source)


def test_a_file_of_another_program_may_hold_more() -> None:
    fields = {"name": "a", "colour": "red", "is_new": 1}
    assert from_plain(Part, fields, source=Source(is_foreign=True)) == Part(name="a", is_new=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Renamed:
    block: int = written_as("piece")


def test_a_renamed_field_keeps_its_name_in_files() -> None:
    assert to_plain(Renamed(block=3)) == {"piece": 3}
    assert from_plain(Renamed, {"piece": 3}) == Renamed(block=3)
    with pytest.raises(UserInputError, match=r"block = 3: there is no such field\. .*piece"):
        from_plain(Renamed, {"block": 3})
    with pytest.raises(UserInputError, match=r"piece = 'x': it must be a whole number"):
        from_plain(Renamed, {"piece": "x"})
