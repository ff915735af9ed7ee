"""Records of any model's work as a chain of blocks: operators, and the bytes that flow between.

``megatron_core/chain.py`` fills them from a module of the user's own. Unlike a ``LayerGraph`` they
know nothing of transformers: blocks are named by their place in the module.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

from nest_megatron.errors import UserInputError
from nest_megatron.model.graph import OperatorKind


@dataclass(frozen=True, slots=True, kw_only=True)
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
            what = "input"
            limit = "every size must be a whole number of at least 1"
            fix = "Give for example 1,2048."
            raise UserInputError(what, ",".join(map(str, self.sizes)), limit, fix)


@dataclass(frozen=True, slots=True, kw_only=True)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainEdge:
    """A tensor from the operator that makes it, or ``input_0``..., to one that reads it."""

    source: str
    target: str
    num_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
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


@dataclass(frozen=True, slots=True, kw_only=True)
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
