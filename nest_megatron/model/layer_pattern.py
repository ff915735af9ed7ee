"""What the layers of a model are made of, and Megatron's notations for their order."""

from __future__ import annotations

import ast
import functools
import re
from typing import Any, TypeVar

from nest_megatron.errors import UserInputError
from nest_megatron.plain import Name

#: Most layers that are planned for: the deepest published transformer has 1,000, and a misprint
#: must not fill memory and time.
MAX_LAYERS = 2_000
_MAX_TEXT = 10_000


def layer_flags(
    what: str, value: int | tuple[int, ...] | None, num_layers: int
) -> tuple[bool, ...]:
    """Which layers a frequency marks: of every N all but the N-th, or those that a list marks.

    Megatron's ``window_attn_skip_freq`` marks the sliding layers by it, ``linear_attention_freq``
    the linear ones and ``no_rope_freq``, other way around, those that are rotated. ``None`` marks
    all.

    Raises:
        UserInputError: for a number below 1, or a list of another length.

    >>> layer_flags("window_attn_skip_freq", 3, 4)
    (True, True, False, True)
    """
    if value is None:
        return (True,) * num_layers
    if isinstance(value, int):
        if value < 1:
            raise UserInputError(
                what,
                value,
                "a period must be at least 1",
                "Write for example 4, or a list of 0 and 1.",
            )
        return tuple((layer + 1) % value != 0 for layer in range(num_layers))
    if len(value) != num_layers or any(flag not in (0, 1) for flag in value):
        raise UserInputError(
            what,
            value,
            f"it must give one 0 or 1 for each of the {num_layers} layers",
            "Give one number for each layer.",
        )
    return tuple(map(bool, value))


def read_frequency(text: str) -> int | list[int]:
    """A frequency in Megatron's notation: a whole number, or a list made by ``+`` and ``*``.

    Raises:
        UserInputError: if it is neither.
    """
    if len(text) > _MAX_TEXT:
        raise _refused(text[:40] + "...", f"the text may have at most {_MAX_TEXT} characters")
    try:
        return _evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _refused(text, f"it cannot be read ({error})") from error


class _MalformedError(ValueError):
    """The text is not in Megatron's notation."""


def moe_layer_pattern(moe_layer_freq: object, num_layers: int) -> tuple[int, ...]:
    """Expand Megatron's ``moe_layer_freq`` to one flag for each layer.

    Args:
        moe_layer_freq: an integer N (layers 0, N, 2N, ... route), a list of a 1 for each
            mixture-of-experts layer and a 0 for a dense one, or such a list in Megatron's notation.

    Raises:
        UserInputError: if the value is none of these, or has another length.

    Source: ``megatron.core.models.gpt.gpt_layer_specs`` and Megatron's ``moe_freq_type``.

    >>> moe_layer_pattern("([0]*2+[1]*3)", 5)
    (0, 0, 1, 1, 1)
    >>> moe_layer_pattern(2, 5)
    (1, 0, 1, 0, 1)
    """
    if num_layers > MAX_LAYERS:
        raise UserInputError(
            "num_layers",
            num_layers,
            f"it must be at most {MAX_LAYERS:,}",
            "Correct the model's description.",
        )
    value = read_frequency(moe_layer_freq) if isinstance(moe_layer_freq, str) else moe_layer_freq
    if isinstance(value, list | tuple) and all(type(flag) is int for flag in value):
        flags = tuple(value)
    elif type(value) is int:
        if value < 1:
            raise _refused(value, "a period must be at least 1")
        flags = tuple(int(layer % value == 0) for layer in range(num_layers))
    else:
        raise _refused(
            moe_layer_freq, "it must be a whole number, a list of 0 and 1, or such a list as text"
        )
    if len(flags) != num_layers or any(flag not in (0, 1) for flag in flags):
        raise _refused(
            moe_layer_freq, f"it must give one 0 or 1 for each of the {num_layers} layers"
        )
    return flags


