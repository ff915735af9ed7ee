"""What Megatron accepts, as fast predicates on degrees: whole numbers in, yes or no out.

A search asks these; ``degree_rules`` states the same rules in words for a user.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from nest_megatron.cluster.records import Precision
from nest_megatron.model.execution import PLAIN, Execution, GraphImpl
from nest_megatron.model.layer_pattern import LayerBlock
from nest_megatron.model.shard import fits_fused_attention
from nest_megatron.model.spec import ModelFamily, TransformerSpec
from nest_megatron.parallel.batch_schedule import BatchSchedule
from nest_megatron.parallel.cuda_graphs import CudaGraphs
from nest_megatron.parallel.dims import ParallelDims, RankOrder
from nest_megatron.parallel.layout import PartialLayout
from nest_megatron.parallel.partition import StagePartition
from nest_megatron.parallel.recompute import NO_RECOMPUTE, Recompute
from nest_megatron.parallel.zero import DataParallelSharding, ZeroStage

_LINEAR = frozenset({LayerBlock.LINEAR_FOR_ATTENTION, LayerBlock.LINEAR_FOR_MLP})
#: The release whose rules hold where none is named.
DEFAULT_VERSION = "0.16.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """Everything about a job that Megatron's rules look at.

    Args:
        partition: ``None`` while a search has not chosen one.
        sharding: what divides states among replicas; ``None`` leaves it to the ZeRO stage.
        gradient_bytes: width of the gradients that replicas reduce and keep.
        cuda_graphs: the job's own, of which ``execution`` says what they capture; ``None`` where a
            plan chooses them, or there are none.
        fused_attention: attention runs in a fused kernel (``ExecutionTraits.flash_attention``).
        microbatch_group_size_per_vp_stage: micro batches of a round of virtual stages; 0 is one a
            pipeline rank.
        version: the Megatron-LM release, ``0.16.1`` or ``0.20``.
        execution: what carries the layers out (``execution_checks``).
        batch_schedule: how the batch grows; every rule holds at each of its sizes.
    """

    spec: TransformerSpec
    dims: ParallelDims
    micro_batch_size: int
    global_batch_size: int
    partition: StagePartition | None = None
    recompute: Recompute = NO_RECOMPUTE
    zero: ZeroStage = ZeroStage.NONE
    precision: Precision = Precision.BF16
    sequence_parallel: bool = False
    moe_grouped_gemm: bool = False
    gradient_bytes: int = 4
    sharding: DataParallelSharding | None = None
    optimizer: str = "adam"
    cuda_graphs: CudaGraphs | None = None
    fp8_recipe: str = "delayed"
    transformer_impl: str = "transformer_engine"
    fused_attention: bool = True
    microbatch_group_size_per_vp_stage: int = 0
    version: str = DEFAULT_VERSION
    execution: Execution = PLAIN
    batch_schedule: BatchSchedule | None = None

    @classmethod
    def of(cls, spec: TransformerSpec, grid: PartialLayout, **others: Any) -> LaunchRequest:
        """A grid of a model, but its execution; ``others`` are the fields that it does not say.

        Every plan has grouped GEMMs of experts where the layers are Transformer Engine's.
        """
        engine = others.get("transformer_impl", "transformer_engine")
        others.setdefault("moe_grouped_gemm", spec.is_moe and engine != "local")
        return cls(
            spec=spec,
            dims=grid.dims,
            micro_batch_size=grid.micro_batch_size,
            global_batch_size=grid.global_batch_size,
            recompute=grid.recompute,
            zero=grid.zero,
            sequence_parallel=grid.sequence_parallel,
            **others,
        )

    def __getitem__(self, name: str) -> object:
        """A field of the job, its degrees, its model or its execution, by Megatron's name."""
        records = (self, self.dims, self.spec, self.execution)
        return next(getattr(record, name) for record in records if hasattr(record, name))

    @property
    def batch_unit(self) -> int:
        """The global batch, or what every size of one that grows is a multiple of."""
        growing = self.batch_schedule
        return self.global_batch_size if growing is None else growing.batch_unit

    @property
    def num_microbatches(self) -> int:
        """Micro batches of a step of ``batch_unit`` on each rank, 0 if they are no whole number.

        Where these are whole, and whole rounds of virtual stages, so are those of every multiple.
        """
        dp = self.dims.data_parallel_size
        return num_microbatches(self.batch_unit, self.micro_batch_size, dp)

    @property
    def captured(self) -> CudaGraphs | None:
        """What CUDA graphs capture; ``None`` where there are none."""
        how = self.execution
        if how.cuda_graph_impl is GraphImpl.NONE:
            return None
        impl, scope = how.cuda_graph_impl.value, frozenset(how.cuda_graph_scope)
        own = self.cuda_graphs or CudaGraphs(impl=impl)
        return dataclasses.replace(own, impl=impl, scope=scope)

    @property
    def is_0_16(self) -> bool:
        """Whether the release is 0.16.1."""
        return self.version.startswith("0.16")


