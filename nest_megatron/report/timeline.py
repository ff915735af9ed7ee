"""The schedule timeline of a plan: a trace file for Perfetto, and a picture.

The picture needs matplotlib (the ``report`` extra); the trace and the HTML report need nothing.
"""

from __future__ import annotations

import io
import json
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from nest_megatron.errors import UserInputError
from nest_megatron.files import MARK, write_bytes
from nest_megatron.packages import install_command
from nest_megatron.parallel.plan import ParallelPlan
from nest_megatron.profile.lookup import LayerTimes
from nest_megatron.report.palette import (
    PICTURE_STYLE,
    backward_colour,
    forward_colour,
    ink_on,
    picture_metadata,
)
from nest_megatron.report.schedule_view import (
    ScheduleView,
    Span,
    SpanKind,
    Window,
    schedule_view,
    windows,
)
from nest_megatron.units import format_seconds

#: Formats that ``draw_timeline`` writes, by suffix.
SUFFIXES = (".png", ".svg")
#: Colours of what belongs to no chunk.
EDGE_COLOURS = {
    SpanKind.HEAD: "#b79bdc",
    SpanKind.TAIL: "#7d57b2",
    SpanKind.OPTIMIZER: "#c98a00",
    SpanKind.OTHER: "#858b95",
}
#: What the background of a picture means.
WAITING = "waiting"
_IDLE = "#eceef1"


def span_colour(span: Span, num_virtual: int) -> str:
    """Colour of a span in every picture."""
    if span.kind is SpanKind.FORWARD:
        return forward_colour(span.virtual, num_virtual)
    if span.kind is SpanKind.BACKWARD:
        return backward_colour(span.virtual, num_virtual)
    return EDGE_COLOURS[span.kind]


def chrome_trace(plan: ParallelPlan, times: LayerTimes | None = None) -> str:
    """The schedule in Chrome's trace-event format: open it in ui.perfetto.dev or chrome://tracing.

    One row for each pipeline rank. Virtual stages are named by letters, because Perfetto colours a
    slice by its name without digits.
    """
    view = schedule_view(plan, times)
    events = [*_row_names(plan), *_trace_events(plan, view)]
    described = {
        "generator": MARK,
        "model": plan.model.name,
        "cluster": plan.cluster.describe(),
        "iteration_time_s": view.iteration_time_s,
        "plan_checksum": plan.provenance.checksum,
    }
    whole = {"displayTimeUnit": "ms", "otherData": described, "traceEvents": events}
    return json.dumps(whole, separators=(",", ":"), allow_nan=False)


def draw_timeline(plan: ParallelPlan, path: Path, times: LayerTimes | None = None) -> None:
    """Draw the schedule: pipeline ranks over time, a long one as its beginning, middle and end.

    Args:
        path: a ``.png`` or ``.svg`` file.
        times: the measured layer times that the plan was made with.

    Raises:
        UserInputError: for another suffix, a file that cannot be written, or without matplotlib.
    """
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise UserInputError(
            "timeline",
            value=str(path),
            limit=f"a picture is one of {', '.join(SUFFIXES)}",
            fix="Give the file one of these suffixes.",
        )
    picture = _rendered(plan, schedule_view(plan, times), suffix[1:])
    write_bytes(path, picture)