def _evaluate(node: ast.expr) -> int | list[int]:
    """Value of an expression made of whole numbers, lists of them, ``+`` and ``*``."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        items = [_evaluate(item) for item in node.elts]
        if any(isinstance(item, list) for item in items):
            raise _MalformedError("lists may not be nested")
        return [item for item in items if isinstance(item, int)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        left, right = _evaluate(node.left), _evaluate(node.right)
        is_sum = isinstance(node.op, ast.Add)
        if isinstance(left, int) and not is_sum:
            left, right = right, left
        if isinstance(left, int) or isinstance(right, list) is not is_sum:
            needed = "+ needs two lists" if is_sum else "* needs a list and a whole number"
            raise _MalformedError(needed)
        num_layers = len(left) + len(right) if isinstance(right, list) else len(left) * right
        if num_layers > MAX_LAYERS:
            raise _MalformedError(f"it has more than {MAX_LAYERS} layers")
        return left + right if isinstance(right, list) else left * right
    raise _MalformedError("only lists of 0 and 1, + and * are allowed")


def _refused(value: object, limit: str) -> UserInputError:
    return UserInputError(
        "moe_layer_freq",
        value,
        limit,
        "Write for example 1 (all layers), 2 (every other) or ([0]*3+[1]*58).",
    )


_Named = TypeVar("_Named", bound=Name)


def _new(names: type[_Named], *values: Any) -> _Named:
    """A value of an enumeration that is no member, made as its members are."""
    made: _Named = names.__dict__["_new_member_"](names, *values)
    return made


class LayerBlock(Name):
    """A part of the model with work of its own, which is priced and timed by itself.

    A decoder layer is a block that mixes tokens (attention and its kin), one that works on each
    token (an MLP or experts), or both, norm and residual included. ``MTP`` is what all MTP layers
    of the model do around their decoder layers.

    Besides the members there are blocks of a size of their own, for heterogeneous layers:
    ``attention[8]`` has 8 query groups, ``dense[1024]`` a ``ffn_hidden_size`` of 1,024. They equal
    each other by their text.

    Attributes:
        size: of such a block, else ``None``.

    >>> LayerBlock("dense[1024]").base, LayerBlock("dense[1024]").size
    (<LayerBlock.DENSE: 'dense'>, 1024)
    """

    size: int | None

    def __new__(cls, value: str, size: int | None = None) -> LayerBlock:
        block = str.__new__(cls, value)
        block._name_ = block._value_ = value
        block.size = size
        return block

    @classmethod
    def _missing_(cls, value: object) -> LayerBlock | None:
        found = _SIZED.fullmatch(str(value))
        return _new(cls, found[0], int(found[2])) if found else None

    ATTENTION = "attention"
    WINDOW_ATTENTION = "window_attention"
    CHUNKED_ATTENTION = "chunked_attention"
    GATED_DELTA_NET = "gated_delta_net"
    MAMBA = "mamba"
    CROSS_ATTENTION = "cross_attention"
    ENCODER_ATTENTION = "encoder_attention"
    LINEAR_FOR_ATTENTION = "linear_for_attention"
    DENSE = "dense"
    ENCODER_DENSE = "encoder_dense"
    LINEAR_FOR_MLP = "linear_for_mlp"
    EXPERTS = "experts"
    EMBEDDING = "embedding"
    ENCODER = "encoder"
    PROJECTOR = "projector"
    MTP = "mtp"
    HEAD = "head"

    @property
    def base(self) -> LayerBlock:
        """The member of which this is a size."""
        return self if self.size is None else LayerBlock(self.partition("[")[0])

    @property
    def mixes_tokens(self) -> bool:
        """Whether tokens of a sequence meet in it, which context parallelism divides."""
        return self.base in _MIXERS


#: Blocks of a size of their own: query groups of attention, ``ffn_hidden_size`` of an MLP.
_SIZE = "[1-9][0-9]{0,8}"
_SIZED = re.compile(rf"(attention|dense)\[({_SIZE})\]")
_MIXERS = frozenset(
    {
        LayerBlock.ATTENTION,
        LayerBlock.WINDOW_ATTENTION,
        LayerBlock.CHUNKED_ATTENTION,
        LayerBlock.GATED_DELTA_NET,
        LayerBlock.MAMBA,
        LayerBlock.CROSS_ATTENTION,
        LayerBlock.ENCODER_ATTENTION,
    }
)
_MLPS = frozenset({LayerBlock.DENSE, LayerBlock.ENCODER_DENSE, LayerBlock.LINEAR_FOR_MLP})
_OF_EACH_TOKEN = _MLPS | {LayerBlock.EXPERTS}


class LayerKind(Name):
    """A distinct kind of unit in the layer sequence; the stage partition cuts between units.

    Besides the members there are the kinds of heterogeneous layers, each half of which has a size
    of its own, is a linear layer instead, or is left out (Megatron's ``num_query_groups`` and
    ``ffn_hidden_size`` of a layer, ``replace_with_linear`` and ``no_op``); ``NO_OP`` has neither.

    Attributes:
        blocks: what a unit is made of, in order; those of ``MTP`` depend on the model
            (``TransformerSpec.unit_blocks``).

    >>> LayerKind("attention[8]+dense[1024]").blocks
    (<LayerBlock.attention[8]: 'attention[8]'>, <LayerBlock.dense[1024]: 'dense[1024]'>)
    """

    blocks: tuple[LayerBlock, ...]

    def __new__(cls, value: str, *blocks: LayerBlock) -> LayerKind:
        kind = str.__new__(cls, value)
        kind._name_ = value
        kind._value_ = value
        kind.blocks = blocks
        return kind

    @classmethod
    def _missing_(cls, value: object) -> LayerKind | None:
        if not _HETEROGENEOUS.fullmatch(str(value)):
            return None
        return _new(cls, str(value), *map(LayerBlock, str(value).split("+")))

    EMBEDDING = "embedding", LayerBlock.EMBEDDING
    DENSE = "dense", LayerBlock.ATTENTION, LayerBlock.DENSE
    MOE = "moe", LayerBlock.ATTENTION, LayerBlock.EXPERTS
    WINDOW_DENSE = "window_dense", LayerBlock.WINDOW_ATTENTION, LayerBlock.DENSE
    WINDOW_MOE = "window_moe", LayerBlock.WINDOW_ATTENTION, LayerBlock.EXPERTS
    CHUNKED_DENSE = "chunked_dense", LayerBlock.CHUNKED_ATTENTION, LayerBlock.DENSE
    CHUNKED_MOE = "chunked_moe", LayerBlock.CHUNKED_ATTENTION, LayerBlock.EXPERTS
    LINEAR_DENSE = "linear_dense", LayerBlock.GATED_DELTA_NET, LayerBlock.DENSE
    LINEAR_MOE = "linear_moe", LayerBlock.GATED_DELTA_NET, LayerBlock.EXPERTS
    MAMBA = "mamba", LayerBlock.MAMBA
    LINEAR = "linear", LayerBlock.GATED_DELTA_NET
    ATTENTION = "attention", LayerBlock.ATTENTION
    MLP = "mlp", LayerBlock.DENSE
    EXPERTS = "experts", LayerBlock.EXPERTS
    ENCODER = "encoder", LayerBlock.ENCODER_ATTENTION, LayerBlock.ENCODER_DENSE
    CROSS = "cross", LayerBlock.ATTENTION, LayerBlock.CROSS_ATTENTION, LayerBlock.DENSE
    NO_OP = ("no_op",)
    MTP = "mtp", LayerBlock.MTP
    HEAD = "head", LayerBlock.HEAD

    @property
    def is_layer(self) -> bool:
        """Whether it is a decoder layer."""
        return not self.is_end and self is not LayerKind.MTP

    @property
    def is_end(self) -> bool:
        """Whether it is the embedding or the head."""
        return self in (LayerKind.EMBEDDING, LayerKind.HEAD)

    @property
    def letter(self) -> str:
        """The letter of a stage layout, or for layers of one block a hybrid pattern's symbol."""
        return _LETTERS.get(self, "t")

    @property
    def has_experts(self) -> bool:
        """Whether it routes tokens to experts, MTP layers aside."""
        return LayerBlock.EXPERTS in self.blocks

    @property
    def has_mlp(self) -> bool:
        """Whether it has a dense MLP, or a linear layer in its place."""
        return any(block.base in _MLPS for block in self.blocks)

    @property
    def begins_with_mlp(self) -> bool:
        """Whether nothing mixes tokens before its MLP or experts."""
        return bool(self.blocks) and self.blocks[0].base in _OF_EACH_TOKEN

    @property
    def is_heterogeneous(self) -> bool:
        """Whether it is a layer of a heterogeneous model."""
        return self is LayerKind.NO_OP or _HETEROGENEOUS.fullmatch(self) is not None


