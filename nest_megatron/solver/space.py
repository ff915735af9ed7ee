"""The declared search space: which launchable grids the solver chooses among."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import field
from itertools import combinations
from typing import Any, NamedTuple

from nest_megatron.cluster.records import Cluster
from nest_megatron.errors import UserInputError, nearest, require_known
from nest_megatron.layout.cuda_graphs import CudaGraphs
from nest_megatron.layout.dims import RankOrder
from nest_megatron.layout.recompute import (
    NO_RECOMPUTE,
    Recompute,
    RecomputeGranularity,
    RecomputeMethod,
    RecomputeModule,
)
from nest_megatron.layout.rulebook.facts import DEFAULT_VERSION
from nest_megatron.layout.stage_layout import StagePartition
from nest_megatron.layout.zero import DataParallelSharding, ZeroStage
from nest_megatron.model.execution import PLAIN, Execution
from nest_megatron.model.shard import fits_fused_attention
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.plain import frozen, set_field

#: Degrees that can be fixed (``parallel.NAME``) or limited (``search.max_NAME``).
DEGREES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "data_parallel_size",
    "micro_batch_size",
)

#: Largest value tried where neither the user nor the cluster says otherwise.
DEFAULT_LIMITS = {
    "virtual_pipeline_model_parallel_size": 12,
    "context_parallel_size": 16,
    "micro_batch_size": 32,
}


@frozen
class SearchSpace:
    """What the search may choose.

    Args:
        fixed: degrees fixed at one value.
        limits: largest value of a degree; tensor-parallel sizes go up to one node by default.
        least: least value of a degree.
        sharding: what divides states among replicas; ``None`` leaves it to the ZeRO stage.
        recompute: the one setting allowed, or ``None`` for all.
        execution: of layers, as the job's flags and its framework's defaults say.
        executions: fields of it that may be chosen, with the values that framework and device have.
        version: the Megatron-LM release whose rules say where they may be.
        transformer_impl: whose layers the job has.
        cuda_graphs: those of the job, which a plan keeps; ``None`` where it may choose them.
        without_modules: modules whose recomputation is not tried.
        full_recompute: whether recomputing whole layers is tried.
        partition: the one allowed; its pipeline and virtual sizes join ``fixed``.
        sequence_parallel: it is on wherever tensor parallelism is; otherwise nowhere.
        even_stages: only cuts that Megatron makes by itself, as many layers in each virtual stage;
            for frameworks that can state no layout.
        layers_in_bf16: as of ``LaunchRequest``.
        mtp_beside_layer: MTP layers lie between the last layer and the head, and no block of layers
            is recomputed, for a framework that builds them of their stage's layers.
        use_all_gpus: every GPU works; otherwise any whole nodes may, or a divisor of one.
        present: degrees of what the job runs today outside the limits; they are tried, too.
        present_recompute: its recomputation, where it is none of those that are tried.
        batch_unit: what every global batch of the run is a multiple of, where the batch grows;
            otherwise the global batch itself.

    Raises:
        UserInputError: for a degree that is none, and for settings that contradict each other.
    """

    fixed: Mapping[str, int] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)
    least: Mapping[str, int] = field(default_factory=dict)
    rank_orders: tuple[RankOrder, ...] = tuple(RankOrder)
    zero_stages: tuple[ZeroStage, ...] = tuple(ZeroStage)
    sharding: DataParallelSharding | None = None
    recompute: Recompute | None = None
    execution: Execution = PLAIN
    executions: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    version: str = DEFAULT_VERSION
    transformer_impl: str = "transformer_engine"
    cuda_graphs: CudaGraphs | None = None
    without_modules: frozenset[RecomputeModule] = frozenset()
    full_recompute: bool = True
    partition: StagePartition | None = None
    sequence_parallel: bool = True
    even_stages: bool = False
    layers_in_bf16: int = 0
    mtp_beside_layer: bool = False
    use_all_gpus: bool = True
    present: Mapping[str, int] = field(default_factory=dict)
    present_recompute: Recompute | None = None
    batch_unit: int | None = None

    def __post_init__(self) -> None:
        fields = [each.name for each in dataclasses.fields(Execution) if each.init]
        for name in self.executions:
            require_known("executions", name, fields, "no such field")
        if self.partition is not None:
            set_field(self, "fixed", _with_its_degrees(self.fixed, self.partition))
        for what, values in (("parallel.", self.fixed), ("search.max_", self.limits)):
            for name, value in values.items():
                if name not in DEGREES:
                    fix = nearest(name, DEGREES)
                    raise UserInputError(f"{what}{name}", value, "no such degree", fix)
                where = "train." if (what, name) == ("parallel.", "micro_batch_size") else what
                if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                    raise UserInputError(
                        f"{where}{name}",
                        value,
                        "a degree is a whole number of at least 1",
                        "Give a positive whole number, or leave it out to search it.",
                    )
        for name in self.fixed.keys() & self.limits.keys():
            if self.fixed[name] > self.limits[name]:
                raise UserInputError(
                    f"search.max_{name}",
                    self.limits[name],
                    f"{name} is fixed at {self.fixed[name]}, which is more",
                    "Give one of the two, or raise the limit.",
                )

    def values(self, name: str, divisors_of: int, cluster: Cluster) -> list[int]:
        """Values of a degree to try, rising: the divisors of a number within the limits."""
        return [d for d in divisors(divisors_of) if self.allows(name, d, cluster)]

    def allows(self, name: str, value: int, cluster: Cluster) -> bool:
        """Whether a degree may have a value."""
        if name in self.fixed:
            return value == self.fixed[name]
        if value == self.present.get(name):
            return True
        return self.least.get(name, 1) <= value <= self.limit(name, cluster)

    def limit(self, name: str, cluster: Cluster) -> int:
        """Largest value of a degree to try."""
        if name in self.limits:
            return self.limits[name]
        if name in ("tensor_model_parallel_size", "expert_tensor_parallel_size"):
            return max(8, cluster.gpus_per_node)
        return DEFAULT_LIMITS.get(name, cluster.num_gpus)

    def world_sizes(self, cluster: Cluster) -> list[int]:
        """Numbers of GPUs to use, largest first."""
        total, node = cluster.num_gpus, cluster.gpus_per_node
        if self.use_all_gpus:
            return [total]
        whole_nodes = range(total - total % node, 0, -node)
        return sorted(
            {total, *whole_nodes, *(d for d in divisors(node) if d <= total)}, reverse=True
        )


def _with_its_degrees(fixed: Mapping[str, int], partition: StagePartition) -> dict[str, int]:
    """Fixed degrees with the two that a stage partition states."""
    pp = partition.pipeline_model_parallel_size
    degrees = {
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": partition.num_chunks // pp,
    }
    for name, value in degrees.items():
        if fixed.get(name, value) != value:
            raise UserInputError(
                f"parallel.{name}",
                fixed[name],
                f"the stage partition has {value}",
                f"Use {value}, or leave one of the two out.",
            )
    if pp == 1 and partition.num_chunks > 1:
        raise UserInputError(
            "stage partition",
            partition.num_chunks,
            "virtual stages need at least 2 pipeline ranks",
            "Raise parallel.pipeline_model_parallel_size, or give one stage.",
        )
    return {**fixed, **degrees}


def divisors(number: int) -> list[int]:
    """Divisors, rising.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def recompute_settings(
    spec: TransformerSpec,
    layers_per_chunk: int,
    *,
    flash_attention: bool = True,
    without: frozenset[RecomputeModule] = frozenset(),
    full: bool = True,
) -> Iterator[Recompute]:
    """Recompute settings to try: none, every useful set of modules, full by blocks, full uniform.

    Args:
        layers_per_chunk: largest block that is tried.
        without: modules that are left out.
    """
    yield NO_RECOMPUTE
    useful = _useful_modules(spec, flash_attention=flash_attention)
    modules = tuple(module for module in useful if module not in without)
    for size in range(1, len(modules) + 1):
        for subset in combinations(modules, size):
            # To recompute all experts covers what is inside them.
            if RecomputeModule.MOE not in subset or _INSIDE_MOE.isdisjoint(subset):
                yield Recompute(granularity=RecomputeGranularity.SELECTIVE, modules=subset)
    if not full:
        return
    blocks = [(RecomputeMethod.BLOCK, size) for size in range(1, layers_per_chunk + 1)]
    for method, size in (*blocks, (RecomputeMethod.UNIFORM, 1)):
        yield Recompute(granularity=RecomputeGranularity.FULL, method=method, num_layers=size)