def divides_heads(spec: TransformerSpec, tp: int) -> bool:
    """Attention heads split over tp; query groups are a multiple or a divisor of tp."""
    return spec.num_attention_heads % tp == 0 and all(
        (groups % tp == 0 or tp % groups == 0)
        and 2 * groups * spec.head_dim % tp == 0  # the packed query-key-value projection
        for groups in spec.query_group_counts
    )


def divides_vocab(spec: TransformerSpec, tp: int) -> bool:
    """A vocabulary whose padding is settled splits over tp; any other is padded until it does."""
    return not spec.vocab_is_padded or spec.vocab_size % tp == 0


def divides_dense_mlp(spec: TransformerSpec, tp: int) -> bool:
    """The MLPs that tensor parallelism splits (dense layers, shared experts) come out whole."""
    shared = spec.moe_shared_expert_intermediate_size or 0
    splits_hidden = (
        spec.num_mtp_layers > 0  # the projection that joins embedding and hidden state
        or not _LINEAR.isdisjoint(spec.blocks)
    )
    return (
        shared % tp == 0
        and not any(size % tp for size in spec.ffn_hidden_sizes)
        and not (splits_hidden and spec.hidden_size % tp)
    )


def divides_linear(spec: TransformerSpec, tp: int, cp: int, version: str) -> bool:
    """Key and value heads of gated delta nets split over tp and cp; 0.16.1 splits no sequence."""
    if LayerBlock.GATED_DELTA_NET not in spec.blocks:
        return True
    whole = spec.linear_num_key_heads % (tp * cp) == spec.linear_num_value_heads % (tp * cp) == 0
    return whole and (cp == 1 or not version.startswith("0.16"))


def divides_mamba(spec: TransformerSpec, tp: int, cp: int) -> bool:
    """Mamba heads and groups split over tp, heads over cp too, which may share a group.

    Source: ``MambaMixer`` and ``MambaContextParallel`` (at build).
    """
    if LayerBlock.MAMBA not in spec.blocks:
        return True
    heads, groups = spec.num_mamba_heads, spec.mamba_num_groups
    if heads % groups or heads % (tp * cp) or groups % tp:
        return False
    return groups // tp % cp == 0 or cp % (groups // tp) == 0


def cuts_anywhere(spec: TransformerSpec, version: str) -> bool:
    """Whether a layout may cut stages: 0.16.1 divides a hybrid model's layers by the ranks.

    It has no virtual stages for them either, and passes full recomputation over in silence
    (``MambaStack._select_layers_for_pipeline_parallel``, ``forward``).
    """
    return not (spec.hybrid_layer_pattern and version.startswith("0.16"))


def allows_linear_for_tp(spec: TransformerSpec, tp: int, *, sequence_parallel: bool) -> bool:
    """A linear layer in the place of another does not run with sequence parallelism.

    ``linear_replacements._gather_from_tensor_parallel_region`` pads the sequence there where it
    means the hidden size (0.16.1 and 0.20).
    """
    return tp == 1 or not sequence_parallel or _LINEAR.isdisjoint(spec.blocks)


def allows_virtual_stages(spec: TransformerSpec, vpp: int) -> bool:
    """Heterogeneous layers are built for one stage a rank.

    No framework tells ``get_gpt_heterogeneous_layer_spec`` which virtual stage it builds.
    """
    return vpp == 1 or not spec.heterogeneous_layers


def divides_adapters(spec: TransformerSpec, tp: int, etp: int = 1) -> bool:
    """The rank of adapters splits over tp, and over etp where experts have some."""
    if spec.adapters is None:
        return True
    return spec.adapters.dim % tp == 0 and spec.adapters.dim % etp == 0


def divides_experts(spec: TransformerSpec, ep: int, etp: int) -> bool:
    """Experts split over ep, and each expert's MLP over etp; dense models have neither."""
    if spec.num_experts is None:
        return ep == 1
    return spec.num_experts % ep == 0 and spec.expert_ffn_hidden_size % etp == 0


def allows_expert_bias(spec: TransformerSpec, etp: int) -> bool:
    """Experts with a bias are not split, and shared experts have none."""
    if spec.num_experts is None or not spec.add_bias_linear:
        return True
    return etp == 1 and not spec.moe_shared_expert_intermediate_size


def reduces_expert_gradients(spec: TransformerSpec, tp: int, ep: int, etp: int) -> bool:
    """Megatron sums the gradients of every copy of an expert.

    With ep = 1 it reduces experts over dp * cp alone, as dense parameters, so copies drift apart
    where etp != tp: on gloo, tp 2, etp 1, ep 1 has a gradient norm of 1.756 instead of 1.765.
    """
    return spec.num_experts is None or ep > 1 or etp == tp


