"""Records of one layer's work: operators, collectives and what is saved for the backward pass.

The closed forms of ``operators`` fill them, and so does an extractor of the framework's modules.
"""

from __future__ import annotations

import functools
import math
import operator
from collections import Counter, defaultdict
from dataclasses import KW_ONLY, dataclass, replace
from itertools import groupby
from operator import attrgetter

from nest_megatron.errors import UserInputError
from nest_megatron.plain import Name, frozen


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


@frozen
class Operator:
    """One operator of one rank for one micro batch.

    Args:
        flops: multiply-adds count two, forward pass.
        bytes_moved: device-memory traffic of the forward pass.
        backward_flops: of both gradients.
        backward_bytes_moved: accumulation of weight gradients included.
        num_kernels: kernels launched forward; the backward pass launches twice as many.
        fp8: the GEMM runs in fp8 where the job requests it.
        parallel_rows: of attention: query rows over all heads; of a grouped GEMM: rows of each
            product. Few leave processors idle.
        exponentials: of attention: scores, whose exponentials each pass takes.
        aligned: of a GEMM: every dimension is a multiple of 8, as matrix units ask in 16 bits.
        has_weight: of a GEMM: one factor is a weight, whose gradient the backward pass makes.
        num_gemms: of a grouped GEMM: how many GEMMs it is made of.
        input_elements, output_elements: of a GEMM that may run in fp8: what is cast for it, its
            input on the way forward and its output's gradient on the way back.
        weight_elements: of such a GEMM: what else it reads.
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
    exponentials: float = 0.0
    aligned: bool = True
    has_weight: bool = True
    num_gemms: int = 1
    input_elements: float = 0.0
    output_elements: float = 0.0
    weight_elements: float = 0.0
    frozen: bool = False

    @property
    def is_forward_only(self) -> bool:
        """Whether nothing before it is trained either, so that it has no backward pass."""
        return self.frozen and not self.backward_flops and not self.backward_bytes_moved


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


@frozen
class LayerGraph:
    """All work of one unit, or of a block of it, on one rank for one micro batch.

    Args:
        input_bytes: of the unit's own input, saved in every recompute mode.
        saved_bytes: of other saved activations, by part, each storage once.
        working_bytes: largest extra memory while the unit's backward pass runs.
        offloaded_bytes: sent to the host in the forward pass and fetched for the backward pass;
            not among ``saved_bytes``.
    """

    operators: tuple[Operator, ...] = ()
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
        return functools.reduce(operator.add, count * [self], LayerGraph())

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


@frozen
class TensorShape:
    """A tensor without its numbers.

    Args:
        dtype: torch's name of the number type (``float32``, ``bfloat16``, ``int64``).
        keyword: of an input that the forward pass takes by name.

    Raises:
        UserInputError: for a size below 1.
    """

    sizes: tuple[int, ...]
    dtype: str = "float32"
    keyword: str = ""

    def __post_init__(self) -> None:
        if any(size < 1 for size in self.sizes):
            raise UserInputError(
                "input",
                ",".join(map(str, self.sizes)),
                "every size must be a whole number of at least 1",
                "Give for example 1,2048.",
            )


@frozen
class ChainOperator:
    """One operator of the forward pass.

    Args:
        target: what runs (``aten.mm``).
        module: path of the module that runs it ("" is the model itself).
        flops: multiply-adds count two.
        bytes_moved: read and written, each tensor once.
        parameters: a shared weight counts where it is met first.
        saved_bytes: of what it makes, the bytes that the backward pass needs, each storage once.
    """

    name: str
    target: str
    module: str
    kind: OperatorKind
    flops: float
    bytes_moved: float
    parameters: int
    output_bytes: float
    saved_bytes: float


@frozen
class ChainEdge:
    """A tensor from the operator that makes it, or ``input_0``..., to one that reads it."""

    source: str
    target: str
    num_bytes: float


@frozen
class ChainBlock:
    """A stretch of the chain: ``operators[first:last]`` of its graph.

    Args:
        name: path of its module, with ``#2`` and so on where the chain comes back to it.
        kind: blocks of one kind do the same work.
        saved_bytes: of its operators and their inputs, each storage once, in the first block that
            saves it.
        cut_bytes: the message of a pipeline that is cut here: each tensor once.
    """

    name: str
    kind: str
    first: int
    last: int
    flops: float
    bytes_moved: float
    parameters: int
    saved_bytes: float
    cut_bytes: float


@frozen
class ChainGraph:
    """The forward pass of a model on one device, in the order in which it runs.

    Args:
        name: of the model's class.
        input_bytes: what the model is given.
    """

    name: str
    inputs: tuple[TensorShape, ...]
    input_bytes: float
    operators: tuple[ChainOperator, ...]
    edges: tuple[ChainEdge, ...]
    blocks: tuple[ChainBlock, ...]

    def __post_init__(self) -> None:
        starts = [block.first for block in self.blocks] + [len(self.operators)]
        ends = [0] + [block.last for block in self.blocks]
        assert starts == ends, "a block begins where the one before it ends"
        names = {op.name for op in self.operators}
        assert len(names) == len(self.operators), "an operator's name is its own"

    def flops(self) -> float:
        """Floating-point operations of the forward pass."""
        return math.fsum(op.flops for op in self.operators)

    def parameters(self) -> int:
        """Parameters that the forward pass uses, shared ones once."""
        return sum(op.parameters for op in self.operators)

    def saved_bytes(self) -> float:
        """Bytes of saved activations."""
        return math.fsum(block.saved_bytes for block in self.blocks)

    def within(self, block: ChainBlock) -> tuple[ChainOperator, ...]:
        """The operators of a block."""
        return self.operators[block.first : block.last]

    def kinds(self) -> dict[str, int]:
        """How many blocks of each kind, in order of appearance."""
        return Counter(block.kind for block in self.blocks)

    def runs(self) -> tuple[tuple[ChainBlock, ...], ...]:
        """Neighbours of one kind together."""
        return tuple(tuple(run) for _, run in groupby(self.blocks, key=attrgetter("kind")))
