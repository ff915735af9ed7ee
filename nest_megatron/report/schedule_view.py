"""The predicted schedule of a plan in seconds: what is drawn of it, and its trace for Perfetto."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from nest_megatron.cost_model.estimate import exposed_communication
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.pipeline import (
    Evaluation,
    PipelineProblem,
    chunk_cost,
    evaluate,
    timeline,
)
from nest_megatron.cost_model.schedule import TimedOp
from nest_megatron.cost_model.settings import restored_settings
from nest_megatron.cost_model.stage_problems import stage_problem
from nest_megatron.files import MARK
from nest_megatron.layout import plan_file
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.plain import Name, frozen
from nest_megatron.profile.lookup import LayerTimes
from nest_megatron.report.words import TERM_WORDS
from nest_megatron.units import GIB, Bytes, Seconds, to_seconds


class SpanKind(Name):
    """What a pipeline rank does for a while."""

    FORWARD = "forward"
    BACKWARD = "backward"
    PARAMETER_GATHER = "parameter gather"
    GRADIENT_REDUCTION = "gradient reduction"
    OPTIMIZER = "optimizer"
    OTHER = "outside the schedule"


class Span(NamedTuple):
    """One stretch of a pipeline rank's time.

    ``chunk`` counts along the model and ``virtual`` on the rank; both are -1, as is ``microbatch``,
    for what belongs to no chunk.
    """

    kind: SpanKind
    start: Seconds
    end: Seconds
    chunk: int = -1
    virtual: int = -1
    microbatch: int = -1


class Window(NamedTuple):
    """A part of the iteration that is drawn."""

    name: str
    start: Seconds
    end: Seconds

    @property
    def length(self) -> Seconds:
        """How long it lasts."""
        return self.end - self.start


@frozen
class ScheduleView:
    """The schedule of a plan.

    Args:
        ranks: for each pipeline rank its spans, in order of time.
        num_virtual, num_microbatches: chunks on each rank, micro batches of a step.
        exposed: for each chunk, of a pass forward and of one backward, the seconds of each term of
            communication that nothing hides.
        sent: for each chunk, the seconds that its activation travels to the next and its gradient
            to the previous one, ``sent_bytes`` each.
        saved_bytes: for each chunk, what a micro batch keeps from its pass forward to the other.
        fixed_bytes: for each rank, the rest of its peak memory.
        iteration_time_s: of this schedule. It is the plan's own prediction unless the cost model
            has changed since the plan was made.
    """

    ranks: tuple[tuple[Span, ...], ...]
    num_virtual: int
    num_microbatches: int
    exposed: tuple[tuple[Mapping[str, Seconds], Mapping[str, Seconds]], ...]
    sent: tuple[tuple[Seconds, Seconds], ...]
    sent_bytes: float
    saved_bytes: tuple[Bytes, ...]
    fixed_bytes: tuple[Bytes, ...]
    iteration_time_s: Seconds

    def communication(self, span: Span) -> Mapping[str, Seconds]:
        """What a span spends on communication that nothing hides, by term of the step."""
        if span.chunk >= 0:
            return self.exposed[span.chunk][span.kind is SpanKind.BACKWARD]
        if span.kind in (SpanKind.PARAMETER_GATHER, SpanKind.GRADIENT_REDUCTION):
            return {"dp_communication": span.end - span.start}
        return {}


def schedule_view(plan: ParallelPlan, times: LayerTimes | None = None) -> ScheduleView:
    """Simulate a plan's schedule again, under the settings and times that it was made with."""
    model = CostModel(plan.model, plan.cluster, restored_settings(plan.provenance.settings), times)
    layout, partition = plan.layout, plan.layout.partition
    problem = stage_problem(model, layout)
    evaluation = evaluate(problem, partition.boundaries)
    return ScheduleView(
        ranks=tuple(
            _spans(problem, evaluation, rank, passes)
            for rank, passes in enumerate(timeline(problem, evaluation))
        ),
        num_virtual=problem.num_virtual,
        num_microbatches=problem.num_microbatches,
        exposed=exposed_communication(model, layout, problem),
        sent=tuple(
            (to_seconds(ahead), to_seconds(back))
            for ahead, back in zip(problem.send_forward, problem.send_backward, strict=True)
        ),
        sent_bytes=model.sent_bytes(layout),
        saved_bytes=tuple(
            chunk_cost(problem, first, end).saved_bytes
            for first, end in pairwise(partition.boundaries)
        ),
        fixed_bytes=tuple(held.static + held.working for held in evaluation.memory),
        iteration_time_s=to_seconds(evaluation.iteration),
    )


