"""Rules of pipelines, virtual stages and micro batches, and of what each stage holds."""

from __future__ import annotations

from itertools import pairwise

from nest_megatron.layout.dims import RankOrder
from nest_megatron.layout.recompute import Recompute, RecomputeMethod
from nest_megatron.layout.rulebook.facts import Rule, release_number, shape_of
from nest_megatron.layout.stage_layout import (
    StagePartition,
    is_uneven_at_ends,
    is_uniform,
    parse_layout,
    uneven_flags,
)
from nest_megatron.model.spec import ModelFamily, TransformerSpec

_PP, _VPP = "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
_EVEN = "even stages: as many layers on each pipeline rank"


def cuts_anywhere(spec: TransformerSpec, recompute: Recompute, version: str) -> bool:
    """Whether a layout may cut stages anywhere, which releases before 0.17 do not allow all.

    They divide a hybrid model's layers by the ranks, have no virtual stages for them, and pass full
    recomputation over in silence (``MambaStack._select_layers_for_pipeline_parallel``,
    ``forward``). Groups of ``uniform`` recomputation must divide every virtual stage's layers.
    """
    grouped = recompute.method is RecomputeMethod.UNIFORM and recompute.num_layers != 1
    return not ((spec.hybrid_layer_pattern or grouped) and release_number(version) < (0, 17))


def allows_blocks(spec: TransformerSpec) -> bool:
    """``block`` recomputation counts the layers of each stack; with an encoder there are two."""
    return spec.family is not ModelFamily.T5 and not spec.has_split_encoder


def allows_interleaving(
    pp: int, vpp: int, microbatches: int, group: int = 0, *, whole: bool = False
) -> bool:
    """Virtual stages need a pipeline and rounds of at least as many micro batches as ranks.

    The last round may be smaller, but not than that (0.16.1 schedules.py:949-970).

    Args:
        group: micro batches of a round (``microbatch_group_size_per_vp_stage``); 0 is one a
            pipeline rank.
        whole: the last round is as large as the others, so that rounds of every multiple of these
            micro batches are whole too.
    """
    size = group or pp
    rest = microbatches % size
    fits = rest == 0 or (rest >= pp and not whole)
    return vpp == 1 or (1 < pp <= size <= microbatches and fits)


def _uneven_words(spec: TransformerSpec, pp: int) -> str:
    """What makes stages of a hybrid model uneven, which is not searched for."""
    if not spec.hybrid_layer_pattern:
        return ""
    flags = uneven_flags(spec, pp)
    return f", where the command says no more ({flags[0].lower()}{flags[1:]})"


def _rounds(pp: int, microbatch_group_size_per_vp_stage: int) -> str:
    group, name = microbatch_group_size_per_vp_stage, "microbatch_group_size_per_vp_stage"
    if not group:
        return f"whole rounds of {pp} micro batches, one a pipeline rank"
    return f"rounds of {group} micro batches ({name}), none smaller than the {pp} pipeline ranks"


