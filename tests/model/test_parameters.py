"""Closed forms against published sizes; ``tests/contract`` compares with megatron-core's own."""

from __future__ import annotations

import dataclasses

import pytest

from nest_megatron.model.layer_pattern import LayerKind
from nest_megatron.model.operators import layer_graph
from nest_megatron.model.parameters import (
    active_parameters,
    model_parameters,
    one_layer,
    total_parameters,
    unit_parameters,
)
from nest_megatron.model.shard import LayerShard
from tests import catalogue

#: Billions, as the model cards state them; vocabulary padding and MTP are inside the tolerance.
PUBLISHED = {
    "bert_large": (0.336, 0.336),  # with its pre-training heads
    "gpt3_175b": (175.0, 175.0),
    "llama2_7b": (6.74, 6.74),
    "llama3_8b": (8.03, 8.03),
    "llama3_70b": (70.6, 70.6),
    "llama3_1_405b": (405.9, 405.9),
    "mixtral_8x7b": (46.7, 12.9),
    "mixtral_8x22b": (140.6, 39.1),
    "deepseek_v3": (684.5, 38.0),  # 671 B and 37 B of the main model, and the MTP module
    "qwen3_30b_a3b": (30.5, 3.3),
    "qwen3_235b_a22b": (235.0, 22.0),
    "gpt_oss_120b": (116.8, 5.7),
    "nemotron4_340b": (341.0, 341.0),
}


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_sizes_are_the_published_ones(name: str) -> None:
    total, active = PUBLISHED[name]
    spec = catalogue.model(name)
    assert total_parameters(spec) / 1e9 == pytest.approx(total, rel=0.01)
    assert active_parameters(spec) / 1e9 == pytest.approx(active, rel=0.03)


@pytest.mark.parametrize("name", ["llama3_70b", "mixtral_8x7b", "deepseek_v3"])
def test_shards_add_up_to_the_whole(name: str) -> None:
    """What tensor and expert ranks split adds up; what they repeat is counted on each."""
    spec = catalogue.model(name)
    whole = unit_parameters(spec, 1, 1, 1, single_stage=True)
    ep = 8 if spec.is_moe else 1
    shards = unit_parameters(spec, 1, ep, 1, single_stage=True)
    for one, shard in zip(whole, shards, strict=True):
        assert one.dense == shard.dense
        assert one.expert == ep * shard.expert


def test_vocabulary_padding_follows_tensor_parallelism() -> None:
    spec = catalogue.model("llama2_7b")
    assert spec.padded_vocab_size(1) == 32_000
    assert spec.padded_vocab_size(8) == 32_768


def test_sparse_attention_is_counted_and_priced() -> None:
    """The indexers of DeepSeek-V3.2 add 13,959,424 parameters to each layer of V3."""
    plain = catalogue.model("deepseek_v3")
    sparse = dataclasses.replace(
        plain,
        experimental_attention_variant="dsa",
        dsa_indexer_n_heads=64,
        dsa_indexer_head_dim=128,
        dsa_indexer_topk=2048,
    )
    indexer = 1536 * 64 * 128 + 7168 * 128 + 7168 * 64 + 2 * 128
    added = model_parameters(sparse) - model_parameters(plain)
    assert added == 61 * indexer == 61 * 13_959_424
    shard = LayerShard(tensor_model_parallel_size=8)
    pairs = sparse.seq_length**2
    work = layer_graph(sparse, LayerKind.MOE, shard).flops()
    more = work - layer_graph(plain, LayerKind.MOE, shard).flops()
    scored = 2 * pairs * 64 * 128  # by the indexer, whole on each rank
    absorbed = 2 * pairs * 128 // 8 * (2 * 512 + 64)  # all of them, with one key for all heads
    projected = 2 * sparse.seq_length * (indexer - 2 * 128)
    causal = pairs * 128 // 8 * (192 + 128)  # half of them, each head with a key of its own
    assert more == pytest.approx(scored + absorbed + projected - causal, rel=1e-9)


@pytest.mark.parametrize("name", ["qwen3_next_80b_a3b", "deepseek_v3", "nemotron3_super"])
def test_a_model_of_one_layer_has_that_layer(name: str) -> None:
    spec = catalogue.model(name)
    for kind in dict.fromkeys(spec.layer_kinds()):
        one = one_layer(spec, kind)
        assert not kind.is_layer or one.layer_kinds()[1] is kind
        assert one.num_mtp_layers == (kind is LayerKind.MTP)
