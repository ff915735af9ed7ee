"""Best-first search over grids; the stage solver judges each grid that could still win.

The heap holds nodes of six kinds, from coarse to fine, each with an admissible bound (no plan
below the node is faster):

* *shard*: tensor, context, expert degrees and micro batch. A replica's work on one micro batch is
  known, and the best pipeline can do is to divide it evenly with no bubble at all.
* *grid*: pipeline size and rank order on top.
* *family*: virtual stages and ZeRO stage on top; for the plain schedule the bound holds the fill
  and drain of a balanced pipeline.
* *members*: a family whose stage problem was solved without recomputation in unlimited memory;
  recomputation and memory limits only make a partition slower, so its time is a bound.
* *blocks*: full recomputation of the first layers of each chunk, block sizes rising lazily.
* *variant*: another recompute setting on top, judged by the stage solver.

A *layout* is a choice of tensor, context, pipeline and expert degrees and GPU count. The search
keeps the best plan of each of the best ``num_layouts`` layouts, and a node is dropped only when
its bound says it can neither improve its own layout nor enter that list.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from nest_megatron.cost_model.memory import static_bytes_per_parameter
from nest_megatron.cost_model.model import CostModel, replicas, shard_of
from nest_megatron.cost_model.pipeline import PipelineProblem
from nest_megatron.parallel import rules
from nest_megatron.parallel.dims import ParallelDims, RankOrder
from nest_megatron.parallel.grid import Grid
from nest_megatron.parallel.recompute import (
    NO_RECOMPUTE,
    Recompute,
    RecomputeMethod,
    RecomputeModule,
)
from nest_megatron.parallel.zero import ZeroStage
from nest_megatron.solver.outcome import (
    DEFAULT_NODE_LIMIT,
    NO_THRESHOLD,
    StageSolution,
    Status,
)
from nest_megatron.solver.space import SearchSpace, recompute_settings
from nest_megatron.units import Ticks, to_ticks

#: Memory that no plan reaches, to ask for the fastest partition whatever it needs.
UNLIMITED = 1 << 58

#: Solves a stage problem: the problem, the time to beat, and the most partial partitions to look
#: at.
StageSolver = Callable[[PipelineProblem, Ticks, int], StageSolution]

#: Enough for a bound that only orders the search; a plan that may win gets the solver's own limit.
BOUND_NODES = 2_000


class Layout(NamedTuple):
    """What tells one alternative from another."""

    world_size: int
    tensor_model_parallel_size: int
    context_parallel_size: int
    pipeline_model_parallel_size: int
    expert_model_parallel_size: int
    expert_tensor_parallel_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SolvedGrid:
    """A grid with its best stage partition.

    Args:
        iteration: predicted step, in ticks.
    """

    grid: Grid
    boundaries: tuple[int, ...]
    iteration: Ticks

    @property
    def rank(self) -> tuple[object, ...]:
        """Order of preference: faster first, then the tie rule on what is simpler to run."""
        return (self.iteration, *preference(self.grid))


def preference(grid: Grid) -> tuple[object, ...]:
    """Tie rule: fewer GPUs, then smaller degrees, then less recomputation and less sharding."""
    dims, again = grid.dims, grid.recompute
    return (
        dims.world_size,
        dims.tensor_model_parallel_size,
        dims.pipeline_model_parallel_size,
        dims.context_parallel_size,
        dims.expert_tensor_parallel_size,
        dims.expert_model_parallel_size,
        dims.virtual_pipeline_model_parallel_size,
        grid.micro_batch_size,
        int(grid.zero),
        again.granularity.value,
        again.method or "",
        again.num_layers or 0,
        again.modules,
        dims.rank_order.value,
    )


def layout_of(grid: Grid) -> Layout:
    """The layout that a grid belongs to."""
    dims = grid.dims
    return Layout(
        dims.world_size,
        dims.tensor_model_parallel_size,
        dims.context_parallel_size,
        dims.pipeline_model_parallel_size,
        dims.expert_model_parallel_size,
        dims.expert_tensor_parallel_size,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """What the search proved.

    Args:
        optimal: nothing in the declared space is faster than the answer.
        lower_bound: nothing in it is faster than this, in ticks.
        candidates: plans in the space, each a grid with recompute and ZeRO choice.
        bounded: those proven too slow without being solved.
        infeasible: those that cannot fit, by reason.
        solved: those whose best stage partition was computed.
        illegal: combinations of degrees that Megatron refuses, by rule.
        nodes, simulations: work of the stage solver.
    """

    optimal: bool
    lower_bound: Ticks
    candidates: int
    bounded: int
    infeasible: dict[str, int]
    solved: int
    illegal: dict[str, int]
    nodes: int
    simulations: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The best plan of each of the best layouts, fastest first, and what is proven."""

    plans: tuple[SolvedGrid, ...]
    certificate: Certificate


