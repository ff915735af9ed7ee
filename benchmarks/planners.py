"""Every planner on the paper's clusters, and where knowing the network pays.

Run from the project's root::

    python benchmarks/planners.py --out docs/planners.md

Figures 5 and 7 of the NEST paper on our cost model (25 jobs each), then the H100 cluster at 512
GPUs with its outermost level oversubscribed 1:1 to 1:8. The *blind* planner there is our own search
on a copy of the cluster without network levels: what it loses is what knowing the network is worth.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.paper.experiments import (  # noqa: E402
    MODELS,
    SPINE_LEAF,
    Gain,
    Report,
    geometric_mean,
)
from benchmarks.paper.published import PaperJob  # noqa: E402
from benchmarks.paper.run import draw_figure, experiment, notes, request_for  # noqa: E402
from nest_megatron.cost_model.model import CostModel  # noqa: E402
from nest_megatron.files import write_text  # noqa: E402
from nest_megatron.layout.plan import ParallelPlan  # noqa: E402
from nest_megatron.planner import Request, estimate_for, plan  # noqa: E402
from nest_megatron.research.baselines.job import with_network_levels  # noqa: E402
from nest_megatron.research.comparison import compare  # noqa: E402
from tools.markdown import table  # noqa: E402

RATIOS = (1, 2, 4, 8)
SIZE = 512
#: Planners that know less of the network than ours.
UNAWARE = ("phaze", "mist", "alpa_e")
COMMAND = "python benchmarks/planners.py --out docs/planners.md"


def request_of(model: str, ratio: float) -> Request:
    """A model on the H100 cluster with so much oversubscription."""
    job = PaperJob(model=model, cluster=SPINE_LEAF, num_gpus=SIZE)
    return request_for(job, [f"cluster.oversubscription={ratio}"])


def blind(request: Request) -> ParallelPlan | None:
    """Our own plan for a network without levels, priced on the real one."""
    model = CostModel(request.spec, request.cluster, request.settings, request.times)
    flat = with_network_levels(model, 1).cluster
    limits = {
        name: request.space.limit(name, request.cluster)
        for name in ("tensor_model_parallel_size", "expert_tensor_parallel_size")
    }
    space = dataclasses.replace(request.space, limits={**limits, **request.space.limits})
    found = plan(
        dataclasses.replace(request, cluster=flat, space=space, num_alternatives=0, tie_percent=0.0)
    )
    if not isinstance(found, ParallelPlan):
        return None
    return estimate_for(request, found.layout)


def oversubscription() -> Iterator[list[str]]:
    """A row a model and ratio: what each planner that knows less loses against ours."""
    for model in MODELS:
        for ratio in RATIOS:
            print(f"{model}, oversubscribed 1:{ratio}", file=sys.stderr)
            request = request_of(model, ratio)
            ours, *others = compare(request, UNAWARE)
            assert ours.plan is not None
            step = ours.plan.predicted.iteration_time_s
            other = blind(request)
            losses = [None if other is None else other.predicted.iteration_time_s / step]
            losses += [
                None if each.plan is None else each.plan.predicted.iteration_time_s / step
                for each in others
            ]
            shown = ["no plan" if loss is None else f"{loss:.3f}" for loss in losses]
            yield [model, f"1:{ratio}", f"{step:.3f}", *shown]


def gain_rows(gains: Sequence[Gain]) -> list[list[str]]:
    """The table of gains."""
    rows = []
    for gain in gains:
        values = (gain.ours, gain.least, *gain.artifact.values())
        cells = [gain.planner, str(gain.jobs), str(gain.only_ours)]
        cells += ["" if value is None else f"{value:.2f}" for value in values]
        cells += [""] * (8 - len(cells))
        rows.append([*cells, "" if gain.paper is None else f"{gain.paper:.2f}"])
    return rows


def figure(report: Report, picture: Path, seconds: float) -> Iterator[str]:
    """A figure's section."""
    draw_figure(report, picture)
    title = report.title.partition(",")[0]
    yield f"## {title}\n"
    yield f"![{title}](images/{picture.name})\n"
    yield f"25 jobs by {len(report.gains) + 1} planners in {seconds:.0f} s. Geometric-mean gains of"
    yield "`nest`, the least of them, and the artifact's gains on its recorded instances:\n"
    head = ("planner", "jobs", "only nest has a plan", "ours", "least", "artifact, as shipped")
    yield table((*head, "one rule", "best cuts", "paper"), gain_rows(report.gains)) + "\n"
    worst = min(gain.least for gain in report.gains if gain.least is not None)
    proven = all(row.outcome.optimal for row in report.rows if row.planner == "nest")
    yield f"Smallest gain of all jobs: {worst:.4f}. All of nest's plans proven optimal: {proven}.\n"
    for note in notes(report)[: len(report.gains)]:
        yield f"* {note}"
    yield "\n<details><summary>All jobs</summary>\n"
    yield table(report.head, report.cells)
    yield "\n</details>\n"


def page(images: Path) -> Iterator[str]:
    """The whole page."""
    yield "# Planners compared\n"
    yield "Five models, the two clusters of the NEST paper, 64 to 1,024 devices, a batch of 4,096"
    yield "sequences; every planner priced by the cost model of `nest-megatron plan`. `nest` is"
    yield "that search; it never sees the others' plans.\n"
    yield f"Machine: {platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python"
    yield f"{platform.python_version()}. Written on {date.today()} by `{COMMAND}`.\n"
    last: Report | None = None
    for name in ("figure5", "figure7"):
        started = time.perf_counter()
        last = experiment(name)
        seconds = time.perf_counter() - started
        yield from figure(last, images / f"planners_{name}.svg", seconds)
    assert last is not None
    yield "## What holds for both\n"
    for note in notes(last)[len(last.gains) :]:
        yield f"* {note}"
    yield "\n## Where knowing the network pays\n"
    yield f"The H100 cluster at {SIZE} GPUs, its spine oversubscribed 1:1 to 1:8. Step of `nest`,"
    yield "and that of the others over it. *blind* is the search of `nest` itself on the same"
    yield "cluster without network levels, so that it loses by nothing else.\n"
    rows = list(oversubscription())
    yield table(("model", "spine", "nest, s", "blind", *UNAWARE), rows) + "\n"
    for ratio in RATIOS:
        found = [float(r[3]) for r in rows if r[1] == f"1:{ratio}" and r[3] != "no plan"]
        mean, most = geometric_mean(found), max(found)
        yield f"* 1:{ratio}: blind takes {mean:.3f} times as long on average, {most:.3f} at most."


def main() -> int:
    """Write the page, or print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    images = ROOT / "docs" / "images"
    text = "\n".join(page(images)) + "\n"
    if options.out is None:
        print(text, end="")
    else:
        write_text(options.out, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