def divides_sequence(spec: TransformerSpec, tp: int, cp: int, sequence_parallel: bool) -> bool:
    """A sequence splits into two pieces a cp rank, and over tp with sequence parallelism.

    One with images is padded until it does (``multimodal.context_parallel.get_padding``).
    """
    if spec.has_split_encoder:
        return True
    pieces = cp * 2 if cp > 1 else 1
    shards = tp if sequence_parallel else 1
    lengths = (spec.seq_length, spec.decoder_seq_length or 0)
    return all(length % pieces == 0 and length // cp % shards == 0 for length in lengths)


def allows_context_parallel(spec: TransformerSpec, cp: int, *, fused: bool = True) -> bool:
    """Attention splits the sequence if it runs ``fused``, in a kernel of 16-bit numbers."""
    plain = spec.softmax_type == "vanilla" and spec.window_size is None
    plain = plain and spec.experimental_attention_variant != "dsa"
    fused = fused and fits_fused_attention(spec)
    return cp == 1 or (fused and plain and spec.family is ModelFamily.GPT)


def allows_pipeline(spec: TransformerSpec, pp: int) -> bool:
    """Both stacks of a T5-like model lie on one pipeline rank."""
    return pp == 1 or spec.family is not ModelFamily.T5


def allows_blocks(spec: TransformerSpec) -> bool:
    """``block`` recomputation counts the layers of each stack; with an encoder there are two."""
    return spec.family is not ModelFamily.T5 and not spec.has_split_encoder


def allows_encoder(spec: TransformerSpec, dims: ParallelDims) -> bool:
    """Megatron-core's encoder goes with a pipeline or context ranks, without virtual stages."""
    pp, vpp = dims.pipeline_model_parallel_size, dims.virtual_pipeline_model_parallel_size
    return not spec.has_split_encoder or (vpp == 1 and min(pp, dims.context_parallel_size) == 1)


def allows_rank_order(spec: TransformerSpec, dims: ParallelDims) -> bool:
    """With data parallelism outermost and a pipeline, dense and expert replicas must be as many.

    For a dense model the expert grid is free: ``launched_expert_tensor_size`` makes it fit.
    """
    inner = dims.tensor_model_parallel_size * dims.context_parallel_size
    is_free = spec.num_experts is None or dims.expert_ranks == inner
    return is_free or not _pipelines_inside(dims)


def _pipelines_inside(dims: ParallelDims) -> bool:
    return dims.rank_order is RankOrder.TP_CP_EP_PP_DP and dims.pipeline_model_parallel_size > 1


def launched_expert_tensor_size(spec: TransformerSpec, dims: ParallelDims) -> int | None:
    """What ``--expert-tensor-parallel-size`` must be, ``None`` where the flag is not needed.

    Megatron builds the expert grid for dense models too, with etp = tp unless told otherwise; under
    the second rank order that fails with cp > 1 unless etp * ep = tp * cp (ps:811).
    """
    if spec.num_experts is not None:
        return dims.expert_tensor_parallel_size
    if _pipelines_inside(dims) and dims.context_parallel_size > 1:
        return dims.tensor_model_parallel_size * dims.context_parallel_size
    return None


def num_microbatches(global_batch_size: int, micro_batch_size: int, dp: int) -> int:
    """Micro batches of one step on each rank, 0 if they do not come out whole."""
    samples = micro_batch_size * dp
    return 0 if global_batch_size % samples else global_batch_size // samples


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
    fits = pp <= size <= microbatches and (rest == 0 or (rest >= pp and not whole))
    return vpp == 1 or (pp > 1 and fits)


def allows_zero(zero: ZeroStage, num_chunks: int) -> bool:
    """Megatron-FSDP runs without a pipeline."""
    return not zero.is_fsdp or num_chunks == 1


def initializes_on_meta_device(spec: TransformerSpec) -> bool:
    """``--init-model-with-meta-device`` gives every weight the values that the model asks for.

    ``reset_parameters`` of ``torch.nn.Embedding`` (learned positions, BERT's token types) draws
    with a deviation of 1 instead: on gloo, a first step's gradient norm fell from 1.636 to 0.343.
    """
    learned = spec.position_embedding_type == "learned_absolute"
    return not learned and spec.family is ModelFamily.GPT


#: Optimizers that keep state by element; Muon, SOAP and Lion are Megatron's emerging ones.
ELEMENTWISE_OPTIMIZERS = ("adam", "sgd")


def overlaps_gradients(optimizer: str, version: str) -> bool:
    """0.16.1 reduces Muon's gradients after the backward pass (args:1181)."""
    return optimizer in ELEMENTWISE_OPTIMIZERS or not version.startswith("0.16")


def allows_optimizer(optimizer: str, zero: ZeroStage, version: str) -> bool:
    """Emerging optimizers take whole matrices: no FSDP, in 0.16.1 no distributed optimizer.

    Source: 0.16.1 args:1184-1186; 0.20 args:1144, :1739.
    """
    if optimizer in ELEMENTWISE_OPTIMIZERS:
        return True
    return zero < (ZeroStage.OPTIMIZER if version.startswith("0.16") else ZeroStage.GRADIENTS)


def allows_uniform_recompute(layers: Iterable[int], num_layers: int, version: str) -> bool:
    """On 0.16.1 a group of ``uniform`` recomputation must divide every virtual stage's layers."""
    return not version.startswith("0.16") or all(count % num_layers == 0 for count in layers)


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
