"""The legal grids of a job: every combination of degrees that Megatron accepts, coarse to fine."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import product

from nest_megatron.caching import Caching, cached_by
from nest_megatron.cost_model.formats import format_of, uneven_sides
from nest_megatron.cost_model.keys import split_block
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.unit_cost import replicas
from nest_megatron.model.execution import PLAIN, Execution
from nest_megatron.parallel import rules
from nest_megatron.parallel.dims import ParallelDims, RankOrder
from nest_megatron.parallel.execution_checks import decisive_modules
from nest_megatron.parallel.layout import PartialLayout
from nest_megatron.parallel.recompute import (
    FULL_RECOMPUTE,
    NO_RECOMPUTE,
    Recompute,
    RecomputeMethod,
    selective_recompute,
)
from nest_megatron.parallel.recompute_rules import allows_recompute
from nest_megatron.parallel.zero import ZeroStage
from nest_megatron.solver.executions import (
    Executions,
    RecomputeKinds,
    has_graphs,
    kind_of,
    laid_out,
    launched,
)
from nest_megatron.solver.space import SearchSpace, recompute_settings


class GridSpace(Caching):
    """Enumerates a declared space for a job.

    Args:
        model: the job's cost model, for its model and cluster.
        global_batch_size: sequences of one step.
        space: what may be chosen.

    Attributes:
        illegal: combinations that a rule of Megatron refused, by rule, as met so far.
    """

    def __init__(self, model: CostModel, global_batch_size: int, space: SearchSpace) -> None:
        self.model = model
        self.global_batch_size = global_batch_size
        self.space = space
        self.batch_unit = space.batch_unit or global_batch_size
        self.illegal: Counter[str] = Counter()
        self._decisive = decisive_modules(model.spec, graphs=has_graphs(space))
        self.kinds = Counter(map(self._kind_of, self._all_settings(0)))
        self.ways = Executions(model, space, frozenset(self.kinds))
        self._num_units = model.spec.num_units

    def anew(self) -> GridSpace:
        """The same space with counts of its own; what is worked out of it is shared."""
        same = copy.copy(self)
        same.illegal = Counter()
        return same

    def shards(self) -> Iterator[PartialLayout]:
        """Grids with one pipeline stage that stand for all with the same shard of a layer."""
        for world in self.space.world_sizes(self.model.cluster):
            for tp, cp in self._dense_degrees(world):
                for ep, etp in self._expert_degrees(world, tp):
                    for micro in self._micro_batches():
                        shard = self._one_stage(world, tp, cp, ep, etp, micro)
                        if not self._has_whole_sides(shard.dims):
                            self.illegal["sides of matrices divide by the number format's"] += 1
                        elif self._has_ways(shard):
                            yield shard

    def _has_whole_sides(self, dims: ParallelDims) -> bool:
        settings = self.model.settings
        number_format = format_of(settings.precision, settings.traits.fp8_recipe)
        return number_format is None or not uneven_sides(self.model.spec, dims, number_format)

    def _has_ways(self, grid: PartialLayout) -> bool:
        """Whether layers can be carried out there, with some recomputation."""
        has_some = bool(self.ways.of_shard(grid).fastest)
        if not has_some:
            self.illegal["how layers are carried out goes with the layout"] += 1
        return has_some

    def _values(self, name: str, number: int) -> list[int]:
        """Values of a degree that divide a number; a fixed one that does not is noted."""
        values = self.space.values(name, number, self.model.cluster)
        if not values and name in self.space.fixed:
            self.illegal[f"{name}={self.space.fixed[name]} divides what is left of the GPUs"] += 1
        return values

    def _dense_degrees(self, world: int) -> Iterator[tuple[int, int]]:
        spec, fused = self.model.spec, self.model.settings.traits.flash_attention
        for tp in self._values("tensor_model_parallel_size", world):
            if not rules.divides_vocab(spec, tp):
                self.illegal["tensor_model_parallel_size divides the padded vocabulary"] += 1
                continue
            splits = tp > 1 and self.space.sequence_parallel
            runs = rules.allows_linear_for_tp(spec, tp, sequence_parallel=splits)
            if not (runs and rules.divides_heads(spec, tp) and rules.divides_dense_mlp(spec, tp)):
                self.illegal["tensor_model_parallel_size divides heads and MLP"] += 1
                continue
            if not rules.divides_adapters(spec, tp):
                self.illegal["tensor_model_parallel_size divides the rank of adapters"] += 1
                continue
            for cp in self._values("context_parallel_size", world // tp):
                if not rules.allows_context_parallel(spec, cp, fused=fused):
                    self.illegal["model's attention allows context parallelism"] += 1
                elif not rules.divides_mamba(spec, tp, cp):
                    self.illegal["tp and cp divide heads and groups of Mamba layers"] += 1
                elif not rules.divides_linear(spec, tp, cp, self.space.version):
                    self.illegal["tp and cp divide heads of gated delta nets"] += 1
                elif not rules.divides_sequence(spec, tp, cp, splits):
                    self.illegal["sequence divides by 2 * cp and by cp * tp"] += 1
                else:
                    yield tp, cp

    def _expert_degrees(self, world: int, tp: int) -> Iterator[tuple[int, int]]:
        spec = self.model.spec
        if spec.num_experts is None:
            yield 1, 1
            return
        for ep in self._values("expert_model_parallel_size", spec.num_experts):
            for etp in self._values("expert_tensor_parallel_size", world):
                divides = rules.divides_experts(spec, ep, etp)
                if not (divides and rules.divides_adapters(spec, tp, etp)) or world % (ep * etp):
                    self.illegal["expert degrees divide the experts and the ranks"] += 1
                elif not rules.allows_expert_bias(spec, etp):
                    self.illegal["experts with a bias are not split"] += 1
                elif not rules.reduces_expert_gradients(spec, tp, ep, etp):
                    self.illegal["without expert parallelism, etp equals tp"] += 1
                else:
                    yield ep, etp

    def _micro_batches(self) -> list[int]:
        sizes = self.space.values("micro_batch_size", self.batch_unit, self.model.cluster)
        if "micro_batch_size" in self.space.fixed:
            return sizes
        own = self.space.present.get("micro_batch_size")
        return [size for size in sizes if size & (size - 1) == 0 or size == own]

    def _one_stage(
        self, world: int, tp: int, cp: int, ep: int, etp: int, micro: int
    ) -> PartialLayout:
        dims = ParallelDims(
            tensor_model_parallel_size=tp,
            context_parallel_size=cp,
            data_parallel_size=world // (tp * cp),
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=etp,
        )
        # A stand-in batch: whether the real one divides depends on the pipeline size.
        return PartialLayout(
            dims=dims,
            global_batch_size=micro * dims.data_parallel_size,
            micro_batch_size=micro,
            sequence_parallel=tp > 1 and self.space.sequence_parallel,
            execution=self.space.execution,
        )

    def leanest(self, shard: PartialLayout) -> Iterator[PartialLayout]:
        """A shard in ways of which some takes as little memory as any that it may have."""
        return _with_executions(shard, self.ways.of_shard(shard).leanest)

    def fastest(self, shard: PartialLayout) -> Iterator[PartialLayout]:
        """A shard in ways of which some is as fast as any way that it may be carried out in."""
        return _with_executions(shard, self.ways.of_shard(shard).fastest)

    def grids(self, shard: PartialLayout) -> Iterator[PartialLayout]:
        """Pipeline sizes and rank orders of a shard that Megatron accepts."""
        orders = self.space.rank_orders
        for pp in self._pipeline_sizes(shard):
            dp = shard.dims.data_parallel_size // pp
            # Without stages or replicas the second order has the groups of the first.
            alike = pp == 1 or dp == 1
            for order in orders:
                if alike and order is RankOrder.TP_CP_EP_PP_DP and len(orders) > 1:
                    continue
                dims = dataclasses.replace(
                    shard.dims,
                    pipeline_model_parallel_size=pp,
                    data_parallel_size=dp,
                    rank_order=order,
                )
                grid = dataclasses.replace(
                    shard, dims=dims, global_batch_size=self.global_batch_size
                )
                if rules.allows_rank_order(self.model.spec, dims) and self._has_ways(grid):
                    yield grid

    def pipelines(self, dims: ParallelDims) -> Iterator[ParallelDims]:
        """Every pipeline that some shard with these tensor and expert degrees may have.

        Context ranks count as data-parallel ones: states are divided over both alike.
        """
        ranks = dims.world_size // dims.tensor_model_parallel_size
        for pp in self.space.values("pipeline_model_parallel_size", ranks, self.model.cluster):
            legal = pp <= self._num_units and rules.allows_pipeline(self.model.spec, pp)
            if legal and dims.world_size // pp % dims.expert_ranks == 0:
                yield dataclasses.replace(
                    dims,
                    pipeline_model_parallel_size=pp,
                    context_parallel_size=1,
                    data_parallel_size=ranks // pp,
                )

    def _pipeline_sizes(self, shard: PartialLayout) -> list[int]:
        dims, cluster = shard.dims, self.model.cluster
        sizes = []
        for pp in self._values("pipeline_model_parallel_size", dims.data_parallel_size):
            dp = dims.data_parallel_size // pp
            if not rules.allows_pipeline(self.model.spec, pp):
                self.illegal["both stacks of the model lie on one pipeline rank"] += 1
            elif pp > self._num_units:
                self.illegal[f"at most {self._num_units} stages, one a layer or end"] += 1
            elif self.space.even_stages and not self._is_even(pp):
                self.illegal["even stages: as many layers on each pipeline rank"] += 1
            elif dims.world_size // pp % dims.expert_ranks:
                self.illegal["expert ranks divide the ranks of a stage"] += 1
            elif not rules.allows_encoder(
                self.model.spec, dataclasses.replace(dims, pipeline_model_parallel_size=pp)
            ):
                self.illegal["an encoder goes with a pipeline or context ranks"] += 1
            elif not rules.num_microbatches(self.batch_unit, shard.micro_batch_size, dp):
                self.illegal["micro batch * data-parallel size divides the global batch"] += 1
            elif not self.space.allows("data_parallel_size", dp, cluster):
                self.illegal["data_parallel_size is within its limits"] += 1
            else:
                sizes.append(pp)
        return sizes

    def families(self, grid: PartialLayout) -> Iterator[PartialLayout]:
        """Virtual stages, ZeRO stages and executions of a grid that Megatron accepts."""
        for laid in self.interleavings(grid):
            for zero in self.zero_stages(grid.dims):
                yield from self.executions(dataclasses.replace(laid, zero=zero))

    def executions(self, grid: PartialLayout) -> Iterator[PartialLayout]:
        """A grid with virtual stages and ZeRO stage in every way worth a candidate."""
        return _with_executions(grid, self.ways.of_family(grid))

    def schedules(self, grid: PartialLayout, zeros: Sequence[ZeroStage]) -> Iterator[PartialLayout]:
        """One family for all that run a micro batch through the pipeline alike.

        They differ in how many virtual stages there are, if any, and in the ZeRO stage.

        Args:
            zeros: the ZeRO stages that may be chosen.
        """
        plain = {size == 1: size for size in reversed(self.virtual_sizes(grid))}
        sharded = {zero.is_fsdp: zero for zero in reversed(zeros)}
        for virtual, zero in product(plain.values(), sharded.values()):
            yield from self.executions(laid_out(grid, virtual, zero))

    def families_of(
        self, schedule: PartialLayout, zeros: Sequence[ZeroStage]
    ) -> Iterator[PartialLayout]:
        """The families that one of ``schedules`` stands for."""
        plain = schedule.dims.virtual_pipeline_model_parallel_size == 1
        for virtual in self.virtual_sizes(schedule):
            for zero in zeros if plain == (virtual == 1) else ():
                if zero.is_fsdp == schedule.zero.is_fsdp:
                    yield laid_out(schedule, virtual, zero)

    def interleavings(self, grid: PartialLayout) -> Iterator[PartialLayout]:
        """Virtual stages of a grid that Megatron accepts."""
        return (laid_out(grid, virtual, grid.zero) for virtual in self.virtual_sizes(grid))

    def virtual_sizes(self, grid: PartialLayout) -> tuple[int, ...]:
        """Numbers of virtual stages of a grid that Megatron accepts."""
        pp = grid.dims.pipeline_model_parallel_size
        least = self.batch_unit // (grid.micro_batch_size * grid.dims.data_parallel_size)
        return self._virtual_sizes(pp, least)

    @cached_by(lambda _, pp, num_microbatches: (pp, num_microbatches))
    def _virtual_sizes(self, pp: int, num_microbatches: int) -> tuple[int, ...]:
        space, name = self.space, "virtual_pipeline_model_parallel_size"
        spec = self.model.spec
        virtual = not spec.has_split_encoder and rules.allows_virtual_stages(spec, 2)
        if pp == 1 or not (virtual and rules.cuts_anywhere(spec, space.version)):
            return (1,) if space.allows(name, 1, self.model.cluster) else ()
        most = (self.model.spec.num_layers + 2) // pp  # interior chunks hold a layer each
        if space.partition is not None:
            most = space.fixed[name]
        sizes = (v for v in range(1, most + 1) if space.allows(name, v, self.model.cluster))
        group = self.model.settings.traits.microbatch_group_size_per_vp_stage
        grows = space.batch_unit is not None
        return tuple(
            v
            for v in sizes
            if rules.allows_interleaving(pp, v, num_microbatches, group, whole=grows)
            and (not space.even_stages or self._is_even(pp * v))
        )

    def _is_even(self, chunks: int) -> bool:
        """Whether virtual stages have as many layers each, in whole groups of those recomputed."""
        layers, rest = divmod(self.model.spec.num_layers, chunks)
        recompute = self.space.recompute
        if rest or recompute is None or recompute.method is not RecomputeMethod.UNIFORM:
            return not rest
        size = recompute.num_layers or 1
        return rules.allows_uniform_recompute((layers,), size, self.space.version)

    def zero_stages(self, dims: ParallelDims) -> list[ZeroStage]:
        """ZeRO stages that Megatron launches here, with virtual stages or without.

        Without replicas there is nothing to divide. A job that has Megatron-FSDP already may start
        without the meta device.
        """
        allowed, pp = self.space.zero_stages, dims.pipeline_model_parallel_size
        if replicas(dims) == (1, 1) and ZeroStage.NONE in allowed:
            return [ZeroStage.NONE]
        legal = [zero for zero in allowed if rules.allows_zero(zero, pp)]
        if self.model.spec.vision is not None:
            return [zero for zero in legal if not zero.is_fsdp]
        if self.space.sharding is None and not rules.initializes_on_meta_device(self.model.spec):
            return [zero for zero in legal if not zero.is_fsdp]
        return legal

    def recompute_settings(self, grid: PartialLayout) -> tuple[Recompute, ...]:
        """Recompute settings to try on a grid, none first; block sizes up to the largest chunk."""
        if self.ways.is_fixed:
            return self._settings(grid.dims.num_chunks)
        return self._allowed(*self.settings_key(grid))

    @cached_by(lambda _, chunks: chunks)
    def _settings(self, chunks: int) -> tuple[Recompute, ...]:
        return self._all_settings(self.largest_block(chunks))

    @cached_by(lambda _, chunks, kinds: (chunks, kinds))
    def _allowed(self, chunks: int, kinds: RecomputeKinds) -> tuple[Recompute, ...]:
        return tuple(each for each in self._settings(chunks) if self._kind_of(each) in kinds)

    def _kind_of(self, recompute: Recompute) -> Recompute:
        return kind_of(recompute, self._decisive)

    def settings_key(self, grid: PartialLayout) -> tuple[int, RecomputeKinds]:
        """What tells recompute settings of one grid from those of another."""
        kinds = self.ways.of_family(grid).get(grid.execution, self.ways.kinds)
        return grid.dims.num_chunks, kinds

    def keeping_least(self, grid: PartialLayout | None = None) -> tuple[Recompute, ...]:
        """Settings than which none keeps less of a layer, or needs less while it is at work.

        Args:
            grid: whose execution may forbid some; ``None`` is any.
        """
        if self.space.recompute is not None:
            return split_block(self.space.recompute)
        return self._least_kept(self.ways.kinds if grid is None else self.settings_key(grid)[1])

    @cached_by(lambda _, kinds: kinds)
    def _least_kept(self, kinds: RecomputeKinds) -> tuple[Recompute, ...]:
        """Nothing recomputed, and whole layers or else every module: more modules keep less."""
        if FULL_RECOMPUTE in kinds:
            return NO_RECOMPUTE, FULL_RECOMPUTE
        allowed = (each for each in self._all_settings(0) if self._kind_of(each) in kinds)
        modules = {module for recompute in allowed for module in recompute.modules}
        return (NO_RECOMPUTE, *((selective_recompute(modules),) if modules else ()))

    def largest_block(self, chunks: int) -> int:
        """Layers of the largest chunk of the partition given, or of ``chunks`` balanced ones."""
        if self.space.partition is not None:
            return max(rules.decoder_layers(self.model.spec, self.space.partition))
        if not rules.allows_blocks(self.model.spec):
            return 0
        return -(-self.model.spec.num_layers // chunks)

    def _all_settings(self, layers_per_chunk: int) -> tuple[Recompute, ...]:
        """The settings that Megatron accepts for the model, whatever the layout."""
        fixed = self.space.recompute
        found = (
            (fixed,)
            if fixed is not None
            else recompute_settings(
                self.model.spec,
                layers_per_chunk,
                flash_attention=self.model.flash_attention,
                without=self.space.without_modules,
                full=self.space.full_recompute,
            )
        )
        own = self.space.present_recompute
        with_own = dict.fromkeys((*found, *(() if own is None else (own,))))
        return tuple(filter(self._is_recomputed, with_own))

    @cached_by(lambda _, recompute: (recompute.method, recompute.modules))
    def _is_recomputed(self, recompute: Recompute) -> bool:
        """Whether Megatron recomputes so; of blocks and groups it takes any number of layers."""
        grid = dataclasses.replace(self._one_stage(1, 1, 1, 1, 1, 1), recompute=recompute)
        plain = dataclasses.replace(grid, execution=PLAIN)
        return allows_recompute(launched(self.model, self.space, plain))


def _with_executions(
    grid: PartialLayout, executions: Iterable[Execution]
) -> Iterator[PartialLayout]:
    for execution in executions:
        same = execution is grid.execution
        yield grid if same else dataclasses.replace(grid, execution=execution)