class _Node(NamedTuple):
    """A heap entry; ``serial`` keeps the order of equal bounds fixed."""

    bound: Ticks
    serial: int
    grid: Grid
    level: int


SHARD, GRID, FAMILY, MEMBERS, BLOCKS, VARIANT = range(6)

NO_STATES = "memory: weights, gradients and optimizer states"
NO_ROOM = "memory: with activations"


class Search:
    """One run of the search.

    Args:
        solve_stages: the stage solver, compiled or reference.
        num_layouts: how many layouts to rank exactly.
        first_fit: stop at the first plan that fits; its time means nothing.
        out_of_time: asked now and then; once true the search stops with what it has proven.
        on_progress: called with (candidates solved, best so far, proven bound), in ticks.
    """

    def __init__(
        self,
        model: CostModel,
        global_batch_size: int,
        space: SearchSpace,
        solve_stages: StageSolver,
        *,
        num_layouts: int = 11,
        first_fit: bool = False,
        out_of_time: Callable[[], bool] = lambda: False,
        on_progress: Callable[[int, Ticks, Ticks], None] | None = None,
    ) -> None:
        self.model = model
        self.global_batch_size = global_batch_size
        self.space = space
        self.solve_stages = solve_stages
        self.num_layouts = num_layouts
        self.first_fit = first_fit
        self.out_of_time = out_of_time
        self.on_progress = on_progress
        self.heap: list[_Node] = []
        self.serial = 0
        self.best: dict[Layout, SolvedGrid] = {}
        self.worst_kept: Ticks = NO_THRESHOLD
        self.illegal: Counter[str] = Counter()
        self.infeasible: Counter[str] = Counter()
        self.candidates = self.solved = self.nodes = self.simulations = 0
        self.unproven = NO_THRESHOLD
        self._sums: dict[object, tuple[Ticks, Ticks, float]] = {}
        self._leaves: dict[object, int] = {}
        self._settings: dict[int, tuple[Recompute, ...]] = {}
        self._kinds = Counter(model.spec.layer_kinds())
        self._num_units = len(model.spec.layer_kinds())
        self._floor = to_ticks(model.settings.iteration_floor_s)

    def run(self) -> SearchResult:
        """Search until nothing left can change the answer, or time is up."""
        for grid in self.shards():
            self.candidates += self._leaves_of_shard(grid)
            self._push(self._even_bound(grid), grid, SHARD)
        finished = self._drain()
        return self._result(finished)

    def _drain(self) -> bool:
        expand = (
            self._expand_shard,
            self._expand_grid,
            self._expand_family,
            self._expand_members,
            self._solve_blocks,
            self._solve_variant,
        )
        while self.heap:
            node = self.heap[0]
            if node.bound > self.worst_kept:
                return True
            if self.out_of_time():
                return False
            heapq.heappop(self.heap)
            if node.level == SHARD or node.bound <= self._threshold(node.grid):
                expand[node.level](node)
        return True

    def _result(self, finished: bool) -> SearchResult:
        plans = tuple(sorted(self.best.values(), key=lambda plan: plan.rank)[: self.num_layouts])
        best = plans[0].iteration if plans else NO_THRESHOLD
        open_bound = min((node.bound for node in self.heap), default=NO_THRESHOLD)
        lower = min(best, self.unproven, NO_THRESHOLD if finished else open_bound)
        known = self.solved + sum(self.infeasible.values())
        return SearchResult(
            plans=plans,
            certificate=Certificate(
                optimal=bool(plans) and lower >= best,
                lower_bound=lower,
                candidates=self.candidates,
                bounded=self.candidates - known,
                infeasible=dict(self.infeasible),
                solved=self.solved,
                illegal=dict(self.illegal),
                nodes=self.nodes,
                simulations=self.simulations,
            ),
        )

    def _push(self, bound: Ticks, grid: Grid, level: int) -> None:
        if bound <= self.worst_kept:
            self.serial += 1
            heapq.heappush(self.heap, _Node(bound, self.serial, grid, level))

    def _threshold(self, grid: Grid) -> Ticks:
        """Largest time with which a plan of this grid's layout still matters."""
        mine = self.best.get(layout_of(grid))
        return self.worst_kept if mine is None else min(mine.iteration, self.worst_kept)

    # --- shards -----------------------------------------------------------------------------

    def shards(self) -> Iterator[Grid]:
        """Grids with one pipeline stage that stand for all with the same shard of a layer."""
        for world in self.space.world_sizes(self.model.cluster):
            for tp, cp in self._dense_degrees(world):
                for ep, etp in self._expert_degrees(world, tp):
                    for micro in self._micro_batches():
                        yield self._one_stage(world, tp, cp, ep, etp, micro)

    def _dense_degrees(self, world: int) -> Iterator[tuple[int, int]]:
        spec, space, cluster = self.model.spec, self.space, self.model.cluster
        for tp in space.values("tensor_model_parallel_size", world, cluster):
            if not (rules.divides_heads(spec, tp) and rules.divides_dense_mlp(spec, tp)):
                self.illegal["tensor_model_parallel_size divides heads and MLP"] += 1
                continue
            for cp in space.values("context_parallel_size", world // tp, cluster):
                if not rules.allows_context_parallel(spec, cp):
                    self.illegal["model's attention allows context parallelism"] += 1
                elif not rules.divides_sequence(spec.seq_length, tp, cp, tp > 1):
                    self.illegal["sequence divides by 2 * cp and by cp * tp"] += 1
                else:
                    yield tp, cp

    def _expert_degrees(self, world: int, tp: int) -> Iterator[tuple[int, int]]:
        spec, space, cluster = self.model.spec, self.space, self.model.cluster
        if spec.num_experts is None:
            yield 1, 1
            return
        for ep in space.values("expert_model_parallel_size", spec.num_experts, cluster):
            for etp in space.values("expert_tensor_parallel_size", world, cluster):
                if not rules.divides_experts(spec, ep, etp) or world % (ep * etp):
                    self.illegal["expert degrees divide the experts and the ranks"] += 1
                elif not rules.allows_expert_bias(spec, etp):
                    self.illegal["experts with a bias are not split"] += 1
                elif not rules.reduces_expert_gradients(spec, tp, ep, etp):
                    self.illegal["without expert parallelism, etp equals tp"] += 1
                else:
                    yield ep, etp

    def _micro_batches(self) -> list[int]:
        sizes = self.space.values("micro_batch_size", self.global_batch_size, self.model.cluster)
        if "micro_batch_size" in self.space.fixed:
            return sizes
        return [size for size in sizes if size & (size - 1) == 0]

    def _one_stage(self, world: int, tp: int, cp: int, ep: int, etp: int, micro: int) -> Grid:
        dims = ParallelDims(
            tensor_model_parallel_size=tp,
            context_parallel_size=cp,
            data_parallel_size=world // (tp * cp),
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=etp,
        )
        # A stand-in batch: whether the real one divides depends on the pipeline size.
        return Grid(
            dims=dims,
            global_batch_size=micro * dims.data_parallel_size,
            micro_batch_size=micro,
            sequence_parallel=tp > 1,
        )

    def _work(self, grid: Grid, recompute: Recompute) -> tuple[Ticks, Ticks, float]:
        """Forward and backward time of one micro batch through all units, and the largest share
        of a unit's time that is forward. Blocks of full recomputation are not counted.
        """
        key = (self.model.shard_key(grid), recompute)
        if key not in self._sums:
            forward = backward = 0
            share = 0.0
            places, shard = self.model.places(grid.dims), shard_of(grid)
            for kind, count in self._kinds.items():
                ahead, back = self.model.least_time(kind, places, shard, recompute)
                forward, backward = forward + count * ahead, backward + count * back
                share = max(share, (ahead + 1) / max(1, ahead + back))
            self._sums[key] = (forward, backward, share)
        return self._sums[key]

    def _even_bound(self, grid: Grid, recompute: Recompute = NO_RECOMPUTE) -> Ticks:
        """All ranks busy all the time: the work of the whole batch over all ranks."""
        dims = grid.dims
        forward, backward, _ = self._work(grid, recompute)
        ranks = dims.tensor_model_parallel_size * dims.context_parallel_size
        work = (forward + backward) * self.global_batch_size * ranks
        return self._floor + work // (grid.micro_batch_size * dims.world_size)

    # --- grids ------------------------------------------------------------------------------

    def _expand_shard(self, node: _Node) -> None:
        for grid in self.grids(node.grid):
            bound = max(node.bound, self._even_bound(grid))
            if bound <= self._threshold(grid):
                self._push(bound, grid, GRID)

    def grids(self, shard: Grid) -> Iterator[Grid]:
        """Pipeline sizes and rank orders of a shard that Megatron accepts."""
        dims = shard.dims
        inner = dims.tensor_model_parallel_size * dims.context_parallel_size
        for pp in self._pipeline_sizes(shard):
            dp = dims.world_size // (inner * pp)
            for order in self.space.rank_orders:
                if (
                    order is RankOrder.TP_CP_EP_PP_DP
                    and (pp == 1 or dp == 1)
                    and (len(self.space.rank_orders) > 1)
                ):
                    continue  # the same groups as in the first order
                laid = ParallelDims(
                    tensor_model_parallel_size=dims.tensor_model_parallel_size,
                    pipeline_model_parallel_size=pp,
                    context_parallel_size=dims.context_parallel_size,
                    data_parallel_size=dp,
                    expert_model_parallel_size=dims.expert_model_parallel_size,
                    expert_tensor_parallel_size=dims.expert_tensor_parallel_size,
                    rank_order=order,
                )
                if rules.allows_rank_order(self.model.spec, laid):
                    yield Grid(
                        dims=laid,
                        global_batch_size=self.global_batch_size,
                        micro_batch_size=shard.micro_batch_size,
                        sequence_parallel=shard.sequence_parallel,
                    )

    def _pipeline_sizes(self, shard: Grid) -> list[int]:
        dims, fixed = shard.dims, self.space.fixed
        replicas_and_stages = dims.data_parallel_size
        sizes = []
        for pp in self.space.values(
            "pipeline_model_parallel_size", replicas_and_stages, self.model.cluster
        ):
            dp = replicas_and_stages // pp
            stage = dims.world_size // pp
            if (
                pp <= self._num_units
                and stage % dims.expert_ranks == 0
                and rules.num_microbatches(self.global_batch_size, shard.micro_batch_size, dp)
                and fixed.get("data_parallel_size", dp) == dp
            ):
                sizes.append(pp)
        return sizes

    # --- families ---------------------------------------------------------------------------

    def _expand_grid(self, node: _Node) -> None:
        for grid in self.families(node.grid):
            if self.least_static_bytes(grid) > self.model.capacity_bytes:
                self.infeasible[NO_STATES] += self._leaves_of_family(grid)
                continue
            bound = max(node.bound, self._pipeline_bound(grid, NO_RECOMPUTE))
            if bound <= self._threshold(grid):
                self._push(bound, grid, FAMILY)

    def families(self, grid: Grid) -> Iterator[Grid]:
        """Virtual stages and ZeRO stages of a grid that Megatron accepts."""
        for virtual in self._virtual_sizes(grid):
            dims = grid.dims
            if virtual > 1:
                dims = dataclasses.replace(dims, virtual_pipeline_model_parallel_size=virtual)
            for zero in self._zero_stages(dims):
                yield dataclasses.replace(grid, dims=dims, zero=zero)

    def _virtual_sizes(self, grid: Grid) -> list[int]:
        space, dims = self.space, grid.dims
        name, pp = "virtual_pipeline_model_parallel_size", dims.pipeline_model_parallel_size
        if pp == 1:
            return [1] if space.fixed.get(name, 1) == 1 else []
        most = (self.model.spec.num_layers + 2) // pp  # interior chunks hold a layer each
        sizes = range(1, min(most, space.limit(name, self.model.cluster)) + 1)
        if name in space.fixed:
            sizes = range(space.fixed[name], min(most, space.fixed[name]) + 1)
        fits = rules.allows_interleaving
        return [v for v in sizes if v == 1 or fits(pp, v, grid.num_microbatches)]

    def _zero_stages(self, dims: ParallelDims) -> list[ZeroStage]:
        """ZeRO stages that Megatron launches here; without replicas there is nothing to divide."""
        allowed = self.space.zero_stages
        pp, vpp = dims.pipeline_model_parallel_size, dims.virtual_pipeline_model_parallel_size
        if replicas(dims) == (1, 1) and ZeroStage.NONE in allowed:
            return [ZeroStage.NONE]
        return [zero for zero in allowed if rules.allows_zero(zero, pp, vpp)]

    def least_static_bytes(self, grid: Grid) -> float:
        """Weights and states of the fullest stage are at least the mean over stages."""
        dense, expert = replicas(grid.dims)
        count = self.model.parameters(grid.dims)
        total = count.dense * static_bytes_per_parameter(grid.zero, dense)
        total += count.expert * static_bytes_per_parameter(grid.zero, expert)
        return total / grid.dims.pipeline_model_parallel_size - self._num_units

    def _pipeline_bound(self, grid: Grid, recompute: Recompute) -> Ticks:
        """A balanced pipeline with its fill and drain (plain schedule), or with none.

        With stage times ``t_i`` the plain schedule takes at least ``T + w_i t_i`` for every stage,
        ``T`` the time of one micro batch through all stages and ``w_i = m - 1 - s min(m - 1, p - 1
        - i)`` with ``s`` the largest forward share (``reference._Search._stage_bound``). The best
        division of ``T`` makes all ``w_i t_i`` equal.
        """
        even = self._even_bound(grid, recompute)
        dims, m = grid.dims, grid.num_microbatches
        p = dims.pipeline_model_parallel_size
        if p == 1 or dims.virtual_pipeline_model_parallel_size > 1:
            return even
        forward, backward, share = self._work(grid, recompute)
        weights = [m - 1 - share * min(m - 1, p - 1 - i) for i in range(p)]
        if min(weights) <= 0:
            return max(even, self._floor + forward + backward)
        spread = 1.0 + 1.0 / sum(1.0 / w for w in weights)
        whole = math.floor((forward + backward) * spread * (1.0 - 1e-12))
        return max(even, self._floor + whole)

    def _expand_family(self, node: _Node) -> None:
        """Solve without recomputation in unlimited memory: nothing in the family is faster."""
        roomy = self._solve_roomy(node.grid)
        if roomy.status is not Status.BOUNDED:
            self._push(max(node.bound, roomy.lower_bound), node.grid, MEMBERS)

    def _expand_members(self, node: _Node) -> None:
        """Solve without recomputation in real memory; if that costs nothing, all else is slower."""
        settings = self.recompute_settings(node.grid)
        if settings[0] == NO_RECOMPUTE:
            settings.pop(0)
            found = self._solve_and_record(node.grid)
            if found.status is Status.OPTIMAL and found.iteration <= node.bound:
                return
        blocks = [r for r in settings if r.method is RecomputeMethod.BLOCK]
        if len(blocks) > 1:
            settings = [r for r in settings if r.method is not RecomputeMethod.BLOCK]
            self._push(node.bound, dataclasses.replace(node.grid, recompute=blocks[0]), BLOCKS)
        threshold = self._threshold(node.grid)
        bounds = {
            recompute: max(node.bound, self._pipeline_bound(node.grid, self._least_work(recompute)))
            for recompute in settings
        }
        in_time = [recompute for recompute in settings if bounds[recompute] <= threshold]
        for recompute in self._that_can_fit(node.grid, in_time):
            grid = dataclasses.replace(node.grid, recompute=recompute)
            self._push(bounds[recompute], grid, VARIANT)

    def _that_can_fit(self, grid: Grid, settings: list[Recompute]) -> list[Recompute]:
        """Leave out sets of modules inside a set that does not fit: fewer modules keep more bytes.

        Only the largest sets are asked; of a smaller one inside a large one that fits nothing is
        known until its turn comes.
        """
        too_small: list[frozenset[RecomputeModule]] = []
        possible: list[Recompute] = []
        for recompute in sorted(settings, key=lambda r: -len(r.modules)):
            modules = frozenset(recompute.modules)
            if modules and any(modules <= larger for larger in too_small):
                self.infeasible[NO_ROOM] += 1
                continue
            asked = modules and not any(modules < {*kept.modules} for kept in possible)
            if asked and not self._fits(dataclasses.replace(grid, recompute=recompute)):
                too_small.append(modules)
                self.infeasible[NO_ROOM] += 1
                continue
            possible.append(recompute)
        return possible

    def _fits(self, grid: Grid) -> bool:
        """Whether any partition of a grid fits in memory: ask for one that takes no time."""
        return self._solve(self.model.problem(grid), -1).status is not Status.INFEASIBLE

    def _solve_roomy(self, grid: Grid) -> StageSolution:
        """A bound for every plan that takes at least as long: the same in unlimited memory."""
        roomy = dataclasses.replace(self.model.problem(grid), capacity_bytes=UNLIMITED)
        return self._solve(roomy, self._threshold(grid), BOUND_NODES)

    def _least_work(self, recompute: Recompute) -> Recompute:
        """A setting whose work is a lower bound of this one's whatever the partition."""
        return NO_RECOMPUTE if recompute.method is RecomputeMethod.BLOCK else recompute

    def recompute_settings(self, grid: Grid) -> list[Recompute]:
        if self.space.recompute is not None:
            return [self.space.recompute]
        chunks = grid.dims.num_chunks
        if chunks not in self._settings:
            spec, precision = self.model.spec, self.model.settings.precision
            per_chunk = -(-spec.num_layers // chunks)
            self._settings[chunks] = tuple(recompute_settings(spec, precision, per_chunk))
        return list(self._settings[chunks])

    # --- variants ---------------------------------------------------------------------------

    def _solve_variant(self, node: _Node) -> None:
        self._solve_and_record(node.grid)

    def _solve_blocks(self, node: _Node) -> None:
        """Blocks of full recomputation, smallest first.

        A bigger block frees memory and takes longer, so block sizes that do not fit come first, and
        when even unlimited memory leaves a block too slow, all bigger ones are too.
        """
        first = node.grid.recompute.num_layers or 1
        most = self._largest_block(node.grid)
        size = self._smallest_block(node.grid, first, most)
        self.infeasible[NO_ROOM] += size - first
        if size > most:
            return
        grid = _with_block(node.grid, size)
        roomy = self._solve_roomy(grid)
        if roomy.status is Status.BOUNDED:
            return
        found = self._solve_and_record(grid)
        exhausted = found.status is Status.OPTIMAL and found.iteration == roomy.iteration
        if size < most and not exhausted:
            bound = max(node.bound, roomy.lower_bound)
            self._push(bound, _with_block(grid, size + 1), BLOCKS)

    def _largest_block(self, grid: Grid) -> int:
        return -(-self.model.spec.num_layers // grid.dims.num_chunks)

    def _smallest_block(self, grid: Grid, first: int, most: int) -> int:
        """Smallest block from ``first`` on with which some partition fits, or ``most + 1``."""
        if not self._fits(_with_block(grid, most)):
            return most + 1
        return (
            bisect.bisect_left(
                range(first, most + 1), True, key=lambda size: self._fits(_with_block(grid, size))
            )
            + first
        )

    def _solve_and_record(self, grid: Grid) -> StageSolution:
        """Solve a candidate as far as it matters, count it, and keep it if it is its layout's best."""
        found = self._solve(self.model.problem(grid), self._threshold(grid))
        if found.status is Status.INFEASIBLE:
            self.infeasible[NO_ROOM] += 1
            return found
        self.solved += 1
        if found.status is Status.LIMIT:
            self.unproven = min(self.unproven, found.lower_bound)
        if found.boundaries:
            self._keep(
                SolvedGrid(grid=grid, boundaries=found.boundaries, iteration=found.iteration)
            )
        return found

    def _solve(
        self, problem: PipelineProblem, threshold: Ticks, node_limit: int = DEFAULT_NODE_LIMIT
    ) -> StageSolution:
        """Ask for the best partition that takes no longer than a threshold."""
        found = self.solve_stages(problem, min(threshold + 1, NO_THRESHOLD), node_limit)
        self.nodes += found.nodes
        self.simulations += found.simulations
        return found

    def _keep(self, plan: SolvedGrid) -> None:
        layout = layout_of(plan.grid)
        if layout in self.best and self.best[layout].rank < plan.rank:
            return
        self.best[layout] = plan
        if len(self.best) >= self.num_layouts:
            times = sorted(kept.iteration for kept in self.best.values())
            self.worst_kept = times[self.num_layouts - 1]
        if self.first_fit:
            self.worst_kept = -1
        if self.on_progress:
            best = min(kept.iteration for kept in self.best.values())
            self.on_progress(self.solved, best, self.heap[0].bound if self.heap else best)

    # --- counting ---------------------------------------------------------------------------

    def _leaves_of_shard(self, shard: Grid) -> int:
        """Candidates below a shard; shards of the same sizes have equally many."""
        dims = shard.dims
        key = (
            dims.world_size,
            dims.tensor_model_parallel_size,
            dims.context_parallel_size,
            dims.expert_ranks,
            shard.micro_batch_size,
        )
        if key not in self._leaves:
            self._leaves[key] = sum(self._leaves_of_grid(grid) for grid in self.grids(shard))
        return self._leaves[key]

    def _leaves_of_grid(self, grid: Grid) -> int:
        zeros = len(self._zero_stages(grid.dims))
        pp = grid.dims.pipeline_model_parallel_size
        if pp > 1:
            zeros = min(zeros, len([zero for zero in self.space.zero_stages if not zero.is_fsdp]))
        return sum(zeros * self._num_settings(pp * v) for v in self._virtual_sizes(grid))

    def _leaves_of_family(self, grid: Grid) -> int:
        return self._num_settings(grid.dims.num_chunks)

    def _num_settings(self, chunks: int) -> int:
        """Recompute settings of a grid; only the block sizes depend on it."""
        if self.space.recompute is not None:
            return 1
        if 0 not in self._settings:
            spec, precision = self.model.spec, self.model.settings.precision
            self._settings[0] = tuple(recompute_settings(spec, precision, 0))
        return len(self._settings[0]) + -(-self.model.spec.num_layers // chunks)


def _with_block(grid: Grid, num_layers: int) -> Grid:
    block = dataclasses.replace(grid.recompute, num_layers=num_layers)
    return dataclasses.replace(grid, recompute=block)
