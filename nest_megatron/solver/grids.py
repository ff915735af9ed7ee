"""The legal grids of a job: every combination of degrees that Megatron accepts, coarse to fine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from nest_megatron.caching import Caching, cached_by
from nest_megatron.cost_model.keys import split_block
from nest_megatron.cost_model.memory import replicas
from nest_megatron.cost_model.model import CostModel
from nest_megatron.layout import rulebook
from nest_megatron.layout.dims import ParallelDims, RankOrder
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.recompute import (
    FULL_RECOMPUTE,
    NO_RECOMPUTE,
    Recompute,
    selective_recompute,
)
from nest_megatron.layout.rulebook.execution import decisive_modules
from nest_megatron.layout.rulebook.facts import (
    Facts,
    facts_of,
    facts_of_dims,
    facts_reader,
    sources,
    uneven_sides,
)
from nest_megatron.layout.rulebook.schedule import allows_blocks, decoder_layers
from nest_megatron.layout.rulebook.search import SearchStep, search_steps
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.model.execution import Execution
from nest_megatron.plain import replace
from nest_megatron.solver.executions import (
    Executions,
    RecomputeKinds,
    has_graphs,
    kind_of,
    known_facts,
    with_stages_and_zero,
)
from nest_megatron.solver.space import SearchSpace, recompute_settings


class GridSpace(Caching):
    """Enumerates a declared space for a job.

    Args:
        model: the job's cost model, for its model and cluster.
        global_batch_size: sequences of one step.
        space: what may be chosen.

    Attributes:
        illegal: reasons for which the space or a rule of Megatron refused a combination so far.
    """

    def __init__(self, model: CostModel, global_batch_size: int, space: SearchSpace) -> None:
        self.model = model
        self.global_batch_size = global_batch_size
        self.space = space
        self.batch_unit = space.batch_unit or global_batch_size
        self.micro_batches = space.values("micro_batch_size", self.batch_unit, model.cluster)
        self.illegal: set[str] = set()
        known = known_facts(model, space, global_batch_size)
        self.steps = search_steps(known, rulebook.RULES)
        pipelines = ("world_size", "tp", "ep", "etp", "pp", "vpp")
        shards = {"cp", "dp", "micro_batch_size", "sequence_parallel"}
        rules = [rule for rule in self.steps["pipeline"].rules if shards.isdisjoint(rule.reads)]
        self._any_pipeline = SearchStep(Facts(known, even_stages=0), pipelines, rules)
        self._decisive = decisive_modules(model.spec, graphs=has_graphs(space))
        kinds = dict.fromkeys(kind for _, kind in self._all_settings(0))
        self.executions = Executions(model, space, kinds, self.steps["execution"])
        virtual, once = self.steps["virtual"], "num_microbatches"
        names = {name for rule in virtual.rules for name in rule.names if name != once}
        read = {each for name in names for each in sources(name)} - {"vpp"}
        self._virtual_key = facts_reader([once, *(n for n in virtual.names if n in read)])

    def shards(self) -> Iterator[PartialLayout]:
        """Grids with one pipeline stage that stand for all with the same shard of a layer."""
        for world in self.space.world_sizes(self.model.cluster):
            for facts in self._degrees(world):
                yield from self._shards_of(facts)

    def _shards_of(self, facts: dict[str, Any]) -> Iterator[PartialLayout]:
        """Shards with these degrees in every micro batch that Megatron accepts."""
        spec, settings = self.model.spec, self.model.settings
        tp, cp = facts["tp"], facts["cp"]
        dims = ParallelDims(
            tensor_model_parallel_size=tp,
            context_parallel_size=cp,
            data_parallel_size=facts["world_size"] // (tp * cp),
            expert_model_parallel_size=facts["ep"],
            expert_tensor_parallel_size=facts["etp"],
        )
        uneven = uneven_sides(spec, dims, settings.precision, settings.traits.fp8_recipe)
        for micro in self.micro_batches:
            # A stand-in batch: whether the real one divides depends on the pipeline size.
            shard = PartialLayout(
                dims=dims,
                global_batch_size=micro * dims.data_parallel_size,
                micro_batch_size=micro,
                sequence_parallel=facts["sequence_parallel"],
                execution=self.space.execution,
            )
            whole = {**facts, "micro_batch_size": micro, "uneven_sides": uneven}
            if self._allows("shard", whole) and self._has_executions(shard):
                yield shard

    def _allows(self, step: str, facts: Mapping[str, Any]) -> bool:
        """Whether no rule refuses what a step decides; the reason of the first one is noted."""
        reason = self.steps[step].refusal(facts)
        if reason:
            self.illegal.add(reason)
        return reason is None

    def _has_executions(self, grid: PartialLayout) -> bool:
        """Whether Megatron executes layers there, with some recomputation."""
        has_some = bool(self.executions.fastest(grid))
        if not has_some:
            self.illegal.add("the execution of layers goes with the layout")
        return has_some

    def _values(self, name: str, number: int) -> list[int]:
        """Values of a degree that divide a number; a fixed one that does not is noted."""
        values = self.space.values(name, number, self.model.cluster)
        if not values and name in self.space.fixed:
            self.illegal.add(f"{name}={self.space.fixed[name]} divides what is left of the GPUs")
        return values

    def _degrees(self, world: int) -> Iterator[dict[str, Any]]:
        """Tensor, context and expert parallelism that Megatron accepts."""
        for tp in self._values("tensor_model_parallel_size", world):
            splits = tp > 1 and self.space.sequence_parallel
            facts = {"world_size": world, "tp": tp, "sequence_parallel": splits}
            if self._allows("tensor", facts):
                for cp in self._values("context_parallel_size", world // tp):
                    if self._allows("context", {**facts, "cp": cp}):
                        yield from self._expert_degrees({**facts, "cp": cp})

    def _expert_degrees(self, facts: dict[str, Any]) -> Iterator[dict[str, Any]]:
        num_experts = self.model.spec.num_experts
        if num_experts is None:
            found = {**facts, "ep": self.space.fixed.get("expert_model_parallel_size", 1), "etp": 1}
            if self._allows("experts", found):
                yield found
            return
        for ep in self._values("expert_model_parallel_size", num_experts):
            for etp in self._values("expert_tensor_parallel_size", facts["world_size"]):
                found = {**facts, "ep": ep, "etp": etp}
                if self._allows("experts", found):
                    yield found

    def fastest(self, shard: PartialLayout) -> Iterator[PartialLayout]:
        """A shard in executions of which some is as fast as any that it may have."""
        return _with_executions(shard, self.executions.fastest(shard))

    def grids(self, shard: PartialLayout) -> Iterator[PartialLayout]:
        """Pipeline sizes and rank orders of a shard that Megatron accepts."""
        orders = self.space.rank_orders
        for facts in self._pipelined(shard):
            pp, dp = facts["pp"], facts["dp"]
            # Without stages or replicas the second order has the groups of the first.
            alike = pp == 1 or dp == 1
            for order in orders:
                if alike and order is RankOrder.TP_CP_EP_PP_DP and len(orders) > 1:
                    continue
                if not self._allows("rank_order", {**facts, "rank_order": order}):
                    continue
                dims = replace(
                    shard.dims,
                    pipeline_model_parallel_size=pp,
                    data_parallel_size=dp,
                    rank_order=order,
                )
                grid = replace(shard, dims=dims, global_batch_size=self.global_batch_size)
                if self._has_executions(grid):
                    yield grid

    def pipelines(self, dims: ParallelDims) -> Iterator[ParallelDims]:
        """Every pipeline that some shard with these tensor and expert degrees may have.

        Context ranks count as data-parallel ones: states are divided over both alike.
        """
        ranks, facts = dims.world_size // dims.tensor_model_parallel_size, facts_of_dims(dims)
        for pp in self.space.values("pipeline_model_parallel_size", ranks, self.model.cluster):
            if self._any_pipeline.refusal({**facts, "pp": pp, "vpp": 1}) is None:
                yield ParallelDims(
                    tensor_model_parallel_size=dims.tensor_model_parallel_size,
                    pipeline_model_parallel_size=pp,
                    data_parallel_size=ranks // pp,
                    expert_model_parallel_size=dims.expert_model_parallel_size,
                    expert_tensor_parallel_size=dims.expert_tensor_parallel_size,
                )

    def _pipelined(self, shard: PartialLayout) -> Iterator[dict[str, Any]]:
        """Facts of a shard with each pipeline size that Megatron accepts."""
        ranks, facts = shard.dims.data_parallel_size, facts_of(shard)
        for pp in self._values("pipeline_model_parallel_size", ranks):
            found = {**facts, "pp": pp, "dp": ranks // pp}
            if not self._allows("pipeline", found):
                continue
            if self.space.allows("data_parallel_size", ranks // pp, self.model.cluster):
                yield found
            else:
                self.illegal.add("data_parallel_size is within its limits")

    def families(self, grid: PartialLayout) -> Iterator[PartialLayout]:
        """Virtual stages, ZeRO stages and executions of a grid that Megatron accepts."""
        for virtual, zero in product(self.virtual_sizes(grid), self.zero_stages(grid.dims)):
            yield from self.executed(with_stages_and_zero(grid, virtual, zero))

    def executed(self, grid: PartialLayout) -> Iterator[PartialLayout]:
        """A grid with virtual stages and ZeRO stage in every execution that none dominates."""
        return _with_executions(grid, self.executions.of_family(grid))

    def schedules(self, grid: PartialLayout, zeros: Sequence[ZeroStage]) -> Iterator[PartialLayout]:
        """One family for all that run a micro batch through the pipeline alike.

        They differ in how many virtual stages there are, if any, and in the ZeRO stage.

        Args:
            zeros: the ZeRO stages that may be chosen.
        """
        for schedule in self._schedule_grids(grid, zeros):
            yield from self.executed(schedule)

    def _schedule_grids(
        self, grid: PartialLayout, zeros: Sequence[ZeroStage]
    ) -> Iterator[PartialLayout]:
        """The same without an execution: the first of each kind of sizes and of ZeRO stages."""
        sizes = {size == 1: size for size in reversed(self.virtual_sizes(grid))}
        stages = {zero.is_fsdp: zero for zero in reversed(zeros)}
        for virtual, zero in product(sizes.values(), stages.values()):
            yield with_stages_and_zero(grid, virtual, zero)

    def families_of(
        self, schedule: PartialLayout, zeros: Sequence[ZeroStage]
    ) -> Iterator[PartialLayout]:
        """The families that one of ``schedules`` stands for."""
        alike = [zero for zero in zeros if zero.is_fsdp == schedule.zero.is_fsdp]
        for virtual, zero in product(self._sizes_like(schedule), alike):
            yield with_stages_and_zero(schedule, virtual, zero)

    def _sizes_like(self, schedule: PartialLayout) -> list[int]:
        """The numbers of virtual stages that a schedule stands for: one, or all others."""
        is_plain = schedule.dims.virtual_pipeline_model_parallel_size == 1
        return [size for size in self.virtual_sizes(schedule) if (size == 1) is is_plain]

    @cached_by(lambda self, grid: self._virtual_key(grid))
    def virtual_sizes(self, grid: PartialLayout) -> tuple[int, ...]:
        """Numbers of virtual stages of a grid that Megatron accepts."""
        return tuple(self._sizes_of(grid))

    def _sizes_of(self, grid: PartialLayout) -> Iterator[int]:
        space, name, facts = self.space, "virtual_pipeline_model_parallel_size", facts_of(grid)
        # interior chunks hold a layer each
        most = (self.model.spec.num_layers + 2) // grid.dims.pipeline_model_parallel_size
        if space.partition is not None:
            most = space.fixed[name]
        for virtual in range(1, most + 1):
            found = {**facts, "vpp": virtual}
            legal = space.allows(name, virtual, self.model.cluster)
            if legal and self.steps["virtual"].refusal(found) is None:
                yield virtual

    @cached_by(lambda _, dims: dims)
    def zero_stages(self, dims: ParallelDims) -> list[ZeroStage]:
        """ZeRO stages that Megatron launches here, with virtual stages or without.

        Without replicas there is nothing to divide. A job that has Megatron-FSDP already may start
        without the meta device.
        """
        allowed = self.space.zero_stages
        if replicas(dims) == (1, 1) and ZeroStage.NONE in allowed:
            return [ZeroStage.NONE]
        facts, step = facts_of_dims(dims), self.steps["zero"]
        return [zero for zero in allowed if step.refusal({**facts, "zero": zero}) is None]

    @cached_by(
        lambda self, shard: (
            shard.dims.world_size,
            shard.dims.tensor_model_parallel_size * shard.dims.context_parallel_size,
            shard.dims.expert_ranks,
            shard.micro_batch_size,
            shard.dims.context_parallel_size == 1,  # context ranks are replicas of states
            tuple(self.zero_stages(shard.dims)),
            self.executions.key(shard),
        )
    )
    def candidates_of_shard(self, shard: PartialLayout) -> int:
        """How many candidates lie below a shard; shards of the same shape are counted once."""
        zeros = self.zero_stages
        return sum(self.candidates_of_grid(grid, zeros(grid.dims)) for grid in self.grids(shard))

    @cached_by(
        lambda self, grid, zeros: (
            self.executions.key(grid),
            grid.dims.pipeline_model_parallel_size,
            self.virtual_sizes(grid),
            tuple(zeros),
        )
    )
    def candidates_of_grid(self, grid: PartialLayout, zeros: Sequence[ZeroStage]) -> int:
        """How many candidates a grid has under these ZeRO stages.

        Virtual stages or none and Megatron-FSDP or not decide how layers are executed, and with it
        which recomputation is allowed; how many virtual stages there are decides the largest block.
        """
        pp, num_zeros = grid.dims.pipeline_model_parallel_size, Counter(z.is_fsdp for z in zeros)
        total = 0
        for schedule in self._schedule_grids(grid, zeros):
            total += num_zeros[schedule.zero.is_fsdp] * sum(
                len(self.allowed_settings(self.largest_block(pp * size), kinds))
                for size, kinds in product(
                    self._sizes_like(schedule), self.executions.possible(schedule).values()
                )
            )
        return total

    def recompute_settings(self, grid: PartialLayout) -> tuple[Recompute, ...]:
        """Recompute settings to try on a grid, none first; block sizes up to the largest chunk."""
        chunks, kinds = self.settings_key(grid)
        return self.allowed_settings(self.largest_block(chunks), kinds)

    @cached_by(lambda _, largest_block, kinds: (largest_block, kinds))
    def allowed_settings(self, largest_block: int, kinds: RecomputeKinds) -> tuple[Recompute, ...]:
        """Those with blocks up to a size whose kinds go with an execution."""
        return tuple(each for each, kind in self._all_settings(largest_block) if kind in kinds)

    def settings_key(self, grid: PartialLayout) -> tuple[int, RecomputeKinds]:
        """What tells recompute settings of one grid from those of another."""
        kinds = self.executions.of_family(grid).get(grid.execution, self.executions.kinds)
        return grid.dims.num_chunks, kinds

    def keeping_least(self, grid: PartialLayout) -> tuple[Recompute, ...]:
        """Settings than which none keeps less of a layer, or needs less while it is at work."""
        if self.space.recompute is not None:
            return split_block(self.space.recompute)
        return self._least_kept(self.settings_key(grid)[1])

    @cached_by(lambda _, kinds: kinds)
    def _least_kept(self, kinds: RecomputeKinds) -> tuple[Recompute, ...]:
        """Nothing recomputed, and whole layers or else every module: more modules keep less."""
        if FULL_RECOMPUTE in kinds:
            return NO_RECOMPUTE, FULL_RECOMPUTE
        allowed = self.allowed_settings(0, kinds)
        modules = {module for recompute in allowed for module in recompute.modules}
        return (NO_RECOMPUTE, selective_recompute(modules)) if modules else (NO_RECOMPUTE,)

    def largest_block(self, chunks: int) -> int:
        """Layers of the largest chunk of the one partition, or of ``chunks`` balanced ones."""
        if self.space.partition is not None:
            return max(decoder_layers(self.model.spec, self.space.partition))
        if not allows_blocks(self.model.spec) or self.space.mtp_beside_layer:
            return 0
        return -(-self.model.spec.num_layers // chunks)

    @cached_by(lambda _, layers_per_chunk: layers_per_chunk)
    def _all_settings(self, layers_per_chunk: int) -> list[tuple[Recompute, Recompute]]:
        """The settings that Megatron accepts for the model in some layout, each with its kind."""
        fixed, present = self.space.recompute, self.space.present_recompute
        if fixed is not None:
            settings = [fixed]
        else:
            found = recompute_settings(
                self.model.spec,
                layers_per_chunk,
                flash_attention=self.model.flash_attention,
                without=self.space.without_modules,
                full=self.space.full_recompute,
            )
            settings = [*found]
        if present is not None:
            settings.append(present)
        return [
            (each, kind_of(each, self._decisive))
            for each in dict.fromkeys(settings)
            if self.steps["recompute"].refusal({"recompute": each}) is None
        ]


def _with_executions(
    grid: PartialLayout, executions: Iterable[Execution]
) -> Iterator[PartialLayout]:
    for execution in executions:
        same = execution is grid.execution
        yield grid if same else replace(grid, execution=execution)
