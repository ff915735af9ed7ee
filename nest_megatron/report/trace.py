"""The predicted schedule of a plan as a trace file for Perfetto."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from nest_megatron.files import MARK
from nest_megatron.layout import plan_file
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.profile.lookup import LayerTimes
from nest_megatron.report.schedule_view import ScheduleView, Span, SpanKind, schedule_view
from nest_megatron.report.words import TERM_WORDS
from nest_megatron.units import GIB, Bytes, Seconds

_TRANSFERS = "pp_communication"
#: Tracks of a pipeline rank under its passes, one for each kind of communication.
_TRACKS = (
    "tp_communication",
    "cp_communication",
    "ep_communication",
    "dp_communication",
    _TRANSFERS,
)
_Event = dict[str, Any]


def chrome_trace(plan: ParallelPlan, times: LayerTimes | None = None) -> str:
    """The schedule in Chrome's trace-event format: open it in ui.perfetto.dev or chrome://tracing.

    A process for each pipeline rank: its passes, a track for each kind of communication, and
    counters of its memory and of the bytes that it is sending to other pipeline ranks. Collectives
    are drawn where nothing hides them, at the end of their pass. Virtual stages are named by
    letters, because Perfetto colours a slice by its name without digits.
    """
    view = schedule_view(plan, times)
    events = [*_names(plan, view)]
    for rank, spans in enumerate(view.ranks):
        for span in spans:
            events.append(_slice(plan, view, rank, span))
            events += _communication(view, rank, span)
        events += _memory(view, rank)
        events += _in_flight(view, rank)
    described = {
        "generator": MARK,
        "model": plan.model.name,
        "cluster": plan.cluster.describe(),
        "iteration_time_s": view.iteration_time_s,
        "plan_checksum": plan_file.checksum(plan),
    }
    whole = {"displayTimeUnit": "ms", "otherData": described, "traceEvents": events}
    return json.dumps(whole, separators=(",", ":"), allow_nan=False)


def _names(plan: ParallelPlan, view: ScheduleView) -> Iterator[_Event]:
    """Names and order of processes and tracks; a kind of communication that never runs has none."""
    for rank, gpus in enumerate(plan.placement.stage_ranks):
        about = f"pipeline rank {rank} (GPUs from {gpus[0]}), predicted"
        yield _meta("process_name", rank, 0, name=about)
        yield _meta("process_sort_index", rank, 0, sort_index=rank)
        yield _meta("thread_name", rank, 0, name="passes")
        used = {name for span in view.ranks[rank] for name, _, _ in _pieces(view, span)}
        for track, term in enumerate(_TRACKS, start=1):
            if term in used:
                yield _meta("thread_name", rank, track, name=TERM_WORDS.get(term, term))
                yield _meta("thread_sort_index", rank, track, sort_index=track)


def _meta(what: str, pid: int, tid: int, /, **about: object) -> _Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": about}


def _slice(plan: ParallelPlan, view: ScheduleView, rank: int, span: Span) -> _Event:
    category = "edge" if span.chunk < 0 else span.kind.value
    event = _complete(span.kind.value, category, rank, 0, span.start, span.end)
    if span.chunk >= 0:
        event["name"] = f"{span.kind.value} {_letter(span.virtual)}"
        layers = plan.predicted.stages[rank].layers[span.virtual]
        event["args"] = {"micro batch": span.microbatch, "chunk": span.chunk, "layers": layers}
    return event


def _communication(view: ScheduleView, rank: int, span: Span) -> Iterator[_Event]:
    for term, start, end in _pieces(view, span):
        name = TERM_WORDS.get(term, term) if span.chunk >= 0 else span.kind.value
        track = 1 + _TRACKS.index(term)
        yield _complete(name, "communication", rank, track, start, end)


def _pieces(view: ScheduleView, span: Span) -> Iterator[tuple[str, Seconds, Seconds]]:
    """What communicates in a span and after it: term, start, end."""
    exposed = view.communication(span)
    at = span.end - sum(exposed.values())
    for term, spent in exposed.items():
        if spent > 0:
            yield term, at, at + spent
        at += spent
    if _TRANSFERS not in exposed and (spent := _sent(view, span)):  # beside the rank's next work
        yield _TRANSFERS, span.end, span.end + spent


def _sent(view: ScheduleView, span: Span) -> Seconds:
    """How long the result of a pass travels."""
    return view.sent[span.chunk][span.kind is SpanKind.BACKWARD] if span.chunk >= 0 else 0.0


def _memory(view: ScheduleView, rank: int) -> Iterator[_Event]:
    """Memory over time, whose maximum is the predicted peak.

    A micro batch keeps its activations from the start of its pass forward to the end of the other.
    """
    changes = []
    for span in view.ranks[rank]:
        if span.kind is SpanKind.FORWARD:
            changes.append((span.start, view.saved_bytes[span.chunk]))
        elif span.kind is SpanKind.BACKWARD:
            changes.append((span.end, -view.saved_bytes[span.chunk]))
    yield from _counter("memory", "GiB", rank, changes, view.fixed_bytes[rank], GIB)


def _in_flight(view: ScheduleView, rank: int) -> Iterator[_Event]:
    size, changes = round(view.sent_bytes), []
    for span in view.ranks[rank]:
        for term, start, end in _pieces(view, span):
            if term == _TRANSFERS:
                changes += [(start, size), (end, -size)]
    if changes:
        yield from _counter("in flight to pipeline ranks", "MB", rank, changes, 0, 10**6)


def _counter(
    name: str,
    unit: str,
    rank: int,
    changes: Iterable[tuple[Seconds, Bytes]],
    level: Bytes,
    scale: int,
) -> Iterator[_Event]:
    """A counter from its changes; those of one moment are one."""
    total: defaultdict[Seconds, Bytes] = defaultdict(int, {0.0: level})
    for time, change in changes:
        total[time] += change
    level = 0
    for time, change in sorted(total.items()):
        level += change
        value = {unit: round(level / scale, 6)}
        yield {"ph": "C", "name": name, "pid": rank, "tid": 0, "ts": _us(time), "args": value}


def _complete(name: str, category: str, pid: int, tid: int, start: Seconds, end: Seconds) -> _Event:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": pid,
        "tid": tid,
        "ts": _us(start),
        "dur": _us(end - start),
    }


def _us(seconds: Seconds) -> float:
    return round(seconds * 1e6, 6)


def _letter(number: int) -> str:
    """``A`` to ``Z``, then ``AA``, ``AB``..."""
    rest, last = divmod(number, 26)
    return (_letter(rest - 1) if rest else "") + chr(ord("A") + last)
