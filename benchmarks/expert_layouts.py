"""Are layouts that NVIDIA's engineers published near the best that our own cost model knows?

Run from the project's root with a file of measured runs (``nest-megatron validate --help``)::

    python benchmarks/expert_layouts.py throughput.csv --out docs/expert_layouts.md

Each job (model, GPU, GPUs, sequence, batch, number format, framework) counts once, with the layout
that was measured fastest. The published layout is predicted and a search is run for the same job
under the same assumptions. A best plan that is predicted to be much faster than what the experts
chose says that the model of time or of memory is too kind to it, or that they left time on the
table; the table says which term the difference comes from, so that a person can judge.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import yaml  # noqa: E402

from nest_megatron.cost_model.estimate import estimate  # noqa: E402
from nest_megatron.cost_model.model import CostModel  # noqa: E402
from nest_megatron.files import write_text  # noqa: E402
from nest_megatron.parallel.grid import Grid  # noqa: E402
from nest_megatron.parallel.partition import StagePartition  # noqa: E402
from nest_megatron.solver.backend import choose, solver_of  # noqa: E402
from nest_megatron.solver.search import Search  # noqa: E402
from nest_megatron.solver.space import SearchSpace  # noqa: E402
from nest_megatron.units import to_seconds  # noqa: E402
from nest_megatron.validation.assess import work_of  # noqa: E402
from nest_megatron.validation.job import Job, job_of  # noqa: E402
from nest_megatron.validation.measured import measured_time, require_consistent  # noqa: E402
from nest_megatron.validation.models import ModelBook  # noqa: E402
from nest_megatron.validation.predict import (  # noqa: E402
    Prediction,
    Predictor,
    iteration_ticks,
    measured_partition,
)
from nest_megatron.validation.refusal import RefusedRowError  # noqa: E402
from nest_megatron.validation.rows import Row, read_rows  # noqa: E402

SOURCES = ("nvidia-megatron-bridge-perf", "nvidia-dgxc-benchmarking", "nvidia-nemo-docs-24.07")
#: What makes two rows layouts of one job.
JOB = ("model", "gpu", "n_gpus", "seq", "gbs", "precision", "framework")
#: A best plan within this share of the published layout counts as agreement.
NEAR = 0.05
NOTES = ROOT / "docs" / "expert_layouts_notes.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A measured run of a whole model, and what is predicted for it."""

    row: Row
    job: Job
    prediction: Prediction
    measured_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A published layout beside our best plan for the same job.

    Args:
        saved: seconds by term that the best plan is predicted to take less.
        proven: the search ended before its time did.
        legal: the published layout lies in the space that was searched.
    """

    published: Published
    best: Grid | None
    best_s: float
    saved: Mapping[str, float]
    proven: bool

    @property
    def ratio(self) -> float:
        """Predicted time of the published layout over that of our best plan."""
        return self.published.prediction.iteration_time_s / self.best_s

    @property
    def is_near(self) -> bool:
        """Whether the published layout is within ``NEAR`` of the best."""
        return self.ratio <= 1 + NEAR


def published_runs(path: Path) -> list[Published]:
    """The fastest measured layout of each job of ``SOURCES``, whole models in pretraining only."""
    book, predictor = ModelBook.load(), Predictor()
    fastest: dict[tuple[str, ...], Published] = {}
    for row in read_rows(path).rows:
        if not _is_wanted(row):
            continue
        try:
            run = _published(row, book, predictor)
        except RefusedRowError:
            continue
        key = tuple(row.get(column, "") for column in JOB)
        if key not in fastest or run.measured_s < fastest[key].measured_s:
            fastest[key] = run
    return list(fastest.values())


def _is_wanted(row: Row) -> bool:
    return (
        row["source"] in SOURCES
        and row.get("task") == "pretrain"
        and "PROXY" not in row.get("ambiguity", "")
    )


def _published(row: Row, book: ModelBook, predictor: Predictor) -> Published:
    job = job_of(row, book)
    prediction = predictor.predict(job)
    work = work_of(job, prediction)
    require_consistent(row, work)
    measured = measured_time(row, work)
    return Published(row=row, job=job, prediction=prediction, measured_s=measured)


def compared(run: Published, seconds: float) -> Compared:
    """Search the job of a published run for at most so many seconds."""
    job, grid = run.job, run.prediction.grid
    model = CostModel(job.spec, job.cluster, job.settings)
    started = time.perf_counter()
    result = Search(
        model,
        grid.global_batch_size,
        _space(run),
        solver_of(choose(None)),
        num_layouts=1,
        out_of_time=lambda: time.perf_counter() - started > seconds,
    ).run()
    if not result.plans:
        return Compared(published=run, best=None, best_s=float("nan"), saved={}, proven=False)
    best = result.plans[0]
    pp = best.grid.dims.pipeline_model_parallel_size
    cut = StagePartition(boundaries=best.boundaries, pipeline_model_parallel_size=pp)
    theirs = estimate(model, grid, measured_partition(job, model.problem(job.grids[0]))).terms
    ours = estimate(model, best.grid, cut).terms
    return Compared(
        published=run,
        best=best.grid,
        best_s=to_seconds(iteration_ticks(model.problem(best.grid), cut)),
        saved={name: theirs[name] - ours[name] for name in theirs},
        proven=result.certificate.optimal,
    )


def _space(run: Published) -> SearchSpace:
    """Everything within a node's tensor parallelism, under the framework's ZeRO stage."""
    dims = run.prediction.grid.dims
    node = run.job.cluster.gpus_per_host or run.job.cluster.gpus_per_node
    tensor = max(min(node, 8), dims.tensor_model_parallel_size)
    return SearchSpace(
        limits={
            "tensor_model_parallel_size": tensor,
            "expert_tensor_parallel_size": tensor,
            "virtual_pipeline_model_parallel_size": max(
                12, dims.virtual_pipeline_model_parallel_size
            ),
            "micro_batch_size": max(8, run.prediction.grid.micro_batch_size),
        },
        rank_orders=(dims.rank_order,),
        zero_stages=(run.prediction.grid.zero,),
    )


_NAMES = {
    "tensor_model_parallel_size": "TP",
    "pipeline_model_parallel_size": "PP",
    "virtual_pipeline_model_parallel_size": "VP",
    "context_parallel_size": "CP",
    "data_parallel_size": "DP",
    "expert_model_parallel_size": "EP",
    "expert_tensor_parallel_size": "ETP",
}


def words(grid: Grid) -> dict[str, str]:
    """A layout by short names, what is 1 left out."""
    found = {short: str(getattr(grid.dims, name)) for name, short in _NAMES.items()}
    if grid.dims.expert_model_parallel_size == 1:
        del found["ETP"]
    found = {name: value for name, value in found.items() if value != "1"}
    found["micro batch"] = str(grid.micro_batch_size)
    found["recompute"] = grid.recompute.label()
    return found


def layout(grid: Grid) -> str:
    """A layout in one cell."""
    return ", ".join(f"{name} {value}" for name, value in words(grid).items())


def differences(theirs: Grid, ours: Grid) -> str:
    """What our plan does differently."""
    left, right = words(theirs), words(ours)
    names = [*_NAMES.values(), "micro batch", "recompute"]
    pairs = ((name, left.get(name, "1"), right.get(name, "1")) for name in names)
    return "; ".join(f"{name} {a} → {b}" for name, a, b in pairs if a != b) or "stages only"


def savings(each: Compared) -> str:
    """The largest terms of the difference, in per cent of the published layout's time."""
    whole = each.published.prediction.iteration_time_s
    shares = {name: 100 * seconds / whole for name, seconds in each.saved.items()}
    largest = sorted(shares.items(), key=lambda item: -abs(item[1]))[:3]
    return ", ".join(f"{name} {-share:+.1f}" for name, share in largest if abs(share) >= 1)


