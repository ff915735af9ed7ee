"""Parameters of one block of a layer on one rank, in closed form."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from nest_megatron.model.layer_pattern import LayerBlock
from nest_megatron.model.spec import ModelFamily, TransformerSpec
from nest_megatron.model.variant import Bias, NormParameters, NormPlacement


@functools.lru_cache(maxsize=256)
def encoder_of(spec: TransformerSpec) -> TransformerSpec:
    """The first stack of a T5-like model, or of images, as a model that attends both ways."""
    vision = spec.vision
    if vision is None:
        assert spec.encoder_num_layers is not None
        return replace(
            spec,
            family=ModelFamily.BERT,
            num_layers=spec.encoder_num_layers,
            encoder_num_layers=None,
            decoder_seq_length=None,
        )
    same = {field.name for field in dataclasses.fields(TransformerSpec)} - {"vision"}
    names = same.intersection(field.name for field in dataclasses.fields(vision))
    return TransformerSpec(
        **{name: getattr(vision, name) for name in names},
        name=f"{spec.name}: encoder",
        family=ModelFamily.BERT,
        seq_length=vision.num_tokens,
        vocab_size=1,
        position_embedding_type="learned_absolute",
    )


def decoder_of(spec: TransformerSpec) -> TransformerSpec:
    """The second stack of a T5-like model by itself; of others the model."""
    if spec.decoder_seq_length is None:
        return spec
    return replace(
        spec,
        family=ModelFamily.GPT,
        seq_length=spec.decoder_seq_length,
        encoder_num_layers=None,
        decoder_seq_length=None,
    )


def sized(spec: TransformerSpec, block: LayerBlock) -> TransformerSpec:
    """The model whose layers all have the size that a block has for itself."""
    return spec if block.size is None else _sized(spec, block)


@functools.lru_cache(maxsize=256)
def _sized(spec: TransformerSpec, block: LayerBlock) -> TransformerSpec:
    assert block.size is not None
    if block.base is LayerBlock.DENSE:
        return replace(spec, ffn_hidden_size=block.size, heterogeneous_layers=())
    return replace(spec, num_query_groups=block.size, heterogeneous_layers=())


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """Parameters of one rank.

    Args:
        dense: those replicated over the dense data-parallel group.
        expert: those of routed experts, replicated over the expert data-parallel group.
        frozen_dense, frozen_expert: those of them that are not trained.
    """

    dense: int = 0
    expert: int = 0
    frozen_dense: int = 0
    frozen_expert: int = 0

    def __add__(self, other: ParameterCount) -> ParameterCount:
        return ParameterCount(*map(operator.add, self._each, other._each))

    def times(self, count: int) -> ParameterCount:
        """Those of so many."""
        return ParameterCount(*(number * count for number in self._each))

    def over(self, count: int) -> ParameterCount:
        """The mean of so many parts, rounded down."""
        return ParameterCount(*(number // count for number in self._each))

    @property
    def _each(self) -> tuple[int, ...]:
        return self.dense, self.expert, self.frozen_dense, self.frozen_expert

    @property
    def trained(self) -> ParameterCount:
        """Those that have gradients and optimizer states."""
        return ParameterCount(self.dense - self.frozen_dense, self.expert - self.frozen_expert)

    @property
    def frozen(self) -> ParameterCount:
        """Those that have none."""
        return ParameterCount(self.frozen_dense, self.frozen_expert)

    @property
    def total(self) -> int:
        """Dense and expert parameters together."""
        return self.dense + self.expert


def norm(spec: TransformerSpec, width: int) -> int:
    """Weight of a norm over ``width`` channels, and its bias for LayerNorm."""
    learned = spec.variant.norm_parameters
    if learned is NormParameters.NONE:
        return 0
    has_bias = spec.normalization == "LayerNorm" and learned is NormParameters.ALL
    return 2 * width if has_bias else width


def _norms_around(spec: TransformerSpec, *, of_mlp: bool) -> int:
    """The norms of one block: before it, behind it, both, or none where attention's serves."""
    shared = spec.variant.norm_placement is NormPlacement.SHARED and of_mlp
    both = spec.variant.norm_placement is NormPlacement.SANDWICH
    return (0 if shared else 2 if both else 1) * norm(spec, spec.hidden_size)


