"""Best-first search over grids; the stage solver judges each grid that could still win.

The heap holds nodes of six kinds (``bounds.py``), from coarse to fine, each with a lower bound.

A *layout* is a choice of tensor, pipeline and expert degrees and GPU count. The search
keeps the best plan of each of the best ``num_layouts`` layouts, and a node is dropped only when
its bound says it can neither improve its own layout nor enter that list.
"""

from __future__ import annotations

import bisect
import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, InitVar, dataclass

from nest_megatron.caching import Caching, cached_by
from nest_megatron.cost_model.keys import SHARD as SHARD_KEY
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.peak_limit import PeakLimit
from nest_megatron.cost_model.pipeline import PipelineProblem
from nest_megatron.cost_model.stage_problems import StageProblems
from nest_megatron.layout.layout import Layout, PartialLayout
from nest_megatron.layout.recompute import NO_RECOMPUTE, Recompute
from nest_megatron.layout.rulebook.facts import is_within
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.solver.bounds import (
    BLOCKS,
    GRID,
    MEMBERS,
    SCHEDULE,
    SHARD,
    VARIANT,
    Bounds,
    MemoryBounds,
    Node,
)
from nest_megatron.solver.first_plan import first_plan
from nest_megatron.solver.grids import GridSpace
from nest_megatron.solver.one_partition import (
    check_partition,
    solver_of_even_stages,
    solver_of_partition,
    solver_with_mtp_at_head,
)
from nest_megatron.solver.outcome import (
    DEFAULT_NODE_LIMIT,
    NO_THRESHOLD,
    OutOfTime,
    StageSolution,
    StageSolver,
    Status,
)
from nest_megatron.solver.ranking import FastestPlans, SearchResult, SolvedLayout
from nest_megatron.solver.recompute_bounds import RecomputeBounds
from nest_megatron.solver.space import Choices, SearchSpace, sort_settings
from nest_megatron.units import Bytes, Ticks

#: Memory that no plan reaches, to ask for the fastest partition whatever it needs.
UNLIMITED = 1 << 58

_STATES = "memory: weights, gradients and optimizer states"
_ACTIVATIONS = "memory: with activations"


