"""Parameters of blocks whose work is not modelled: counted, and refused where they are priced."""

from __future__ import annotations

from nest_megatron.model.spec import TransformerSpec
from nest_megatron.model.variant import Bias


def mamba1_parameters(spec: TransformerSpec) -> int:
    """A Mamba-1 layer of Jamba without the norm before it, whole.

    Source: ``JambaMambaMixer`` of transformers: the time step's rank and the states are normed.
    """
    hidden, inner, state = spec.hidden_size, spec.num_mamba_heads, spec.mamba_state_dim
    variant, rank = spec.variant, spec.variant.mamba_dt_rank or 0
    count = 3 * hidden * inner + inner * (variant.mamba_conv_kernel + variant.mamba_conv_bias)
    count += inner * (rank + 2 * state) + (rank + 1) * inner
    count += inner * state + inner + rank + 2 * state
    return (
        count
        + 2 * inner * variant.has_bias(Bias.MAMBA_IN)
        + hidden * variant.has_bias(Bias.MAMBA_OUT)
    )


def lightning_parameters(spec: TransformerSpec) -> int:
    """Lightning attention without the norm before it, whole.

    Source: ``MiniMaxLightningAttention`` of transformers: queries, keys and values of all heads, a
    gate, an output projection and a norm as wide as the heads.
    """
    width = spec.num_attention_heads * spec.head_dim
    return 5 * spec.hidden_size * width + width
