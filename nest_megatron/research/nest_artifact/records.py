"""An instance of the artifact's solver, a plan for it, and the switches of its cost formula."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from nest_megatron.errors import UserInputError
from nest_megatron.plain import Count

#: Edges at one end of a node: the node at the other end, and bytes.
Edges = tuple[tuple[int, float], ...]


class Optimizer(Enum):
    """Optimizers of the format, with the bytes of states for each byte of weights."""

    SGD = "SGD"
    ADAM = "Adam"

    @property
    def state_bytes_per_weight_byte(self) -> float:
        """Adam keeps momentum, variance and a copy in float32 beside weights in 16 bits."""
        return 6.0 if self is Optimizer.ADAM else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A node of the layer graph; -1 is the embedding. Latencies are in the instance's unit.

    Args:
        weight_bytes: of its parameters, at 2 bytes each.
        activation_bytes: outputs of all its operators for one micro batch.
    """

    node_id: int
    forward: float
    backward: float
    weight_bytes: float
    activation_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The layers for one tensor degree, in the only order that their edges allow.

    Args:
        incoming, outgoing: edges of each layer by its place in ``layers``; some may skip layers.
    """

    layers: tuple[Layer, ...]
    incoming: tuple[Edges, ...]
    outgoing: tuple[Edges, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Levels, innermost first: fan-out, bytes per second, seconds."""

    fan_outs: tuple[int, ...]
    bandwidths: tuple[float, ...]
    latencies: tuple[float, ...]

    def level_between(self, one: int, other: int) -> int:
        """The innermost level whose group holds both devices.

        >>> network = Network(fan_outs=(8, 4), bandwidths=(2.0, 1.0), latencies=(0.0, 0.0))
        >>> network.level_between(0, 7), network.level_between(7, 8)
        (0, 1)
        """
        for level, fan_out in enumerate(self.fan_outs):
            one, other = one // fan_out, other // fan_out
            if one == other:
                return level
        return len(self.fan_outs) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedPlan:
    """A fixed plan, in the words of the format: stages, replicas, tensor degree, layers."""

    p: Count
    d: Count
    t: Count
    num_transformer_layers: Count
    layer_partition: tuple[Count, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """What the artifact's solver is given: chains by tensor degree, fixed plans by name.

    Args:
        num_micro_batches: of one batch, over all pipelines.
        notes: what the file holds and this format does not.
    """

    chains: dict[int, Chain]
    network: Network
    num_devices: int
    memory_bytes: float
    num_micro_batches: int
    expert_model_parallel_size: int
    context_parallel_size: int
    sequence_parallel: bool
    recompute: bool
    optimizer: Optimizer
    baselines: dict[str, FixedPlan]
    notes: tuple[str, ...] = ()

    def devices_per_stage(self, tensor_model_parallel_size: int) -> int:
        """Devices that a stage takes: every layer on all of them, whatever it holds."""
        shards = self.expert_model_parallel_size * self.context_parallel_size
        return tensor_model_parallel_size * shards


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Layers ``first`` to ``end`` (exclusive) by their places in the chain."""

    first: int
    end: int
    num_devices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlacement:
    """A plan: stages first to last, and degrees.

    Args:
        is_baseline: costed as the artifact costs its fixed plans.
        printed_devices: the device of each layer as a solver printed it, if it did.
    """

    stages: tuple[Stage, ...]
    data_parallel_size: int
    tensor_model_parallel_size: int
    is_baseline: bool = False
    printed_devices: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactRule:
    """How a plan is priced; as it stands, exactly as the artifact prices it.

    Args:
        seconds_added_to_milliseconds: links are priced in seconds and added to layers in
            milliseconds. Off: links are in milliseconds as well, 1,000 times heavier.
        recomputed_forward_costs_backward: a recomputed forward pass is charged the time of the
            backward pass. Off: that of the forward pass.
        sync_first_stage_only: the gradients of the first stage alone are summed over replicas.
            Off: those of the stage with the most weights.
        sync_counts_lower_levels_again: from the third network level up, what lower levels took is
            added once more. Off: each level counts once.
        pipeline_bandwidth_never_rises: between stages no level is faster than the one below it.
            Off: the bandwidths as given, which the sum over replicas always uses.
        baselines_last_stage_first: the stages of a baseline are costed in reversed order, so that
            the last one recomputes, stashes most and is the one whose weights are summed. Off: in
            the order of any other plan.
        baseline_cuts_count_embedding: the cuts of a baseline count the embedding as its first
            layer, so that the last stage has one layer more. Off: the embedding comes on top.
        links_from_printed_placement: where a solver's output holds a placement, links between
            stages are looked up there although its cuts may be others. Off: stages stand packed,
            the last one first, as they are listed.
    """

    seconds_added_to_milliseconds: bool = True
    recomputed_forward_costs_backward: bool = True
    sync_first_stage_only: bool = True
    sync_counts_lower_levels_again: bool = True
    pipeline_bandwidth_never_rises: bool = True
    baselines_last_stage_first: bool = True
    baseline_cuts_count_embedding: bool = True
    links_from_printed_placement: bool = True


AS_ARTIFACT = ArtifactRule()
SWITCHES = tuple(field.name for field in dataclasses.fields(ArtifactRule))


def rule_without(switches: Iterable[str]) -> ArtifactRule:
    """The artifact's rule with some of its peculiarities off; ``all`` turns every one off.

    Raises:
        UserInputError: for a name that is no switch.

    >>> rule_without(["sync_first_stage_only"]).sync_first_stage_only
    False
    """
    off: set[str] = set()
    for name in switches:
        if name not in (*SWITCHES, "all"):
            fix = f"Known: {', '.join((*SWITCHES, 'all'))}."
            raise UserInputError("--without", name, "the formula has no such switch", fix)
        off |= set(SWITCHES) if name == "all" else {name}
    return ArtifactRule(**dict.fromkeys(off, False))