def _row_names(plan: ParallelPlan) -> Iterator[dict[str, Any]]:
    title = f"{plan.model.name} on {plan.cluster.name}, predicted"
    yield {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": title}}
    for rank, gpus in enumerate(plan.placement.stage_ranks):
        name = f"pipeline rank {rank} (GPUs from {gpus[0]})"
        yield {"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": {"name": name}}
        order = {"sort_index": rank}
        yield {"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": rank, "args": order}


def _trace_events(plan: ParallelPlan, view: ScheduleView) -> Iterator[dict[str, Any]]:
    for rank, spans in enumerate(view.ranks):
        for span in spans:
            event: dict[str, Any] = {
                "ph": "X",
                "name": span.kind.value,
                "cat": "edge" if span.chunk < 0 else span.kind.value,
                "pid": 0,
                "tid": rank,
                "ts": round(span.start * 1e6, 6),
                "dur": round((span.end - span.start) * 1e6, 6),
            }
            if span.chunk >= 0:
                event["name"] = f"{span.kind.value} {_letter(span.virtual)}"
                event["args"] = {
                    "micro batch": span.microbatch,
                    "chunk": span.chunk,
                    "layers": plan.predicted.stages[rank].layers[span.virtual],
                }
            yield event


def _letter(number: int) -> str:
    """``A`` to ``Z``, then ``AA``, ``AB``..."""
    rest, last = divmod(number, 26)
    return (_letter(rest - 1) if rest else "") + chr(ord("A") + last)


def _rendered(plan: ParallelPlan, view: ScheduleView, suffix: str) -> bytes:
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserInputError(
            "timeline",
            value=f".{suffix}",
            limit="the picture is drawn by matplotlib, which is not installed",
            fix=f"{install_command('report')}, or write a trace (.json) instead.",
        ) from error
    shown, ranks = windows(view), len(view.ranks)
    with matplotlib.rc_context(PICTURE_STYLE):
        height = 1.75 + max(0.5, min(0.34 * ranks, 5.0 + 0.05 * ranks))
        figure = Figure(figsize=(13.0, height), dpi=110, layout="constrained")
        lengths = [window.length for window in shown]
        rows = figure.subplots(1, len(shown), sharey=True, squeeze=False, width_ratios=lengths)
        for axes, window in zip(rows[0], shown, strict=True):
            _draw_window(axes, view, window, share=window.length / sum(lengths))
        _label(figure, rows[0], plan, view)
        stream = io.BytesIO()
        figure.savefig(stream, format=suffix, metadata=picture_metadata(suffix))
    return stream.getvalue()


def _draw_window(axes: Any, view: ScheduleView, window: Window, share: float) -> None:
    """Draw one window on its own axes; its times in milliseconds."""
    ranks = len(view.ranks)
    for rank, spans in enumerate(view.ranks):
        seen = [span for span in spans if span.end > window.start and span.start < window.end]
        by_colour: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for span in seen:
            colour = span_colour(span, view.num_virtual)
            by_colour[colour].append((1e3 * span.start, 1e3 * (span.end - span.start)))
        thin = 0.4 if ranks <= 16 else 0.15
        for colour, bars in by_colour.items():
            axes.broken_barh(bars, (rank - 0.42, 0.84), color=colour, ec="white", lw=thin)
        if ranks <= 16:
            _number(axes, view, window, rank, seen, 12.0 * share / window.length)
    axes.set_xlim(1e3 * window.start, 1e3 * window.end)
    axes.set_title(window.name, fontsize=9)
    axes.set_facecolor(_IDLE)
    axes.tick_params(labelsize=8)
    if share < 0.2:
        axes.locator_params(axis="x", nbins=3)


def _number(
    axes: Any, view: ScheduleView, window: Window, rank: int, spans: list[Span], scale: float
) -> None:
    """Write micro batch numbers into passes with room for them; ``scale`` is inches a second."""
    for span in spans:
        middle = (span.start + span.end) / 2
        needed = 0.07 * len(str(span.microbatch + 1)) + 0.03
        wide = (span.end - span.start) * scale > needed
        if span.microbatch >= 0 and wide and window.start < middle < window.end:
            ink = ink_on(span_colour(span, view.num_virtual))
            place = {"ha": "center", "va": "center", "fontsize": 6.5, "clip_on": True}
            axes.text(1e3 * middle, rank, str(span.microbatch + 1), color=ink, **place)


def _label(figure: Any, axes: Any, plan: ParallelPlan, view: ScheduleView) -> None:
    from matplotlib.patches import Patch

    ranks = len(view.ranks)
    axes[0].set_ylim(ranks - 0.5, -0.5)
    axes[0].set_yticks(range(0, ranks, max(1, ranks // 16)))
    axes[0].set_ylabel("pipeline rank", fontsize=9)
    for left, right in pairwise(axes):
        left.spines["right"].set_linestyle((0, (2, 3)))
        right.spines["left"].set_visible(False)
        right.tick_params(axis="y", left=False)
    axes[len(axes) // 2].set_xlabel("milliseconds from the start of the step", fontsize=9)
    virtual = f", {view.num_virtual} chunks a rank" if view.num_virtual > 1 else ""
    figure.suptitle(
        f"{plan.model.name} on {plan.cluster.describe()}: "
        f"{format_seconds(view.iteration_time_s)} a step, "
        f"{view.num_microbatches} micro batches{virtual}",
        fontsize=11,
    )
    patches = [Patch(color=colour, label=name) for name, colour in legend(view)]
    columns = len(patches) if len(patches) <= 7 else -(-len(patches) // 2)
    place = {"loc": "outside lower center", "ncols": columns, "fontsize": 8, "frameon": False}
    figure.legend(handles=patches, **place)


def legend(view: ScheduleView) -> list[tuple[str, str]]:
    """Names and colours of what a picture shows."""
    kinds = {span.kind for spans in view.ranks for span in spans}
    last = view.num_virtual - 1
    named: list[tuple[str, str]] = []
    for kind in SpanKind:
        if kind not in kinds:
            continue
        if kind in EDGE_COLOURS:
            named.append((kind.value, EDGE_COLOURS[kind]))
            continue
        for virtual in sorted({0, last}):
            chunk = f", chunk {virtual + 1} of {last + 1}" if last else ""
            colour = span_colour(Span(kind, 0.0, 0.0, 0, virtual, 0), view.num_virtual)
            named.append((f"{kind.value}{chunk}", colour))
    return [*named, (WAITING, _IDLE)]
