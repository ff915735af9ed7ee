"""The cost model of one job on one cluster: prices grids, remembers what grids share."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain
from statistics import NormalDist

from nest_megatron.caching import Caching, cached_by
from nest_megatron.cluster.communication import collective_time, send_time
from nest_megatron.cluster.records import Cluster, CollectiveKind
from nest_megatron.cost_model.block_times import BlockTimes
from nest_megatron.cost_model.data_parallel import ReplicaTraffic, replica_traffic
from nest_megatron.cost_model.formats import expert_alignment
from nest_megatron.cost_model.keys import (
    DEGREES,
    INSIDE,
    SHARD,
    GroupPlaces,
    split_block,
    unit_key,
)
from nest_megatron.cost_model.layer_cost import PassTime, UnitTimes, with_copies_to_host
from nest_megatron.cost_model.memory import capacity_bytes, saved_attention_bytes, saved_input_bytes
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.cost_model.unit_cost import (
    ReplicaCost,
    Structure,
    UnitKind,
    memory_time,
    optimizer_step,
    passes,
    replica_costs,
)
from nest_megatron.cost_model.unit_run import UnitRun, norm_stays, run_unit
from nest_megatron.layout.dims import LAYER_DEGREES, ParallelDims
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.rank_order import GroupKind, group_shape, pipeline_link_level
from nest_megatron.layout.recompute import NO_RECOMPUTE, Recompute
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.model.block_parameters import ParameterCount
from nest_megatron.model.layer_pattern import LayerBlock, LayerKind
from nest_megatron.model.parameters import unit_parameters
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.profile.lookup import LayerTimes
from nest_megatron.profile.records import Source
from nest_megatron.units import Seconds, Ticks, to_ticks

#: Traits that a ``LayerShard`` has under the same name.
_OF_SHARDS = (
    "loss_bytes",
    "loss_traffic_bytes",
    "fused_activation",
    "fp8_activation_input",
    "loss_chunk_tokens",
    "keeps_stage_outputs",
    "attended_tokens",
)
#: Seconds of a forward and of a backward pass.
PassPair = tuple[Seconds, Seconds]


def _both_passes(blocks: Iterable[UnitTimes]) -> PassPair:
    """The passes of blocks, one after the other."""
    forward = backward = PassTime()
    for block in blocks:
        forward, backward = forward.plus(block.whole_forward), backward.plus(block.backward)
    return forward.total, backward.total


def _step_key(_: object, grid: PartialLayout) -> tuple[object, ...]:
    """What decides how long a step takes outside its schedule."""
    return DEGREES.of(grid.dims), grid.num_microbatches, SHARD.of(grid)


class CostModel(Caching):
    """Prices grids of one job.

    What depends on a few degrees only (a layer's time, the traffic of a group) is computed once,
    because a search prices thousands of grids that share it.

    Args:
        times: measured times of the model's layers. They replace the analytic compute time of the
            blocks that they speak for, and the optimizer's.
    """

    def __init__(
        self,
        spec: TransformerSpec,
        cluster: Cluster,
        settings: CostSettings,
        times: LayerTimes | None = None,
    ) -> None:
        self.spec = spec
        self.cluster = cluster
        self.settings = settings
        self.capacity_bytes = capacity_bytes(cluster.accelerator, settings)
        self.times = times
        self._blocks = BlockTimes(spec, cluster, settings, times)
        self._step = optimizer_step(cluster.accelerator, settings, times)
        self._sizes = cluster.group_sizes()
        self._hosts = (cluster.launch_gpus_per_host, cluster.num_gpus)
        self.num_units = Counter(spec.layer_kinds())

    def with_figures(self, cluster: Cluster, settings: CostSettings) -> CostModel:
        """The job with other figures of its cluster, or settings; what neither changes is shared.

        Args:
            cluster: with the same groups of GPUs, or only another number of them.
        """
        other = CostModel(self.spec, cluster, settings, self.times)
        if cluster.num_gpus == self.cluster.num_gpus:
            for name in ("places", "_link_levels"):
                other.kept[name] = self.kept[name]
        elif settings == self.settings:
            for name in ("unit_time", "run"):
                other.kept[name] = self.kept[name]
            other._blocks = self._blocks
        other._blocks.kept["graph"] = self._blocks.kept["graph"]
        return other

    @cached_by(INSIDE)
    def places(self, dims: ParallelDims) -> GroupPlaces:
        """Shapes of the groups inside a layer: tensor, context, expert, expert-tensor.

        Both rank orders number these groups first, so they lie alike whatever comes after.
        """
        kinds = (GroupKind.TP, GroupKind.CP, GroupKind.EP, GroupKind.ETP)
        return tuple(group_shape(dims, kind, self._sizes) for kind in kinds)

    @cached_by(lambda self, kind, places, shard: unit_key(self.spec, kind, places, shard))
    def unit_time(self, kind: LayerKind, places: GroupPlaces, shard: LayerShard) -> UnitTimes:
        """A unit without recomputation, with its groups in some places."""
        blocks = self._blocks.of_units(places, shard)[kind]
        layers, device = self.spec.num_layers, self.cluster.accelerator
        times = sum(blocks[1:], blocks[0])
        if kind.begins_with_mlp:
            times = times.with_input(shard.hidden_bytes(self.spec))
        return with_copies_to_host(times, kind, shard.execution, layers, device)

    def block_times(self, places: GroupPlaces, shard: LayerShard) -> tuple[UnitTimes, ...]:
        """The blocks that units are made of, kind by kind, without copies to the host."""
        return tuple(chain.from_iterable(self._blocks.of_units(places, shard).values()))

    @cached_by(
        lambda self, kind, places, shard, recompute: (
            unit_key(self.spec, kind, places, shard),
            recompute,
        )
    )
    def run(
        self, kind: LayerKind, places: GroupPlaces, shard: LayerShard, recompute: Recompute
    ) -> UnitRun:
        """A unit under a recompute setting."""
        if kind is LayerKind.EMBEDDING and self.spec.vision is not None:
            return self._run_with_encoder(places, shard, recompute)
        return run_unit(
            self.unit_time(kind, places, shard),
            kind,
            recompute,
            latent_attention=self.spec.multi_latent_attention,
            inputs_on_host=self.settings.traits.offloads_layer_inputs,
            norm_stays=kind.has_experts and norm_stays(shard.execution),
        )

    def _run_with_encoder(
        self, places: GroupPlaces, shard: LayerShard, recompute: Recompute
    ) -> UnitRun:
        """The embedding with an encoder of images, whose layers megatron-core recomputes."""
        vision = self.spec.vision
        assert vision is not None
        kind = LayerKind.EMBEDDING
        lookup, encoder, projector = (
            functools.partial(run_unit, times, recompute=recompute, latent_attention=False)
            for times in self._blocks.of_units(places, shard)[kind]
        )
        layers = LayerKind.DENSE if vision.is_split and not vision.frozen else kind
        return lookup(kind) + encoder(layers, num_layers=vision.num_layers) + projector(kind)

    @cached_by(SHARD)
    def pass_times(self, grid: PartialLayout) -> tuple[PassPair, ...]:
        """Forward and backward time of each kind of unit, without recomputation.

        No unit is joined from its blocks for it, which is cheap.
        """
        places, shard = self.places(grid.dims), self.shard(grid)
        if not grid.execution.offloads:
            return tuple(map(_both_passes, self._blocks.of_units(places, shard).values()))
        runs = [self.run(kind, places, shard, NO_RECOMPUTE) for kind in self.num_units]
        return tuple((run.forward.total, run.backward.total) for run in runs)

    @cached_by(SHARD)
    def shard(self, grid: PartialLayout) -> LayerShard:
        """How a grid divides a layer."""
        dims = grid.dims
        taken, made = saved_attention_bytes(self.settings)
        traits = self.settings.traits
        return LayerShard(
            **{name: getattr(dims, name) for name in LAYER_DEGREES},
            **{name: getattr(traits, name) for name in _OF_SHARDS},
            micro_batch_size=grid.micro_batch_size,
            sequence_parallel=grid.sequence_parallel,
            flash_attention=self.flash_attention,
            activation_bytes=traits.params_bytes,
            saved_input_bytes=saved_input_bytes(self.settings),
            qkv_bytes=taken,
            attention_output_bytes=made,
            expert_alignment=expert_alignment(self.settings, grid.execution),
            execution=grid.execution,
        )

    @property
    def flash_attention(self) -> bool:
        """Whether attention keeps no score matrix: the device and the job both allow it."""
        return self.cluster.accelerator.flash_attention and self.settings.traits.flash_attention

    def unit_kinds(self, grid: PartialLayout) -> tuple[bytes, tuple[UnitKind, ...]]:
        """The distinct units of a grid, and which one stands at each place of the sequence."""
        sequence = self.structure(grid.dims).sequence
        return sequence, self.kinds_under(grid, *split_block(grid.recompute))

    @cached_by(
        lambda _, grid, covered, elsewhere: (SHARD.of(grid), grid.dims.is_one_stage, covered)
    )
    def kinds_under(
        self, grid: PartialLayout, covered: Recompute, elsewhere: Recompute
    ) -> tuple[UnitKind, ...]:
        """The distinct units of a grid under another setting, as ``split_block`` splits it."""
        shard, places = self.shard(grid), self.places(grid.dims)
        kinds = []
        for kind, count in self.structure(grid.dims).units:
            again = elsewhere if kind is LayerKind.MTP else covered
            own = passes(self.run(kind, places, shard, elsewhere))
            is_same = again == elsewhere
            block = own if is_same else passes(self.run(kind, places, shard, again))
            kinds.append(UnitKind(kind, count, own, block))
        return tuple(kinds)

    @cached_by(lambda _, dims, zero: (DEGREES.of(dims), bool(zero), zero.is_fsdp))
    def traffic(self, dims: ParallelDims, zero: ZeroStage) -> ReplicaTraffic:
        """Data-parallel traffic of a grid."""
        layer = self.structure(dims).parameters.over(self.spec.num_stacked_layers)
        return replica_traffic(dims, zero, self.cluster, layer, self.settings)

    def structure(self, dims: ParallelDims) -> Structure:
        """The units of a grid."""
        tp, ep = dims.tensor_model_parallel_size, dims.expert_model_parallel_size
        etp = dims.expert_tensor_parallel_size
        return _structure(self.spec, tp, ep, etp, single_stage=dims.is_one_stage)

    @cached_by(_step_key)
    def constant(self, grid: PartialLayout) -> Ticks:
        """Time of a step that no stage partition changes: host, stragglers, tied embeddings."""
        seconds = self.settings.iteration_floor_s + self.straggler_time(grid)
        seconds += self._embedding_time(grid.dims)
        return to_ticks(seconds, what="time outside the schedule")

    def straggler_time(self, grid: PartialLayout) -> Seconds:
        """What a step waits for the slowest replica; what is recomputed counts as no work."""
        dims = grid.dims
        own = straggler_wait(
            self.settings.straggler_delay_s,
            self._work(grid) * grid.num_microbatches / dims.pipeline_model_parallel_size,
            dims.pipeline_model_parallel_size,
            self._replica_hosts(dims),
        )
        return math.hypot(own, self._uneven_packs(grid))

    @cached_by(DEGREES)
    def _replica_hosts(self, dims: ParallelDims) -> int:
        """Hosts over which the ranks lie that reduce a gradient."""
        return group_shape(dims, GroupKind.DP_CP, self._hosts)[-1]

    @cached_by(SHARD)
    def _work(self, grid: PartialLayout) -> Seconds:
        """One micro batch through all units."""
        times = zip(self.num_units.values(), self.pass_times(grid), strict=True)
        return sum(count * sum(sides) for count, sides in times)

    def _uneven_packs(self, grid: PartialLayout) -> Seconds:
        """What a step waits for the replica with most attention in its packs, beyond a mean one.

        Deviations of the micro batches of a step add up as their squares do.
        """
        deviation = self.settings.traits.attention_deviation
        if not deviation:
            return 0.0
        dims, tokens = grid.dims, self.spec.seq_length * grid.micro_batch_size
        of_stage = self._attention_time(grid) / dims.pipeline_model_parallel_size
        deviating = deviation * math.sqrt(grid.num_microbatches / tokens)
        return of_stage * deviating * expected_largest(dims.data_parallel_size)

    @cached_by(SHARD)
    def _attention_time(self, grid: PartialLayout) -> Seconds:
        return self._blocks.attention_time(self.shard(grid))

    def _embedding_time(self, dims: ParallelDims) -> Seconds:
        """The sum of tied embeddings' gradients over the first and the last pipeline rank."""
        spec = self.spec
        are_separate = spec.untie_embeddings_and_output_weights and not spec.num_mtp_layers
        is_frozen = spec.adapters is not None
        if dims.pipeline_model_parallel_size == 1 or are_separate or is_frozen:
            return 0.0
        level = pipeline_link_level(dims, dims.pipeline_model_parallel_size - 1, self._sizes)
        shape = tuple(2 if i == level else 1 for i in range(len(self._sizes)))
        tp = dims.tensor_model_parallel_size
        rows = spec.padded_vocab_size(tp) // tp
        size = rows * spec.hidden_size * self.settings.traits.gradient_bytes
        return collective_time(CollectiveKind.ALL_REDUCE, size, shape, self.cluster.levels)

    def sources(self, grid: PartialLayout) -> dict[LayerBlock, Source]:
        """Where the compute time of each of the model's blocks comes from."""
        return self._blocks.sources(self.shard(grid))

    @cached_by(lambda _, dims, zero: (DEGREES.of(dims), zero))
    def replica_costs(self, dims: ParallelDims, zero: ZeroStage) -> tuple[ReplicaCost, ...]:
        """What the parameters of each distinct unit cost for their replicas' sake."""
        rank = self.structure(dims).on_rank(dims, self.settings)
        byte_s = memory_time(self.cluster.accelerator)
        units, traffic = self.structure(dims).units, self.traffic(dims, zero)
        return replica_costs(units, dims, zero, traffic, rank, self._step, byte_s)

    def sends(self, grid: PartialLayout) -> tuple[tuple[Ticks, ...], tuple[Ticks, ...]]:
        """Transfer time from each chunk to the next, and from each chunk to the previous one."""
        by_link = self._times_by_link(grid) * grid.dims.virtual_pipeline_model_parallel_size
        forward = by_link[: grid.dims.num_chunks - 1]
        return (*forward, 0), (0, *forward)

    def sent_bytes(self, grid: PartialLayout) -> float:
        """Bytes of an activation, or of its gradient, between neighbouring pipeline ranks."""
        tokens = self.shard(grid).tokens_between_blocks(self.spec)
        size = tokens * self.spec.hidden_size * self.settings.traits.params_bytes
        if self.settings.traits.scatter_between_stages and not grid.sequence_parallel:
            size /= grid.dims.tensor_model_parallel_size
        return size

    @cached_by(
        lambda _, grid: (DEGREES.of(grid.dims), grid.micro_batch_size, grid.sequence_parallel)
    )
    def _times_by_link(self, grid: PartialLayout) -> tuple[Ticks, ...]:
        """Transfer time from each pipeline rank to the next, and from the last to the first."""
        size = self.sent_bytes(grid)
        times = [to_ticks(send_time(size, level)) for level in self.cluster.levels]
        return tuple(times[level] for level in self._link_levels(grid.dims))

    @cached_by(DEGREES)
    def _link_levels(self, dims: ParallelDims) -> tuple[int, ...]:
        ranks = range(0 if dims.is_one_stage else dims.pipeline_model_parallel_size)
        return tuple(pipeline_link_level(dims, rank, self._sizes) for rank in ranks)


@functools.lru_cache(maxsize=1 << 12)
def _structure(
    spec: TransformerSpec, tp: int, ep: int, etp: int, *, single_stage: bool
) -> Structure:
    counts = unit_parameters(spec, tp, ep, etp, single_stage=single_stage)
    units = list(zip(spec.layer_kinds(), counts, strict=True))
    numbers = Counter(units)
    places = {unit: place for place, unit in enumerate(numbers)}
    layers = {unit: number for unit, number in numbers.items() if not unit[0].is_end}
    return Structure(
        sequence=bytes(map(places.__getitem__, units)),
        units=tuple(numbers),
        parameters=_total(numbers),
        layer=_total(layers).over(sum(layers.values())),
    )


def _total(units: Mapping[tuple[LayerKind, ParameterCount], int]) -> ParameterCount:
    each = (count.times(number) for (_, count), number in units.items())
    return sum(each, ParameterCount())


def straggler_wait(delay_s: float, work_s: Seconds, num_stages: int, num_hosts: int) -> Seconds:
    """What a step waits for the slowest of its replicas, beyond a mean one.

    Ranks that do the same work do not end at the same time: clocks follow power and temperature,
    hosts run other processes, switches are shared. What a rank is late grows as a random walk does:
    after ``t`` seconds its standard deviation is ``delay_s * sqrt(t)``, and that of a replica of
    ``p`` stages ``delay_s * sqrt(p * t)``. Once a step, where gradients are reduced, every replica
    waits for the slowest. What the ranks of one host wait for each other is in the efficiencies
    that are fitted to measured layers, so replicas count by the hosts that they lie on.

    Args:
        delay_s: fitted to published weak scalings (``tools/calibration/stragglers.py``,
            ``hydra_configs/calibration/stragglers.yaml``).
        num_hosts: those over which the ranks lie that reduce a gradient.

    >>> straggler_wait(0.02, 10.0, 1, 1)
    0.0
    >>> round(straggler_wait(0.02, 10.0, 1, 8), 3), round(straggler_wait(0.02, 10.0, 4, 512), 3)
    (0.091, 0.383)
    """
    return delay_s * math.sqrt(num_stages * work_s) * expected_largest(num_hosts)


@functools.lru_cache(maxsize=1 << 12)
def expected_largest(num_draws: int) -> float:
    """Expected largest of so many standard normal draws.

    Source: Blom, Statistical Estimates and Transformed Beta-Variables (1958).

    >>> expected_largest(1), round(expected_largest(8), 2), round(expected_largest(1000), 2)
    (0.0, 1.43, 3.23)
    """
    share = (num_draws - 0.375) / (num_draws + 0.25)
    return NormalDist().inv_cdf(share) if num_draws > 1 else 0.0
