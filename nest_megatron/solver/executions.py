"""Executions of a grid's layers: those that Megatron accepts, and those that none dominates.

An execution dominates another where it allows as much recomputation, keeps and needs no more memory
and takes no more time in any part of any layer, forward or backward.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from nest_megatron.caching import Caching, cached_by
from nest_megatron.cost_model.keys import INSIDE, SHARD
from nest_megatron.cost_model.layer_cost import UnitTimes
from nest_megatron.cost_model.model import CostModel
from nest_megatron.errors import UserInputError
from nest_megatron.layout.dims import ParallelDims
from nest_megatron.layout.execution_rules import (
    allowed_execution,
    of_every_layout,
    what_allows_execution,
)
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.recompute import (
    FULL_RECOMPUTE,
    NO_RECOMPUTE,
    Recompute,
    RecomputeGranularity,
    RecomputeMethod,
    RecomputeModule,
    selective_recompute,
)
from nest_megatron.layout.rulebook.facts import (
    Facts,
    LaunchRequest,
    facts_of,
    facts_reader,
    release_number,
    sources,
)
from nest_megatron.layout.rulebook.search import OF_LAYOUT, SearchStep
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.model.execution import PLAIN, Execution, GraphImpl
from nest_megatron.plain import replace
from nest_megatron.solver.space import SearchSpace

#: Recompute settings, as ``kind_of`` sees them.
RecomputeKinds = frozenset[Recompute]
#: Executions, each with the recomputation that it goes with.
AllowedRecompute = Mapping[Execution, RecomputeKinds]

#: Switches that take no time and no memory anywhere: no execution is better without one.
_NEVER_SLOWER = frozenset({"moe_permute_fusion", "moe_router_fusion", "tp_comm_overlap"})
#: Facts of a layout that switch off a part of an execution (``allowed_execution``).
_SWITCH_OFF = (
    "sequence_parallel",
    "one_context_rank",
    "one_expert_rank",
    "experts_alone",
    "is_pipelined",
    "is_interleaved",
    "is_fsdp",
)
#: Parts that Megatron refuses together with others: a job that keeps one goes without the others.
_KEPT = ("moe_shared_expert_overlap", "cpu_offloading_num_layers", "offload_modules")
_ANY_MODULE = selective_recompute([RecomputeModule.LAYERNORM])


def kind_of(recompute: Recompute, decisive: Collection[RecomputeModule]) -> Recompute:
    """The setting that stands for all that the same executions go with.

    Args:
        decisive: modules whose recomputation some execution forbids.
    """
    if recompute.granularity is RecomputeGranularity.FULL:
        return FULL_RECOMPUTE
    if not recompute.modules:
        return NO_RECOMPUTE
    modules = tuple(module for module in recompute.modules if module in decisive)
    return replace(recompute, modules=modules) if modules else _ANY_MODULE


def with_stages_and_zero(grid: PartialLayout, virtual: int, zero: ZeroStage) -> PartialLayout:
    """A grid with so many virtual stages and a ZeRO stage."""
    dims = grid.dims
    if virtual != dims.virtual_pipeline_model_parallel_size:
        dims = _with_virtual_stages(dims, virtual)
    elif zero is grid.zero:
        return grid
    return replace(grid, dims=dims, zero=zero)


@functools.lru_cache(maxsize=1 << 16)
def _with_virtual_stages(dims: ParallelDims, virtual: int) -> ParallelDims:
    return replace(dims, virtual_pipeline_model_parallel_size=virtual)


def launch_request(model: CostModel, space: SearchSpace, grid: PartialLayout) -> LaunchRequest:
    """What Megatron's rules read of a grid at the launch."""
    return LaunchRequest.of(
        model.spec,
        grid,
        execution=grid.execution,
        sharding=space.sharding,
        cuda_graphs=space.cuda_graphs,
        transformer_impl=space.transformer_impl,
        version=space.version,
        even_stages=_even_stages(space),
        layers_in_bf16=space.layers_in_bf16,
        **model.settings.of_launch(),
    )


