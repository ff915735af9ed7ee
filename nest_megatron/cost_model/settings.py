"""Assumptions of the cost model that are neither the model's, the cluster's nor the plan's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from nest_megatron.cluster.records import Precision
from nest_megatron.cost_model.traits import ExecutionTraits, ranged, require_ranges
from nest_megatron.model.sequence_lengths import SequenceLengths
from nest_megatron.plain import from_plain, frozen
from nest_megatron.units import GIB


def _name_of(field: str) -> str:
    section = "memory" if field.startswith("memory_") else "cost"
    return f"{section}.{field.removeprefix('memory_')}"


@frozen
class CostSettings:
    """What the cost model takes for granted; a value outside its range is a ``UserInputError``.

    Args:
        precision: number format of the GEMMs.
        expert_imbalance: busiest expert rank's tokens over the mean; 1 is balanced routing.
        compute_slowdown: time of the device's work over what its calibrated kernels need: kernels
            that a framework does not fuse, gaps between them.
        attention_slowdown: the same of attention alone: older kernels, rings that do not overlap.
        fp8_attention_speedup: rate of attention in fp8 over that in 16 bits.
        tp_overlap: share of tensor-parallel traffic that overlaps the GEMMs which need it,
            with user buffers (``--tp-comm-overlap``).
        ep_overlap: share of the token all-to-all with experts that overlaps another micro
            batch's work, with ``--overlap-moe-expert-parallel-comm``.
        alltoall_slowdown: time of the token all-to-all across nodes over what the network's own
            tables say: parts of unequal size. Inside a node it takes what the tables say.
        flex_slowdown: the same of the token all-to-all with DeepEP or HybridEP, wherever.
        count_sync_launches: launches for which the device waits where the host reads how many
            tokens each expert gets: its queue is empty, and fills again at the host's pace.
        dp_slowdown: time of the traffic between replicas over what the network needs: weights that
            a framework gathers one by one.
        host_kernel_s: time that the host takes to launch one operator outside CUDA graphs, in place
            of the accelerator's; half a layer takes at least the sum over its operators.
        dp_overlap: share of a micro batch's compute under which data-parallel traffic can hide.
        overlap_slowdown: time that compute loses for each second of traffic hidden under it,
            because the collective's kernels take processors away (NCCL's default of 16 channels on
            a 132-processor H100 is 12 %).
        optimizer_bytes_per_parameter: memory traffic of one optimizer step, where no profile timed
            one: gradient, master weight and two moments read, three written, model weight written.
        memory_reserve_bytes: CUDA context, NCCL buffers and library workspaces, outside the
            allocator.
        memory_margin: share of a GPU's memory that a plan leaves free against fragmentation, chosen
            by published runs (``docs/accuracy.md``).
        straggler_delay_s: delay of a rank after one second of work, its standard deviation; it
            grows with the square root of the work.
        iteration_floor_s: CPU overhead of a step that nothing hides (data, logging, launch).
        traits: what the job's flags say apart from the layout: formats of states, fused kernels.
        target: framework and release whose defaults fill what the job leaves open.
    """

    precision: Precision = Precision.BF16
    expert_imbalance: float = ranged(1.0, 1.0)
    compute_slowdown: float = ranged(1.0, 0.1, 10.0)
    attention_slowdown: float = ranged(1.0, 0.1, 10.0)
    fp8_attention_speedup: float = ranged(1.0, 0.1, 10.0)
    tp_overlap: float = ranged(0.0, 0.0, 1.0)
    ep_overlap: float = ranged(0.0, 0.0, 1.0)
    alltoall_slowdown: float = ranged(1.0, 0.1, 100.0)
    flex_slowdown: float = ranged(1.0, 0.1, 100.0)
    count_sync_launches: float = ranged(0.0, 0.0, 1e3)
    dp_slowdown: float = ranged(1.0, 1.0, 100.0)
    host_kernel_s: float | None = ranged(None, 0.0, 1.0)
    dp_overlap: float = ranged(0.9, 0.0, 1.0)
    overlap_slowdown: float = ranged(0.12, 0.0, 1.0)
    optimizer_bytes_per_parameter: float = ranged(30.0, 0.0, 1e3)
    memory_reserve_bytes: int = ranged(2 * GIB, 0, 1 << 50)
    #: With the reserve, the largest whole per cent that refuses at most 1 % of what ran in
    #: ``throughput.csv`` and ``throughput_2.csv`` as planned (``tools/accuracy/margin.py``).
    memory_margin: float = ranged(0.04, 0.0, 0.9)
    #: Fitted in ``calibration/stragglers.yaml``.
    straggler_delay_s: float = ranged(0.025, 0.0, 10.0)
    iteration_floor_s: float = ranged(0.005, 0.0, 1e3)
    traits: ExecutionTraits = dataclasses.field(default_factory=ExecutionTraits)
    target: str | None = None

    def __post_init__(self) -> None:
        require_ranges(self, _name_of)

    def of_launch(self) -> dict[str, Any]:
        """Fields of ``LaunchRequest`` that the settings say."""
        traits = self.traits
        return {
            "precision": self.precision,
            "fp8_recipe": traits.fp8_recipe.value,
            "fused_attention": traits.flash_attention,
            "gradient_bytes": traits.gradient_bytes,
            "microbatch_group_size_per_vp_stage": traits.microbatch_group_size_per_vp_stage,
        }

    def expert_load(self, num_ranks: int) -> float:
        """Tokens of the busiest of some expert ranks over the mean.

        An expert drops what exceeds its capacity, and may be filled up to it.
        """
        routed = self.expert_imbalance if num_ranks > 1 else 1.0
        capacity = self.traits.expert_capacity_factor
        if capacity is None:
            return routed
        return capacity if self.traits.pads_to_capacity else min(routed, capacity)

    def on_packs(self, lengths: SequenceLengths) -> CostSettings:
        """The settings where each sequence is a pack of shorter ones, of these lengths."""
        traits = dataclasses.replace(
            self.traits,
            attended_tokens=lengths.attended,
            attention_deviation=lengths.attention_deviation,
        )
        return dataclasses.replace(self, traits=traits)


#: Settings that say nothing of a model without experts.
OF_EXPERTS = frozenset(
    ("expert_imbalance", "ep_overlap", "alltoall_slowdown", "flex_slowdown", "count_sync_launches")
)
#: What stands before the name of a trait.
_TRAITS = "traits."


def stored_settings(settings: CostSettings) -> dict[str, float | str]:
    """All settings as a plan file has them: traits that are not the defaults as ``traits.NAME``."""
    stored = {
        field.name: _stored(getattr(settings, field.name))
        for field in dataclasses.fields(settings)
        if field.name != "traits" and getattr(settings, field.name) is not None
    }
    for field in dataclasses.fields(settings.traits):
        value = getattr(settings.traits, field.name)
        if value != field.default:
            stored[_TRAITS + field.name] = _stored(value)
    return stored


def is_trait(name: str) -> bool:
    """Whether a stored setting is one of the execution's traits."""
    return name.startswith(_TRAITS)


def traits_of(stored: Mapping[str, float | str]) -> dict[str, float | str]:
    """The traits among stored settings; one that is not there has its default."""
    return {name: value for name, value in stored.items() if is_trait(name)}


def restored_settings(stored: Mapping[str, float | str]) -> CostSettings:
    """The settings that were stored; an unknown one is a ``UserInputError``."""
    named = {name.removeprefix(_TRAITS): name for name in traits_of(stored)}
    plain = _in_kind(CostSettings, {k: v for k, v in stored.items() if k not in named.values()})
    plain["traits"] = _in_kind(ExecutionTraits, {k: stored[name] for k, name in named.items()})
    return from_plain(CostSettings, plain, "provenance.settings")


def _stored(value: object) -> float | str:
    return float(value) if isinstance(value, int | float) else str(value)


def _in_kind(record: Any, stored: Mapping[str, float | str]) -> dict[str, object]:
    """Floats as the whole numbers and switches that the record's defaults are."""
    plain: dict[str, object] = dict(stored)
    for field in dataclasses.fields(record):
        value = stored.get(field.name)
        if isinstance(field.default, int) and isinstance(value, float) and value.is_integer():
            plain[field.name] = type(field.default)(value)
    return plain