_FIRST = rf"(attention\[{_SIZE}\]|linear_for_attention)"
_SECOND = rf"(dense\[{_SIZE}\]|linear_for_mlp)"
_HETEROGENEOUS = re.compile(rf"{_FIRST}\+{_SECOND}|{_FIRST}|{_SECOND}")
_BY_BLOCKS = {kind.blocks: kind for kind in LayerKind}
#: Layers of a hybrid model by Megatron's symbols; which attention is meant, the model's fields say.
#: Source: ``hybrid_layer_allocation.Symbols`` of Megatron-LM 0.20, and 0.16.1's, which has four.
HYBRID_SYMBOLS = {
    "M": LayerKind.MAMBA,
    "G": LayerKind.LINEAR,
    "*": LayerKind.ATTENTION,
    "D": LayerKind.ATTENTION,
    "+": LayerKind.ATTENTION,
    "-": LayerKind.MLP,
    "E": LayerKind.EXPERTS,
}

_LETTERS = {
    **{kind: symbol for symbol, kind in reversed(HYBRID_SYMBOLS.items())},
    LayerKind.EMBEDDING: "E",
    LayerKind.MTP: "m",
    LayerKind.HEAD: "L",
}


def layer_kind(mixer: LayerBlock, each_token: LayerBlock) -> LayerKind:
    """The kind of a layer of two blocks."""
    return _BY_BLOCKS[mixer, each_token]