def _even_stages(space: SearchSpace) -> int:
    """Layers of which every virtual stage has the same multiple; 0 where stages may be uneven."""
    recompute = space.recompute or NO_RECOMPUTE
    in_groups = release_number(space.version) < (0, 17)
    grouped = in_groups and recompute.method is RecomputeMethod.UNIFORM
    return (recompute.num_layers or 1) if space.even_stages and grouped else int(space.even_stages)


def known_facts(model: CostModel, space: SearchSpace, global_batch_size: int) -> Facts:
    """Facts of a job that are the same for all layouts of a search."""
    nowhere = PartialLayout(
        dims=ParallelDims(), global_batch_size=1, micro_batch_size=1, sequence_parallel=False
    )
    return Facts(
        job=launch_request(model, space, nowhere),
        batch_unit=space.batch_unit or global_batch_size,
        batch_grows=space.batch_unit is not None,
    )


def has_graphs(space: SearchSpace) -> bool:
    """Whether CUDA graphs are among what a space may choose."""
    impls = {space.execution.cuda_graph_impl, *space.executions.get("cuda_graph_impl", ())}
    return impls != {GraphImpl.NONE}


@functools.cache
def _without_graphs(execution: Execution) -> Execution:
    return replace(
        execution, cuda_graph_impl=PLAIN.cuda_graph_impl, cuda_graph_scope=PLAIN.cuda_graph_scope
    )


