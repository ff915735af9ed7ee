"""Writes ``docs/gpu.md`` from what ``measure.py`` brought back, and keeps that under ``results/``.

A job is predicted twice from its command: from data sheets, and with the profile that was taken on
the same device. ``python benchmarks/gpu/page.py [FOLDER ...]`` takes in new folders of results.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

import nest_megatron
from nest_megatron.cost_model.compute import operator_times
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.errors import NestError
from nest_megatron.files import write_text
from nest_megatron.history import store as history
from nest_megatron.history.records import RunRecord
from nest_megatron.model.execution import Implementation
from nest_megatron.model.operators import block_graph
from nest_megatron.model.shard import LayerShard
from nest_megatron.profile import store
from nest_megatron.profile.lookup import shard_of
from nest_megatron.profile.records import LayerProfile
from nest_megatron.units import format_gib
from nest_megatron.validation.scores import error_scores, rank_scores

HERE = Path(__file__).parent
#: The catalogue's cluster of a device, by a word of its name.
_CLUSTERS = {"H200": "h200", "H100": "dgx_h100", "A100": "dgx_a100", "B200": "b200"}
_KEPT = ("results.jsonl", "runs.jsonl", "*.yaml")
_VERSIONS = ("driver", "torch", "cuda", "nccl", "megatron_core", "transformer_engine")

#: A predicted step in seconds, and the peak in bytes.
Predicted = tuple[float, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job that was trained, and what was predicted of it.

    Args:
        model: jobs of one model, which have the same batch, are compared with each other.
        step_s, peak_bytes: as measured; ``None`` where it did not train, for the reason ``error``.
        sheets, profiled: from data sheets and with the profile; ``None`` where it is refused.
    """

    name: str
    model: str
    step_s: float | None
    peak_bytes: int | None
    error: str
    sheets: Predicted | None
    profiled: Predicted | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """What came back from one machine; entries that did not begin are left out."""

    facts: Mapping[str, Any]
    entries: Sequence[Mapping[str, Any]]
    runs: Mapping[str, RunRecord]
    profiles: Mapping[str, LayerProfile]

    @property
    def device(self) -> str:
        """The device in the driver's words."""
        return str(self.facts["machine"]["device_name"])

    @property
    def cluster(self) -> str:
        """The catalogue's cluster of the device."""
        return next(name for word, name in _CLUSTERS.items() if word in self.device)


def main() -> None:
    """Take in new results, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--page", type=Path, default=HERE.parents[1] / "docs" / "gpu.md")
    options = parser.parse_args()
    for folder in options.folders:
        keep(folder, options.results)
    folders = sorted(path.parent for path in options.results.glob("*/results.jsonl"))
    source = (HERE / "page.md.j2").read_text(encoding="utf-8")
    template = jinja2.Environment(undefined=jinja2.StrictUndefined).from_string(source)
    machines = [view(read(folder)) for folder in folders]
    write_text(options.page, template.render(machines=machines, gib=_gib, percent=_percent) + "\n")


def keep(folder: Path, results: Path) -> None:
    """Copy what came back, under the device's name and the day."""
    found = read(folder)
    day = max((run.start for run in found.runs.values()), default="undated")[:10]
    target = results / f"{found.device.removeprefix('NVIDIA ').replace(' ', '_')}-{day}"
    target.mkdir(parents=True, exist_ok=True)
    for path in (path for pattern in _KEPT for path in folder.glob(pattern)):
        shutil.copy(path, target / path.name)


def read(folder: Path) -> Results:
    """Read what ``measure.py`` left in a folder."""
    lines = (folder / "results.jsonl").read_text(encoding="utf-8").splitlines()
    first, *entries = map(json.loads, lines)
    runs = folder / "runs.jsonl"
    return Results(
        facts=first["facts"],
        entries=[entry for entry in entries if "code" in entry],
        runs={run.id: run for run in history.read(runs)} if runs.exists() else {},
        profiles={path.stem: store.read(path) for path in sorted(folder.glob("*.yaml"))},
    )


def view(found: Results) -> Mapping[str, object]:
    """What the page shows of one machine."""
    machine = found.facts["machine"]
    versions = [f"{name} {machine[name]}" for name in _VERSIONS if machine.get(name)]
    jobs = [job_of(found, entry) for entry in found.entries if "job" in entry]
    return {
        "device": found.device,
        "versions": ", ".join([*versions, f"Python {found.facts['python']}"]),
        "overhead": ", ".join(f"{n} {format_gib(b)}" for n, b in found.facts["bytes"].items()),
        "profiles_s": math.fsum(entry["took_s"] for entry in found.entries if "profile" in entry),
        "jobs_s": math.fsum(entry["took_s"] for entry in found.entries if "job" in entry),
        "jobs": jobs,
        "scores": [
            *scores(jobs, "data sheets", "sheets"),
            *scores(jobs, "the profile", "profiled"),
        ],
        "blocks": [
            {"name": name, "rows": list(block_ratios(profile, found.cluster))}
            for name, profile in found.profiles.items()
        ],
    }


