"""The page on accuracy, from the stored part of the published rows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from nest_megatron.validation.rows import RowKind
from tests.architecture.imports import ROOT
from tests.published.sets import judged
from tools.accuracy.named_sets import SETS, Measure
from tools.accuracy.page import NOT_EXPLAINED, NOTES, Notes, page, read_notes
from tools.accuracy.pictures import ticks

DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def text() -> str:
    notes = Notes(rows={"tp0657": "one | two"}, not_captured=["the weather"])
    return page(judged(), notes, ["time", "memory"], "9 of 10 are near.", "8 layouts ran.")


def sections(text: str) -> list[str]:
    return re.findall(r"^## (.*)$", text, re.MULTILINE)


def test_every_section_is_there(text: str) -> None:
    assert sections(text) == [
        "As planned, by regime",
        "Rows",
        "Sets of rows that others have predicted",
        "Predicted against measured",
        "Errors by source",
        "The worst rows",
        "What the model does not capture",
        "Layouts that experts published",
        "Runs of our own",
        "The memory margin",
        "Rows that are refused",
        "Fitted constants",
        "Link technologies",
        "Targets",
        "How columns are read",
    ]


def test_tables_are_whole(text: str) -> None:
    """Every row of a table has the cells of its head."""
    width = 0
    for line in text.splitlines():
        cells = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
        assert cells == 0 or width in (0, cells), line
        width = cells


def test_every_set_stands_beside_its_goal(text: str) -> None:
    for each in SETS:
        for goal in each.goals:
            mark = "≥" if goal.measure is Measure.SPEARMAN else "≤"
            assert re.search(rf"\| {re.escape(each.name)}.*{mark} {goal.value:g} \|", text)


def test_the_page_leads_with_plans_and_the_worst_regime(text: str) -> None:
    rows = re.findall(r"^\| (\w+) \| \d+ of \d+ \| \*\*([\d.]+)\*\*", text, re.MULTILINE)
    first = rows[: [name for name, _ in rows].index("all")]
    errors = [float(error) for _, error in first]
    assert errors == sorted(errors, reverse=True)
    assert {"dense", "moe", "fp8"} <= {name for name, _ in first}
    for goal in ("dense", "experts", "all"):
        assert f"| error of time, {goal}, % |" in text
    assert "clusters left out of the fit" in text
    assert "`pairs_in_order_pct`" in text


def missed(text: str) -> dict[str, str]:
    """What follows each missed goal, by its name in the table."""
    table, _, rest = text.partition("### Goals")[2].partition("\n## ")[0].partition("####")
    names = re.findall(r"^\| ([^|]*) \| .* \| \*\*no\*\* \|$", table, re.MULTILINE)
    parts = rest.split("####")
    assert len(parts) == len(names) > 0
    return dict(zip(names, parts, strict=True))


def test_every_missed_goal_names_the_rows_behind_it(text: str) -> None:
    for name, part in missed(text).items():
        head, *body = part.strip().splitlines()
        assert head.lower().startswith(f"{name}: ".lower())
        assert re.search(r": [\d.]+, goal [≤≥] \d", head)
        assert sum(line.startswith("| ") for line in body) >= 2, "a table with a row"


def test_reasons_for_goals_are_those_of_goals(text: str) -> None:
    """A reason by hand stands under its goal, and is for a goal that there is."""
    stored = yaml.safe_load((DOCS / NOTES).read_text(encoding="utf-8"))
    for name in stored["goals"]:
        assert f"| {name} | " in text
    found = next(iter(missed(text)))
    told = page(judged(), Notes(goals={found: "a reason\nin two lines"}), [], "", "")
    assert missed(told)[found].strip().splitlines()[2] == "a reason in two lines"


def test_worst_rows_have_their_reasons(text: str) -> None:
    assert NOT_EXPLAINED in text
    assert "one \\| two" in text or "tp0657" not in text


def test_pictures_are_linked(text: str) -> None:
    assert re.findall(r"\]\((accuracy/[a-z]*\.png)\)", text) == [
        "accuracy/time.png",
        "accuracy/memory.png",
    ]


def test_runs_of_our_own_are_named_where_there_are_some(text: str) -> None:
    assert "measured by\nus, but for [one section](#runs-of-our-own)." in text
    assert "8 layouts ran. Layout by layout: [accuracy/cpu_end_to_end.md]" in text
    without = page(judged(), Notes(), [], "", "")
    assert "measured by\nus. Written" in without
    assert "Runs of our own" not in without


def test_every_column_that_marks_a_kind_is_explained(text: str) -> None:
    for kind, words in {
        RowKind.THROUGHPUT: "model gpu n_gpus tp pp iter_time_s",
        RowKind.MEMORY_PEAK: "throughput_row peak_mem",
        RowKind.MEMORY_GOLDEN: "mem_max_allocated_gib test_case",
        RowKind.COLLECTIVES: "collective n_ranks size_bytes",
    }.items():
        part = text.partition(f"\n### {kind}\n")[2].partition("\n### ")[0]
        names = re.findall(r"^\| (.*?) \|", part, re.MULTILINE)
        known = {name for cell in names for name in re.findall(r"`(\w+)`", cell)}
        if "(all columns of throughput)" in names:
            known.add("model")
        assert known >= set(words.split())


def test_our_notes_can_be_read() -> None:
    notes = read_notes(DOCS / NOTES)
    assert notes.not_captured
    assert all(isinstance(reason, str) and reason for reason in notes.rows.values())
    stored = yaml.safe_load((DOCS / NOTES).read_text(encoding="utf-8"))
    assert stored.keys() == {"rows", "goals", "not_captured"}


def test_without_notes_nothing_is_explained(tmp_path: Path) -> None:
    assert read_notes(tmp_path / NOTES) == Notes()


@pytest.mark.parametrize(("low", "high"), [(0.8, 1.6), (3.0, 70.0), (1e-3, 1e4), (45.0, 90.0)])
def test_ticks_are_few_and_inside(low: float, high: float) -> None:
    marks = list(ticks(low, high))
    assert 2 <= len(marks) <= 4
    assert all(low <= mark <= high for mark in marks)
    assert marks == sorted(marks)
