"""Degrees that divide a model: tensor, context and expert parallelism.

Source lines here and in the other tables are those of Megatron-LM core_v0.16.1: ``args`` is
``megatron/training/arguments.py``, ``tc`` ``megatron/core/transformer/transformer_config.py``,
``ps`` ``megatron/core/parallel_state.py``, ``mpc`` ``megatron/core/model_parallel_config.py``;
"(at build)" and "(run)" are what its own validation lets pass.
"""

from __future__ import annotations

import math

from nest_megatron.cluster.records import Precision
from nest_megatron.layout.dims import ParallelDims, RankOrder
from nest_megatron.layout.rulebook.facts import Rule
from nest_megatron.model.layer_pattern import LayerBlock
from nest_megatron.model.shard import fits_fused_attention
from nest_megatron.model.spec import ModelFamily, TransformerSpec

_LINEAR = frozenset({LayerBlock.LINEAR_FOR_ATTENTION, LayerBlock.LINEAR_FOR_MLP})
_TP, _CP = "tensor_model_parallel_size", "context_parallel_size"
_EP, _ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"
_HEADS_AND_MLP = "tensor_model_parallel_size divides heads and MLP"
_ATTENTION = "model's attention allows context parallelism"
_BACKEND = (
    "Transformer Engine's backend choice; dot_product_attention.py:58 (run); "
    "pretrain_bert.py get_batch"
)
_MAMBA = "tp and cp divide heads and groups of Mamba layers"
_EXPERTS = "expert degrees divide the experts and the ranks"
_BIAS = "experts with a bias are not split"


def _divides_mlp(spec: TransformerSpec, tp: int) -> bool:
    """The MLPs that tensor parallelism splits (dense layers, shared experts) come out whole."""
    shared = spec.moe_shared_expert_intermediate_size or 0
    splits_hidden = (
        spec.num_mtp_layers > 0  # the projection that joins embedding and hidden state
        or not _LINEAR.isdisjoint(spec.blocks)
    )
    sizes = (shared, *spec.ffn_hidden_sizes, spec.hidden_size if splits_hidden else 0)
    return not any(size % tp for size in sizes)


def _divides_mamba(spec: TransformerSpec, tp: int, cp: int) -> bool:
    """Mamba heads and groups split over tp, heads over cp too, which may share a group."""
    heads, groups = spec.num_mamba_heads, spec.mamba_num_groups
    if LayerBlock.MAMBA not in spec.blocks:
        return True
    if heads % (tp * cp) or groups % tp:
        return False
    return groups // tp % cp == 0 or cp % (groups // tp) == 0


def _divides_sequence(spec: TransformerSpec, tp: int, cp: int, sequence_parallel: bool) -> bool:
    """A sequence splits into two pieces a cp rank, and over tp with sequence parallelism.

    One with images is padded until it does (``multimodal.context_parallel.get_padding``).
    """
    pieces = cp * 2 if cp > 1 else 1
    shards = tp if sequence_parallel else 1
    return spec.has_split_encoder or all(
        length % pieces == 0 and length // cp % shards == 0
        for length in (spec.seq_length, spec.decoder_seq_length or 0)
    )


def _splits_sequence(spec: TransformerSpec) -> bool:
    """Whether a model's attention has kernels for a sequence that context ranks divide."""
    plain = spec.softmax_type == "vanilla" and spec.experimental_attention_variant != "dsa"
    return plain and spec.family is ModelFamily.GPT


def launched_expert_tensor_size(spec: TransformerSpec, dims: ParallelDims) -> int | None:
    """What ``--expert-tensor-parallel-size`` must be, ``None`` where the flag is not needed.

    Megatron builds the expert grid for dense models too, with etp = tp unless a flag says
    otherwise; in the second rank order that fails with cp > 1 unless etp * ep = tp * cp (ps:811).
    """
    if spec.num_experts is not None:
        return dims.expert_tensor_parallel_size
    inside = dims.rank_order is RankOrder.TP_CP_EP_PP_DP and dims.pipeline_model_parallel_size > 1
    if inside and dims.context_parallel_size > 1:
        return dims.tensor_model_parallel_size * dims.context_parallel_size
    return None


