"""Jobs for the baselines, and what every plan of theirs must be."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

from nest_megatron.cluster.records import Cluster, Precision
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.peak_limit import PeakLimit
from nest_megatron.cost_model.pipeline import evaluate
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.cost_model.stage_problems import stage_problem
from nest_megatron.layout.recompute import NO_RECOMPUTE
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.planner import check_launchable
from nest_megatron.research.baselines.job import ComparisonJob
from nest_megatron.solver.chunk_space import interleaved_partitions
from nest_megatron.solver.ranking import SolvedLayout
from nest_megatron.solver.space import SearchSpace
from tests.catalogue import cluster, model
from tests.solver.jobs import KERNEL


def job_of(
    spec: TransformerSpec,
    machines: Cluster,
    batch: int,
    space: SearchSpace | None = None,
    settings: CostSettings | None = None,
) -> ComparisonJob:
    """A job with a fresh cost model."""
    cost = CostModel(spec, machines, settings or CostSettings())
    return ComparisonJob(
        model=cost,
        global_batch_size=batch,
        space=space or SearchSpace(),
        solve_stages=KERNEL,
        peaks=PeakLimit(cost),
    )


def named_job(
    name: str, machines: str, num_gpus: int, batch: int, space: SearchSpace | None = None
) -> ComparisonJob:
    """A job of the catalogue, in the number format that its devices have."""
    found = cluster(machines, num_gpus)
    precision = Precision.BF16 if found.accelerator.supports(Precision.BF16) else Precision.FP16
    return job_of(model(name), found, batch, space, CostSettings(precision=precision))


def oversubscribed(machines: Cluster, times: float) -> Cluster:
    """The cluster with less bandwidth on its outermost level."""
    last = machines.levels[-1]
    slower = dataclasses.replace(last, bandwidth_bytes_per_s=last.bandwidth_bytes_per_s / times)
    return dataclasses.replace(machines, levels=(*machines.levels[:-1], slower))


def check_in_our_space(job: ComparisonJob, plan: SolvedLayout) -> None:
    """Megatron launches it, it fits, our search covers it, and its price is right."""
    grid, boundaries = plan.layout, plan.layout.partition.boundaries
    check_launchable(job.model.spec, job.model.settings, grid)
    grids = job.grids(job.space)
    bare = dataclasses.replace(grid.without_stages(), recompute=NO_RECOMPUTE)
    shards = (shard for shard in grids.shards() if job.model.shard(shard) == job.model.shard(grid))
    assert bare in [f for s in shards for g in grids.grids(s) for f in grids.families(g)]
    assert grid.recompute in grids.recompute_settings(grid)
    problem = stage_problem(job.model, grid)
    assert all(first < end for first, end in pairwise(boundaries))
    assert problem.num_virtual == 1 or boundaries in set(interleaved_partitions(problem))
    evaluation = evaluate(problem, boundaries)
    assert evaluation.fits
    assert evaluation.iteration == plan.iteration