class Executions(Caching):
    """Executions of a job's grids; those that grids share are worked out once.

    Args:
        kinds: of all recompute settings, in the order in which executions are tried with them.
        step: the rules on executions.

    Attributes:
        offloads: whether some move activations to the host.
        may_keep_norm: whether some save a norm that is to be recomputed (``norm_stays``).
    """

    def __init__(
        self, model: CostModel, space: SearchSpace, kinds: Iterable[Recompute], step: SearchStep
    ) -> None:
        self.model = model
        self.space = space
        self._default = space.execution
        self._kept = tuple(name for name in _KEPT if name not in space.executions)
        self._kinds = tuple(kinds)
        self.kinds = frozenset(self._kinds)
        self._step = step
        self._variants = tuple(dict.fromkeys((self._default, *_combinations(space))))
        self.offloads = any(each.offloads for each in self._variants)
        self.may_keep_norm = any("moe_router" in each.cuda_graph_scope for each in self._variants)
        read = [
            name
            for rule in step.rules
            if any(map(rule.concerns, self._variants))
            for name in rule.names
            if set(OF_LAYOUT).issuperset(sources(name))
        ]
        # Of one execution that no layout and no recomputation changes, no fact matters.
        varies = self._variants != (_without_optional_parts(self._default),) or has_graphs(space)
        switching = _SWITCH_OFF if varies else ()
        self._facts = tuple(dict.fromkeys((*switching, *read)))
        self._names = tuple(dict.fromkeys(each for name in self._facts for each in sources(name)))
        self._read = facts_reader(self._names)

    @cached_by(lambda self, grid: self._read(grid))
    def key(self, grid: PartialLayout) -> tuple[object, ...]:
        """The facts of a layout that may forbid an execution."""
        facts = Facts(zip(self._names, self._read(grid), strict=True))
        return tuple(facts[name] for name in self._facts)

    @cached_by(key)
    def fastest(self, shard: PartialLayout) -> tuple[Execution, ...]:
        """Executions that stand for all of a shard, whatever its pipeline and its ZeRO stage.

        None is faster than some of these, which Megatron need not accept.
        """
        # Layouts that stand for all that forbid the same; numbers of ranks do not matter.
        dims = replace(shard.dims, pipeline_model_parallel_size=2)
        pipelined = replace(shard, dims=dims)
        layouts = (
            with_stages_and_zero(shard, 1, ZeroStage.NONE),
            with_stages_and_zero(shard, 1, ZeroStage.WEIGHTS),
            with_stages_and_zero(pipelined, 1, ZeroStage.NONE),
            with_stages_and_zero(pipelined, 2, ZeroStage.NONE),
        )
        return _with_all_on(
            [*dict.fromkeys(each for grid in layouts for each in self.possible(grid))]
        )

    @cached_by(
        lambda self, grid: (
            INSIDE.of(grid.dims),
            grid.micro_batch_size,
            grid.sequence_parallel,
            self.key(grid),
        )
    )
    def of_family(self, grid: PartialLayout) -> AllowedRecompute:
        """The possible executions that no other dominates.

        Args:
            grid: with its virtual stages and ZeRO stage; its own execution is not read.
        """
        found = self.possible(grid)
        if len(found) == 1:
            return found
        found = {each: found[each] for each in found if self._may_gain(grid, each, found)}
        if len(found) > 1:
            units = {each: self._units(grid, each) for each in found}
            best: list[Execution] = []  # what dominates a dominated one dominates what that does
            for each in found:
                if not any(_dominates(other, each, found, units) for other in best):
                    best = [other for other in best if not _dominates(each, other, found, units)]
                    best.append(each)
            found = {each: found[each] for each in best}
        return found

    def _may_gain(
        self, grid: PartialLayout, execution: Execution, possible: AllowedRecompute
    ) -> bool:
        """Whether graphs can save anything: the host launches more slowly than layers run."""
        if execution.cuda_graph_impl in (self._default.cuda_graph_impl, GraphImpl.NONE):
            return True
        eager = _without_graphs(execution)
        return eager not in possible or any(unit.launch_s for unit in self._units(grid, eager))

    @cached_by(key)
    def possible(self, grid: PartialLayout) -> AllowedRecompute:
        """The executions that Megatron accepts on a layout, by what it makes of each variant."""
        found: dict[Execution, set[Recompute]] = {}
        by_kind = [self._allowed(replace(grid, recompute=kind)) for kind in self._kinds]
        for variants in zip(*by_kind, strict=True):
            for kind, execution in zip(self._kinds, variants, strict=True):
                if execution is not None:
                    found.setdefault(execution, set()).add(kind)
        return {execution: frozenset(allowed) for execution, allowed in found.items()}

    def _allowed(self, grid: PartialLayout) -> list[Execution | None]:
        """What Megatron makes of each variant on a grid; ``None`` where it refuses."""
        facts, left = facts_of(grid), self._left_of_variants(grid)

        def is_accepted(execution: Execution) -> bool:
            return self._step.refusal({**facts, "execution": execution}) is None

        met = {each: self._is_free(grid, each) and is_accepted(each) for each in {*left}}
        allowed = [each if met[each] else None for each in left]
        if not met[left[0]] and self._is_free(grid, left[0]):
            bare = self._left_of(of_every_layout(self._default), grid)
            allowed[0] = bare if is_accepted(bare) else None
        return allowed

    @cached_by(lambda _, grid: what_allows_execution(grid))
    def _left_of_variants(self, grid: PartialLayout) -> tuple[Execution, ...]:
        """What is left of each variant on a grid, the default first."""
        return tuple(self._left_of(each, grid) for each in self._variants)

    def _left_of(self, execution: Execution, grid: PartialLayout) -> Execution:
        return allowed_execution(execution, grid, own_graphs=self.space.cuda_graphs is not None)

    def _is_free(self, grid: PartialLayout, execution: Execution) -> bool:
        """Whether it leaves alone what the job keeps, and what its sharding cannot move."""
        if any(getattr(execution, name) != getattr(self._default, name) for name in self._kept):
            return False
        if grid.zero.is_fsdp and execution.offload_modules != self._default.offload_modules:
            return False  # not known to keep gathered weights on the device
        # Graphs read weights and activations at fixed addresses.
        moving = grid.zero.is_fsdp or execution.offload_modules
        return not moving or execution.cuda_graph_impl is self._default.cuda_graph_impl

    def _units(self, grid: PartialLayout, execution: Execution) -> tuple[UnitTimes, ...]:
        return self._unit_times(replace(grid, execution=execution))

    @cached_by(SHARD)
    def _unit_times(self, grid: PartialLayout) -> tuple[UnitTimes, ...]:
        """The times of each kind of unit; of their blocks where nothing can wait on the host."""
        places, shard = self.model.places(grid.dims), self.model.shard(grid)
        if not self.offloads:
            return self.model.block_times(places, shard)
        return tuple(self.model.unit_time(kind, places, shard) for kind in self.model.num_units)