def hybrid_kinds(pattern: str) -> tuple[tuple[LayerKind, ...], tuple[LayerKind, ...], int]:
    """Read a hybrid model's pattern: its layers, the layers of one MTP depth, and the depths.

    Bars, which cut pipeline stages, are passed over.

    Raises:
        UserInputError: for a symbol that is not Megatron's, no layer, or depths that differ.

    Source: ``hybrid_layer_allocation.parse_hybrid_pattern`` of Megatron-LM 0.20.

    >>> hybrid_kinds("M*/E/E")[1:]
    ((<LayerKind.EXPERTS: 'experts'>,), 2)
    """
    strange = sorted(set(pattern) - {*HYBRID_SYMBOLS, "|", "/"})
    main, *depths = pattern.split("/")
    depths = depths if any(depths) else []
    layers = main.replace("|", "")
    limit = ""
    if strange:
        limit = f"its symbols are {' '.join(HYBRID_SYMBOLS)}, | and /, not {' '.join(strange)}"
    elif not 0 < len(layers) <= MAX_LAYERS:
        limit = f"it must name 1 to {MAX_LAYERS:,} layers before the first /"
    elif len(set(depths)) > 1 or any("|" in depth for depth in depths):
        limit = "all patterns behind a / must be the same, without |"
    elif "*" in pattern and set("D+") & set(pattern):
        limit = "plain attention (*) does not go with latent or sparse attention (+, D)"
    if limit:
        raise UserInputError(
            "hybrid_layer_pattern",
            pattern if len(pattern) <= 80 else f"{pattern[:77]}...",
            limit,
            "Write for example M-M*-/*E.",
        )
    kinds = tuple(HYBRID_SYMBOLS[symbol] for symbol in layers)
    depth = tuple(HYBRID_SYMBOLS[symbol] for symbol in depths[0]) if depths else ()
    return kinds, depth, len(depths)


