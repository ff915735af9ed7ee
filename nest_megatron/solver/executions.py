"""How the layers of a grid may be carried out: what is possible, and what is worth a candidate.

A way to carry layers out is left out where another one allows as much recomputation, keeps and
needs no more memory and takes no more time in any part of any layer, forward or backward.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

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
from nest_megatron.layout.rulebook.execution import allows_execution
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
from nest_megatron.solver.space import SearchSpace

#: Recompute settings, as ``kind_of`` sees them.
RecomputeKinds = frozenset[Recompute]
#: Ways to carry layers out, each with the recomputation that it goes with.
AllowedRecompute = Mapping[Execution, RecomputeKinds]

#: Switches that take no time and no memory anywhere, so that a way without one is never better.
_NEVER_SLOWER = frozenset({"moe_permute_fusion", "moe_router_fusion", "tp_comm_overlap"})
#: What of a layout switches off a part of a way (``allowed_execution``).
_SWITCH_OFF = (
    *("sequence_parallel", "one_context_rank", "one_expert_rank", "experts_alone"),
    *("is_pipelined", "is_interleaved", "is_fsdp"),
)
#: Parts of a way that Megatron refuses beside others: a job that keeps one goes without the others.
_KEPT = ("moe_shared_expert_overlap", "cpu_offloading_num_layers", "offload_modules")
_ANY_MODULE = selective_recompute([RecomputeModule.LAYERNORM])


def kind_of(recompute: Recompute, decisive: Collection[RecomputeModule]) -> Recompute:
    """What of a setting matters to how layers are carried out: one that stands for its like.

    Args:
        decisive: modules whose recomputation some way forbids.
    """
    if recompute.granularity is RecomputeGranularity.FULL:
        return FULL_RECOMPUTE
    if not recompute.modules:
        return NO_RECOMPUTE
    modules = tuple(module for module in recompute.modules if module in decisive)
    return dataclasses.replace(recompute, modules=modules) if modules else _ANY_MODULE


def with_stages_and_zero(grid: PartialLayout, virtual: int, zero: ZeroStage) -> PartialLayout:
    """A grid with so many virtual stages and a ZeRO stage."""
    dims = grid.dims
    if virtual != dims.virtual_pipeline_model_parallel_size:
        dims = _with_virtual_stages(dims, virtual)
    elif zero is grid.zero:
        return grid
    return dataclasses.replace(grid, dims=dims, zero=zero)


@functools.lru_cache(maxsize=1 << 16)
def _with_virtual_stages(dims: ParallelDims, virtual: int) -> ParallelDims:
    return dataclasses.replace(dims, virtual_pipeline_model_parallel_size=virtual)


def launched(model: CostModel, space: SearchSpace, grid: PartialLayout) -> LaunchRequest:
    """What Megatron's rules look at of a grid, as the launch is held to them."""
    return LaunchRequest.of(
        model.spec,
        grid,
        execution=grid.execution,
        sharding=space.sharding,
        cuda_graphs=space.cuda_graphs,
        transformer_impl=space.transformer_impl,
        version=space.version,
        even_stages=_even_stages(space),
        **model.settings.of_launch(),
    )


def _even_stages(space: SearchSpace) -> int:
    """Layers of which every virtual stage has the same multiple; 0 where stages may be uneven."""
    recompute = space.recompute or NO_RECOMPUTE
    in_groups = release_number(space.version) < (0, 17)
    grouped = in_groups and recompute.method is RecomputeMethod.UNIFORM
    return (recompute.num_layers or 1) if space.even_stages and grouped else int(space.even_stages)


def known_facts(model: CostModel, space: SearchSpace, global_batch_size: int) -> Facts:
    """What rules read of a job that is the same for all layouts of a search."""
    nowhere = PartialLayout(
        dims=ParallelDims(), global_batch_size=1, micro_batch_size=1, sequence_parallel=False
    )
    return Facts(
        job=launched(model, space, nowhere),
        batch_unit=space.batch_unit or global_batch_size,
        batch_grows=space.batch_unit is not None,
    )


def is_accepted(model: CostModel, space: SearchSpace, grid: PartialLayout, way: Execution) -> bool:
    """Whether the release of a space carries a grid's layers out in a way."""
    carried = dataclasses.replace(grid, execution=way)
    return allows_execution(launched(model, space, carried))


def has_graphs(space: SearchSpace) -> bool:
    """Whether CUDA graphs are among what a space may choose."""
    impls = {space.execution.cuda_graph_impl, *space.executions.get("cuda_graph_impl", ())}
    return impls != {GraphImpl.NONE}


@functools.cache
def _without_graphs(way: Execution) -> Execution:
    return dataclasses.replace(
        way, cuda_graph_impl=PLAIN.cuda_graph_impl, cuda_graph_scope=PLAIN.cuda_graph_scope
    )


class ShardExecutions(NamedTuple):
    """Ways to carry out the layers of a shard that stand for all that its grids may have.

    Args:
        fastest: no way is faster than some of these, which Megatron need not accept.
        least_memory: no way takes less memory than some of these: graphs only add to it.
    """

    fastest: tuple[Execution, ...]
    least_memory: tuple[Execution, ...]