def _qk_norms(spec: TransformerSpec, tp: int) -> int:
    """Norms of queries and keys; those over the full width have weights alone."""
    if not spec.qk_layernorm:
        return 0
    if spec.variant.qk_norm_full_width:
        return (spec.num_attention_heads + spec.query_groups) * spec.head_dim // tp
    return 2 * norm(spec, spec.head_dim)


def _attention(spec: TransformerSpec, tp: int) -> int:
    """Self-attention with its input norm, on one tensor-parallel rank.

    Source: ``megatron.core.transformer.attention.SelfAttention``; with fewer query groups than
    tensor ranks the joint projection is still split evenly.
    """
    if spec.multi_latent_attention:
        return _latent_attention(spec, tp)
    hidden, head_dim = spec.hidden_size, spec.head_dim
    query = spec.num_attention_heads * head_dim
    joint = ((1 + spec.attention_output_gate) * query + 2 * spec.query_groups * head_dim) // tp
    count = _norms_around(spec, of_mlp=False) + hidden * joint + query // tp * hidden
    if spec.add_bias_linear or spec.add_qkv_bias:
        count += joint
    if spec.add_bias_linear or spec.variant.has_bias(Bias.PROJECTION):
        count += hidden
    count += _qk_norms(spec, tp)
    if spec.softmax_type == "learnable":
        count += spec.num_attention_heads // tp
    return count


def _cross_attention(spec: TransformerSpec, tp: int) -> int:
    """Attention to an encoder's output with its norm, on one tensor-parallel rank.

    Source: ``megatron.core.transformer.attention.CrossAttention``.
    """
    hidden, width = spec.hidden_size, spec.num_attention_heads * spec.head_dim // tp
    count = norm(spec, hidden) + 4 * hidden * width
    return count + (3 * width + hidden if spec.add_bias_linear else 0)


def _latent_attention(spec: TransformerSpec, tp: int) -> int:
    """Multi-latent attention with its input norm, on one tensor-parallel rank.

    Source: ``megatron.core.transformer.multi_latent_attention.MLASelfAttention``: the down
    projections are whole on every rank, the up projections are split by heads.
    """
    hidden, heads, latent = spec.hidden_size, spec.num_attention_heads, spec.kv_lora_rank
    query_dim = spec.qk_head_dim + spec.qk_pos_emb_head_dim
    query_rank = spec.q_lora_rank or 0
    down = query_rank + latent + spec.qk_pos_emb_head_dim
    count = _norms_around(spec, of_mlp=False) + hidden * down
    if spec.variant.has_bias(Bias.LATENT_DOWN):
        count += down
    if spec.variant.has_bias(Bias.PROJECTION):
        count += hidden
    count += (query_rank or hidden) * heads * query_dim // tp
    if spec.qk_layernorm:
        count += norm(spec, latent) + norm(spec, query_rank)
    count += latent * heads * (spec.qk_head_dim + spec.v_head_dim) // tp
    return count + heads * spec.v_head_dim // tp * hidden + _indexer(spec)


def _indexer(spec: TransformerSpec) -> int:
    """What chooses the tokens that sparse attention sees, whole on every rank.

    Source: ``experimental_attention_variant.dsa.DSAIndexer``: projections of queries, of the one
    key and of a weight for each head, and the key's LayerNorm.
    """
    if spec.experimental_attention_variant != "dsa":
        return 0
    heads, width = spec.dsa_indexer_n_heads, spec.dsa_indexer_head_dim
    assert heads is not None
    assert width is not None
    queries = (spec.q_lora_rank or spec.hidden_size) * heads * width
    return queries + spec.hidden_size * (width + heads) + 2 * width


def _mamba(spec: TransformerSpec, tp: int) -> int:
    """A Mamba-2 layer with its input norm, on one tensor-parallel rank.

    Source: ``megatron.core.ssm.mamba_mixer.MambaMixer``: heads and groups are split; of each head
    there are ``dt_bias``, ``A_log`` and ``D``, and the convolution has a bias.
    """
    hidden, heads = spec.hidden_size, spec.num_mamba_heads // tp
    inner = heads * spec.mamba_head_dim
    mixed = inner + 2 * spec.mamba_num_groups // tp * spec.mamba_state_dim
    projections = hidden * (inner + mixed + heads) + inner * hidden
    variant = spec.variant
    count = norm(spec, hidden) + projections + 3 * heads
    count += mixed * (variant.mamba_conv_kernel + variant.mamba_conv_bias)
    count += inner + hidden * variant.has_bias(Bias.MAMBA_OUT)
    return count + (inner + mixed + heads) * variant.has_bias(Bias.MAMBA_IN)