DEGREE_RULES = (
    Rule(
        "vocab_over_tp",
        "tensor_parallel/utils.py:118 (at build)",
        lambda spec, tp: not spec.vocab_is_padded or spec.vocab_size % tp == 0,
        _TP,
        "it must divide the padded vocabulary ({vocab_size}), which stays as it is",
        "Use a divisor.",
        reason="tensor_model_parallel_size divides the padded vocabulary",
    ),
    Rule(
        "groups_over_tp",
        "0.15 tc:759",
        lambda spec, tp: all(groups % tp == 0 for groups in spec.query_group_counts),
        _TP,
        "before 0.16 it must divide the {query_groups} query groups",
        "Use a divisor, or Megatron-LM 0.16.",
        value="tp",
        until="0.15",
        reason=_HEADS_AND_MLP,
    ),
    Rule(
        "heads_over_tp",
        "tc:925-945",
        lambda spec, tp: (
            spec.num_attention_heads % tp == 0
            and all(
                (groups % tp == 0 or tp % groups == 0)
                and 2 * groups * spec.head_dim % tp == 0  # the packed query-key-value projection
                for groups in spec.query_group_counts
            )
        ),
        _TP,
        "it must divide the {num_attention_heads} attention heads and be a multiple or "
        "a divisor of the {query_groups} query groups",
        "Use a common divisor of both.",
        reason=_HEADS_AND_MLP,
    ),
    Rule(
        "ffn_over_tp",
        "megatron/core/utils.py:468 (at build)",
        _divides_mlp,
        _TP,
        "it must divide ffn_hidden_size ({ffn_hidden_size}) and the shared experts' size "
        "({moe_shared_expert_intermediate_size})",
        "Use a divisor.",
        reason=_HEADS_AND_MLP,
    ),
    Rule(
        # ``_gather_from_tensor_parallel_region`` pads the sequence where it means the hidden size
        "linear_replacements",
        "transformer/heterogeneous/linear_replacements.py (run)",
        lambda spec, tp, sequence_parallel: (
            tp == 1 or not sequence_parallel or _LINEAR.isdisjoint(spec.blocks)
        ),
        _TP,
        "a linear layer in the place of attention or an MLP does not run with sequence parallelism",
        "Use 1.",
        reason=_HEADS_AND_MLP,
    ),
    Rule(
        "adapters_over_tp",
        "megatron.bridge.peft.utils.ParallelLinearAdapter (at build)",
        lambda spec, tp: spec.adapters is None or spec.adapters.dim % tp == 0,
        _TP,
        "it must divide the rank of the adapters",
        "Use a divisor, or another peft.dim.",
        reason="tensor_model_parallel_size divides the rank of adapters",
    ),
    Rule(
        "no_experts",
        "args:1025, tc experts",
        lambda spec, ep: ep == 1 or spec.num_experts is not None,
        _EP,
        "the model has no experts",
        "Use 1.",
        reason=_EXPERTS,
    ),
    Rule(
        "experts_in_fp16",
        "0.15 args:1041",
        lambda precision, ep: ep == 1 or precision is not Precision.FP16,
        _EP,
        "0.15 has no expert parallelism in fp16",
        "Use 1, or bf16.",
        reason=_EXPERTS,
        until="0.15",
    ),
    Rule(
        "experts_over_ep",
        "args:1025, tc experts",
        lambda spec, ep, etp: (
            spec.num_experts is None
            or spec.num_experts % ep == spec.expert_ffn_hidden_size % etp == 0
        ),
        f"{_EP}, {_ETP}",
        "they must divide the experts ({num_experts}) and the size of one "
        "({expert_ffn_hidden_size})",
        "Use divisors.",
        reason=_EXPERTS,
    ),
    Rule(
        "adapters_over_etp",
        "megatron.bridge.peft.utils.ParallelLinearAdapter (at build)",
        lambda spec, etp: (
            spec.adapters is None or spec.num_experts is None or spec.adapters.dim % etp == 0
        ),
        _ETP,
        "it must divide the rank of the adapters",
        "Use a divisor, or another peft.dim.",
        reason=_EXPERTS,
    ),
    Rule(
        "expert_ranks",
        "ps:792",
        lambda world_size, ep, etp: world_size % (ep * etp) == 0,
        f"{_EP}, {_ETP}",
        "their product must divide the {world_size} ranks",
        "Lower one of the two.",
        reason=_EXPERTS,
    ),
    Rule(
        "shared_expert_bias",
        "tc:1590, moe/shared_experts.py:47",
        lambda spec: (
            spec.num_experts is None
            or not (spec.add_bias_linear and spec.moe_shared_expert_intermediate_size)
        ),
        "add_bias_linear",
        "shared experts have no bias (moe_shared_expert_intermediate_size "
        "{moe_shared_expert_intermediate_size})",
        "Set add_bias_linear=False (--disable-bias-linear).",
        reason=_BIAS,
    ),
    Rule(
        "expert_bias",
        "tc:1590, moe/shared_experts.py:47",
        lambda spec, etp: etp == 1 or spec.num_experts is None or not spec.add_bias_linear,
        _ETP,
        "experts with a linear bias (add_bias_linear) are not split",
        "Use 1, or disable the bias.",
        reason=_BIAS,
    ),
    Rule(
        # with ep 1 it reduces experts over dp * cp alone, as dense parameters: on gloo, tp 2, etp 1
        # has a gradient norm of 1.756 instead of 1.765; 0.19 reduces them over their replicas
        # (use_expert_pgs), and losses are those of etp 2
        "expert_gradients",
        "tensor_parallel/layers.py:886, transformer_engine.py:1551 (run, silent)",
        lambda spec, tp, ep, etp: spec.num_experts is None or ep > 1 or etp == tp,
        _ETP,
        "before 0.19, without expert parallelism, it must be tensor_model_parallel_size ({tp}), or "
        "copies of an expert drift apart",
        "Make both equal, or raise expert_model_parallel_size.",
        reason="without expert parallelism, etp equals tp before 0.19",
        until="0.18",
    ),
    Rule(
        "local_attention_under_cp",
        _BACKEND,
        lambda cp, is_local: cp == 1 or not is_local,
        _CP,
        "Megatron's own layers (--transformer-impl local) have no context parallelism: only "
        "Transformer Engine's attention splits the sequence",
        "Use 1, or transformer_impl transformer_engine.",
        reason=_ATTENTION,
    ),
    Rule(
        "head_sizes_under_cp",
        _BACKEND,
        lambda spec, cp: cp == 1 or fits_fused_attention(spec),
        _CP,
        "the ring exchange of keys and values needs fused attention, whose heads have sizes that "
        "are multiples of 8 up to 256",
        "Use 1.",
        reason=_ATTENTION,
    ),
    Rule(
        "attention_under_cp",
        _BACKEND,
        lambda spec, cp: cp == 1 or _splits_sequence(spec),
        _CP,
        "the scripts of BERT and T5 do not split their batches, learnable softmax has no kernel "
        "for a divided sequence, and sparse attention (dsa) is not planned with it",
        "Use 1.",
        reason=_ATTENTION,
    ),
    Rule(
        "unfused_attention_under_cp",
        _BACKEND,
        lambda cp, fused_attention: cp == 1 or fused_attention,
        _CP,
        "the ring exchange of keys and values needs fused attention; single precision and "
        "--attention-backend unfused run another",
        "Use 1, or fused attention in 16 bits (train.precision=bf16).",
        reason=_ATTENTION,
    ),
    Rule(
        "hybrid_latent_attention",
        "ssm/mamba_hybrid_layer_allocation.py Symbols",
        lambda spec: "+" not in spec.hybrid_layer_pattern,
        "hybrid_layer_pattern",
        "{core} has no layer of latent attention (+) in a hybrid model",
        "Use Megatron-LM 0.19.",
        until="0.18",
    ),
    Rule(
        "mamba_groups",
        "ssm/mamba_mixer.py:227-247, ssm/mamba_context_parallel.py:91-117 (at build)",
        lambda spec: (
            LayerBlock.MAMBA not in spec.blocks or spec.num_mamba_heads % spec.mamba_num_groups == 0
        ),
        "mamba_num_heads",
        "it must be a multiple of the {mamba_num_groups} groups of Mamba layers "
        "(--mamba-num-groups, 8 where nobody says)",
        "Use --mamba-num-groups {divisor}, or more heads.",
        value="num_mamba_heads",
        words={"divisor": lambda spec: math.gcd(spec.num_mamba_heads, spec.mamba_num_groups)},
        reason=_MAMBA,
    ),
    Rule(
        "mamba_over_tp_and_cp",
        "ssm/mamba_mixer.py:227-247, ssm/mamba_context_parallel.py:91-117 (at build)",
        _divides_mamba,
        f"{_TP}, {_CP}",
        "the first must divide the {mamba_num_groups} groups of Mamba layers; both together their "
        "{num_mamba_heads} heads, and the second be a multiple or a divisor of a rank's groups",
        "Use powers of two no larger than the groups.",
        reason=_MAMBA,
    ),
    Rule(
        "linear_over_tp_and_cp",
        "tc:964-980",
        lambda spec, tp, cp, release: (
            LayerBlock.GATED_DELTA_NET not in spec.blocks
            or (
                math.gcd(spec.linear_num_key_heads, spec.linear_num_value_heads) % (tp * cp) == 0
                and (cp == 1 or release >= (0, 18))
            )
        ),
        f"{_TP}, {_CP}",
        "their product must divide the {linear_num_key_heads} key heads and "
        "{linear_num_value_heads} value heads of gated delta nets, and before 0.18 there is no "
        "context parallelism with them",
        "Use smaller sizes.",
        reason="tp and cp divide heads of gated delta nets",
    ),
    Rule(
        "sequence_pieces",
        "args:818, mappings.py:69 (run)",
        _divides_sequence,
        "seq_length",
        "it must be a multiple of 2 * {cp} with context parallelism, and each rank's share of {tp} "
        "with sequence parallelism",
        "Lower one of the degrees.",
        reason="sequence divides by 2 * cp and by cp * tp",
    ),
    Rule(
        "sequence_parallel",
        "args:905, model_parallel_config.py:411, moe_layer.py:380 (run)",
        lambda spec, tp, sequence_parallel: (
            tp > 1 if sequence_parallel else tp == 1 or not spec.is_moe
        ),
        "sequence_parallel",
        "it needs tensor_model_parallel_size above 1, and experts with such a size need it",
        "Set it exactly when tensor_model_parallel_size is above 1.",
    ),
    Rule(
        "norm_under_sequence_parallel",
        "transformer/torch_norm.py:32 (at build)",
        lambda spec, is_local, sequence_parallel: (
            not (is_local and sequence_parallel) or spec.normalization != "RMSNorm"
        ),
        "sequence_parallel",
        "PyTorch's RMSNorm, which Megatron's own layers have (--transformer-impl local), does not "
        "run with it",
        "Use tensor_model_parallel_size 1, or transformer_impl transformer_engine.",
        reason="RMSNorm of Megatron's own layers is of whole sequences",
    ),
)