class Executions(Caching):
    """Ways to carry out the layers of a job's grids; what grids share is worked out once.

    Args:
        kinds: of all recompute settings, in the order in which ways are tried with them.
        step: the rules on ways.
    """

    def __init__(
        self, model: CostModel, space: SearchSpace, kinds: Iterable[Recompute], step: SearchStep
    ) -> None:
        self.model = model
        self.space = space
        self.given = space.execution
        self._kept = tuple(name for name in _KEPT if name not in space.executions)
        self._kinds = tuple(kinds)
        self.kinds = frozenset(self._kinds)
        self._step = step
        self._variants = tuple(dict.fromkeys((self.given, *_combinations(space))))
        read = [
            name
            for rule in step.rules
            if any(map(rule.concerns, self._variants))
            for name in rule.names
            if set(OF_LAYOUT).issuperset(sources(name))
        ]
        self._facts = tuple(dict.fromkeys((*_SWITCH_OFF, *read)))
        self._names = tuple(dict.fromkeys(each for name in self._facts for each in sources(name)))
        self._read = facts_reader(self._names)
        least, nowhere = _least_of(self.given)
        # No layout and no recomputation changes it, and no rule looks at a layout for it.
        self.is_fixed = self._variants == (least,) and not (has_graphs(space) or read)
        self._fixed: AllowedRecompute = {}
        if self.is_fixed and self.kinds and self._is_accepted(facts_of(nowhere), least):
            self._fixed = {least: self.kinds}

    @cached_by(lambda self, grid: self._read(grid))
    def key(self, grid: PartialLayout) -> tuple[object, ...]:
        """What of a layout may forbid a way."""
        facts = Facts(zip(self._names, self._read(grid), strict=True))
        return tuple(facts[name] for name in self._facts)

    def _is_accepted(self, facts: dict[str, Any], way: Execution) -> bool:
        return self._step.refusal({**facts, "execution": way}) is None

    @cached_by(key)
    def of_shard(self, shard: PartialLayout) -> ShardExecutions:
        """The ways of a shard, of whatever pipeline, virtual stages and ZeRO stage."""
        # Layouts that stand for all that forbid the same; numbers of ranks do not matter.
        dims = dataclasses.replace(shard.dims, pipeline_model_parallel_size=2)
        piped = dataclasses.replace(shard, dims=dims)
        layouts = (
            with_stages_and_zero(shard, 1, ZeroStage.NONE),
            with_stages_and_zero(shard, 1, ZeroStage.WEIGHTS),
            with_stages_and_zero(piped, 1, ZeroStage.NONE),
            with_stages_and_zero(piped, 2, ZeroStage.NONE),
        )
        ways = tuple(dict.fromkeys(way for grid in layouts for way in self.possible(grid)))
        is_lean = self.given.cuda_graph_impl is not GraphImpl.NONE
        lean = ways if is_lean else tuple(dict.fromkeys(map(_without_graphs, ways)))
        return ShardExecutions(_together(ways), lean)

    def of_family(self, grid: PartialLayout) -> AllowedRecompute:
        """The ways worth a candidate.

        Args:
            grid: with its virtual stages and ZeRO stage; its own execution is not read.
        """
        return self._fixed if self.is_fixed else self._worth(grid)

    @cached_by(
        lambda self, grid: (
            INSIDE.of(grid.dims),
            grid.micro_batch_size,
            grid.sequence_parallel,
            self.key(grid),
        )
    )
    def _worth(self, grid: PartialLayout) -> AllowedRecompute:
        ways = self.possible(grid)
        ways = {way: ways[way] for way in ways if self._may_gain(grid, way, ways)}
        if len(ways) > 1:
            units = {way: self._units(grid, way) for way in ways}
            worth: list[Execution] = []  # what beats one that is beaten beats what that beats
            for way in ways:
                if not any(_beats(other, way, ways, units) for other in worth):
                    worth = [other for other in worth if not _beats(way, other, ways, units)]
                    worth.append(way)
            ways = {way: ways[way] for way in worth}
        return ways

    def _may_gain(self, grid: PartialLayout, way: Execution, ways: AllowedRecompute) -> bool:
        """Whether graphs can save anything: the host launches more slowly than layers run."""
        if way.cuda_graph_impl in (self.given.cuda_graph_impl, GraphImpl.NONE):
            return True
        eager = _without_graphs(way)
        return eager not in ways or any(unit.launch_s for unit in self._units(grid, eager))

    def possible(self, grid: PartialLayout) -> AllowedRecompute:
        """The ways that Megatron accepts on a layout, by what it does of each variant there.

        They need not be worth a candidate.
        """
        return self._fixed if self.is_fixed else self._possible(grid)

    @cached_by(key)
    def _possible(self, grid: PartialLayout) -> AllowedRecompute:
        found: dict[Execution, set[Recompute]] = {}
        by_kind = [self._allowed(dataclasses.replace(grid, recompute=kind)) for kind in self._kinds]
        for ways in zip(*by_kind, strict=True):
            for kind, way in zip(self._kinds, ways, strict=True):
                if way is not None:
                    found.setdefault(way, set()).add(kind)
        return {way: frozenset(allowed) for way, allowed in found.items()}

    def _allowed(self, grid: PartialLayout) -> list[Execution | None]:
        """What Megatron does of each variant on a grid, if it does anything."""
        facts, met = facts_of(grid), dict[Execution, bool]()
        carried = self._carried(grid)
        for way in carried:
            if way not in met:
                met[way] = self._is_free(grid, way) and self._is_accepted(facts, way)
        allowed = [way if met[way] else None for way in carried]
        if not met[carried[0]] and self._is_free(grid, carried[0]):
            bare = self._left_of(of_every_layout(self.given), grid)
            allowed[0] = bare if self._is_accepted(facts, bare) else None
        return allowed

    @cached_by(lambda _, grid: what_allows_execution(grid))
    def _carried(self, grid: PartialLayout) -> tuple[Execution, ...]:
        """What is left of each variant on a grid, the given one first."""
        return tuple(self._left_of(each, grid) for each in self._variants)

    def _left_of(self, way: Execution, grid: PartialLayout) -> Execution:
        return allowed_execution(way, grid, own_graphs=self.space.cuda_graphs is not None)

    def _is_free(self, grid: PartialLayout, way: Execution) -> bool:
        """Whether a way leaves alone what the job keeps, and what its sharding cannot move."""
        if any(getattr(way, name) != getattr(self.given, name) for name in self._kept):
            return False
        if grid.zero.is_fsdp and way.offload_modules != self.given.offload_modules:
            return False  # not known to keep gathered weights on the device
        # Graphs read weights and activations at fixed addresses.
        moving = grid.zero.is_fsdp or way.offload_modules
        return not moving or way.cuda_graph_impl is self.given.cuda_graph_impl

    def _units(self, grid: PartialLayout, way: Execution) -> tuple[UnitTimes, ...]:
        return self._unit_times(dataclasses.replace(grid, execution=way))

    @cached_by(SHARD)
    def _unit_times(self, grid: PartialLayout) -> tuple[UnitTimes, ...]:
        places, shard = self.model.places(grid.dims), self.model.shard(grid)
        return tuple(self.model.unit_time(kind, places, shard) for kind in self.model.num_units)