def windows(view: ScheduleView) -> tuple[Window, ...]:
    """What to draw: the whole iteration, or beginning, some middle and end of a long one."""
    p, m = len(view.ranks), view.num_microbatches
    passes = [span for spans in view.ranks for span in spans if span.microbatch >= 0]
    period = (max(s.end for s in passes) - min(s.start for s in passes)) / m

    def first(spans: Sequence[Span], kind: SpanKind) -> Span:
        return next(span for span in spans if span.kind is kind)

    warm = max(first(spans, SpanKind.BACKWARD).end for spans in view.ranks) + period
    drain = min(first(spans[::-1], SpanKind.FORWARD).start for spans in view.ranks) - period
    steady = period * (p if view.num_virtual > 1 else max(3, p // 4))
    whole = view.iteration_time_s
    if drain - warm < 2 * steady:
        return (Window("whole iteration", 0.0, whole),)
    middle = (warm + drain - steady) / 2
    return (
        Window("warm-up", 0.0, warm),
        Window("steady", middle, middle + steady),
        Window("drain", drain, whole),
    )


def _spans(
    problem: PipelineProblem, evaluation: Evaluation, rank: int, passes: Sequence[TimedOp]
) -> tuple[Span, ...]:
    """Gather, passes, reduction, optimizer and the rest of one rank, as far as they take time."""
    ends = [
        end + tail for end, tail in zip(evaluation.path.ends, evaluation.reductions, strict=True)
    ]
    step = max(ends)  # every rank waits for the last one's gradients (norm, overflow check)
    after = step + max(evaluation.optimizers)
    spans = [
        (SpanKind.PARAMETER_GATHER, 0, evaluation.gathers[rank], ()),
        *(
            (
                SpanKind.FORWARD if timed.op.is_forward else SpanKind.BACKWARD,
                timed.start,
                timed.end,
                (timed.op.chunk, timed.op.chunk // problem.num_stages, timed.op.microbatch),
            )
            for timed in passes
        ),
        (SpanKind.GRADIENT_REDUCTION, evaluation.path.ends[rank], ends[rank], ()),
        (SpanKind.OPTIMIZER, step, step + evaluation.optimizers[rank], ()),
        (SpanKind.OTHER, after, after + problem.constant, ()),
    ]
    return tuple(
        Span(kind, to_seconds(start), to_seconds(end), *which)
        for kind, start, end, which in spans
        if which or end > start
    )


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
    events = [*_track_names(plan, view)]
    for rank, spans in enumerate(view.ranks):
        # a micro batch keeps its activations from the start of its pass forward to the end of the
        # other, so that the maximum of the memory is the predicted peak
        held: list[tuple[Seconds, Bytes]] = []
        in_flight: list[tuple[Seconds, Bytes]] = []
        for span in spans:
            events.append(_slice(plan, view, rank, span))
            for term, start, end in _pieces(view, span):
                name = TERM_WORDS.get(term, term) if span.chunk >= 0 else span.kind.value
                track = 1 + _TRACKS.index(term)
                events.append(_complete(name, "communication", rank, track, start, end))
                if term == _TRANSFERS:
                    in_flight += [(start, round(view.sent_bytes)), (end, -round(view.sent_bytes))]
            if span.kind is SpanKind.FORWARD:
                held.append((span.start, view.saved_bytes[span.chunk]))
            elif span.kind is SpanKind.BACKWARD:
                held.append((span.end, -view.saved_bytes[span.chunk]))
        events += _counter("memory", "GiB", rank, held, view.fixed_bytes[rank], GIB)
        if in_flight:
            name = "in flight to pipeline ranks"
            events += _counter(name, "MB", rank, in_flight, 0, 10**6)
    described = {
        "generator": MARK,
        "model": plan.model.name,
        "cluster": plan.cluster.describe(),
        "iteration_time_s": view.iteration_time_s,
        "plan_checksum": plan_file.checksum(plan),
    }
    whole = {"displayTimeUnit": "ms", "otherData": described, "traceEvents": events}
    return json.dumps(whole, separators=(",", ":"), allow_nan=False)


def _track_names(plan: ParallelPlan, view: ScheduleView) -> Iterator[_Event]:
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


def _pieces(view: ScheduleView, span: Span) -> Iterator[tuple[str, Seconds, Seconds]]:
    """What communicates in a span and after it: term, start, end."""
    exposed = view.communication(span)
    at = span.end - sum(exposed.values())
    for term, spent in exposed.items():
        if spent > 0:
            yield term, at, at + spent
        at += spent
    sent = view.sent[span.chunk][span.kind is SpanKind.BACKWARD] if span.chunk >= 0 else 0.0
    if sent and _TRANSFERS not in exposed:  # beside the rank's next work
        yield _TRANSFERS, span.end, span.end + sent


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
