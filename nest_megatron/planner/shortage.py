"""Why nothing fits, and what would."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from nest_megatron.cost_model.memory import capacity_bytes, within_error
from nest_megatron.cost_model.model import CostModel
from nest_megatron.deadline import Deadline
from nest_megatron.errors import UserInputError
from nest_megatron.parallel.dims import SHORT_DEGREES
from nest_megatron.parallel.grid import Grid
from nest_megatron.parallel.plan import SearchRecord
from nest_megatron.planner.conflict import binding, is_legal_without, single_relaxations
from nest_megatron.planner.request import PlanRequest
from nest_megatron.solver.backend import choose, solver_of
from nest_megatron.solver.memory_shortage import Shortage, fits, least_memory
from nest_megatron.solver.ranking import SearchResult
from nest_megatron.solver.search import Search
from nest_megatron.solver.space import SearchSpace
from nest_megatron.units import Seconds

#: Largest cluster that is tried to make a job fit.
LARGEST_CLUSTER = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class NoPlan:
    """Nothing fits: how far off the nearest plan is, and what would make it fit.

    Args:
        missing_bytes: what the nearest plan lacks on the GPU with the highest peak.
        nearest: that plan's degrees, in words.
        remedies: changes that were tried and make some plan fit.
        complete: false if time ended the analysis: some other plan may lack less, and other changes
            may help.
    """

    shortage: Shortage
    missing_bytes: int
    capacity_bytes: int
    nearest: str
    remedies: tuple[str, ...]
    search: SearchRecord
    complete: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedEarly:
    """Time ran out before a plan was found; whether there is one is not known.

    Args:
        lower_bound_s: no plan of the searched space has a shorter step.
        max_seconds: the limit that was given.
        search: what was looked at; its certificate is ``ended-early``.
    """

    lower_bound_s: Seconds
    max_seconds: Seconds
    search: SearchRecord


def refuse_if_nothing_is_legal(
    request: PlanRequest, result: SearchResult, deadline: Deadline
) -> None:
    """Tell a job that no grid can hold from one that lacks memory.

    Args:
        deadline: when it passes, what was found until then is told.

    Raises:
        UserInputError: if no combination of degrees is legal, naming the rules.
    """
    if result.certificate.candidates:
        return
    broken = binding(request, deadline.passed)
    rules = "; ".join(f"{rule.what} = {rule.value}: {rule.limit}" for rule in broken)
    rules = rules or "; ".join(sorted(result.certificate.illegal)) or "nothing divides the GPUs"
    advice = _relaxed(request, deadline)
    if not advice and all(rule.what != "global_batch_size" for rule in broken):
        advice = " ".join(rule.fix for rule in broken)
    gpus, batch = f"{request.cluster.num_gpus} GPUs", f"global batch {request.global_batch_size}"
    fixed = (f"{name}={value}" for name, value in request.space.fixed.items())
    raise UserInputError(
        "the job",
        value=", ".join([gpus, batch, *fixed]),
        limit=f"no combination of degrees is legal for {request.spec.name} ({rules})",
        fix=advice or "Use a batch and a number of GPUs with more common divisors.",
    )


def _relaxed(request: PlanRequest, deadline: Deadline) -> str:
    """Which fixed values to free, as far as that makes some combination legal."""
    free = single_relaxations(request, deadline.passed)
    if free:
        alone = "any one of them" if len(free) > 1 else "that"
        return f"Change or free {' or '.join(free)}: {alone} alone makes it legal."
    if is_legal_without(request, tuple(request.space.fixed), deadline.passed):
        return "Change or free more than one of these sizes: no single one alone makes it legal."
    return ""


def no_plan(
    request: PlanRequest, model: CostModel, record: SearchRecord, deadline: Deadline
) -> NoPlan:
    """Explain an infeasible job: the nearest plan, and which larger clusters would take it.

    Args:
        deadline: when it passes, what was found until then is told.
    """
    shortage = least_memory(_new_search(request, model, deadline), deadline.passed)
    assert shortage is not None, "a legal space has a plan that needs least memory"
    missing = shortage.needed_bytes - model.capacity_bytes
    return NoPlan(
        shortage=shortage,
        missing_bytes=missing,
        capacity_bytes=model.capacity_bytes,
        nearest=describe_grid(shortage.grid),
        remedies=tuple(_remedies(request, missing, deadline)),
        search=record,
        complete=not deadline.passed(),
    )


def _remedies(request: PlanRequest, missing: int, deadline: Deadline) -> list[str]:
    """Single changes after which something fits, each tried."""
    found, accelerator = [], request.cluster.accelerator
    if enough := _smallest_that_fits(request, deadline):
        found.append(f"cluster.num_gpus={enough}")
    given = _given(request.space)
    if given and _fits(dataclasses.replace(request, space=_freed(request.space)), deadline):
        found.append(f"leave free what is fixed ({', '.join(given)})")
    offer = request.offer
    if offer is not None and _fits(dataclasses.replace(request, space=offer.space), deadline):
        found.append(f"another data-parallel sharding: {offer.free}")
    # A smaller margin, where less is missing than such predictions are wrong by.
    limit = capacity_bytes(accelerator, request.settings)
    margin = request.settings.memory_margin - missing / accelerator.memory_bytes
    if within_error(limit + missing, limit) and margin >= 0:
        rounded = math.floor(1000 * margin) / 1000
        found.append(f"memory.margin={rounded:g}, at your own risk: it may run out of memory")
    more = -(-(missing + accelerator.memory_bytes) // 2**30)
    batch = request.global_batch_size
    found.append(f"GPUs with at least {more} GiB of memory, for a global batch of {batch}")
    return found


def _freed(space: SearchSpace) -> SearchSpace:
    """A space without what ``_given`` names; what the framework or the run limits stays."""
    names = ("fixed", "limits", "partition", "recompute", "sharding", "zero_stages", "rank_orders")
    everything = SearchSpace()
    return dataclasses.replace(space, **{name: getattr(everything, name) for name in names})


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


def _smallest_that_fits(request: PlanRequest, deadline: Deadline) -> int | None:
    """Fewest GPUs, in whole nodes, found by doubling and then halving the step back.

    Where time runs out it is some number of GPUs that is enough, or none.
    """
    cluster = request.cluster
    node, size = cluster.gpus_per_node, cluster.num_gpus

    def enough(num_gpus: int) -> bool:
        return _fits(dataclasses.replace(request, cluster=cluster.resized(num_gpus)), deadline)

    while True:
        below, size = size, 2 * size if 2 * size <= node else -(-2 * size // node) * node
        if size > LARGEST_CLUSTER or deadline.passed():
            return None
        if enough(size):
            break
    if size <= node:
        return size
    fewer, nodes = below // node, size // node
    while nodes - fewer > 1 and not deadline.passed():
        middle = (fewer + nodes) // 2
        fewer, nodes = (fewer, middle) if enough(middle * node) else (middle, nodes)
    return nodes * node


def _fits(request: PlanRequest, deadline: Deadline) -> bool:
    """Whether some plan fits, as far as there was time to find one."""
    return fits(_new_search(request, request.cost_model(), deadline), deadline.passed)


def _new_search(request: PlanRequest, model: CostModel, deadline: Deadline) -> Search:
    solve = solver_of(choose(request.backend), deadline.passed)
    return Search(model, request.global_batch_size, request.space, solve)


def describe_grid(grid: Grid) -> str:
    """A grid's degrees in one line."""
    degrees = {short: getattr(grid.dims, name) for name, short in SHORT_DEGREES.items()}
    left_out = ("VPP",) if grid.dims.expert_ranks > 1 else ("VPP", "EP", "ETP")
    words = [f"{short} {size}" for short, size in degrees.items() if short not in left_out]
    words.append(f"micro batch {grid.micro_batch_size}")
    return ", ".join([*words, f"ZeRO-{int(grid.zero)}", f"recompute {grid.recompute.label()}"])