def job_name(row: Row) -> str:
    """A job in one cell."""
    return (
        f"{row['model']}, {row['n_gpus']} {row['gpu']}, sequence {row['seq']}, batch {row['gbs']},"
        f" {row['precision']}, {row['framework']}"
    )


HEAD = """\
# Layouts that experts published, beside our best plans

Written by `python benchmarks/expert_layouts.py {file} --out docs/expert_layouts.md`; do not edit.

NVIDIA publishes how it lays out its own pretraining runs. For {jobs} such jobs (sources {sources};
whole models; each model, GPU, GPU count, sequence, batch, number format and framework once) the
published layout was predicted and our search was run under the same assumptions: the same cost
settings, tensor parallelism within a node, the framework's ZeRO stage, any recomputation, the same
memory limit, at most {seconds:g} s.

**{near} of {jobs} published layouts ({share:.0f} %) are within {bar:.0f} % of our best plan.**
Ratio: predicted time of the published layout over that of our best plan; median {median:.3f},
largest {largest:.2f}. {unproven}
"""


def document(found: Sequence[Compared], file: str, seconds: float) -> str:
    """The page."""
    solved = [each for each in found if each.best is not None]
    ratios = sorted(each.ratio for each in solved)
    near = sum(each.is_near for each in solved)
    short = sum(not each.proven for each in solved)
    lines = [
        HEAD.format(
            file=file,
            jobs=len(found),
            sources=", ".join(SOURCES),
            seconds=seconds,
            near=near,
            share=100 * near / max(1, len(found)),
            bar=100 * NEAR,
            median=ratios[len(ratios) // 2],
            largest=ratios[-1],
            unproven=f"{short} searches ran out of time, so their best plan may be better still."
            if short
            else "Every search proved its plan to be the best.",
        ),
        *_does_not_fit(found),
        *_by_model(solved),
        *_differing([each for each in solved if not each.is_near]),
        *_agreeing([each for each in solved if each.is_near]),
    ]
    return "\n".join(lines) + "\n"


def _does_not_fit(found: Sequence[Compared]) -> Iterator[str]:
    tight = [each for each in found if not each.published.prediction.fits]
    nothing = [each for each in found if each.best is None]
    if not tight and not nothing:
        return
    yield "## Published layouts that our memory model refuses\n"
    yield "They ran, so the memory model is too strict there (or the table leaves something out).\n"
    yield "| row | job | layout | predicted of allowed |"
    yield "|---|---|---|--:|"
    for each in tight:
        told, row = each.published.prediction, each.published.row
        share = 100 * max(told.stage_memory) / told.capacity_bytes
        yield f"| {row['row_id']} | {job_name(row)} | {layout(told.grid)} | {share:.0f} % |"
    for each in nothing:
        yield f"| {each.published.row['row_id']} | {job_name(each.published.row)} | | no plan |"
    yield ""


def _by_model(solved: Sequence[Compared]) -> Iterator[str]:
    yield "## By model\n"
    yield "| model | jobs | within 5 % | mean ratio | largest |"
    yield "|---|--:|--:|--:|--:|"
    models = dict.fromkeys(each.published.row["model"] for each in solved)
    for model in sorted(models):
        mine = [each for each in solved if each.published.row["model"] == model]
        ratios = [each.ratio for each in mine]
        near = sum(each.is_near for each in mine)
        mean = sum(ratios) / len(ratios)
        yield f"| {model} | {len(mine)} | {near} | {mean:.3f} | {max(ratios):.3f} |"
    yield ""


def _differing(far: Iterable[Compared]) -> Iterator[str]:
    notes = yaml.safe_load(NOTES.read_text(encoding="utf-8")) if NOTES.is_file() else {}
    yield "## Where our best plan is more than 5 % faster\n"
    yield from (f"* {text}" for text in notes.get("summary", ()))
    yield ""
    yield "error: of the published layout's prediction against its measured time. terms: per cent"
    yield "of the published layout's predicted time that our plan saves (-) or adds (+).\n"
    yield "| row | job | published | ours differs in | ratio | error % | terms | looks like |"
    yield "|---|---|---|---|--:|--:|---|---|"
    for each in sorted(far, key=lambda each: -each.ratio):
        run = each.published
        error = 100 * (run.prediction.iteration_time_s / run.measured_s - 1)
        assert each.best is not None
        yield (
            f"| {run.row['row_id']} | {job_name(run.row)} | {layout(run.prediction.grid)} |"
            f" {differences(run.prediction.grid, each.best)} | {each.ratio:.3f} | {error:+.0f} |"
            f" {savings(each)} | {_judgement(run.row, notes)} |"
        )
    yield ""


def _judgement(row: Row, notes: Mapping[str, Mapping[str, str]]) -> str:
    """What a person who looked at a row says; by row, or else by the start of the model's name."""
    by_row, by_model = notes.get("rows", {}), notes.get("models", {})
    if row["row_id"] in by_row:
        return by_row[row["row_id"]]
    found = (text for start, text in by_model.items() if re.match(start, row["model"]))
    return next(found, "not judged")


def _agreeing(near: Iterable[Compared]) -> Iterator[str]:
    yield "## Within 5 %\n"
    yield "| row | job | published | ratio |"
    yield "|---|---|---|--:|"
    for each in near:
        run = each.published
        grid = layout(run.prediction.grid)
        yield f"| {run.row['row_id']} | {job_name(run.row)} | {grid} | {each.ratio:.3f} |"


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, metavar="THROUGHPUT.CSV")
    parser.add_argument("--out", type=Path, metavar="FILE.md", help="write the table here")
    parser.add_argument("--seconds", type=float, default=5.0, help="of search for each job")
    parser.add_argument("--every", type=int, default=1, help="look at every n-th job only")
    options = parser.parse_args()
    runs = published_runs(options.file)[:: options.every]
    found = []
    for number, run in enumerate(runs, 1):
        each = compared(run, options.seconds)
        found.append(each)
        text = f"{each.ratio:.3f}" + ("" if each.proven else " (time ran out)")
        print(f"{number}/{len(runs)} {run.row['row_id']} {job_name(run.row)}: {text}", flush=True)
        if each.best is not None and not each.is_near:
            print(f"    {differences(run.prediction.grid, each.best)}: {savings(each)}", flush=True)
    text = document(found, options.file.name, options.seconds)
    print(text.partition("\n## ")[0])
    if options.out:
        write_text(options.out, text)


if __name__ == "__main__":
    main()
