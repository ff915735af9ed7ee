"""Why nothing fits, and what would."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from nest_megatron.cost_model.model import CostModel
from nest_megatron.errors import UserInputError
from nest_megatron.parallel.grid import Grid
from nest_megatron.parallel.plan import SearchRecord
from nest_megatron.planner.request import PlanRequest
from nest_megatron.solver.backend import choose, solver_of
from nest_megatron.solver.ranking import SearchResult
from nest_megatron.solver.room import Shortage, least_memory
from nest_megatron.solver.search import Search
from nest_megatron.solver.space import SearchSpace

#: Largest cluster that is tried to make a job fit.
LARGEST_CLUSTER = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class NoPlan:
    """Nothing fits: how far off the nearest plan is, and what would make it fit.

    Args:
        missing_bytes: what the nearest plan lacks on its fullest GPU.
        nearest: that plan's degrees, in words.
        remedies: changes that were tried and make some plan fit.
    """

    shortage: Shortage
    missing_bytes: int
    capacity_bytes: int
    nearest: str
    remedies: tuple[str, ...]
    search: SearchRecord


def refuse_if_nothing_is_legal(request: PlanRequest, result: SearchResult) -> None:
    """Tell a job that no grid can hold from one that lacks memory.

    Raises:
        UserInputError: if no combination of degrees is legal, naming the rules.
    """
    if result.certificate.candidates:
        return
    rules = "; ".join(sorted(result.certificate.illegal)) or (
        "the batch divides over no data-parallel size and micro batch"
    )
    raise UserInputError(
        "the job",
        value=", ".join(
            [
                f"{request.cluster.num_gpus} GPUs",
                f"global batch {request.global_batch_size}",
                *(f"{name}={value}" for name, value in request.space.fixed.items()),
            ]
        ),
        limit=f"no combination of degrees is legal for {request.spec.name} ({rules})",
        fix="Free a degree, or use a batch and a number of GPUs with more common divisors.",
    )


def no_plan(request: PlanRequest, model: CostModel, record: SearchRecord) -> NoPlan:
    """Explain an infeasible job: the nearest plan, and which larger clusters would take it."""
    shortage = least_memory(_new_search(request, model))
    assert shortage is not None, "a legal space has a plan that needs least memory"
    missing = shortage.needed_bytes - model.capacity_bytes
    return NoPlan(
        shortage=shortage,
        missing_bytes=missing,
        capacity_bytes=model.capacity_bytes,
        nearest=describe_grid(shortage.grid),
        remedies=tuple(_remedies(request, missing)),
        search=record,
    )


def _remedies(request: PlanRequest, missing: int) -> list[str]:
    """Single changes after which something fits, each tried."""
    found = []
    batch = request.global_batch_size
    if enough := _smallest_that_fits(request):
        found.append(f"cluster.num_gpus={enough}")
    free = SearchSpace(use_all_gpus=request.space.use_all_gpus)
    if request.space != free and _fits(dataclasses.replace(request, space=free)):
        found.append(f"leave free what is fixed ({', '.join(_given(request.space))})")
    if request.offer is not None and _fits(dataclasses.replace(request, space=request.offer.space)):
        found.append(f"another data-parallel sharding: {request.offer.free}")
    accelerator = request.cluster.accelerator
    more = -(-(missing + accelerator.memory_bytes) // 2**30)
    found.append(f"GPUs with at least {more} GiB of memory, for a global batch of {batch}")
    return found


def _given(space: SearchSpace) -> list[str]:
    """What the user holds fixed or limits."""
    everything = SearchSpace()
    others = {
        "use_megatron_fsdp": space.sharding is not None,
        "zero_stage": space.sharding is None and space.zero_stages != everything.zero_stages,
        "rank_order": space.rank_orders != everything.rank_orders,
        "recompute_granularity": space.recompute is not None,
    }
    limits = (f"max_{name}" for name in space.limits)
    return [*space.fixed, *limits, *(name for name, given in others.items() if given)]


def _smallest_that_fits(request: PlanRequest) -> int | None:
    """Fewest GPUs, in whole nodes, found by doubling and then halving the step back."""
    cluster = request.cluster
    node, size = cluster.gpus_per_node, cluster.num_gpus

    def fits(num_gpus: int) -> bool:
        return _fits(dataclasses.replace(request, cluster=cluster.resized(num_gpus)))

    while size <= LARGEST_CLUSTER:
        below, size = size, 2 * size if 2 * size <= node else -(-2 * size // node) * node
        if fits(size):
            while size - below > node:
                middle = below + (size - below) // (2 * node) * node
                below, size = (below, middle) if fits(middle) else (middle, size)
            return size
    return None


def _fits(request: PlanRequest) -> bool:
    model = CostModel(request.spec, request.cluster, request.settings, request.times)
    return bool(_new_search(request, model, first_fit=True).run().plans)


def _new_search(request: PlanRequest, model: CostModel, *, first_fit: bool = False) -> Search:
    return Search(
        model,
        request.global_batch_size,
        request.space,
        solver_of(choose(request.backend)),
        first_fit=first_fit,
    )


def describe_grid(grid: Grid) -> str:
    """A grid's degrees in one line."""
    dims = grid.dims
    words = [
        f"TP {dims.tensor_model_parallel_size}",
        f"PP {dims.pipeline_model_parallel_size}",
        f"CP {dims.context_parallel_size}",
        f"DP {dims.data_parallel_size}",
    ]
    if dims.expert_ranks > 1:
        words.append(f"EP {dims.expert_model_parallel_size}")
        words.append(f"ETP {dims.expert_tensor_parallel_size}")
    words += [f"micro batch {grid.micro_batch_size}", f"ZeRO-{int(grid.zero)}"]
    return ", ".join([*words, f"recompute {grid.recompute.label()}"])
