"""What a planner must know of a transformer: its shape, spelled as Megatron-LM spells it."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from nest_megatron.errors import UserInputError
from nest_megatron.model.encoder import Adapters, EncoderSpec
from nest_megatron.model.heterogeneous import require_layers
from nest_megatron.model.layer_pattern import (
    MAX_LAYERS,
    LayerBlock,
    LayerKind,
    blocks_of,
    hybrid_kinds,
    layer_kind,
    two_block_kinds,
)
from nest_megatron.model.variant import ModelVariant
from nest_megatron.plain import Name, added, frozen

#: How the source of a model begins that a Hugging Face configuration describes.
OF_HUGGING_FACE = "Hugging Face config.json"
#: Of multi-latent attention, of Mamba layers, and of gated delta nets.
LATENT_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
MAMBA_SIZES = ("mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "mamba_num_heads")
DELTA_NET_SIZES = (
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
)
_POSITIVE = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "seq_length",
    "vocab_size",
    "make_vocab_size_divisible_by",
)
_POSITIVE_IF_GIVEN = (
    "num_query_groups",
    "kv_channels",
    "moe_ffn_hidden_size",
    "num_experts",
    "moe_latent_size",
    "attention_chunk_size",
    "dsa_indexer_n_heads",
    "dsa_indexer_head_dim",
    "dsa_indexer_topk",
    "encoder_num_layers",
    "decoder_seq_length",
    *MAMBA_SIZES,
    *DELTA_NET_SIZES,
)
_MOST = {"num_layers": MAX_LAYERS, "mtp_num_layers": MAX_LAYERS, "num_experts": 100_000}
_MOST_OF_ANY = 2**31 - 1


def broken_limit(name: str, value: object) -> str | None:
    """The limit that a field's value breaks, if it is no size, or too large a one.

    A misprint must not fill memory and time to no end.

    >>> broken_limit("num_layers", 0), broken_limit("num_layers", 32)
    ('it must be a whole number of at least 1', None)
    """
    is_size = name in _POSITIVE or (name in _POSITIVE_IF_GIVEN and value is not None)
    if is_size and (type(value) is not int or value < 1):
        return "it must be a whole number of at least 1"
    most = _MOST.get(name, _MOST_OF_ANY)
    return f"it must be at most {most:,}" if isinstance(value, int) and value > most else None


class ModelFamily(Name):
    """Which of Megatron-core's models is built."""

    GPT = "gpt"
    BERT = "bert"
    T5 = "t5"


#: What models of two stacks and heterogeneous ones have only at its default, and each of them.
_OF_OTHERS = (
    "window_size",
    "attention_chunk_size",
    "experimental_attention_variant",
    "num_experts",
    "hybrid_layer_pattern",
    "multi_latent_attention",
    "mtp_num_layers",
    "attention_output_gate",
    "softmax_type",
)
_NOT_IN_T5 = (*_OF_OTHERS, "heterogeneous_layers", "qk_layernorm")
_NOT_HETEROGENEOUS = (*_OF_OTHERS, "family", "qk_l2_norm", "variant", "vision")
_FOR_SPARSE_ATTENTION = (
    "multi_latent_attention",
    "dsa_indexer_n_heads",
    "dsa_indexer_head_dim",
    "dsa_indexer_topk",
)


