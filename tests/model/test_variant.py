"""What a model's variant changes in the work of its blocks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from nest_megatron.model.graph import LayerGraph
from nest_megatron.model.layer_pattern import LayerBlock
from nest_megatron.model.operators import block_graph
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.model.variant import ModelVariant, NormPlacement

PLAIN = TransformerSpec(
    name="plain",
    num_layers=4,
    hidden_size=512,
    ffn_hidden_size=2048,
    num_attention_heads=8,
    seq_length=1024,
    vocab_size=32_000,
)
SHARD = LayerShard(tensor_model_parallel_size=4, sequence_parallel=True)
HIDDEN_BYTES = SHARD.hidden_bytes(PLAIN)


def graph(block: LayerBlock, **variant: Any) -> LayerGraph:
    """A block of the plain model with a variant."""
    spec = dataclasses.replace(PLAIN, qk_layernorm=True, variant=ModelVariant(**variant))
    return block_graph(spec, block, SHARD)


def moved(work: LayerGraph) -> float:
    """Bytes that streaming kernels and GEMMs move forward."""
    return sum(operator.bytes_moved for operator in work.operators)


def test_an_mlp_beside_attention_shares_its_norm_and_its_traffic() -> None:
    alone = graph(LayerBlock.DENSE)
    shared = graph(LayerBlock.DENSE, parallel_attention=True, norm_placement=NormPlacement.SHARED)
    assert alone.collectives != ()
    assert shared.collectives == ()
    assert shared.flops() == alone.flops()
    assert moved(alone) - moved(shared) == pytest.approx((2 + 3 - 1) * HIDDEN_BYTES)
    # neither the residual between the halves nor the output of a second norm is kept
    lacking = alone.total_saved_bytes() - shared.total_saved_bytes()
    assert lacking == pytest.approx(2 * HIDDEN_BYTES)
    two_norms = graph(LayerBlock.DENSE, parallel_attention=True)
    assert {each.name.split(".")[0] for each in two_norms.collectives} == {"fc1"}
    assert alone.total_saved_bytes() - two_norms.total_saved_bytes() == pytest.approx(HIDDEN_BYTES)


@pytest.mark.parametrize("block", [LayerBlock.ATTENTION, LayerBlock.DENSE])
def test_a_norm_behind_a_block_keeps_its_input(block: LayerBlock) -> None:
    plain, both = graph(block), graph(block, norm_placement=NormPlacement.SANDWICH)
    assert moved(both) - moved(plain) == pytest.approx(2 * HIDDEN_BYTES)
    assert both.total_saved_bytes() - plain.total_saved_bytes() == pytest.approx(HIDDEN_BYTES)
    behind_alone = graph(block, norm_placement=NormPlacement.POST)
    assert behind_alone == plain, "the one norm lies elsewhere and costs the same"


def test_norms_over_all_heads_sum_over_tensor_ranks() -> None:
    plain = graph(LayerBlock.ATTENTION)
    wide = graph(LayerBlock.ATTENTION, qk_norm_full_width=True)
    added = wide.collectives[len(plain.collectives) :]
    assert [(each.kind, each.message_bytes, each.backward) for each in added] == [
        ("all_reduce", 2 * 1024 * 4, False),
        ("all_reduce", 2 * 1024 * 4, True),
    ]


def test_capped_logits_move_and_hold_more() -> None:
    plain, capped = graph(LayerBlock.HEAD), graph(LayerBlock.HEAD, final_logit_softcapping=30.0)
    logits = 1024 * PLAIN.padded_vocab_size(4) / 4 * 2
    assert capped.working_bytes - plain.working_bytes == pytest.approx(logits)
    assert moved(capped) - moved(plain) == pytest.approx(4 * logits)


def test_narrow_embeddings_are_projected() -> None:
    head = graph(LayerBlock.HEAD, embedding_size=128, final_norm=False)
    flops = {each.name: each.flops for each in head.operators}
    assert flops["output_layer"] * 4 == graph(LayerBlock.HEAD).operators[1].flops
    assert flops["project_out"] == 2 * 256 * 512 * 128
    assert "final_norm" not in flops
    assert "project_in" in {
        each.name for each in graph(LayerBlock.EMBEDDING, embedding_size=128).operators
    }
    normed = graph(LayerBlock.EMBEDDING, embedding_norm=True)
    saved = normed.total_saved_bytes() - graph(LayerBlock.EMBEDDING).total_saved_bytes()
    assert saved == pytest.approx(HIDDEN_BYTES)
