"""Models of every shape that the planner describes, written by hand; no torch is needed."""

from __future__ import annotations

import dataclasses

from nest_megatron.model.spec import ModelFamily, TransformerSpec

LLAMA = TransformerSpec(
    name="llama3_70b",
    num_layers=80,
    hidden_size=8192,
    ffn_hidden_size=28672,
    num_attention_heads=64,
    num_query_groups=8,
    seq_length=8192,
    vocab_size=128256,
    rotary_base=500_000,
)
MIXTRAL = TransformerSpec(
    name="mixtral_8x7b",
    num_layers=32,
    hidden_size=4096,
    ffn_hidden_size=14336,
    num_attention_heads=32,
    num_query_groups=8,
    seq_length=4096,
    vocab_size=32000,
    num_experts=8,
    moe_layer_pattern=(1,) * 32,
)
DEEPSEEK = TransformerSpec(
    name="deepseek_v3",
    num_layers=61,
    hidden_size=7168,
    ffn_hidden_size=18432,
    num_attention_heads=128,
    kv_channels=128,
    seq_length=4096,
    vocab_size=129280,
    qk_layernorm=True,
    num_experts=256,
    moe_layer_pattern=(0,) * 3 + (1,) * 58,
    moe_ffn_hidden_size=2048,
    moe_router_topk=8,
    moe_shared_expert_intermediate_size=2048,
    moe_router_enable_expert_bias=True,
    multi_latent_attention=True,
    q_lora_rank=1536,
    kv_lora_rank=512,
    mtp_num_layers=1,
)
GPT_OSS = TransformerSpec(
    name="gpt_oss_20b",
    num_layers=24,
    hidden_size=2880,
    ffn_hidden_size=2880,
    num_attention_heads=64,
    num_query_groups=8,
    kv_channels=64,
    seq_length=4096,
    vocab_size=201088,
    activation="quick_gelu",
    add_bias_linear=True,
    softmax_type="learnable",
    window_size=128,
    window_attn_skip_freq=2,
    num_experts=32,
    moe_layer_pattern=(1,) * 24,
    moe_ffn_hidden_size=2880,
    moe_router_topk=4,
)
NEMOTRON = TransformerSpec(
    name="nemotron4_15b",
    num_layers=32,
    hidden_size=6144,
    ffn_hidden_size=24576,
    num_attention_heads=48,
    num_query_groups=8,
    seq_length=4096,
    vocab_size=256000,
    normalization="LayerNorm",
    apply_layernorm_1p=True,
    activation="squared_relu",
    gated_linear_unit=False,
    rotary_percent=0.5,
)
BERT = TransformerSpec(
    name="bert_large",
    family=ModelFamily.BERT,
    num_layers=24,
    hidden_size=1024,
    ffn_hidden_size=4096,
    num_attention_heads=16,
    seq_length=512,
    vocab_size=30522,
    position_embedding_type="learned_absolute",
    normalization="LayerNorm",
    activation="gelu",
    gated_linear_unit=False,
    add_bias_linear=True,
    untie_embeddings_and_output_weights=False,
)
T5 = dataclasses.replace(
    BERT,
    name="t5_220m",
    family=ModelFamily.T5,
    num_layers=12,
    encoder_num_layers=12,
    hidden_size=768,
    ffn_hidden_size=3072,
    num_attention_heads=12,
    decoder_seq_length=128,
    vocab_size=29098,
)

ALL = (LLAMA, MIXTRAL, DEEPSEEK, GPT_OSS, NEMOTRON, BERT, T5)


def null_tokenizer(spec: TransformerSpec, version: str = "0.16") -> list[str]:
    """Flags of a tokenizer without files; that of 0.16.1 adds an end of documents by itself."""
    rows = spec.vocab_size - version.startswith("0.16")
    return ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(rows)]