def pattern_from_ratios(num_layers: int, attention: float, mlp: float) -> str:
    """The pattern that shares of attention and of MLP layers make, the others Mamba.

    Attention is spread evenly between Mamba layers, then MLPs over what is left of those.

    Raises:
        UserInputError: for shares that are none.

    Source: ``--hybrid-attention-ratio`` and ``--hybrid-mlp-ratio`` of Megatron-LM 0.16.1
    (``mamba_hybrid_layer_allocation._allocate_auto``).

    >>> pattern_from_ratios(8, 0.25, 0.25)
    'MM*-M*M-'
    """
    if not (0 <= attention <= 1 and 0 <= mlp <= 1 and attention + mlp <= 1):
        raise UserInputError(
            "hybrid_attention_ratio, hybrid_mlp_ratio",
            (attention, mlp),
            "both lie between 0 and 1, their sum too",
            "Correct the shares.",
        )
    symbols = ["M"] * num_layers
    for symbol, share, gaps in (("*", attention, 1), ("-", mlp, 0)):
        count = round(num_layers * share)
        if not count:
            continue
        step = left = (symbols.count("M") - count) / (count + gaps)
        for layer in [at for at, found in enumerate(symbols) if found == "M"]:
            if left < 0.5:
                symbols[layer], left = symbol, left + step
            else:
                left -= 1
    return "".join(symbols)


@functools.lru_cache(maxsize=256)
def blocks_of(kinds: tuple[LayerKind, ...]) -> tuple[LayerBlock, ...]:
    """The blocks that some kinds are made of, each once, those of one member by size."""
    found = {block for kind in kinds for block in kind.blocks}
    order = {block: place for place, block in enumerate(LayerBlock)}
    return tuple(sorted(found, key=lambda block: (order[block.base], block.size or 0)))


#: Whether the model has a sort of attention, and the frequency of the layers that have it.
_Marked = tuple[bool, int | tuple[int, ...] | None]


@functools.lru_cache(maxsize=256)
def two_block_kinds(
    num_layers: int, experts: tuple[int, ...], window: _Marked, chunked: _Marked, linear: _Marked
) -> tuple[LayerKind, ...]:
    """Layers of attention and MLP or experts; linear attention goes before windows and chunks."""
    mixers = [LayerBlock.ATTENTION] * num_layers
    has_chunks, rotated = chunked
    if isinstance(rotated, tuple):  # it marks the layers without rotation, which attend in full
        rotated = tuple(1 - flag for flag in rotated)
    for block, what, (is_there, freq) in (
        (LayerBlock.CHUNKED_ATTENTION, "no_rope_freq", (has_chunks, rotated)),
        (LayerBlock.WINDOW_ATTENTION, "window_attn_skip_freq", window),
        (LayerBlock.GATED_DELTA_NET, "linear_attention_freq", linear),
    ):
        if is_there:
            marked = layer_flags(what, freq, num_layers)
            pairs = zip(mixers, marked, strict=True)
            mixers = [block if is_marked else mixer for mixer, is_marked in pairs]
    return tuple(
        layer_kind(mixer, LayerBlock.EXPERTS if routed else LayerBlock.DENSE)
        for mixer, routed in zip(mixers, experts or (0,) * num_layers, strict=True)
    )
