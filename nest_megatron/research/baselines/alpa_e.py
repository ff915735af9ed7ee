"""Alpa-E: sharding first, stages second, memory last.

Source: Zheng et al., "Alpa: Automating Inter- and Intra-Operator Parallelism for Distributed Deep
Learning" (OSDI 2022), as NEST's paper estimates it.

Kept: the cluster is a mesh of nodes by GPUs with one bandwidth inside a node and one between nodes.
For each sub-mesh that can hold a stage, and each micro batch, the sharding inside it (tensor, data
and expert degrees) is the one that communicates least, chosen without a look at memory. Stages are
then chosen for the shortest step, again without memory. There is one pipeline over all devices:
the replicas of a stage lie inside its sub-mesh. Only the finished candidate is checked against
memory and dropped if it does not fit; whatever else that sub-mesh could have held is not tried.

Left out: a sharding for each operator and sub-meshes of different size, which Megatron
does not launch. The integer program over shardings is an exhaustive choice here. No ZeRO, no
context parallelism, no virtual stages; recomputation is the user's switch there, and both settings
are tried.

Budget: the stages of each candidate are searched among ``PARTITION_NODES`` partial partitions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.stage_problems import stage_problem
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.research.baselines.job import (
    PLAIN,
    BaselineChoice,
    ComparisonJob,
    chosen,
    layer_traffic,
    restricted,
    solved,
    with_network_levels,
)
from nest_megatron.solver.outcome import NO_THRESHOLD
from nest_megatron.solver.ranking import SolvedLayout
from nest_megatron.solver.search import UNLIMITED
from nest_megatron.units import Seconds

#: What is found by then is the best or next to it; without memory to prune it, a proof takes long.
PARTITION_NODES = 100_000


def find(job: ComparisonJob) -> BaselineChoice:
    """The fastest candidate on the mesh that turns out to fit, priced on the real cluster."""
    mesh = with_network_levels(job.model, 2)
    candidates = sorted(_candidates(job, mesh), key=lambda plan: plan.rank)
    for dropped, candidate in enumerate(candidates):
        plan = job.priced(candidate)
        if plan is not None:
            lost = f"; {dropped} faster ones do not" if dropped else ""
            return chosen(plan, len(candidates), f"the fastest of least traffic that fits{lost}")
    nothing_fits = "the shardings that communicate least do not fit in memory, with any stages"
    return chosen(None, len(candidates), "", nothing_fits)


def _candidates(job: ComparisonJob, mesh: CostModel) -> Iterator[SolvedLayout]:
    """For each sub-mesh and micro batch, the sharding of least traffic with its fastest stages.

    A sub-mesh is whole nodes, or a part that divides one.
    """
    node = job.model.cluster.gpus_per_node
    submeshes = defaultdict(list)
    for grid in job.families(restricted(job, PLAIN, zero_stages=(ZeroStage.NONE,))):
        stage = grid.dims.ranks_per_stage
        if node % stage == 0 or stage % node == 0:
            submeshes[stage, grid.micro_batch_size].append(grid)
    least = [min(grids, key=lambda grid: communication(mesh, grid)) for grids in submeshes.values()]
    for recompute in job.all_or_no_recompute():
        for bare in least:
            grid = replace(bare, recompute=recompute)
            problem = stage_problem(mesh, grid)._replace(capacity_bytes=UNLIMITED)
            plan = solved(grid, job.solve_stages(problem, NO_THRESHOLD, PARTITION_NODES))
            if plan is not None:
                yield plan


def communication(model: CostModel, grid: PartialLayout) -> Seconds:
    """Traffic of one step in the layers and between replicas, none of it hidden.

    A stage holds its share of the units, so that the sums are taken over all units and divided.
    """
    sequence, kinds = model.unit_kinds(grid)
    traffic = model.traffic(grid.dims, grid.zero)
    between = 0.0
    for index in sequence:
        unit = kinds[index]
        reduced, summed, gathered = traffic.of_unit(unit.kind, unit.parameters)
        between += reduced + summed
        between += gathered
    stages = grid.dims.pipeline_model_parallel_size
    return (grid.num_microbatches * layer_traffic(model, grid) + between) / stages