_INSIDE_MOE = frozenset({RecomputeModule.MOE_ACT, RecomputeModule.SHARED_EXPERTS})


def _useful_modules(spec: TransformerSpec, *, flash_attention: bool) -> tuple[RecomputeModule, ...]:
    """Modules whose recomputation frees memory in this model, in Megatron's order.

    ``core_attn`` is not among them with flash attention, which keeps no score matrix, so that its
    recomputation frees next to nothing.
    """
    useful = {
        RecomputeModule.CORE_ATTN: not (flash_attention and fits_fused_attention(spec)),
        RecomputeModule.MOE_ACT: spec.is_moe,
        RecomputeModule.LAYERNORM: spec.is_moe or spec.multi_latent_attention,
        RecomputeModule.MLA_UP_PROJ: spec.multi_latent_attention,
        RecomputeModule.MLP: bool(spec.ffn_hidden_sizes),
        RecomputeModule.MOE: spec.is_moe,
        RecomputeModule.SHARED_EXPERTS: bool(spec.moe_shared_expert_intermediate_size),
    }
    return tuple(module for module in RecomputeModule if useful.get(module))


class Choices(NamedTuple):
    """The settings of a grid in the order in which a search asks for them.

    Args:
        none: whether to recompute nothing is one of them.
        blocks: those that are solved lazily, smallest first.
        others: all the rest, large sets of modules first.
    """

    none: bool
    blocks: tuple[Recompute, ...]
    others: tuple[Recompute, ...]


def sort_settings(settings: tuple[Recompute, ...], *, lazily: bool) -> Choices:
    """Sort the settings of a grid.

    Args:
        settings: blocks among them rise by one layer each.
        lazily: whether blocks are solved one after the other, as long as they may win.
    """
    blocks = tuple(r for r in settings if lazily and r.method is RecomputeMethod.BLOCK)
    rest = [r for r in settings if r != NO_RECOMPUTE and r not in blocks]
    others = tuple(sorted(rest, key=lambda r: -len(r.modules)))
    return Choices(NO_RECOMPUTE in settings, blocks, others)


def settings_keeping_least(settings: tuple[Recompute, ...]) -> list[Recompute]:
    """The settings that keep least: the largest block, uniform, the largest sets of modules."""
    if len(settings) == 1:
        return list(settings)
    most = max(len(r.modules) for r in settings)
    blocks = [r for r in settings if r.method is RecomputeMethod.BLOCK]
    uniform = [r for r in settings if r.method is RecomputeMethod.UNIFORM]
    return [*uniform, *blocks[-1:], *(r for r in settings if 0 < len(r.modules) >= most - 1)]