def _with_all_on(executions: Sequence[Execution]) -> tuple[Execution, ...]:
    """The executions with everything switched on that some of them has and that saves time.

    What hides the token all-to-all is switched on together: the better of both is priced. Of
    graphs, one of the whole step stands for all together. It is the job's own where there is one,
    and saves the copies of the others: the bound is lower for it.
    """
    overlaps = ("overlap_moe_expert_parallel_comm", "moe_shared_expert_overlap")
    together: dict[str, Any] = {
        **{name: any(getattr(each, name) for each in executions) for name in overlaps},
        "delay_wgrad_compute": False,
        "offload_modules": PLAIN.offload_modules,
        "cpu_offloading_num_layers": PLAIN.cpu_offloading_num_layers,
    }
    if any(each.cuda_graph_impl is not GraphImpl.NONE for each in executions):
        together |= {"cuda_graph_impl": GraphImpl.FULL_ITERATION, "cuda_graph_scope": ()}
    bare = map(_without_graphs, executions)
    return tuple(dict.fromkeys(replace(each, **together) for each in bare))


def _dominates(
    one: Execution,
    other: Execution,
    possible: AllowedRecompute,
    units: Mapping[Execution, tuple[UnitTimes, ...]],
) -> bool:
    """Whether one execution makes another needless; of equal ones the first does."""
    if one == other or not possible[one] >= possible[other]:
        return False
    if one.overlap_moe_expert_parallel_comm and not other.overlap_moe_expert_parallel_comm:
        return False  # it keeps one more micro batch
    if not all(map(_is_no_worse, units[one], units[other])):
        return False
    order = list(possible)
    return order.index(one) < order.index(other) or not all(
        map(_is_no_worse, units[other], units[one])
    )


def _combinations(space: SearchSpace) -> Iterator[Execution]:
    """Every combination of the values that may be chosen which does not contradict itself."""
    values = []
    for name, allowed in space.executions.items():
        own = getattr(space.execution, name)
        tried = allowed[-1:] if name in _NEVER_SLOWER else tuple(dict.fromkeys((own, *allowed)))
        values.append(tried)
    for chosen in product(*values):
        fields = dict(zip(space.executions, chosen, strict=True))
        base = space.execution
        # what goes with a part alone is off without it
        if fields.get("overlap_moe_expert_parallel_comm") is False:
            base = of_every_layout(base)
        if fields.get("cuda_graph_impl") is GraphImpl.NONE:
            base = _without_graphs(base)
        try:
            yield replace(base, **fields)
        except UserInputError:
            continue  # such as a backend of another dispatcher


def _without_optional_parts(execution: Execution) -> Execution:
    """What is left of an execution where all that can be is forbidden."""
    for recompute in (FULL_RECOMPUTE, selective_recompute([RecomputeModule.SHARED_EXPERTS])):
        grid = PartialLayout(
            dims=ParallelDims(pipeline_model_parallel_size=2),
            global_batch_size=1,
            micro_batch_size=1,
            sequence_parallel=False,
            recompute=recompute,
        )
        execution = allowed_execution(execution, grid)
    return execution


def _is_no_worse(one: UnitTimes, other: UnitTimes) -> bool:
    """Whether a unit takes no more time and memory than another, part by part."""
    return one is other or (
        one.backward.total <= other.backward.total
        and one.whole_forward.total <= other.whole_forward.total
        and one.input_bytes <= other.input_bytes
        and one.working_bytes <= other.working_bytes
        and all(saved <= other.saved_bytes.get(p, 0.0) for p, saved in one.saved_bytes.items())
        and all(
            time.total <= (other.forward[part].total if part in other.forward else 0.0)
            for part, time in one.forward.items()
        )
    )
