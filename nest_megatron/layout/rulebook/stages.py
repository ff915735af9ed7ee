"""Which stage holds which layers, and what is recomputed of them."""

from __future__ import annotations

from itertools import pairwise

from nest_megatron.layout.partition import StagePartition
from nest_megatron.layout.recompute import Recompute, RecomputeMethod
from nest_megatron.layout.rulebook.facts import shape_of
from nest_megatron.layout.rulebook.rule import Rule
from nest_megatron.layout.stage_layout import is_uneven_at_ends, is_uniform, parse_layout
from nest_megatron.model.spec import TransformerSpec

_DIVIDE = "Divide the model again."


def mtp_chunk_fits(chunk: int, pp: int, vpp: int, *, hybrid: bool = False) -> bool:
    """MTP layers lie in the last virtual stage of their rank, which is not the first rank.

    Those of a hybrid model lie beside the head (0.20 ``HybridModel``, which has no layout).
    """
    if hybrid:
        return chunk == pp * vpp - 1
    return (pp, vpp) == (1, 1) or (chunk // pp == vpp - 1 and chunk % pp != 0)


def decoder_layers(spec: TransformerSpec, partition: StagePartition) -> tuple[int, ...]:
    """Transformer layers of each virtual stage, MTP layers apart."""
    last = 1 + spec.num_stacked_layers
    inside = [min(max(boundary, 1), last) for boundary in partition.boundaries]
    return tuple(stop - start for start, stop in pairwise(inside))


def mtp_chunk(spec: TransformerSpec, partition: StagePartition) -> int | None:
    """The virtual stage that holds the MTP layers."""
    if not spec.num_mtp_layers:
        return None
    unit = 1 + spec.num_layers
    return next(k for k in range(partition.num_chunks) if unit in partition.chunk(k))


def misplaced_mtp_chunk(spec: TransformerSpec, partition: StagePartition) -> int | None:
    """The virtual stage that holds the MTP layers where they may not lie."""
    chunk, pp = mtp_chunk(spec, partition), partition.pipeline_model_parallel_size
    vpp, hybrid = partition.num_chunks // pp, bool(spec.hybrid_layer_pattern)
    fits = chunk is None or mtp_chunk_fits(chunk, pp, vpp, hybrid=hybrid)
    return None if fits else chunk


def _grouped_layers(
    spec: TransformerSpec, recompute: Recompute, partition: StagePartition | None
) -> list[int]:
    """Numbers of layers that uniform groups divide; none where there are no such groups."""
    if recompute.method is not RecomputeMethod.UNIFORM:
        return []
    if spec.encoder_num_layers is not None:
        return sorted({spec.num_layers, spec.encoder_num_layers})
    layers = (spec.num_layers,) if partition is None else decoder_layers(spec, partition)
    return sorted({*layers})


STAGE_RULES = (
    Rule(
        "no_partition",
        "arguments.py:520, transformer_config.py:1340",
        lambda partition, pp: partition is not None or pp == 1,
        "partition",
        "a pipeline needs one",
        _DIVIDE,
    ),
    Rule(
        "partition_shape",
        "arguments.py:520, transformer_config.py:1340",
        lambda partition, stages: partition is stages,
        "partition",
        "ranks, virtual stages and units must be {shape}",
        _DIVIDE,
        value=shape_of,
        words={"shape": lambda spec, pp, num_chunks: (pp, num_chunks, spec.num_units)},
    ),
    Rule(
        "encoder_stages",
        "pretrain_vlm.py model_provider",
        lambda spec, stages: (
            stages is None or not spec.has_split_encoder or is_uniform(spec, stages)
        ),
        "partition",
        "a layout would reach the encoder's configuration, which is a copy",
        "Use even stages.",
        value="stage_text",
    ),
    Rule(
        "layout_grammar",
        "pipeline_parallel_layer_layout.py:281",
        lambda spec, stages, stage_text: (
            stages is None
            or parse_layout(stage_text, spec, stages.pipeline_model_parallel_size) == stages
        ),
        "partition",
        "it has no layout string",
        _DIVIDE,
        value="stage_text",
    ),
    Rule(
        "mtp_stage",
        "pipeline_parallel_layer_layout.py:128-146",
        lambda spec, stages: stages is None or misplaced_mtp_chunk(spec, stages) is None,
        "partition",
        "MTP layers lie in the last virtual stage of their rank, and not on the first rank",
        "Move them into the last stage.",
        value=misplaced_mtp_chunk,
    ),
    Rule(
        "hybrid_stages",
        "ssm/mamba_block.py",
        lambda spec, stages: (
            stages is None
            or not spec.hybrid_layer_pattern
            or is_uniform(spec, stages)
            or is_uneven_at_ends(spec, stages)
        ),
        "partition",
        "before 0.17 a hybrid model has as many layers on each rank between first and last",
        "Use even stages, or Megatron-LM 0.17.",
        value="stage_text",
        until="0.16",
    ),
    Rule(
        "recompute_uniform",
        "transformer_block.py:532, :444 (run)",
        lambda spec, recompute, partition: (
            not any(
                count % recompute.num_layers
                for count in _grouped_layers(spec, recompute, partition)
            )
        ),
        "recompute_num_layers",
        "uniform groups must divide every virtual stage's layers {layers}",
        "Use 1, or the block method.",
        value=lambda recompute: recompute.num_layers,
        words={"layers": _grouped_layers},
        until="0.16",
    ),
)
