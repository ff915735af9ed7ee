"""Where the figures of a measured run go besides the terminal and the history."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from nest_megatron.files import write_text
from nest_megatron.history.records import RankMeasured, RunRecord


def figures(run: RunRecord, part: RankMeasured) -> dict[str, float]:
    """Figures of one rank for a dashboard, by name."""
    known = part.peak_memory_bytes
    return {
        "nest/step_s": part.step_s,
        "nest/predicted_step_s": run.predicted.step_s,
        "nest/step_error_percent": 100.0 * (part.step_s / run.predicted.step_s - 1.0),
        **({} if known is None else {"nest/peak_memory_bytes": float(known)}),
    }


def write_prometheus(run: RunRecord, path: Path) -> None:
    """Write a measured run for node_exporter's textfile collector, whole or not at all.

    Source: Prometheus' text exposition format 0.0.4.
    """
    write_text(path, "\n".join(_lines(run)) + "\n")


def _lines(run: RunRecord) -> Iterator[str]:
    measured, predicted = run.measured, run.predicted
    assert measured is not None
    job = {"run": run.id, "model": run.job.model, "plan": run.plan}
    busy = "Median work of a step in a rank's own forward and backward passes."
    peaks = _by_rank(job, measured.peak_memory_bytes)
    planned = _by_rank(job, predicted.peak_memory_bytes, "pipeline_rank")
    for name, about, samples in (
        ("step_seconds", "Median of the watched steps.", [(job, measured.step_s)]),
        ("predicted_step_seconds", "As planned.", [(job, predicted.step_s)]),
        ("rank_busy_seconds", busy, _by_rank(job, measured.busy_s)),
        ("rank_peak_memory_bytes", "Peak memory of a rank's device.", peaks),
        ("predicted_peak_memory_bytes", "As planned.", planned),
        ("warnings", "Ranks or memory unlike the plan.", [(job, len(run.warnings))]),
    ):
        if samples:
            yield f"# HELP nest_{name} {about}"
            yield f"# TYPE nest_{name} gauge"
        for labels, value in samples:
            inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
            yield f"nest_{name}{{{inside}}} {value!r}"


def _by_rank(
    job: Mapping[str, str], values: tuple[float | None, ...], label: str = "rank"
) -> list[tuple[dict[str, str], float]]:
    return [({**job, label: str(r)}, v) for r, v in enumerate(values) if v is not None]


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
