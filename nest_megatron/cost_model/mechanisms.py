"""Which shares of a step the mechanisms take whose prices can be wrong, each in its own way.

The terms of an ``Estimate`` on the pipeline rank that is busy longest, its compute divided by the
kind of operator. An error of a mechanism's price changes the logarithm of the step by that error
times its share, to first order: traffic that is predicted to hide takes no share.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping

from nest_megatron.cost_model.compute import operator_times
from nest_megatron.cost_model.estimate import critical_terms
from nest_megatron.cost_model.model import CostModel
from nest_megatron.layout.layout import Layout, PartialLayout
from nest_megatron.layout.rank_order import GroupKind, group_level
from nest_megatron.model.graph import OperatorKind
from nest_megatron.model.layer_pattern import LayerKind
from nest_megatron.model.operators import block_graph
from nest_megatron.plain import Name
from nest_megatron.profile.records import Source
from nest_megatron.units import Seconds


class Mechanism(Name):
    """What a part of a step's time depends on; kinds of operators by their own names."""

    GEMM = "gemm"
    ATTENTION = "attention"
    GROUPED_GEMM = "grouped_gemm"
    MEMORY_BOUND = "memory_bound"
    PROFILED = "profiled"
    LAUNCH = "launch"
    RECOMPUTE = "recompute"
    TENSOR = "tensor_parallel"
    CONTEXT = "context_parallel"
    EXPERT = "expert_parallel"
    EXPERT_NETWORK = "expert_parallel_across_nodes"
    PIPELINE = "pipeline"
    REPLICAS = "replicas"
    FSDP = "fsdp"
    STRAGGLERS = "stragglers"
    OPTIMIZER = "optimizer"


#: Shares of a step by mechanism; they add up to one.
Shares = Mapping[Mechanism, float]

_OF_TERM = {
    "recompute": Mechanism.RECOMPUTE,
    "tp_communication": Mechanism.TENSOR,
    "cp_communication": Mechanism.CONTEXT,
    "pp_communication": Mechanism.PIPELINE,
    "pipeline_bubble": Mechanism.PIPELINE,
    "embedding_sync": Mechanism.REPLICAS,
    "stragglers": Mechanism.STRAGGLERS,
    "optimizer": Mechanism.OPTIMIZER,
    "host": Mechanism.LAUNCH,
}


def shares(model: CostModel, layout: Layout) -> Shares:
    """Shares of a step by mechanism."""
    rank, terms = critical_terms(model, layout)
    spent: dict[Mechanism, Seconds] = defaultdict(float)
    for name, mechanism in _OF_TERM.items():
        spent[mechanism] += terms[name]
    crosses = group_level(layout.dims, GroupKind.EP, model.cluster.group_sizes()) > 0
    spent[Mechanism.EXPERT_NETWORK if crosses else Mechanism.EXPERT] += terms["ep_communication"]
    spent[Mechanism.FSDP if layout.zero.is_fsdp else Mechanism.REPLICAS] += terms[
        "dp_communication"
    ]
    for mechanism, share in _compute_shares(model, layout, rank).items():
        spent[mechanism] += share * terms["compute"]
    whole = math.fsum(spent.values())
    return {mechanism: seconds / whole for mechanism, seconds in spent.items() if seconds > 0}


def _compute_shares(model: CostModel, layout: Layout, rank: int) -> Shares:
    sequence, kinds = model.unit_kinds(layout)
    held = Counter(
        sequence[unit] for chunk in layout.partition.chunks_of_rank(rank) for unit in chunk
    )
    spent: dict[Mechanism, Seconds] = defaultdict(float)
    for index, count in held.items():
        unit = kinds[index]
        inside = _unit_times(model, layout, unit.kind)
        whole = unit.own.run.forward.compute + unit.own.run.backward.compute
        known = math.fsum(inside.values())
        # The host may take longer to launch than the device to run.
        rest = Mechanism.PROFILED if Mechanism.PROFILED in inside else Mechanism.LAUNCH
        inside[rest] = inside.get(rest, 0.0) + max(0.0, whole - known)
        for mechanism, seconds in inside.items():
            spent[mechanism] += count * seconds
    total = math.fsum(spent.values())
    return {mechanism: seconds / total for mechanism, seconds in spent.items()} if total else {}


def _unit_times(
    model: CostModel, layout: PartialLayout, kind: LayerKind
) -> dict[Mechanism, Seconds]:
    """Both passes of a unit over its operators; what a profile timed counts as profiled."""
    shard, sources = model.shard(layout), model.sources(layout)
    device, settings = model.cluster.accelerator, model.settings
    imbalance = settings.expert_load(layout.dims.expert_model_parallel_size)
    spent: dict[Mechanism, Seconds] = defaultdict(float)
    for block in model.spec.unit_blocks(kind):
        profiled = sources.get(block, Source.ANALYTIC) is not Source.ANALYTIC
        for op in block_graph(model.spec, block, shard).operators:
            seconds = math.fsum(operator_times(op, device, settings))
            seconds *= imbalance if op.kind is OperatorKind.GROUPED_GEMM else 1.0
            if profiled:
                spent[Mechanism.PROFILED] += seconds
                continue
            floor = 3 * settings.compute_slowdown * device.kernel_floor_s * op.num_kernels
            spent[Mechanism.LAUNCH] += min(floor, seconds)
            spent[_mechanism(op.kind)] += max(0.0, seconds - floor)
    return spent


def _mechanism(kind: OperatorKind) -> Mechanism:
    """A scan, which no measurement tells apart, is as uncertain as attention."""
    return Mechanism.ATTENTION if kind is OperatorKind.SCAN else Mechanism(kind)