@dataclass(eq=False)
class Search(Caching):
    """One run of the search.

    Args:
        solve_stages: the stage solver, compiled or reference.
        limit: the highest peaks that plans may have; those of the device by default.
        num_layouts: how many layouts to rank exactly.
        tie_percent: plans so close to the fastest are found of each layout, with each number of
            virtual stages, and with the stages that Megatron cuts by itself.
        slowest: plans that take longer are dropped, and candidates are not counted; without it
            some plan is always looked for.
        like: a search of the same job and space under a lower limit, for slower plans: what it has
            worked out is shared, and only what its limit has stopped is searched, once.
        present: what the job runs today, a plan of the space whatever its limits, and whatever its
            chance to run out of memory; it is priced first. It need not fit.
        out_of_time: called now and then; once true the search stops with what it has proven. The
            present layout is priced all the same, and rules of thumb where nothing was solved.
        on_progress: called with (candidates solved, best so far, proven bound), in ticks; the best
            is ``None`` before there is a plan.
    """

    model: CostModel
    global_batch_size: int
    space: SearchSpace
    solve_stages: StageSolver
    _: KW_ONLY
    limit: InitVar[PeakLimit | None] = None
    num_layouts: int = 11
    tie_percent: float = 0.0
    slowest: InitVar[Ticks] = NO_THRESHOLD
    like: InitVar[Search | None] = None
    present: Layout | None = None
    out_of_time: OutOfTime = lambda: False
    on_progress: Callable[[int, Ticks | None, Ticks], None] | None = None

    def __post_init__(self, limit: PeakLimit | None, slowest: Ticks, like: Search | None) -> None:
        space = self.space
        self.solve_stages = solver_with_mtp_at_head(
            self.solve_stages,
            self.model.spec,
            mtp_beside_layer=space.mtp_beside_layer,
            mtp_beside_head=is_within(space.version, until="0.15"),
        )
        self.solve_any_stages = self.solve_stages
        if like is None:
            self.grids = GridSpace(self.model, self.global_batch_size, space)
            self.bounds = Bounds(self.model, self.global_batch_size, self.grids.micro_batches)
            self.memory = MemoryBounds(self.model, self.grids)
            self.recomputing = RecomputeBounds(self.bounds, self.memory)
            self.lower_bounds: dict[PartialLayout, Ticks] = {}  # in any memory
            self.in_any_memory: dict[PartialLayout, Ticks] = {}  # the same, of whole partitions
            self.shards, self.heap, self.serial = self.grids.shards(), list[Node](), 0
        else:
            self.grids, self.bounds, self.memory = like.grids, like.bounds, like.memory
            self.recomputing = like.recomputing
            self.lower_bounds, self.in_any_memory = like.lower_bounds, like.in_any_memory
            self.shards, self.heap, self.serial = iter(like.refused), like.stopped, like.serial
            heapq.heapify(self.heap)
        self.peaks = limit or PeakLimit(self.model)
        self.most_bytes = max(map(self.peaks.at_most, space.zero_stages), default=0)
        self.only_one = space.partition is not None or space.even_stages
        if space.partition is not None:
            check_partition(
                self.model.spec, space.partition, mtp_beside_layer=space.mtp_beside_layer
            )
            self.solve_stages = solver_of_partition(self.solve_stages, space.partition)
        elif space.even_stages:
            self.solve_stages = solver_of_even_stages(self.solve_stages, self.model.spec)
        self.solve_even = solver_of_even_stages(self.solve_stages, self.model.spec)
        self.is_first = slowest == NO_THRESHOLD
        self.enumerated, self.interrupted = False, False
        # What the limit stops: shards, and nodes below which some layout is refused or slower.
        self.refused: list[PartialLayout] = []
        self.stopped: list[Node] = []
        wanted = self.num_layouts, self.tie_percent, slowest
        self.plans = FastestPlans(self.model.spec, *wanted, cuts_alike=self.only_one)
        self.infeasible: Counter[str] = Counter()
        self.candidates = self.solved = self.nodes = self.simulations = 0
        self.unproven, self._least_open = NO_THRESHOLD, 0

    def run(self) -> SearchResult:
        """Search until nothing left can change the answer, or time is up."""
        present = self._price_present()
        self.enumerated = self._enumerate()
        drained = self.enumerated and self._drain()
        if self.is_first and not (drained or (self.solved and self.plans.best)):
            self.plans.keep(first_plan(self.grids, self.memory, self.peaks, self.solve_stages))
        return self._result(present, drained=drained)

    def _price_present(self) -> SolvedLayout | None:
        """What the job runs today as a plan, the first one known; ``None`` if it does not fit."""
        if self.present is None:
            return None
        grid, stages = self.present.without_stages(), self.present.partition
        solve = solver_of_partition(self.solve_any_stages, stages)
        problem = StageProblems(self.model, grid).problem(grid.recompute)
        found = solve(problem, NO_THRESHOLD, DEFAULT_NODE_LIMIT)
        plan = (
            SolvedLayout.of(grid, grid.recompute, found, self.space.sharding)
            if found.boundaries
            else None
        )
        self.plans.keep(plan)
        return plan

    def _enumerate(self) -> bool:
        """Put every shard whose states fit on the heap; false if time ran out."""
        refused = 0
        for grid in self.shards:
            if self.out_of_time():
                return False
            candidates = self.grids.candidates_of_shard(grid) if self.is_first else 0
            if self.memory.of_shard_states(grid) > self.most_bytes:
                refused += candidates
                self.refused.append(grid)
            else:
                self.candidates += candidates
                self._push(self._least_of(self.bounds.in_any_micro_batch, grid), grid, SHARD)
        if refused:  # counted once all are known: a search that ends before has not seen them
            self.candidates += refused
            self.infeasible[_STATES] = refused
        return True

    def _drain(self) -> bool:
        expand = (
            self._expand_shard,
            self._expand_grid,
            self._expand_schedule,
            self._expand_members,
            self._solve_blocks,
            self._solve_variant,
        )
        while self.heap:
            node = self.heap[0]
            if node.bound > self.plans.slowest:
                return True
            self._least_open = node.bound
            if self.out_of_time():
                return False
            heapq.heappop(self.heap)
            decided, threshold = node.level >= MEMBERS, self.plans.threshold
            if node.level == SHARD or node.bound <= threshold(node.grid, decided=decided):
                expand[node.level](node)
        return True

    def _result(self, present: SolvedLayout | None, *, drained: bool) -> SearchResult:
        plans, ties = self.plans.ranked()
        best = plans[0].iteration if plans else NO_THRESHOLD
        lower = min(best, self.unproven, NO_THRESHOLD if drained else self._open_bound())
        known = self.solved + sum(self.infeasible.values())
        return SearchResult(
            plans=plans,
            ties=ties,
            present=present,
            finished=drained and not self.interrupted,
            optimal=bool(plans) and lower >= best,
            lower_bound=lower,
            candidates=self.candidates,
            bounded=self.candidates - known if drained else 0,
            infeasible=dict(self.infeasible),
            solved=self.solved,
            illegal=tuple(sorted(self.grids.illegal)),
            nodes=self.nodes,
            simulations=self.simulations,
        )

    def _open_bound(self) -> Ticks:
        """No plan that is still to be looked at is faster."""
        if not self.enumerated:
            shards = self.grids.shards()
            bounds = (self._least_of(self.bounds.in_any_micro_batch, each) for each in shards)
            return min(bounds, default=self.bounds.floor)
        return min(self.heap[0].bound, NO_THRESHOLD - 1) if self.heap else NO_THRESHOLD

    def _push(
        self,
        bound: Ticks,
        grid: PartialLayout,
        level: int,
        recompute: Recompute = NO_RECOMPUTE,
        stages: StageProblems | None = None,
        *,
        in_memory: Ticks = 0,
        is_stopped: bool = False,
    ) -> None:
        """Put a node on the heap.

        Args:
            bound: in any memory; ``in_memory``, in that of the search.
            is_stopped: a search with more memory starts above the node.
        """
        if bound <= self.plans.slowest:
            self.serial += 1
            longest = max(bound, in_memory)
            node = Node(longest, self.serial, grid, level, recompute, stages, bound, is_stopped)
            node = self._stop(node) if longest > bound else node
            if longest <= self.plans.slowest:
                heapq.heappush(self.heap, node)

    def _stop(self, node: Node) -> Node:
        """Leave a node to a search with more memory, unless one above it is."""
        if not node.is_stopped:
            self.stopped.append(node._replace(bound=node.in_any_memory, stages=None))
        return node._replace(is_stopped=True)

    def _least_of(self, bound: Callable[[PartialLayout], Ticks], grid: PartialLayout) -> Ticks:
        """A bound of a grid in its fastest executions."""
        return min(map(bound, self.grids.fastest(grid)))

    def _expand_shard(self, node: Node) -> None:
        even = self._least_of(self.bounds.even, node.grid)
        if even > node.bound:  # its experts are priced only now
            heapq.heappush(self.heap, node._replace(bound=even))
            return
        for grid in self.grids.grids(node.grid):
            bound = max(node.bound, self._least_of(self.bounds.waiting, grid))
            if bound <= self.plans.threshold(grid, decided=False):
                self._push(bound, grid, GRID)

    def _expand_grid(self, node: Node) -> None:
        grid, threshold = node.grid, self.plans.threshold(node.grid, decided=False)
        fitting = self.zeros_that_fit(grid)
        if fitting and node.bound == node.in_any_memory:  # its memory is looked at only now
            most = max(map(self.peaks.at_most, fitting))
            in_memory = self.recomputing.of_grid(grid, fitting, most, node.bound)
            if in_memory > node.bound:
                heapq.heappush(self.heap, self._stop(node)._replace(bound=in_memory))
                return
        refused = [zero for zero in self.grids.zero_stages(grid.dims) if zero not in fitting]
        if refused and self.is_first:
            self.infeasible[_STATES] += self.grids.candidates_of_grid(grid, refused)
            node = self._stop(node)
        for schedule in self.grids.schedules(grid, fitting):
            bound = max(node.in_any_memory, self.bounds.pipeline(schedule))
            if bound <= threshold:
                self._push(
                    bound, schedule, SCHEDULE, in_memory=node.bound, is_stopped=node.is_stopped
                )

    def zeros_that_fit(self, grid: PartialLayout) -> list[ZeroStage]:
        """ZeRO stages of a grid with which its states may fit in memory."""
        needed, most = self.memory.of_states, self.peaks.at_most
        allowed = self.grids.zero_stages(grid.dims)
        return [zero for zero in allowed if needed(grid.dims, zero) <= most(zero)]

    def _expand_schedule(self, node: Node) -> None:
        """Bound the stage problems themselves."""
        refused = self.infeasible[_ACTIVATIONS]
        families = [*self.families_that_fit(node.grid)]
        if self.infeasible[_ACTIVATIONS] > refused:
            node = self._stop(node)
        of_zero: dict[ZeroStage, Ticks] = {}  # however many virtual stages
        for family, most in families:
            if family.zero not in of_zero:
                of_zero[family.zero] = self.recomputing.of_family(family, most)
            threshold, least = self.plans.threshold(family), self.lower_bounds.get(family)
            in_memory = max(node.bound, of_zero[family.zero])
            if in_memory > threshold:
                node = self._stop(node)
                continue
            if least is not None and least > threshold:
                continue
            stages = StageProblems(self.model, family, most)
            if least is None:
                least = self._bound_in_any_memory(stages, NO_RECOMPUTE).lower_bound
                self.lower_bounds[family] = least
            if least <= threshold:
                bound, kept = max(node.in_any_memory, least), node.is_stopped
                self._push(
                    bound, family, MEMBERS, stages=stages, in_memory=in_memory, is_stopped=kept
                )

    def families_that_fit(self, schedule: PartialLayout) -> Iterator[tuple[PartialLayout, Bytes]]:
        """The families of a schedule that may fit in memory, each with its limit."""
        needed = self.memory.of_family
        for zero in self.zeros_that_fit(schedule):
            families = [*self.grids.families_of(schedule, [zero])]
            if not families:
                continue
            # The more virtual stages there are, the less is kept early.
            most = self.peaks.of(families[0])
            some_fit = needed(families[-1]) <= most
            all_fit = some_fit and needed(families[0]) <= most
            for family in families:
                if all_fit or (some_fit and needed(family) <= most):
                    yield family, most
                else:
                    self.infeasible[_ACTIVATIONS] += len(self.grids.recompute_settings(family))

    def _expand_members(self, node: Node) -> None:
        """Solve without recomputation; where memory costs that nothing, all else is slower."""
        grid, choices = node.grid, self._choices(node.grid)
        stages = node.stages or StageProblems(self.model, grid, self.peaks.of(grid))
        if choices.none and self.memory.under(grid, (NO_RECOMPUTE,)) > stages.capacity_bytes:
            self.infeasible[_ACTIVATIONS] += 1
        elif choices.none:
            # Blocks have a bound of their own that is as good.
            if not choices.blocks and self._in_any_memory(stages) > self.plans.threshold(grid):
                return
            found = self._solve_and_record(stages, NO_RECOMPUTE)
            if self._is_best_in_any_memory(stages, NO_RECOMPUTE, found):
                return
        self._stop(node)
        if choices.blocks:
            self._push(node.bound, grid, BLOCKS, choices.blocks[0], stages)
        threshold = self.plans.threshold(grid)
        bounds = self.recomputing.of_settings(grid, stages.capacity_bytes, choices.others)
        pairs = zip(choices.others, bounds, strict=True)
        for recompute, bound in self._that_can_fit(stages, (p for p in pairs if p[1] <= threshold)):
            self._push(max(node.bound, bound), grid, VARIANT, recompute, stages)

    def _solve_variant(self, node: Node) -> None:
        """Solve with another recompute setting, which takes as long as none in any memory."""
        fastest = self._in_any_memory(node.problems())
        if fastest > node.bound:
            heapq.heappush(self.heap, node._replace(bound=fastest))
        else:
            self._solve_and_record(node.problems(), node.recompute)

    def _in_any_memory(self, stages: StageProblems) -> Ticks:
        """The time of the best partition in any memory, or one that is too long to matter."""
        if stages.grid not in self.in_any_memory:
            unlimited = self._in_unlimited_memory(stages, NO_RECOMPUTE)
            found = self._solve(unlimited, self.plans.threshold(stages.grid))
            self.in_any_memory[stages.grid] = found.lower_bound
        return self.in_any_memory[stages.grid]

    @cached_by(lambda self, grid: self.grids.settings_key(grid))
    def _choices(self, grid: PartialLayout) -> Choices:
        lazily = self.grids.space.recompute is None and not self.only_one
        return sort_settings(self.grids.recompute_settings(grid), lazily=lazily)

    def _that_can_fit(
        self, stages: StageProblems, settings: Iterable[tuple[Recompute, Ticks]]
    ) -> Iterator[tuple[Recompute, Ticks]]:
        """Leave out sets of modules inside a set that does not fit: fewer modules keep more bytes.

        Only the largest sets are solved; of a smaller one inside a large one that fits nothing is
        known until its turn comes. The one partition of a space is cheap to solve for every set,
        and sure: working memory can grow at a peak where the chunk recomputed keeps nothing.

        Args:
            settings: with their bounds, the largest sets of modules first.
        """
        too_small: list[frozenset[object]] = []
        enough: list[frozenset[object]] = []
        for recompute, bound in settings:
            modules = frozenset[object](() if self.only_one else recompute.modules)
            if modules and not any(modules < larger for larger in enough):
                if any(modules <= larger for larger in too_small) or not self._fits(
                    stages, recompute
                ):
                    too_small.append(modules)
                    self.infeasible[_ACTIVATIONS] += 1
                    continue
                enough.append(modules)
            yield recompute, bound

    @cached_by(
        lambda _, stages, recompute: (
            SHARD_KEY.of(stages.grid),
            stages.grid.dims.pipeline_model_parallel_size,
            stages.grid.dims.virtual_pipeline_model_parallel_size,
            stages.grid.zero,
            stages.capacity_bytes,
            recompute,
        )
    )
    def _fits(self, stages: StageProblems, recompute: Recompute) -> bool:
        """Whether any partition fits in memory, in any rank order: ask for one of no time."""
        return self._solve(stages.problem(recompute), -1).status is not Status.INFEASIBLE

    def _bound_in_any_memory(self, stages: StageProblems, recompute: Recompute) -> StageSolution:
        """A bound for every plan of this grid that takes at least as long: no limits, no search."""
        unlimited = self._in_unlimited_memory(stages, recompute)
        return self._solve(unlimited, self.plans.threshold(stages.grid), node_limit=0)

    def _is_best_in_any_memory(
        self, stages: StageProblems, recompute: Recompute, found: StageSolution
    ) -> bool:
        """Whether no setting that recomputes more can win: memory costs this one nothing.

        Even unlimited memory allows no faster partition than the one found, and no stages that
        Megatron cuts by itself that would tie with the fastest and are not known.
        """
        if found.status is not Status.OPTIMAL:
            return False
        unlimited = self._in_unlimited_memory(stages, recompute)
        if (
            self.in_any_memory.get(stages.grid, 0) < found.iteration
            and self._solve(unlimited, found.iteration - 1).status is not Status.BOUNDED
        ):
            return False
        longest = self.plans.threshold_of_even_stages(stages.grid)
        if self.plans.has_even_tie(stages.grid):
            longest -= 1
        if longest < found.iteration:
            return True
        even = self.solve_even(unlimited, longest + 1, DEFAULT_NODE_LIMIT)
        return even.status is Status.BOUNDED

    def _in_unlimited_memory(self, stages: StageProblems, recompute: Recompute) -> PipelineProblem:
        """A problem that no setting that recomputes more solves faster.

        With virtual stages recomputation can lie in a rank's slack and hide more of its gradient
        reduction, so the least that any setting can leave of it counts.
        """
        virtual = stages.grid.dims.virtual_pipeline_model_parallel_size > 1
        found = stages.problem(recompute, hidden_reduce=self.only_one or virtual)
        return found._replace(capacity_bytes=UNLIMITED)

    def _solve_blocks(self, node: Node) -> None:
        """Blocks of full recomputation, smallest first.

        A bigger block frees memory and takes longer: block sizes that do not fit come first, and
        when even unlimited memory leaves a block too slow, all bigger ones are too.
        """
        stages, blocks = node.problems(), self._choices(node.grid).blocks
        smaller = blocks.index(node.recompute)
        blocks = blocks[smaller:]
        unlimited = self._bound_in_any_memory(stages, blocks[0])
        if unlimited.status is Status.BOUNDED:
            return
        # Behind a block that fits all do.
        first = 0 if smaller else self._first_that_fits(stages, blocks)
        self.infeasible[_ACTIVATIONS] += first
        if first == len(blocks):
            return
        if first:
            unlimited = self._bound_in_any_memory(stages, blocks[first])
        if unlimited.status is Status.BOUNDED:
            return
        found = self._solve_and_record(stages, blocks[first])
        bigger = blocks[first + 1 :]
        if bigger and not self._is_best_in_any_memory(stages, blocks[first], found):
            bound = max(node.bound, unlimited.lower_bound)
            self._push(bound, node.grid, BLOCKS, bigger[0], stages)

    def _first_that_fits(self, stages: StageProblems, blocks: tuple[Recompute, ...]) -> int:
        """Index of the smallest block that fits, or how many blocks there are."""
        last = len(blocks) - 1
        if not self._fits(stages, blocks[last]):
            return len(blocks)
        return bisect.bisect_left(
            blocks, True, 0, last, key=lambda block: self._fits(stages, block)
        )

    def _solve_and_record(self, stages: StageProblems, recompute: Recompute) -> StageSolution:
        """Solve a candidate as far as it matters, count it, keep it if it is its layout's best."""
        grid, problem = stages.grid, stages.problem(recompute)
        found = self._solve(problem, self.plans.threshold_of_any_stages(grid))
        if found.status is Status.INFEASIBLE:
            self.infeasible[_ACTIVATIONS] += 1
            return found
        self.solved += 1
        if found.status is Status.LIMIT:
            self.unproven = min(self.unproven, found.lower_bound)
            self.interrupted |= self.out_of_time()
        if found.boundaries:
            self.plans.keep(SolvedLayout.of(grid, recompute, found, self.space.sharding))
        longest = self.plans.threshold_of_even_stages(grid)
        if longest >= min(found.iteration, found.lower_bound):
            even = self.solve_even(problem, longest + 1, DEFAULT_NODE_LIMIT)
            if even.boundaries and even.boundaries != found.boundaries:
                self.plans.keep(SolvedLayout.of(grid, recompute, even, self.space.sharding))
        if self.on_progress:
            best = self.plans.least()
            # What is being expanded is open, and no longer on the heap.
            proven = min(self._least_open, self.unproven)
            self.on_progress(self.solved, best, proven if best is None else min(proven, best))
        return found

    def _solve(
        self, problem: PipelineProblem, threshold: Ticks, node_limit: int = DEFAULT_NODE_LIMIT
    ) -> StageSolution:
        """Ask for the best partition that takes no longer than a threshold."""
        found = self.solve_stages(problem, min(threshold + 1, NO_THRESHOLD), node_limit)
        self.nodes += found.nodes
        self.simulations += found.simulations
        return found