def _together(ways: Sequence[Execution]) -> tuple[Execution, ...]:
    """The ways with everything switched on that some of them has and that saves time.

    What hides the token all-to-all is switched on together: the better of both is priced. Of
    graphs, one of the whole step stands for all together. It is the job's own where there is one,
    and saves the copies of the others: the bound is lower for it.
    """
    together: dict[str, Any] = {
        "overlap_moe_expert_parallel_comm": any(w.overlap_moe_expert_parallel_comm for w in ways),
        "delay_wgrad_compute": False,
        "moe_shared_expert_overlap": any(w.moe_shared_expert_overlap for w in ways),
        "offload_modules": PLAIN.offload_modules,
        "cpu_offloading_num_layers": PLAIN.cpu_offloading_num_layers,
    }
    if any(way.cuda_graph_impl is not GraphImpl.NONE for way in ways):
        together |= {"cuda_graph_impl": GraphImpl.FULL_ITERATION, "cuda_graph_scope": ()}
    bare = map(_without_graphs, ways)
    return tuple(dict.fromkeys(dataclasses.replace(way, **together) for way in bare))


def _beats(
    one: Execution,
    other: Execution,
    ways: AllowedRecompute,
    units: Mapping[Execution, tuple[UnitTimes, ...]],
) -> bool:
    """Whether one way makes another needless; of equal ones the first does."""
    if one == other or not ways[one] >= ways[other]:
        return False
    if one.overlap_moe_expert_parallel_comm and not other.overlap_moe_expert_parallel_comm:
        return False  # it keeps one more micro batch
    if not all(map(_no_more, units[one], units[other])):
        return False
    order = list(ways)
    return order.index(one) < order.index(other) or not all(map(_no_more, units[other], units[one]))


def _combinations(space: SearchSpace) -> Iterator[Execution]:
    """Every combination of the values that may be chosen which does not contradict itself."""
    names = space.executions
    values = [
        names[name][-1:]
        if name in _NEVER_SLOWER
        else tuple(dict.fromkeys((getattr(space.execution, name), *names[name])))
        for name in names
    ]
    for chosen in product(*values):
        try:
            yield dataclasses.replace(space.execution, **dict(zip(names, chosen, strict=True)))
        except UserInputError:
            continue  # such as a backend of another dispatcher


def _least_of(execution: Execution) -> tuple[Execution, PartialLayout]:
    """What is left of a way where all that can be is forbidden, and a grid where it is."""
    for recompute in (FULL_RECOMPUTE, selective_recompute([RecomputeModule.SHARED_EXPERTS])):
        grid = PartialLayout(
            dims=ParallelDims(pipeline_model_parallel_size=2),
            global_batch_size=1,
            micro_batch_size=1,
            sequence_parallel=False,
            recompute=recompute,
        )
        execution = allowed_execution(execution, grid)
    return execution, grid


def _no_more(one: UnitTimes, other: UnitTimes) -> bool:
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