@frozen
class TransformerSpec:
    """The shape of a GPT-, BERT- or T5-like model, by Megatron-LM's arguments.

    A field that is ``None`` follows Megatron's own default rule, as properties (``query_groups``,
    ``head_dim``...) resolve it.

    Args:
        moe_layer_pattern: for each of ``num_layers`` layers, 1 if it is a mixture-of-experts layer,
            0 if dense; empty for a dense model.
        vocab_is_padded: ``vocab_size`` is the embedding's number of rows, whatever the
            tensor-parallel size (``--padded-vocab-size``).
        activation: of the MLP: ``gelu``, ``silu``, ``relu``, ``squared_relu``, ``quick_gelu``.
        gated_linear_unit: the first MLP projection has a gate (SwiGLU and its kin).
        softmax_type: ``vanilla`` or ``learnable`` (one attention-sink parameter for each head).
        window_size: sliding attention window in tokens on the layers that have one, or ``None``.
        window_attn_skip_freq: every n-th layer attends in full, or a 1 for each layer that slides;
            ``None``: all layers slide.
        attention_chunk_size: tokens attend within chunks of so many on the layers that
            ``no_rope_freq`` leaves rotated, in full on the others.
        no_rope_freq: every n-th layer is not rotated, or a 1 for each such layer.
        qk_l2_norm: queries and keys of rotated layers are divided by their length (Llama 4).
        attention_output_gate: a sigmoid gate, as wide as the queries, on what attention puts out.
        experimental_attention_variant: ``gated_delta_net`` on the layers that
            ``linear_attention_freq`` marks (all but every n-th, or a 1 for each), or ``dsa``.
        heterogeneous_layers: the kind of each layer of a heterogeneous model (``LayerKind``), such
            as ``attention[8]+dense[1024]``, ``dense[512]`` or ``no_op``; ``num_query_groups`` and
            ``ffn_hidden_size`` then say nothing of a layer.
        hybrid_layer_pattern: a symbol for each layer of a hybrid model, and behind each ``/`` the
            layers of one MTP depth; empty for layers of attention and MLP or experts.
        encoder_num_layers, decoder_seq_length: of a T5-like model, whose decoder has ``num_layers``
            layers that attend to what the encoder makes of ``seq_length`` tokens.
        vision: of a model that sees images: their tokens are among the ``seq_length``.
        mamba_num_heads: ``None``: twice the hidden size over ``mamba_head_dim``.
        moe_shared_expert_gate: a sigmoid gate on what the shared experts put out.
        moe_latent_size: width of the tokens that routed experts see, if not the hidden size.
        variant: what Megatron-LM's own layers do not have.
        adapters: what is trained where all other weights are frozen; ``None``: all weights are.
        source: where the figures come from.

    Raises:
        UserInputError: if the shape is impossible (naming the field, the value and the rule).
    """

    name: str
    family: ModelFamily = ModelFamily.GPT
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int | None = None
    kv_channels: int | None = None
    seq_length: int
    max_position_embeddings: int | None = None
    vocab_size: int
    make_vocab_size_divisible_by: int = 128
    vocab_is_padded: bool = False
    position_embedding_type: str = "rope"
    rotary_base: int = 10_000
    rotary_percent: float = 1.0
    normalization: str = "RMSNorm"
    layernorm_epsilon: float = 1e-5
    apply_layernorm_1p: bool = False
    activation: str = "silu"
    gated_linear_unit: bool = True
    add_bias_linear: bool = False
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    softmax_type: str = "vanilla"
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    window_size: int | None = None
    window_attn_skip_freq: int | tuple[int, ...] | None = None
    attention_chunk_size: int | None = added(None)
    no_rope_freq: int | tuple[int, ...] | None = added(None)
    qk_l2_norm: bool = added(False)
    attention_output_gate: bool = added(False)
    experimental_attention_variant: str | None = added(None)
    untie_embeddings_and_output_weights: bool = True
    # Mixture of experts
    num_experts: int | None = None
    moe_layer_pattern: tuple[int, ...] = ()
    moe_ffn_hidden_size: int | None = None
    moe_router_topk: int = 2
    moe_shared_expert_intermediate_size: int | None = None
    moe_router_enable_expert_bias: bool = False
    moe_shared_expert_gate: bool = added(False)
    moe_latent_size: int | None = added(None)
    # Multi-latent attention
    multi_latent_attention: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int = 32
    qk_head_dim: int = 128
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 128
    # Sparse attention (experimental_attention_variant dsa)
    dsa_indexer_n_heads: int | None = added(None)
    dsa_indexer_head_dim: int | None = added(None)
    dsa_indexer_topk: int | None = added(None)
    # Gated delta net
    linear_attention_freq: int | tuple[int, ...] | None = added(None)
    linear_conv_kernel_dim: int = added(4)
    linear_key_head_dim: int = added(128)
    linear_value_head_dim: int = added(128)
    linear_num_key_heads: int = added(16)
    linear_num_value_heads: int = added(32)
    # Heterogeneous layers
    heterogeneous_layers: tuple[LayerKind, ...] = added(())
    # Hybrid models
    hybrid_layer_pattern: str = added("")
    mamba_state_dim: int = added(128)
    mamba_head_dim: int = added(64)
    mamba_num_groups: int = added(8)
    mamba_num_heads: int | None = added(None)
    # Two stacks (family t5)
    encoder_num_layers: int | None = added(None)
    decoder_seq_length: int | None = added(None)
    # An encoder in front (family gpt)
    vision: EncoderSpec | None = added(None)
    # Multi-token prediction
    mtp_num_layers: int | None = None
    variant: ModelVariant = added(ModelVariant())
    # Fine-tuning
    adapters: Adapters | None = added(None)
    source: str = ""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if limit := broken_limit(field.name, getattr(self, field.name)):
                raise self._wrong(field.name, limit)
        heads = self.num_attention_heads
        if self.kv_channels is None and self.hidden_size % heads:
            raise self._wrong(
                "hidden_size",
                f"it must be a multiple of num_attention_heads ({heads})",
                "Set kv_channels to the size of one head.",
            )
        if heads % self.query_groups:
            raise self._wrong(
                "num_query_groups",
                f"it must divide num_attention_heads ({heads})",
                "Use the number of key/value heads of the model.",
            )
        self._check_stacks()
        self._check_pattern()
        if self.heterogeneous_layers:
            require_layers(self.name, self.heterogeneous_layers, self.num_layers, heads)
            limit = "megatron-core builds heterogeneous layers without it"
            self._require_default(_NOT_HETEROGENEOUS, limit)
        self._check_experts()
        if self.adapters is not None and self.is_moe:
            self.adapters.require_experts(self.num_layers)
        self.layer_kinds()

    def _check_stacks(self) -> None:
        """Refuse what megatron-core's ``T5Model`` has no layers for, and a second stack elsewhere.

        Source: ``megatron.core.models.T5.t5_spec``, ``CrossAttention``.
        """
        is_t5 = self.family is ModelFamily.T5
        if self.vision is not None and self.family is not ModelFamily.GPT:
            raise self._wrong("vision", "only models of family gpt have an encoder of images")
        if self.vision is not None and self.adapters is not None:
            raise self._wrong(
                "adapters",
                "adapters beside an encoder of images are not planned",
                "Train all weights.",
            )
        for name in ("encoder_num_layers", "decoder_seq_length"):
            if (getattr(self, name) is not None) is not is_t5:
                raise self._wrong(name, "models of family t5 need it, and no others have it")
        if is_t5 and self.query_groups != self.num_attention_heads:
            raise self._wrong(
                "num_query_groups",
                "cross attention has a key/value head for each query head",
                "Leave it out.",
            )
        if is_t5:
            self._require_default(_NOT_IN_T5, "Megatron-core's T5 has no such layers")

    def _require_default(self, names: Collection[str], limit: str) -> None:
        for field in dataclasses.fields(self):
            if field.name in names and getattr(self, field.name) != field.default:
                raise self._wrong(field.name, limit, "Leave it out.")

    def _check_pattern(self) -> None:
        if self.hybrid_layer_pattern:
            kinds, _, depths = hybrid_kinds(self.hybrid_layer_pattern)
            if len(kinds) != self.num_layers:
                raise self._wrong(
                    "hybrid_layer_pattern",
                    f"it names {len(kinds)} layers and num_layers is {self.num_layers}",
                    "Name every layer once.",
                )
            if depths != self.num_mtp_layers:
                raise self._wrong(
                    "mtp_num_layers",
                    f"hybrid_layer_pattern has {depths} depths behind a /",
                    "Give the same number in both.",
                )
        variant = self.experimental_attention_variant
        if variant not in (None, "gated_delta_net", "dsa"):
            raise self._wrong("experimental_attention_variant", "it must be gated_delta_net or dsa")
        if variant == "gated_delta_net" and self.linear_attention_freq is None:
            raise self._wrong(
                "linear_attention_freq",
                "gated_delta_net needs it, to say which layers are linear",
                "Write for example 4: every fourth layer attends in full.",
            )
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise self._wrong(
                "linear_num_value_heads",
                f"it must be a multiple of linear_num_key_heads ({self.linear_num_key_heads})",
            )
        for name in _FOR_SPARSE_ATTENTION:
            if variant == "dsa" and not getattr(self, name):
                raise self._wrong(name, "experimental_attention_variant dsa needs it")

    def _check_experts(self) -> None:
        pattern = self.moe_layer_pattern
        if self.hybrid_layer_pattern and pattern:
            raise self._wrong(
                "moe_layer_pattern",
                "hybrid_layer_pattern says which layers have experts",
                "Drop it.",
            )
        if self.num_experts is None:
            if any(pattern) or "E" in self.hybrid_layer_pattern:
                raise self._wrong(
                    "hybrid_layer_pattern" if self.hybrid_layer_pattern else "moe_layer_pattern",
                    "it names expert layers but num_experts is not set",
                    "Set num_experts, or drop the pattern.",
                )
            return
        flags = len(pattern) == self.num_layers and all(flag in (0, 1) for flag in pattern)
        if not (flags or self.hybrid_layer_pattern):
            raise self._wrong(
                "moe_layer_pattern",
                f"it needs one 0 or 1 for each of the {self.num_layers} layers",
                "Write for example [0]*3+[1]*58 as moe_layer_freq.",
            )
        if not 1 <= self.moe_router_topk <= self.num_experts:
            raise self._wrong(
                "moe_router_topk",
                f"it must lie between 1 and num_experts ({self.num_experts})",
                "Use the number of experts that each token visits.",
            )

    def _wrong(
        self, field: str, limit: str, fix: str = "Correct the model's description."
    ) -> UserInputError:
        value = getattr(self, field)
        shown = None if dataclasses.is_dataclass(value) else value  # a part has no short text
        return UserInputError(f"model {self.name}: {field}", shown, limit, fix)

    @property
    def query_groups(self) -> int:
        """Number of key/value heads."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def query_group_counts(self) -> tuple[int, ...]:
        """Numbers of key/value heads of all layers that have some, each once."""
        if not self.heterogeneous_layers:
            return (self.query_groups,)
        return tuple(b.size for b in self.blocks if b.base is LayerBlock.ATTENTION and b.size)

    @property
    def ffn_hidden_sizes(self) -> tuple[int, ...]:
        """Inner sizes of all dense MLPs, each once."""
        dense = (block for block in self.blocks if block.base is LayerBlock.DENSE)
        return tuple(block.size or self.ffn_hidden_size for block in dense)

    @property
    def num_gates(self) -> int:
        """Matrices of the first MLP projection: one, and its gate."""
        return 2 if self.gated_linear_unit else 1

    @property
    def expert_ffn_hidden_size(self) -> int:
        """Inner size of one routed expert."""
        return self.moe_ffn_hidden_size or self.ffn_hidden_size

    @property
    def routed_size(self) -> int:
        """Width of the tokens that routed experts see."""
        return self.moe_latent_size or self.hidden_size

    @property
    def is_moe(self) -> bool:
        """Whether any layer routes tokens to experts."""
        routes = any(self.moe_layer_pattern) or "E" in self.hybrid_layer_pattern
        return self.num_experts is not None and routes

    @property
    def num_mtp_layers(self) -> int:
        """Number of multi-token-prediction layers."""
        return self.mtp_num_layers or 0

    @property
    def num_units(self) -> int:
        """Number of units in the layer sequence."""
        return len(self.layer_kinds())

    @property
    def num_stacked_layers(self) -> int:
        """Layers of all stacks: the units between the embedding and MTP or head."""
        return self.num_layers + (self.encoder_num_layers or 0)

    @property
    def has_split_encoder(self) -> bool:
        """Whether it sees images with megatron-core's encoder, as ``pretrain_vlm.py`` does."""
        return self.vision is not None and self.vision.is_split

    @property
    def num_mamba_heads(self) -> int:
        """Heads of a Mamba layer."""
        return self.mamba_num_heads or 2 * self.hidden_size // self.mamba_head_dim

    @property
    def blocks(self) -> tuple[LayerBlock, ...]:
        """The blocks that the model is made of, each once."""
        found = blocks_of((*self.layer_kinds(), *self.mtp_layer_kinds))
        if self.vision is None:
            return found
        return (*found, LayerBlock.ENCODER, LayerBlock.PROJECTOR)

    @property
    def mtp_layer_kinds(self) -> tuple[LayerKind, ...]:
        """The layers of one MTP depth: those of the hybrid pattern, or one as the last layer is."""
        if not self.num_mtp_layers:
            return ()
        if self.hybrid_layer_pattern:
            return hybrid_kinds(self.hybrid_layer_pattern)[1]
        last = _decoder_kinds(self)[-1]
        if self.variant.dense_mtp and last.has_experts:
            return (layer_kind(last.blocks[0], LayerBlock.DENSE),)
        return (last,)

    def padded_vocab_size(self, tensor_model_parallel_size: int) -> int:
        """Vocabulary rows after Megatron's padding, which depends on the tensor-parallel size.

        Source: ``megatron.training.tokenizer.tokenizer._vocab_size_with_padding``.
        """
        if self.vocab_is_padded:
            return self.vocab_size
        multiple = self.make_vocab_size_divisible_by * tensor_model_parallel_size
        return -(-self.vocab_size // multiple) * multiple

    def with_padded_vocab(self, tensor_model_parallel_size: int) -> TransformerSpec:
        """The same model with the vocabulary that this tensor-parallel size gives it, for good."""
        padded = self.padded_vocab_size(tensor_model_parallel_size)
        return dataclasses.replace(self, vocab_size=padded, vocab_is_padded=True)

    def without_mtp(self) -> TransformerSpec:
        """The same model without its layers of multi-token prediction."""
        pattern = self.hybrid_layer_pattern.partition("/")[0]
        return dataclasses.replace(self, mtp_num_layers=None, hybrid_layer_pattern=pattern)

    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The units in order: embedding, ``num_layers`` layers, MTP (one unit), head.

        All MTP layers form one unit, because Megatron keeps them in one virtual stage.
        """
        mtp = (LayerKind.MTP,) if self.num_mtp_layers else ()
        return (LayerKind.EMBEDDING, *_decoder_kinds(self), *mtp, LayerKind.HEAD)

    def unit_blocks(self, kind: LayerKind) -> tuple[LayerBlock, ...]:
        """The blocks of a unit in order; ``MTP`` is what lies around its layers, and all those."""
        if kind is LayerKind.EMBEDDING and self.vision is not None:
            return (*kind.blocks, LayerBlock.ENCODER, LayerBlock.PROJECTOR)
        if kind is not LayerKind.MTP:
            return kind.blocks
        inside = (block for layer in self.mtp_layer_kinds for block in layer.blocks)
        return (*kind.blocks, *(self.num_mtp_layers * tuple(inside)))


def _decoder_kinds(spec: TransformerSpec) -> tuple[LayerKind, ...]:
    """The kinds of the layers in order, those of an encoder first."""
    if spec.encoder_num_layers is not None:
        return (LayerKind.ENCODER,) * spec.encoder_num_layers + (LayerKind.CROSS,) * spec.num_layers
    if spec.hybrid_layer_pattern:
        return hybrid_kinds(spec.hybrid_layer_pattern)[0]
    if spec.heterogeneous_layers:
        return spec.heterogeneous_layers
    return two_block_kinds(
        spec.num_layers,
        spec.moe_layer_pattern,
        (spec.window_size is not None, spec.window_attn_skip_freq),
        (spec.attention_chunk_size is not None, spec.no_rope_freq),
        (spec.experimental_attention_variant == "gated_delta_net", spec.linear_attention_freq),
    )
