"""What a planner must know of a transformer: its shape, spelled as Megatron-LM spells it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from nest_megatron.errors import UserInputError
from nest_megatron.model.layer_pattern import MAX_LAYERS
from nest_megatron.names import Name


class ModelFamily(Name):
    """Which of Megatron-core's models is built."""

    GPT = "gpt"
    BERT = "bert"


class LayerKind(Name):
    """A distinct kind of unit in the layer sequence; the stage partition cuts between units."""

    EMBEDDING = "embedding"
    DENSE = "dense"
    MOE = "moe"
    MTP = "mtp"
    HEAD = "head"


_POSITIVE = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "seq_length"),
    *("vocab_size", "make_vocab_size_divisible_by"),
)
_POSITIVE_IF_GIVEN = ("num_query_groups", "kv_channels", "moe_ffn_hidden_size", "num_experts")
_MOST = {"num_layers": MAX_LAYERS, "mtp_num_layers": MAX_LAYERS, "num_experts": 100_000}
_MOST_OF_ANY = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerSpec:
    """The shape of a GPT- or BERT-like model, by Megatron-LM's arguments.

    A field that is ``None`` follows Megatron's own default rule, as properties (``query_groups``,
    ``head_dim``...) resolve it.

    Args:
        moe_layer_pattern: for each of ``num_layers`` layers, 1 if it is a mixture-of-experts layer,
            0 if dense; empty for a dense model.
        vocab_is_padded: ``vocab_size`` is the embedding's number of rows, whatever the
            tensor-parallel size (``--padded-vocab-size``).
        activation: of the MLP: ``gelu``, ``silu``, ``squared_relu``, ``quick_gelu``.
        gated_linear_unit: the first MLP projection has a gate (SwiGLU and its kin).
        softmax_type: ``vanilla`` or ``learnable`` (one attention-sink parameter for each head).
        window_size: sliding attention window in tokens on the layers that have one, or ``None``.
        window_attn_skip_freq: every n-th layer attends in full; ``None``: all layers slide.
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
    window_attn_skip_freq: int | None = None
    untie_embeddings_and_output_weights: bool = True
    # Mixture of experts
    num_experts: int | None = None
    moe_layer_pattern: tuple[int, ...] = ()
    moe_ffn_hidden_size: int | None = None
    moe_router_topk: int = 2
    moe_shared_expert_intermediate_size: int | None = None
    moe_router_enable_expert_bias: bool = False
    # Multi-latent attention
    multi_latent_attention: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int = 32
    qk_head_dim: int = 128
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 128
    # Multi-token prediction
    mtp_num_layers: int | None = None
    source: str = ""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            self._check_size(field.name, getattr(self, field.name))
        heads = self.num_attention_heads
        if self.kv_channels is None and self.hidden_size % heads:
            limit = f"it must be a multiple of num_attention_heads ({heads})"
            raise self._wrong("hidden_size", limit, "Set kv_channels to the size of one head.")
        if heads % self.query_groups:
            limit = f"it must divide num_attention_heads ({heads})"
            fix = "Use the number of key/value heads of the model."
            raise self._wrong("num_query_groups", limit, fix)
        self._check_experts()

    def _check_size(self, name: str, value: object) -> None:
        """Refuse what is no size, and what would fill memory and time to no end: a misprint."""
        counts = name in _POSITIVE or (name in _POSITIVE_IF_GIVEN and value is not None)
        if counts and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise self._wrong(name, "it must be a whole number of at least 1")
        most = _MOST.get(name, _MOST_OF_ANY)
        if isinstance(value, int) and value > most:
            raise self._wrong(name, f"it must be at most {most:,}")

    def _check_experts(self) -> None:
        pattern = self.moe_layer_pattern
        if self.num_experts is None:
            if any(pattern):
                limit = "it names expert layers but num_experts is not set"
                fix = "Set num_experts, or drop the pattern."
                raise self._wrong("moe_layer_pattern", limit, fix)
            return
        if len(pattern) != self.num_layers or any(flag not in (0, 1) for flag in pattern):
            limit = f"it needs one 0 or 1 for each of the {self.num_layers} layers"
            fix = "Write for example [0]*3+[1]*58 as moe_layer_freq."
            raise self._wrong("moe_layer_pattern", limit, fix)
        if not 1 <= self.moe_router_topk <= self.num_experts:
            limit = f"it must lie between 1 and num_experts ({self.num_experts})"
            fix = "Use the number of experts that each token visits."
            raise self._wrong("moe_router_topk", limit, fix)

    def _wrong(
        self, field: str, limit: str, fix: str = "Correct the model's description."
    ) -> UserInputError:
        value = getattr(self, field)
        return UserInputError(f"model {self.name}: {field}", value=value, limit=limit, fix=fix)

    @property
    def query_groups(self) -> int:
        """Number of key/value heads."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def expert_ffn_hidden_size(self) -> int:
        """Inner size of one routed expert."""
        return self.moe_ffn_hidden_size or self.ffn_hidden_size

    @property
    def is_moe(self) -> bool:
        """Whether any layer routes tokens to experts."""
        return self.num_experts is not None and any(self.moe_layer_pattern)

    @property
    def num_mtp_layers(self) -> int:
        """Number of multi-token-prediction layers."""
        return self.mtp_num_layers or 0

    @property
    def num_units(self) -> int:
        """Number of units in the layer sequence."""
        return len(self.layer_kinds())

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

    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The units in order: embedding, ``num_layers`` layers, MTP (one unit), head.

        All MTP layers form one unit, because Megatron keeps them in one virtual stage.
        """
        pattern = self.moe_layer_pattern or (0,) * self.num_layers
        layers = tuple(LayerKind.MOE if flag else LayerKind.DENSE for flag in pattern)
        mtp = (LayerKind.MTP,) if self.num_mtp_layers else ()
        return (LayerKind.EMBEDDING, *layers, *mtp, LayerKind.HEAD)
