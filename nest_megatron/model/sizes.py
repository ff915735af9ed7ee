"""Which fields of a model are sizes, and how large they can be."""

from __future__ import annotations

from nest_megatron.model.frequency import MAX_LAYERS

#: Of multi-latent attention, of Mamba layers, and of gated delta nets.
LATENT_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
MAMBA_SIZES = ("mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "mamba_num_heads")
DELTA_NET_SIZES = (
    *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"),
    *("linear_num_key_heads", "linear_num_value_heads"),
)
_POSITIVE = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "seq_length"),
    *("vocab_size", "make_vocab_size_divisible_by"),
)
_POSITIVE_IF_GIVEN = (
    *("num_query_groups", "kv_channels", "moe_ffn_hidden_size", "num_experts", "moe_latent_size"),
    *("attention_chunk_size", "dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk"),
    *("encoder_num_layers", "decoder_seq_length", *MAMBA_SIZES, *DELTA_NET_SIZES),
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
    if is_size and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        return "it must be a whole number of at least 1"
    most = _MOST.get(name, _MOST_OF_ANY)
    return f"it must be at most {most:,}" if isinstance(value, int) and value > most else None
