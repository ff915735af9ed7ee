"""How one model layer is divided among ranks, and how many tokens a rank sees."""

from __future__ import annotations

from nest_megatron.model.execution import PLAIN, Execution
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.plain import frozen

_LARGEST_FUSED_HEAD = 256


def fits_fused_attention(spec: TransformerSpec) -> bool:
    """Whether fused kernels take the heads: sizes are multiples of 8 up to 256.

    Transformer Engine runs its unfused attention otherwise, without a word. Source:
    ``transformer_engine.pytorch.attention.dot_product_attention.utils.get_attention_backend``
    (FlashAttention 2), ``nvte_get_fused_attn_backend`` (cuDNN).
    """
    sizes = [spec.head_dim]
    if spec.multi_latent_attention:
        sizes = [spec.qk_head_dim + spec.qk_pos_emb_head_dim, spec.v_head_dim]
    return all(size % 8 == 0 and size <= _LARGEST_FUSED_HEAD for size in sizes)


@frozen
class LayerShard:
    """The degrees that change what one rank computes in a layer.

    Args:
        flash_attention: the device runs attention that keeps no score matrix.
        loss_bytes: memory of one logit while the cross entropy is worked out, forward or back.
        loss_traffic_bytes: memory traffic of one logit in the cross entropy, forward and back.
        activation_bytes: width of activations and of the weights beside them.
        saved_input_bytes: width of the input that a GEMM inside a layer saves for its weight's
            gradient; ``None`` is that of activations, 0 where weights are frozen. Transformer
            Engine keeps it in fp8 where the GEMM runs in fp8.
        qkv_bytes, attention_output_bytes: widths in which attention saves queries, keys and values,
            and what it makes of them; ``None`` is that of activations.
        fused_activation: a gated activation keeps its input alone.
        fp8_activation_input: it keeps it in fp8, cast there and back.
        loss_chunk_tokens: tokens whose logits exist at once; 0 is all of a micro batch.
        attended_tokens: tokens of the sequence that a token stands in, on average, where sequences
            are packed; ``None`` is the sequence length.
        keeps_stage_outputs: a pipeline stage keeps what it sent on until its backward pass.
        expert_alignment: the tokens of each expert are filled up to a multiple of it.
    """

    tensor_model_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int = 1
    micro_batch_size: int = 1
    sequence_parallel: bool = False
    flash_attention: bool = True
    loss_bytes: int = 6
    loss_traffic_bytes: int = 52
    activation_bytes: int = 2
    saved_input_bytes: float | None = None
    qkv_bytes: float | None = None
    attention_output_bytes: float | None = None
    execution: Execution = PLAIN
    fused_activation: bool = True
    fp8_activation_input: bool = False
    loss_chunk_tokens: int = 0
    expert_alignment: int = 1
    keeps_stage_outputs: bool = False
    attended_tokens: float | None = None

    @property
    def input_bytes(self) -> float:
        """Bytes that a GEMM keeps of an element of its input."""
        width = self.saved_input_bytes
        return self.activation_bytes if width is None else width

    @property
    def cast_bytes(self) -> float:
        """The same where another operator keeps the element as it is anyway."""
        return 0 if self.input_bytes == self.activation_bytes else self.input_bytes

    @property
    def attention_bytes(self) -> tuple[float, float]:
        """Bytes that attention keeps of an element of what it takes, and of what it makes."""
        taken, made = self.qkv_bytes, self.attention_output_bytes
        act = self.activation_bytes
        return act if taken is None else taken, act if made is None else made

    def keeps_scores(self, spec: TransformerSpec) -> bool:
        """Whether attention keeps the square of scores.

        Capped scores are not fused: NeMo's and Megatron-Bridge's ``Gemma2DotProductAttention``,
        the ones that cap them, is not.
        """
        capped = spec.variant.attn_logit_softcapping is not None
        return capped or not (self.flash_attention and fits_fused_attention(spec))

    def hidden_bytes(self, spec: TransformerSpec) -> float:
        """Bytes of the hidden states that one rank holds between blocks."""
        return self.tokens_between_blocks(spec) * spec.hidden_size * self.activation_bytes

    def tokens(self, spec: TransformerSpec) -> float:
        """Tokens of one micro batch inside a tensor-parallel block of one rank."""
        return spec.seq_length * self.micro_batch_size / self.context_parallel_size

    def tokens_between_blocks(self, spec: TransformerSpec) -> float:
        """Tokens that one rank holds between blocks (in norms, dropout, routing)."""
        tokens = self.tokens(spec)
        return tokens / self.tensor_model_parallel_size if self.sequence_parallel else tokens
