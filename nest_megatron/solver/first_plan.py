"""The fastest of few layouts that rules of thumb name: a search begins with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice, product

from nest_megatron.cost_model.peak_limit import PeakLimit
from nest_megatron.cost_model.stage_problems import StageProblems
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.recompute import NO_RECOMPUTE, Recompute
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.solver.bounds import MemoryBounds
from nest_megatron.solver.executions import with_stages_and_zero
from nest_megatron.solver.grids import GridSpace
from nest_megatron.solver.outcome import NO_THRESHOLD, StageSolver
from nest_megatron.solver.ranking import SolvedLayout, fastest
from nest_megatron.solver.space import settings_keeping_least

#: How many of the widest tensor sizes are tried, and of the smallest micro batches with each.
_TENSOR_SIZES, _MICRO_BATCHES = 4, 3
#: Context sizes that are tried with each, and pipelines with each of these.
_MOST_CONTEXTS, _MOST_PIPELINES = 4, 6
#: Share of the memory that states may take, so that activations have the rest.
_FOR_STATES = 0.5
#: Partial partitions that are looked at for the stages of one.
_MOST_NODES = 1


def first_plan(
    grids: GridSpace, memory: MemoryBounds, peaks: PeakLimit, solve: StageSolver
) -> SolvedLayout | None:
    """The fastest of a dozen rules of thumb: tenths of a second's work, whatever the clock says.

    The widest tensor sizes with the smallest micro batches. Of each, experts on all ranks or inside
    a node, as much context parallelism as gains, the shortest pipelines that leave room for
    activations, without virtual stages and with the most, the ZeRO stage that costs least, and as
    little recomputation as fits.

    Returns:
        ``None`` if none of these fits: the search itself has to tell.
    """
    return fastest(
        _plan_of(grids, memory, peaks, solve, shards) for shards in _shards_to_try(grids)
    )


def _shards_to_try(grids: GridSpace) -> Iterator[list[PartialLayout]]:
    """The shards of each tensor size and micro batch, those with few context ranks first.

    Experts are whole, on as many ranks as there are and on those of a node.
    """
    shards = list(grids.shards())
    most = max((shard.dims.world_size for shard in shards), default=0)
    shards = [shard for shard in shards if shard.dims.world_size == most]
    sizes = sorted({s.dims.tensor_model_parallel_size for s in shards}, reverse=True)
    micro = sorted({shard.micro_batch_size for shard in shards})
    spreads = (most, grids.model.cluster.gpus_per_node) if grids.model.spec.is_moe else (most,)
    for tp, size, spread in product(sizes[:_TENSOR_SIZES], micro[:_MICRO_BATCHES], spreads):
        found: dict[int, PartialLayout] = {}
        for shard in sorted(shards, key=_spread):
            dims = shard.dims
            sizes_match = (dims.tensor_model_parallel_size, shard.micro_batch_size) == (tp, size)
            if sizes_match and dims.expert_ranks <= spread:
                found.setdefault(dims.context_parallel_size, shard)
        yield [found[context] for context in sorted(found)][:_MOST_CONTEXTS]


def _spread(shard: PartialLayout) -> tuple[int, int]:
    return shard.dims.expert_tensor_parallel_size, -shard.dims.expert_model_parallel_size


def _plan_of(
    grids: GridSpace,
    memory: MemoryBounds,
    peaks: PeakLimit,
    solve: StageSolver,
    shards: Iterable[PartialLayout],
) -> SolvedLayout | None:
    """The fastest plan of some shards; those with more context ranks are tried while they gain."""
    best = None
    for shard in shards:
        plans = [
            plan
            for grid in islice(_pipelines(grids, memory, peaks, shard), _MOST_PIPELINES)
            for executed in grids.executed(grid)
            for plan in _solve_first_that_fits(grids, peaks, solve, executed)
        ]
        found = fastest(plans)
        if best is not None and (found is None or best.rank < found.rank):
            break
        best = found
    return best


def _pipelines(
    grids: GridSpace, memory: MemoryBounds, peaks: PeakLimit, shard: PartialLayout
) -> Iterator[PartialLayout]:
    """Pipelines of a shard, the shortest with room for activations first, then tight ones.

    Each with the ZeRO stage that costs least of those with which its states fit, and with the
    plain schedule or the most virtual stages.
    """
    tight = []
    for grid in grids.grids(shard):
        zeros = grids.zero_stages(grid.dims)
        needs = {zero: memory.of_states(grid.dims, zero) for zero in zeros}
        small = [zero for zero in needs if needs[zero] <= _FOR_STATES * peaks.at_most(zero)]
        sizes = grids.virtual_sizes(grid)
        if small:
            for virtual in dict.fromkeys((*sizes[:1], *sizes[-1:])):
                yield with_stages_and_zero(grid, virtual, min(small, key=_cost))
        elif needs and sizes:
            zero = min(needs, key=lambda zero: needs[zero])
            tight.append((needs[zero], with_stages_and_zero(grid, sizes[0], zero)))
    for needed, grid in sorted(tight, key=lambda each: each[0]):
        if needed <= peaks.of(grid):
            yield grid


def _cost(zero: ZeroStage) -> tuple[bool, bool, int]:
    """The distributed optimizer reduces no more than replicas do, and gathers at most once."""
    return zero.is_fsdp, zero is not ZeroStage.OPTIMIZER, int(zero)


def _solve_first_that_fits(
    grids: GridSpace, peaks: PeakLimit, solve: StageSolver, grid: PartialLayout
) -> Iterator[SolvedLayout]:
    """A grid with the first of its recompute settings that fits, and others of its kind."""
    stages = StageProblems(grids.model, grid, peaks.of(grid))
    for settings in _settings_to_try(grids.recompute_settings(grid)):
        fits = False
        for recompute in settings:
            found = solve(stages.problem(recompute), NO_THRESHOLD, _MOST_NODES)
            if found.boundaries:
                fits = True
                yield SolvedLayout.of(grid, recompute, found, grids.space.sharding)
        if fits:
            return


def _settings_to_try(settings: tuple[Recompute, ...]) -> Iterator[list[Recompute]]:
    """Nothing recomputed; one module or two; what keeps least."""
    yield [recompute for recompute in settings if recompute == NO_RECOMPUTE]
    yield [recompute for recompute in settings if 1 <= len(recompute.modules) <= 2]
    yield settings_keeping_least(settings)
