"""The trace file is complete, and the pictures can be drawn."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from nest_megatron.errors import UserInputError
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.report.schedule_view import chrome_trace, schedule_view
from nest_megatron.report.timeline import draw_timeline
from nest_megatron.units import GIB
from tests.report.plans import SHAPES, hand_plan

SIGNATURES = {".png": b"\x89PNG\r\n\x1a\n", ".svg": b"<?xml"}


def events_of(plan: ParallelPlan) -> list[dict[str, Any]]:
    """What the trace shows of each rank's own schedule."""
    return [e for e in trace_of(plan) if e["ph"] == "X" and e["tid"] == 0]


def trace_of(plan: ParallelPlan) -> list[dict[str, Any]]:
    """All events of the trace."""
    events: list[dict[str, Any]] = json.loads(chrome_trace(plan))["traceEvents"]
    return events


@pytest.mark.parametrize("shape", SHAPES)
def test_trace_holds_every_pass_once(shape: str) -> None:
    plan = SHAPES[shape]()
    grid, chunks = plan.layout, plan.layout.partition.num_chunks
    passes = [event for event in events_of(plan) if event["cat"] in ("forward", "backward")]
    assert len(passes) == 2 * grid.num_microbatches * chunks
    seen = Counter((e["cat"], e["args"]["chunk"], e["args"]["micro batch"]) for e in passes)
    assert set(seen.values()) == {1}
    pp = grid.dims.pipeline_model_parallel_size
    assert all(event["pid"] == event["args"]["chunk"] % pp for event in passes)


def test_trace_rows_do_not_overlap_and_end_with_the_step() -> None:
    plan = hand_plan(8, 4)
    rows = defaultdict(list)
    for event in events_of(plan):
        rows[event["pid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert len(rows) == 8
    for spans in rows.values():
        assert all(before[1] <= after[0] + 1e-5 for before, after in pairwise(sorted(spans)))
    last = max(end for spans in rows.values() for _, end in spans)
    assert last == pytest.approx(plan.predicted.iteration_time_s * 1e6)


def test_chunks_differ_in_more_than_digits() -> None:
    """Perfetto colours a slice by its name without digits."""
    names = {event["name"] for event in events_of(hand_plan(8, 4)) if event["cat"] == "forward"}
    assert names == {"forward A", "forward B", "forward C", "forward D"}
    assert not any(character.isdigit() for name in names for character in name)


def test_ranks_and_tracks_are_named() -> None:
    events = trace_of(hand_plan(4))
    ranks = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(ranks) == [0, 1, 2, 3]
    assert ranks[1].startswith("pipeline rank 1 ")
    tracks = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert tracks == {"passes", "tensor parallel", "pipeline transfers"}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_counter_of_memory_reaches_the_predicted_peak(shape: str) -> None:
    """And ends where it began: what a micro batch kept is free after its backward pass."""
    plan = SHAPES[shape]()
    fixed, counted = schedule_view(plan).fixed_bytes, defaultdict(list)
    for event in trace_of(plan):
        if event["ph"] == "C" and event["name"] == "memory":
            counted[event["pid"]].append(event["args"]["GiB"])
    for rank, stage in enumerate(plan.predicted.stages):
        peak = sum(stage.memory_bytes.values()) / GIB
        assert max(counted[rank]) == pytest.approx(peak, rel=1e-5)
        assert counted[rank][-1] == pytest.approx(fixed[rank] / GIB)


def test_bytes_in_flight_are_those_of_the_transfers() -> None:
    plan = hand_plan(8, 4)
    view, events = schedule_view(plan), trace_of(plan)
    sent = [e for e in events if e["ph"] == "X" and e["name"] == "pipeline transfers"]
    assert len(sent) == 2 * view.num_microbatches * (8 * 4 - 1)
    counted = [e["args"]["MB"] for e in events if e["name"].startswith("in flight")]
    assert min(counted) == 0.0
    assert max(counted) >= view.sent_bytes / 1e6 > 0


@pytest.mark.parametrize("shape", SHAPES)
def test_a_track_of_communication_has_what_the_page_calls_exposed(shape: str) -> None:
    plan = SHAPES[shape]()
    view, drawn = schedule_view(plan), defaultdict(float)
    for event in trace_of(plan):
        if event["ph"] == "X" and event["name"] == "tensor parallel":
            drawn[event["pid"]] += event["dur"] / 1e6
    for rank, spans in enumerate(view.ranks):
        exposed = sum(view.communication(span).get("tp_communication", 0.0) for span in spans)
        assert drawn[rank] == pytest.approx(exposed, abs=1e-6)


@pytest.mark.parametrize("suffix", SIGNATURES)
@pytest.mark.parametrize("shape", SHAPES)
def test_pictures_are_drawn(shape: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"timeline{suffix}"
    draw_timeline(SHAPES[shape](), path)
    assert path.read_bytes().startswith(SIGNATURES[suffix])


def test_a_picture_is_the_same_twice(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        draw_timeline(hand_plan(4), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_dollar_signs_in_a_name_are_no_formula(tmp_path: Path) -> None:
    plan = hand_plan(4)
    spec = dataclasses.replace(plan.model, name=r"$\frac$")
    draw_timeline(dataclasses.replace(plan, model=spec), tmp_path / "a.png")


def test_other_suffixes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match=r"\.png, \.svg"):
        draw_timeline(hand_plan(4), tmp_path / "timeline.gif")


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match="nowhere"):
        draw_timeline(hand_plan(4), tmp_path / "nowhere" / "timeline.png")


def test_without_matplotlib_the_fix_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserInputError, match=r"nest-megatron\[pictures\]"):
        draw_timeline(hand_plan(4), tmp_path / "timeline.png")