def job_of(found: Results, entry: Mapping[str, Any]) -> Job:
    """A job's measured figures beside the predicted ones."""
    run = next((found.runs[run] for run in entry.get("runs", ()) if run in found.runs), None)
    measured = None if run is None else run.measured
    last = str(entry.get("error", "did not train")).strip().splitlines()[-1:]
    return Job(
        name=entry["job"],
        model=entry["model"],
        step_s=None if measured is None else measured.step_s,
        peak_bytes=None if measured is None else measured.highest_allocated_bytes,
        error=run.error if run is not None and run.error else "".join(last),
        sheets=predict(found, entry["command"], {"mode": "analytic"}),
        profiled=predict_with_profile(found, entry),
    )


def predict(found: Results, command: str, profile: Mapping[str, str]) -> Predicted | None:
    """Price a command on one of the devices; ``None`` where it is refused."""
    try:
        plan = nest_megatron.estimate_command(
            command, cluster=found.cluster, num_gpus=1, profile=dict(profile)
        )
    except NestError:
        return None
    return plan.predicted.iteration_time_s, plan.predicted.peak_memory_bytes


def predict_with_profile(found: Results, entry: Mapping[str, Any]) -> Predicted | None:
    """Price a job with the profile of its layers; ``None`` where there is none."""
    kind = "transformer_engine" if entry.get("transformer_engine") else "local"
    for name, profile in found.profiles.items():
        if not name.endswith(f"-{kind}"):
            continue
        with tempfile.TemporaryDirectory() as folder:
            os.environ[store.FOLDER_VARIABLE] = folder
            store.record(profile)
            predicted = predict(found, entry["command"], {"name": profile.name})
            del os.environ[store.FOLDER_VARIABLE]
        if predicted is not None:
            return predicted
    return None


def scores(jobs: Sequence[Job], words: str, field: str) -> Iterator[str]:
    """How far predictions are off, and what choosing each model's layout by them comes to."""
    known = [
        (job, job.step_s, getattr(job, field))
        for job in jobs
        if job.step_s is not None and getattr(job, field) is not None
    ]
    if not known:
        return
    steps = error_scores([(predicted[0], step) for _, step, predicted in known])
    peaks = error_scores([(p[1], job.peak_bytes) for job, _, p in known if job.peak_bytes])
    line = f"With {words}: steps {steps.mape_pct:.1f} % off in the mean"
    line += f" (median {steps.median_signed_pct:+.1f} %)"
    if peaks.mape_pct is not None:
        line += f", peaks {peaks.mape_pct:.1f} % ({peaks.median_signed_pct:+.1f} %)"
    yield line + "."
    for model in sorted({job.model for job, _, _ in known}):
        pairs = [(predicted[0], step) for job, step, predicted in known if job.model == model]
        if len(pairs) > 1:
            ranks = rank_scores(pairs)
            order = "" if ranks.spearman is None else f"rank correlation {ranks.spearman:.2f}, "
            yield f"{model}, {words}: {order}regret {ranks.regret_pct:.1f} %, {len(pairs)} layouts."


def block_ratios(profile: LayerProfile, cluster: str) -> Iterator[Mapping[str, object]]:
    """Closed forms over measured times of a profile's blocks, by block and TP."""
    device = nest_megatron.clusters()[cluster].accelerator
    settings = CostSettings(precision=profile.precision)
    like = LayerShard(flash_attention=profile.machine.implementation is not Implementation.LOCAL)
    ratios = defaultdict[tuple[str, int], list[tuple[float, float]]](list)
    for timing in profile.timings:
        operators = block_graph(profile.model, timing.block, shard_of(timing, like)).operators
        both = [operator_times(operator, device, settings) for operator in operators]
        forward, backward = map(math.fsum, zip(*both, strict=True))
        key = (timing.block.value, timing.tensor_model_parallel_size)
        ratios[key].append((forward / timing.forward_s, backward / timing.backward_s))
    for (block, tp), pairs in sorted(ratios.items()):
        forward, backward = (statistics.median(side) for side in zip(*pairs, strict=True))
        worst = max((ratio for pair in pairs for ratio in pair), key=lambda r: abs(math.log(r)))
        yield {
            "block": block,
            "tp": tp,
            "shapes": len(pairs),
            "forward": forward,
            "backward": backward,
            "worst": worst,
        }


def _gib(size: int | None) -> str:
    return "" if size is None else format_gib(size)


def _percent(predicted: Predicted | None, measured: float) -> str:
    return "" if predicted is None else f"{100 * (predicted[0] / measured - 1):+.1f} %"


if __name__ == "__main__":
    main()