def _gated_delta_net(spec: TransformerSpec, tp: int) -> int:
    """A gated delta net with its input norm, on one tensor-parallel rank.

    Source: ``megatron.core.ssm.gated_delta_net.GatedDeltaNet``: of each value head there are
    ``dt_bias`` and ``A_log``, the convolution has no bias, and the output norm is over one head.
    """
    hidden, heads = spec.hidden_size, spec.linear_num_value_heads // tp
    value = heads * spec.linear_value_head_dim
    mixed = 2 * spec.linear_num_key_heads // tp * spec.linear_key_head_dim + value
    projections = hidden * (mixed + value + 2 * heads) + value * hidden
    count = norm(spec, hidden) + projections + spec.linear_conv_kernel_dim * mixed
    return count + 2 * heads + norm(spec, spec.linear_value_head_dim)


def mlp(spec: TransformerSpec, ffn: int, tp: int, width: int | None = None) -> int:
    """Two projections of an MLP of inner size ``ffn`` split over ``tp`` ranks, without a norm.

    Args:
        width: of the tokens, if not the hidden size.
    """
    hidden = width or spec.hidden_size
    inner = ffn * spec.num_gates // tp
    count = hidden * inner + ffn // tp * hidden
    has_bias = spec.add_bias_linear or spec.variant.has_bias(Bias.MLP)
    return count + (inner + hidden if has_bias else 0)


def _experts(spec: TransformerSpec, tp: int, ep: int, etp: int) -> ParameterCount:
    """Router, routed and shared experts with their norm.

    Source: ``megatron.core.transformer.moe``; the router is whole on every rank, and the bias that
    balances experts without a loss is a buffer, not a parameter.
    """
    hidden, experts = spec.hidden_size, spec.num_experts
    assert experts is not None
    variant = spec.variant
    router = hidden + (spec.add_bias_linear or variant.has_bias(Bias.ROUTER))
    dense = _norms_around(spec, of_mlp=True) + experts * router
    dense += experts * variant.has_bias(Bias.EXPERT_BIAS)
    if spec.moe_shared_expert_intermediate_size:
        dense += mlp(spec, spec.moe_shared_expert_intermediate_size, tp)
        dense += hidden * spec.moe_shared_expert_gate
    if spec.moe_latent_size:
        dense += 2 * hidden * spec.routed_size
        dense += (hidden + spec.routed_size) * spec.add_bias_linear
    each = mlp(spec, spec.expert_ffn_hidden_size, etp, spec.routed_size)
    return ParameterCount(dense, experts // ep * each)


def _dense(spec: TransformerSpec, tp: int) -> int:
    """A dense MLP with its norms."""
    return _norms_around(spec, of_mlp=True) + mlp(spec, spec.ffn_hidden_size, tp)


def _linear(spec: TransformerSpec, tp: int) -> int:
    """A linear layer in the place of attention or MLP, with its norm.

    Source: ``megatron.core.transformer.heterogeneous.linear_replacements``.
    """
    outputs = spec.hidden_size // tp
    return norm(spec, spec.hidden_size) + (spec.hidden_size + spec.add_bias_linear) * outputs


_COUNTS: Mapping[LayerBlock, Callable[[TransformerSpec, int], int]] = {
    LayerBlock.CROSS_ATTENTION: _cross_attention,
    LayerBlock.GATED_DELTA_NET: _gated_delta_net,
    LayerBlock.MAMBA: _mamba,
    LayerBlock.DENSE: _dense,
    LayerBlock.ENCODER_DENSE: _dense,
    LayerBlock.LINEAR_FOR_ATTENTION: _linear,
    LayerBlock.LINEAR_FOR_MLP: _linear,
}


def block_parameters(
    spec: TransformerSpec, block: LayerBlock, tp: int, ep: int, etp: int
) -> ParameterCount:
    """One block of a decoder layer."""
    if block is LayerBlock.EXPERTS:
        return _experts(spec, tp, ep, etp)
    return ParameterCount(_COUNTS.get(block.base, _attention)(sized(spec, block), tp))
