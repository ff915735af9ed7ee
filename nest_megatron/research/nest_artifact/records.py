"""An instance of the artifact's solver, and a plan for it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

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
    """A node of the layer graph.

    Args:
        node_id: as its file has it; -1 is the embedding.
        forward, backward: latencies in the instance's unit.
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
    """A fixed plan that an instance carries: degrees, and uneven stages where it has them."""

    name: str
    num_stages: int
    data_parallel_size: int
    tensor_model_parallel_size: int
    num_layers: int
    layer_partition: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """What the artifact's solver is given.

    Args:
        chains: by tensor degree.
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
