"""Which shapes of a layer a profile should hold where nobody knows yet which will be needed."""

from __future__ import annotations

from collections.abc import Iterator

from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import TransformerSpec

#: Degrees that layouts inside one node use; what lies beyond is interpolated.
TENSOR_SIZES = (1, 2, 4, 8)
EXPERT_SIZES = (8, 4, 2, 1)
MICRO_BATCH_SIZES = (1, 2, 4)


def usual_shards(
    spec: TransformerSpec, *, flash_attention: bool, largest: int = 8
) -> tuple[LayerShard, ...]:
    """The shapes that layouts inside one node use, those of small micro batches first.

    Args:
        largest: most ranks that a group inside a layer has.
    """
    return tuple(
        LayerShard(
            tensor_model_parallel_size=tp,
            expert_model_parallel_size=ep,
            micro_batch_size=micro_batch_size,
            sequence_parallel=tp > 1,
            flash_attention=flash_attention,
        )
        for micro_batch_size in MICRO_BATCH_SIZES
        for ep in _expert_sizes(spec, largest)
        for tp in TENSOR_SIZES
        if tp <= largest and divides(spec, tp)
    )


def _expert_sizes(spec: TransformerSpec, largest: int) -> Iterator[int]:
    """Expert-parallel sizes, the larger first: they hold less, and run more often."""
    if not spec.is_moe or spec.num_experts is None:
        yield 1
        return
    yield from (ep for ep in EXPERT_SIZES if ep <= largest and spec.num_experts % ep == 0)


def divides(spec: TransformerSpec, tp: int) -> bool:
    """Whether megatron-core's layers can be built for so many tensor ranks."""
    groups = spec.num_attention_heads if spec.multi_latent_attention else spec.query_groups
    wide = (spec.num_attention_heads, groups, spec.ffn_hidden_size, spec.seq_length)
    return all(size % tp == 0 for size in wide)