SCHEDULE_RULES = (
    Rule(
        "two_stacks",
        "pretrain_t5.py model_provider",
        lambda spec, pp: pp == 1 or spec.family is not ModelFamily.T5,
        _PP,
        "pretrain_t5.py keeps both stacks of the model on one pipeline rank",
        "Use 1.",
        reason="both stacks of the model lie on one pipeline rank",
    ),
    Rule(
        "no_empty_stage",
        "Megatron-LM issue 1852",
        lambda spec, pp, vpp: pp * vpp <= spec.num_units,
        f"{_PP} * {_VPP}",
        "a stage without a unit makes GPUs wait for ever; the model has {num_units} units",
        "Use fewer stages.",
        value="num_chunks",
        reason="at most {num_units} stages, one a layer or end",
    ),
    Rule(
        "even_stages",
        "ssm/mamba_block.py; frameworks that can state no layout",
        lambda spec, even_stages, pp, vpp: not even_stages or spec.num_layers % (pp * vpp) == 0,
        f"{_PP} * {_VPP}",
        "it must divide the {num_layers} layers: stages are even here{stated_ends}",
        "Use a divisor.",
        value="num_chunks",
        words={"stated_ends": _uneven_words},
        reason=_EVEN,
    ),
    Rule(
        "even_groups",
        "transformer_block.py:532, :444 (run)",
        lambda spec, even_stages, pp, vpp: (
            not even_stages
            or spec.num_layers % (pp * vpp) > 0
            or spec.num_layers // (pp * vpp) % even_stages == 0
        ),
        "recompute_num_layers",
        "uniform groups must divide the {layers} layers of every virtual stage",
        "Use 1, or the block method.",
        value="even_stages",
        words={"layers": lambda spec, num_chunks: spec.num_layers // num_chunks},
        reason=_EVEN,
    ),
    Rule(
        "layers_in_bf16",
        "tc:991",
        lambda spec, layers_in_bf16, pp: layers_in_bf16 <= spec.num_layers // pp,
        _PP,
        "--first-last-layers-bf16 keeps {layers_in_bf16} of the {num_layers} layers at an end in "
        "bf16, and no more than one pipeline rank has",
        "Use a smaller size, or fewer of these layers (--num-layers-at-start-in-bf16, "
        "--num-layers-at-end-in-bf16).",
        reason="layers at the ends in bf16 are of one pipeline rank",
    ),
    Rule(
        "expert_ranks_of_stage",
        "ps:792",
        lambda world_size, pp, ep, etp: world_size // pp % (ep * etp) == 0,
        "expert_model_parallel_size, expert_tensor_parallel_size",
        "their product must divide the ranks of each of the {pp} pipeline ranks' stages "
        "({world_size} in all)",
        "Lower one of the two.",
        reason="expert ranks divide the ranks of a stage",
    ),
    Rule(
        "encoder",
        "pretrain_vlm.py model_provider",
        lambda spec, cp, pp, vpp: not spec.has_split_encoder or (vpp == 1 and min(pp, cp) == 1),
        _PP,
        "pretrain_vlm.py takes a pipeline or context parallelism ({cp}), and no virtual stages "
        "({vpp})",
        "Use 1, or context_parallel_size=1 without virtual stages.",
        reason="an encoder goes with a pipeline or context ranks",
    ),
    Rule(
        "whole_batch",
        "num_microbatches_calculator.py:340",
        lambda num_microbatches: num_microbatches > 0,
        "global_batch_size",
        "it must be a multiple of micro_batch_size * data_parallel_size ({micro_batch_size} * "
        "{dp}) at every size",
        "Change the micro batch or the data-parallel size.",
        value=lambda batch_unit, batch_schedule: (
            batch_schedule.words() if batch_schedule else batch_unit
        ),
        reason="micro batch * data-parallel size divides the global batch",
    ),
    Rule(
        # a dense model's expert grid is free: ``launched_expert_tensor_size`` makes it fit
        "rank_order",
        "ps:811",
        lambda spec, tp, cp, pp, expert_ranks, rank_order: (
            rank_order is not RankOrder.TP_CP_EP_PP_DP
            or pp == 1
            or spec.num_experts is None
            or expert_ranks == tp * cp
        ),
        "use_tp_pp_dp_mapping",
        "with a pipeline, etp * ep must equal tp * cp in this rank order",
        "Use the default rank order.",
        value="expert_ranks",
    ),
    Rule(
        # no framework tells ``get_gpt_heterogeneous_layer_spec`` which virtual stage it builds
        "heterogeneous_virtual_stages",
        "transformer_layer.py:97, 0.20 transformer_layer.py (at build)",
        lambda spec, vpp: vpp == 1 or not spec.heterogeneous_layers,
        _VPP,
        "heterogeneous layers are built for one stage a rank",
        "Use 1.",
    ),
    Rule(
        "block_recompute",
        "pretrain_t5.py model_provider",
        lambda spec, recompute: (
            recompute.method is not RecomputeMethod.BLOCK or allows_blocks(spec)
        ),
        "recompute_method",
        "it would count layers of the encoder and of the decoder, which is not planned",
        "Use uniform.",
        value=lambda recompute: recompute.method.value,
        ours=True,
    ),
    Rule(
        "virtual_stages",
        "args:575, schedules.py:995-1015",
        lambda pp, vpp: vpp == 1 or pp > 1,
        _VPP,
        "it needs pipeline_model_parallel_size above 1",
        "Use 1, or a pipeline.",
    ),
    Rule(
        "interleaving",
        "args:575, schedules.py:995-1015",
        lambda pp, vpp, num_microbatches, microbatch_group_size_per_vp_stage, batch_grows: (
            pp == 1
            or allows_interleaving(
                pp, vpp, num_microbatches, microbatch_group_size_per_vp_stage, whole=batch_grows
            )
        ),
        _VPP,
        "virtual stages work in {rounds}, and there are {num_microbatches} (global batch "
        "{batch_unit} / (micro batch {micro_batch_size} * data-parallel size {dp}))",
        "Use 1, or a batch or micro batch that makes whole rounds.",
        words={"rounds": _rounds},
    ),
    Rule(
        "hybrid_virtual_stages",
        "ssm/mamba_block.py (at build)",
        lambda spec, vpp: vpp == 1 or not spec.hybrid_layer_pattern,
        _VPP,
        "{core} has no virtual stages for hybrid models",
        "Use 1, or Megatron-LM 0.17.",
        until="0.16",
    ),
)

_DIVIDE = "Divide the model again."


def mtp_chunk_fits(chunk: int, pp: int, vpp: int, *, hybrid: bool = False) -> bool:
    """MTP layers lie in the last virtual stage of their rank, which is not the first rank.

    Those of a hybrid model lie with the head (0.20 ``HybridModel``, which has no layout).
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
    hybrid = bool(spec.hybrid_layer_pattern)
    fits = chunk is None or mtp_chunk_fits(chunk, pp, partition.num_chunks // pp, hybrid=hybrid)
    return None if fits else chunk


def lets_nemo_build_mtp(spec: TransformerSpec, partition: StagePartition) -> bool:
    """Whether MTP layers lie where NeMo 2.7.3 builds and feeds them.

    It takes theirs from the last layer of their virtual stage, and gives word embeddings to the
    first and the last stage alone (``mtp_block_spec`` of ``nemo.collections.llm.gpt.model.base``,
    ``init_model_parallel`` of ``nemo.lightning._strategy_lib``).
    """
    chunk, last = mtp_chunk(spec, partition), partition.num_chunks - 1
    return chunk is None or (chunk == last and decoder_layers(spec, partition)[last] > 0)


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
        "mtp_last",
        "pipeline_parallel_layer_layout.py:126-131",
        lambda spec, stages: (
            stages is None or mtp_chunk(spec, stages) in (None, stages.num_chunks - 1)
        ),
        "partition",
        "until Megatron-LM 0.15 MTP layers lie in the last stage, with the head",
        "Move them there, or use Megatron-LM 0.16.",
        value="stage_text",
        until="0.15",
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
