"""A short run of the fuzzer, and Hypothesis on each reader; ``python -m tests.fuzz`` is longer."""

from __future__ import annotations

import contextlib
import json
import os
import signal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nest_megatron.errors import NestError
from tests.cli.runs import ROOT
from tests.fuzz.__main__ import Counts, fuzz, run_block
from tests.fuzz.readers import READERS, Reader

FAST = tuple(reader for reader in READERS if reader.name != "whole program")
NAMES = [reader.name for reader in FAST]
TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=10), inner),
    max_leaves=20,
)


def test_a_short_run_finds_no_fault() -> None:
    found = fuzz(READERS, 3_000, seed=1)
    assert {name: counts.faults for name, counts in found.items() if counts.faults} == {}
    assert sum(counts.cases for counts in found.values()) >= 2_990


@pytest.mark.parametrize("reader", FAST, ids=NAMES)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(text=st.text(max_size=300) | TREES.map(json.dumps))
def test_any_text_is_read_or_refused(reader: Reader, text: str) -> None:
    with contextlib.suppress(NestError):
        reader.read(text)


def test_what_the_runner_calls_a_fault() -> None:
    def crash(text: str) -> object:
        if text.endswith("7"):
            os.kill(os.getpid(), signal.SIGKILL)
        raise ZeroDivisionError

    class Numbered(Reader):
        def case(self, random: object, seeds: tuple[str, ...]) -> str:
            return str(next(numbers))

    numbers = iter(range(100))
    reader = Numbered(name="x", read=crash, seeds=lambda: ("",))
    found = run_block(reader, ("",), range(3), seed=0)
    assert [number for number, _ in found.faults] == [0, 1, 2]
    assert "ZeroDivisionError" in found.faults[0][1]
    assert found.cases == 3
    dying = Reader(name="x", read=lambda _: crash("7"), seeds=lambda: ("",))
    found = run_block(dying, ("",), range(2), seed=0)
    assert [number for number, _ in found.faults] == [0, 1]
    assert "status" in found.faults[0][1]
    assert (Counts(accepted=1) + Counts(refused=2)).cases == 3


def test_a_pinned_plan_without_its_pin_is_refused() -> None:
    (reader,) = (reader for reader in READERS if reader.name == "pinned plan")
    with pytest.raises(NestError, match="pin"):
        reader.read(reader.seeds()[0].replace("\npin:", "\nping:", 1))


def test_the_page_has_a_row_for_every_reader() -> None:
    """Written by ``python -m tests.fuzz --write``; a new reader needs a new page."""
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    section = page.partition("<!-- readers: begin -->")[2].partition("<!-- readers: end -->")[0]
    rows = [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("| ")]
    assert rows[1:] == [reader.name for reader in READERS]
    assert ", 0 faults" in section
