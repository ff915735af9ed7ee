"""Published layouts and our best plans for the same jobs; ``expert_layouts.py`` prints them."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from nest_megatron.cost_model.estimate import estimate
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.stage_problems import stage_problem
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.stage_layout import StagePartition, uniform_partition
from nest_megatron.solver.backend import backend_to_run, solver_of
from nest_megatron.solver.search import Search
from nest_megatron.solver.space import SearchSpace, divisors
from nest_megatron.units import to_seconds
from nest_megatron.validation.assess import (
    Predictor,
    RowPrediction,
    iteration_ticks,
    job_time,
    measured_partition,
)
from nest_megatron.validation.job import RowJob, job_of
from nest_megatron.validation.models import ModelBook
from nest_megatron.validation.rows import RefusedRowError, Row, read_rows

SOURCES = ("nvidia-megatron-bridge-perf", "nvidia-dgxc-benchmarking", "nvidia-nemo-docs-24.07")
#: What makes two rows layouts of one job.
JOB = ("model", "gpu", "n_gpus", "seq", "gbs", "precision", "framework")
#: A best plan within this share of the published layout counts as agreement.
NEAR = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A measured run of a whole model, and what is predicted for it."""

    row: Row
    job: RowJob
    prediction: RowPrediction
    measured_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A published layout beside our best plan for the same job.

    Args:
        saved: seconds by term that the best plan is predicted to take less.
        filled: share of the memory that a plan may fill which the best plan needs.
        uneven: the best plan's stages hold different numbers of layers.
        even_s: predicted time of the best plan among those that divide layers as the published
            layout does: evenly, or just as it does.
        proven: the search ended before its time did.
    """

    published: Published
    best: PartialLayout | None
    best_s: float
    saved: Mapping[str, float]
    filled: float
    uneven: bool
    even_s: float
    proven: bool

    @property
    def ratio(self) -> float:
        """Predicted time of the published layout over that of our best plan."""
        return self.published.prediction.iteration_time_s / self.best_s

    @property
    def even_ratio(self) -> float:
        """The same against the best plan that divides layers as the published layout does."""
        return self.published.prediction.iteration_time_s / self.even_s

    @property
    def is_near(self) -> bool:
        """Whether the published layout is within ``NEAR`` of the best."""
        return self.ratio <= 1 + NEAR


def published_runs(path: Path) -> list[Published]:
    """All measured runs of ``SOURCES`` that can be predicted: whole models in pretraining."""
    book, predictor = ModelBook.load(), Predictor()
    found = []
    for row in filter(_is_wanted, read_rows(path).rows):
        try:
            found.append(_published(row, book, predictor))
        except RefusedRowError:
            continue
    return found


def fastest(runs: Iterable[Published]) -> list[Published]:
    """The fastest measured layout of each job."""
    best: dict[tuple[str, ...], Published] = {}
    for run in runs:
        key = tuple(run.row.get(column, "") for column in JOB)
        if key not in best or run.measured_s < best[key].measured_s:
            best[key] = run
    return list(best.values())


def in_other_layouts(runs: Iterable[Published]) -> list[list[Published]]:
    """Jobs that were published in several layouts, release by release; the fastest of each."""
    jobs: dict[tuple[str, ...], dict[str, Published]] = {}
    for run in runs:
        model = re.sub(r" \d\d\.\d\d$", "", run.row["model"])  # some tables name a release here
        key = (model, *(run.row.get(column, "") for column in JOB[1:-1]))
        layouts, mine = jobs.setdefault(key, {}), str(_degrees(run.prediction.layout))
        if mine not in layouts or run.measured_s < layouts[mine].measured_s:
            layouts[mine] = run
    return [list(layouts.values()) for layouts in jobs.values() if len(layouts) > 1]


def _degrees(grid: PartialLayout) -> tuple[object, int]:
    return grid.dims, grid.micro_batch_size


def _is_wanted(row: Row) -> bool:
    return (
        row["source"] in SOURCES
        and row.get("task") == "pretrain"
        and "PROXY" not in row.get("ambiguity", "")
    )


def _published(row: Row, book: ModelBook, predictor: Predictor) -> Published:
    job = job_of(row, book)
    prediction = predictor.predict(job)
    measured = job_time(row, job, prediction)
    return Published(row=row, job=job, prediction=prediction, measured_s=measured)


def compared(run: Published, seconds: float) -> Compared:
    """Search the job of a published run for at most so many seconds."""
    job, grid = run.job, run.prediction.layout
    model = CostModel(job.spec, job.cluster, job.settings)
    started = time.perf_counter()
    result = Search(
        model,
        grid.global_batch_size,
        space_of(run),
        solver_of(backend_to_run(None)),
        num_layouts=1,
        out_of_time=lambda: time.perf_counter() - started > seconds,
    ).run()
    if not result.plans:
        return Compared(
            published=run,
            best=None,
            best_s=float("nan"),
            saved={},
            filled=0.0,
            uneven=False,
            even_s=float("nan"),
            proven=False,
        )
    best = result.plans[0]
    cut = best.layout.partition
    theirs = estimate(
        model, grid.with_stages(measured_partition(job, stage_problem(model, job.grids[0])))
    ).terms
    ours = estimate(model, best.layout)
    return Compared(
        published=run,
        best=best.layout,
        best_s=to_seconds(iteration_ticks(stage_problem(model, best.layout), cut)),
        saved={name: theirs[name] - ours.terms[name] for name in theirs},
        filled=max(stage.peak_memory_bytes for stage in ours.stages) / ours.capacity_bytes,
        uneven=job.spec.num_layers % best.layout.dims.num_chunks != 0,
        even_s=_best_even(run, model),
        proven=result.optimal,
    )


def _best_even(run: Published, model: CostModel) -> float:
    """Predicted time of the best plan whose stages all hold the same number of layers.

    The published division counts too, so that the published layout is always among them.
    """
    job, grid = run.job, run.prediction.layout
    cuts = [measured_partition(job, stage_problem(model, job.grids[0])), *_even_cuts(run)]
    times = [run.prediction.iteration_time_s]
    for cut in dict.fromkeys(cuts):
        space = dataclasses.replace(space_of(run), partition=cut)
        search = Search(
            model, grid.global_batch_size, space, solver_of(backend_to_run(None)), num_layouts=1
        )
        times += [to_seconds(plan.iteration) for plan in search.run().plans[:1]]
    return min(times)


def _even_cuts(run: Published) -> Iterator[StagePartition]:
    layers, gpus = run.job.spec.num_layers, run.job.cluster.num_gpus
    most = run.prediction.layout.dims.virtual_pipeline_model_parallel_size
    for stages in divisors(gpus):
        for virtual in range(1, 1 + (max(12, most) if stages > 1 else 1)):
            if layers % (stages * virtual) == 0:
                yield uniform_partition(run.job.spec, stages, virtual)


def space_of(run: Published) -> SearchSpace:
    """Everything within a node's tensor parallelism, under the published ZeRO stage and execution.

    Without the execution (dispatcher, overlaps) the search would be of another job than the run.
    """
    dims = run.prediction.layout.dims
    node = run.job.cluster.gpus_per_host or run.job.cluster.gpus_per_node
    tensor = max(min(node, 8), dims.tensor_model_parallel_size)
    return SearchSpace(
        limits={
            "tensor_model_parallel_size": tensor,
            "expert_tensor_parallel_size": tensor,
            "virtual_pipeline_model_parallel_size": max(
                12, dims.virtual_pipeline_model_parallel_size
            ),
            "micro_batch_size": max(8, run.prediction.layout.micro_batch_size),
        },
        rank_orders=(dims.rank_order,),
        zero_stages=(run.prediction.layout.zero,),
        execution=run.prediction.layout.execution,
    )
