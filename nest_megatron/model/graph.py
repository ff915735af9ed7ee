"""Records of one layer's work: operators, collectives and what is saved for the backward pass.

The closed forms of ``operators`` fill them, and so does an extractor of the framework's modules.
"""

from __future__ import annotations

import functools
import math
import operator
from collections import defaultdict
from dataclasses import KW_ONLY, dataclass, replace

from nest_megatron.names import Name


class OperatorKind(Name):
    """What limits an operator, and so which efficiency applies."""

    GEMM = "gemm"
    GROUPED_GEMM = "grouped_gemm"
    ATTENTION = "attention"
    SCAN = "scan"
    MEMORY_BOUND = "memory_bound"


class Group(Name):
    """The process group that a collective runs in."""

    TENSOR = "tp"
    CONTEXT = "cp"
    EXPERT = "ep"
    EXPERT_TENSOR = "etp"


class Part(Name):
    """Part of a layer; recomputation names parts."""

    INPUT_NORM = "input_norm"
    QKV = "qkv"
    MLA_DOWN = "mla_down"
    MLA_UP = "mla_up"
    CORE_ATTENTION = "core_attention"
    SSM = "ssm"
    PROJECTION = "projection"
    RESIDUAL = "residual"
    MLP_NORM = "mlp_norm"
    MLP = "mlp"
    ROUTER = "router"
    DISPATCH = "dispatch"
    EXPERTS = "experts"
    EXPERT_ACTIVATION = "expert_activation"
    SHARED_EXPERTS = "shared_experts"
    EMBEDDING = "embedding"
    MTP = "mtp"
    HEAD = "head"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One operator of one rank for one micro batch.

    Args:
        flops: multiply-adds count two, forward pass.
        bytes_moved: device-memory traffic of the forward pass.
        backward_flops: of both gradients.
        backward_bytes_moved: accumulation of weight gradients included.
        num_kernels: kernels launched forward; the backward pass launches twice as many.
        fp8: the GEMM runs in fp8 where the job asks for it.
        parallel_rows: of attention: query rows over all heads; few leave processors idle.
        aligned: of a GEMM: every dimension is a multiple of 8, as matrix units ask in 16 bits.
        has_weight: of a GEMM: one factor is a weight, whose gradient the backward pass makes.
        num_gemms: of a grouped GEMM: how many GEMMs it is made of.
        input_elements, output_elements: of a GEMM that may run in fp8: what is cast for it, its
            input on the way forward and its output's gradient on the way back.
        frozen: its weight is not trained: the backward pass makes the input's gradient alone, in
            as many kernels as the forward pass.
    """

    name: str
    part: Part
    kind: OperatorKind
    flops: float = 0.0
    bytes_moved: float = 0.0
    backward_flops: float = 0.0
    backward_bytes_moved: float = 0.0
    num_kernels: int = 1
    fp8: bool = False
    parallel_rows: float = math.inf
    aligned: bool = True
    has_weight: bool = True
    num_gemms: int = 1
    input_elements: float = 0.0
    output_elements: float = 0.0
    frozen: bool = False


@dataclass(frozen=True, slots=True)
class LayerCollective:
    """Communication inside a layer, in one direction of the pass.

    Args:
        kind: a name of ``cluster.CollectiveKind``, as text: this package imports no other.
        message_bytes: size of the whole (gathered, reduced or exchanged) tensor on one rank.
        backward: issued in the backward pass.
        hidden_under: operator whose time may hide it, or "" if it stands in the open.
        num_calls: how many such calls.
        copies: of an all-to-all: how many members each of its tokens goes to.
        within: the group is divided into groups of so many neighbours, which run it each (0: not).
        across: the members so many ranks apart run it (0: all members).
    """

    name: str
    part: Part
    kind: str
    message_bytes: float
    _: KW_ONLY
    group: Group = Group.TENSOR
    backward: bool = False
    hidden_under: str = ""
    num_calls: int = 1
    copies: int = 1
    within: int = 0
    across: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGraph:
    """All work of one unit, or of a block of it, on one rank for one micro batch.

    Args:
        input_bytes: of the unit's own input, saved in every recompute mode.
        saved_bytes: of other saved activations, by part, each storage once.
        working_bytes: largest extra memory while the unit's backward pass runs.
        offloaded_bytes: sent to the host in the forward pass and fetched for the backward pass;
            not among ``saved_bytes``.
    """

    operators: tuple[Operator, ...]
    collectives: tuple[LayerCollective, ...] = ()
    input_bytes: float = 0.0
    saved_bytes: tuple[tuple[Part, float], ...] = ()
    working_bytes: float = 0.0
    offloaded_bytes: float = 0.0

    def __add__(self, other: LayerGraph) -> LayerGraph:
        return LayerGraph(
            operators=self.operators + other.operators,
            collectives=self.collectives + other.collectives,
            input_bytes=self.input_bytes + other.input_bytes,
            saved_bytes=self.saved_bytes + other.saved_bytes,
            working_bytes=max(self.working_bytes, other.working_bytes),
            offloaded_bytes=self.offloaded_bytes + other.offloaded_bytes,
        )

    def __rmul__(self, count: int) -> LayerGraph:
        return functools.reduce(operator.add, count * [self], LayerGraph(operators=()))

    def with_input(self, num_bytes: float) -> LayerGraph:
        """The graph of a unit that begins with an MLP: what its residual saves is its input."""
        saved = (*self.saved_bytes, (Part.RESIDUAL, -num_bytes))
        return replace(self, input_bytes=self.input_bytes + num_bytes, saved_bytes=saved)

    def flops(self) -> float:
        """Forward floating-point operations."""
        return sum(op.flops for op in self.operators)

    def saved_by_part(self) -> dict[Part, float]:
        """Bytes of saved activations by part, the input apart."""
        saved: dict[Part, float] = defaultdict(float)
        for part, num in self.saved_bytes:
            saved[part] += num
        return saved

    def total_saved_bytes(self) -> float:
        """Bytes of saved activations without recomputation."""
        return self.input_bytes + sum(num for _, num in self.saved_bytes)
