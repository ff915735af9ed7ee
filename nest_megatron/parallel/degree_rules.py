"""The rules on degrees in words: what a user is shown when a grid cannot be launched.

Every rule calls its predicate in ``rules``, so a search and a message never disagree.

Source lines are those of Megatron-LM core_v0.16.1; ``tc`` stands for
``megatron/core/transformer/transformer_config.py``, ``args`` for
``megatron/training/arguments.py``, ``ps`` for ``megatron/core/parallel_state.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from nest_megatron.parallel.rules import (
    LaunchRequest,
    allows_context_parallel,
    allows_expert_bias,
    allows_interleaving,
    allows_optimizer,
    allows_rank_order,
    allows_sequence_parallel,
    allows_zero,
    divides_dense_mlp,
    divides_experts,
    divides_heads,
    divides_sequence,
    divides_vocab,
    initializes_on_meta_device,
    reduces_expert_gradients,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One broken rule, in words for a user."""

    what: str
    value: object
    limit: str
    fix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule of Megatron.

    Args:
        name: short and stable, for tests and messages.
        source: where Megatron enforces it.
        check: the violation, or ``None``.
    """

    name: str
    source: str
    check: Callable[[LaunchRequest], Violation | None]


def violations(request: LaunchRequest, rules: Iterable[Rule]) -> Iterator[tuple[Rule, Violation]]:
    """Every broken rule, in the order of the rules."""
    for rule in rules:
        found = rule.check(request)
        if found is not None:
            yield rule, found


def _heads(request: LaunchRequest) -> Violation | None:
    spec, tp = request.spec, request.dims.tensor_model_parallel_size
    if divides_heads(spec, tp):
        return None
    return Violation(
        what="tensor_model_parallel_size",
        value=tp,
        limit=f"it must divide the {spec.num_attention_heads} attention heads and be a multiple or "
        f"a divisor of the {spec.query_groups} query groups",
        fix="Use a common divisor of both.",
    )


def _dense_mlp(request: LaunchRequest) -> Violation | None:
    spec, tp = request.spec, request.dims.tensor_model_parallel_size
    if divides_dense_mlp(spec, tp):
        return None
    return Violation(
        what="tensor_model_parallel_size",
        value=tp,
        limit=f"it must divide ffn_hidden_size ({spec.ffn_hidden_size}) and the shared experts' "
        f"size ({spec.moe_shared_expert_intermediate_size})",
        fix="Use a divisor.",
    )


def _vocab(request: LaunchRequest) -> Violation | None:
    spec, tp = request.spec, request.dims.tensor_model_parallel_size
    if divides_vocab(spec, tp):
        return None
    return Violation(
        what="tensor_model_parallel_size",
        value=tp,
        limit=f"it must divide the padded vocabulary ({spec.vocab_size}), which stays as it is",
        fix="Use a divisor.",
    )


def _experts(request: LaunchRequest) -> Violation | None:
    spec, dims = request.spec, request.dims
    ep, etp = dims.expert_model_parallel_size, dims.expert_tensor_parallel_size
    if divides_experts(spec, ep, etp):
        return None
    return Violation(
        what="expert_model_parallel_size, expert_tensor_parallel_size",
        value=(ep, etp),
        limit=f"they must divide the experts ({spec.num_experts}) and the size of one "
        f"({spec.expert_ffn_hidden_size})",
        fix="Use divisors; a dense model has expert_model_parallel_size 1.",
    )


def _expert_bias(request: LaunchRequest) -> Violation | None:
    etp = request.dims.expert_tensor_parallel_size
    if allows_expert_bias(request.spec, etp):
        return None
    if request.spec.moe_shared_expert_intermediate_size:
        return Violation(
            what="add_bias_linear",
            value=True,
            limit="shared experts have no bias (moe_shared_expert_intermediate_size "
            f"{request.spec.moe_shared_expert_intermediate_size})",
            fix="Set add_bias_linear=False (--disable-bias-linear).",
        )
    return Violation(
        what="expert_tensor_parallel_size",
        value=etp,
        limit="experts with a linear bias (add_bias_linear) are not split",
        fix="Use 1, or disable the bias.",
    )


def _expert_gradients(request: LaunchRequest) -> Violation | None:
    dims = request.dims
    tp, etp = dims.tensor_model_parallel_size, dims.expert_tensor_parallel_size
    if reduces_expert_gradients(request.spec, tp, dims.expert_model_parallel_size, etp):
        return None
    return Violation(
        what="expert_tensor_parallel_size",
        value=etp,
        limit=f"without expert parallelism it must be tensor_model_parallel_size ({tp}), or copies "
        "of an expert drift apart",
        fix="Make both equal, or raise expert_model_parallel_size.",
    )


def _sequence(request: LaunchRequest) -> Violation | None:
    spec, dims = request.spec, request.dims
    tp, cp = dims.tensor_model_parallel_size, dims.context_parallel_size
    if divides_sequence(spec.seq_length, tp, cp, request.sequence_parallel):
        return None
    return Violation(
        what="seq_length",
        value=spec.seq_length,
        limit=f"it must be a multiple of 2 * {cp} with context parallelism, and each rank's share "
        f"of {tp} with sequence parallelism",
        fix="Lower one of the degrees.",
    )


def _context_parallel(request: LaunchRequest) -> Violation | None:
    cp = request.dims.context_parallel_size
    if allows_context_parallel(request.spec, cp, fused=request.fused_attention):
        return None
    if allows_context_parallel(request.spec, cp):
        return Violation(
            what="context_parallel_size",
            value=cp,
            limit="the ring exchange of keys and values needs fused attention; single precision, "
            "--attention-backend unfused and --transformer-impl local run another",
            fix="Use 1, or fused attention in 16 bits (train.precision=bf16).",
        )
    return Violation(
        what="context_parallel_size",
        value=cp,
        limit="BERT's script does not split its batch, and sliding windows or learnable softmax "
        "have no kernel with the ring exchange of keys and values",
        fix="Use 1.",
    )


def _sequence_parallel(request: LaunchRequest) -> Violation | None:
    tp = request.dims.tensor_model_parallel_size
    if allows_sequence_parallel(request.spec, tp, request.sequence_parallel):
        return None
    return Violation(
        what="sequence_parallel",
        value=request.sequence_parallel,
        limit="it needs tensor_model_parallel_size above 1, and experts with such a size need it",
        fix="Set it exactly when tensor_model_parallel_size is above 1.",
    )


def _rank_order(request: LaunchRequest) -> Violation | None:
    if allows_rank_order(request.spec, request.dims):
        return None
    return Violation(
        what="use_tp_pp_dp_mapping",
        value=request.dims.expert_ranks,
        limit="with a pipeline, etp * ep must equal tp * cp in this rank order",
        fix="Use the default rank order.",
    )


def _batch(request: LaunchRequest) -> Violation | None:
    sizes = (request.micro_batch_size, request.global_batch_size)
    if min(sizes) > 0 and request.num_microbatches:
        return None
    dp = request.dims.data_parallel_size
    return Violation(
        what="global_batch_size",
        value=request.global_batch_size,
        limit=f"it must be a multiple of micro_batch_size * data_parallel_size "
        f"({request.micro_batch_size} * {dp})",
        fix="Change the micro batch or the data-parallel size.",
    )


def _interleaving(request: LaunchRequest) -> Violation | None:
    dims, count = request.dims, request.num_microbatches
    pp, vpp = dims.pipeline_model_parallel_size, dims.virtual_pipeline_model_parallel_size
    if allows_interleaving(pp, vpp, count):
        return None
    if pp > 1:
        dp, micro = dims.data_parallel_size, request.micro_batch_size
        return Violation(
            what="virtual_pipeline_model_parallel_size",
            value=vpp,
            limit=f"virtual stages work in whole rounds of {pp} micro batches, one a pipeline "
            f"rank, and there are {count} (global batch {request.global_batch_size} / "
            f"(micro batch {micro} * data-parallel size {dp})); rounds of another size "
            "(microbatch_group_size_per_vp_stage) are not planned",
            fix="Use 1, or a batch or micro batch that makes whole rounds.",
        )
    return Violation(
        what="virtual_pipeline_model_parallel_size",
        value=vpp,
        limit="it needs a pipeline",
        fix="Use 1, or pipeline_model_parallel_size above 1.",
    )


def _zero(request: LaunchRequest) -> Violation | None:
    dims = request.dims
    pp, vpp = dims.pipeline_model_parallel_size, dims.virtual_pipeline_model_parallel_size
    if allows_zero(request.zero, pp, vpp):
        return None
    return Violation(
        what="data_parallel_sharding_strategy",
        value=request.zero.name,
        limit="Megatron-FSDP's device mesh has no pipeline dimension",
        fix="Use pipeline_model_parallel_size 1, or the distributed optimizer.",
    )


def _meta_device(request: LaunchRequest) -> Violation | None:
    chosen = request.zero.is_fsdp and request.sharding is None
    if not chosen or initializes_on_meta_device(request.spec):
        return None
    return Violation(
        what="data_parallel_sharding_strategy",
        value=request.zero.name,
        limit="Megatron-FSDP needs --init-model-with-meta-device, or every GPU first holds the "
        "whole model; learned positions and token types would then start with a deviation of 1",
        fix="Use rotary positions (rope), or parallel.zero_stage=1.",
    )


def _optimizer(request: LaunchRequest) -> Violation | None:
    if allows_optimizer(request.optimizer, request.zero, request.version):
        return None
    return Violation(
        what="optimizer",
        value=request.optimizer,
        limit=f"Megatron-LM {request.version} does not divide its state (ZeRO-{int(request.zero)})",
        fix="Use parallel.zero_stage=0, or adam.",
    )


def _stage_count(request: LaunchRequest) -> Violation | None:
    units = len(request.spec.layer_kinds())
    if request.dims.num_chunks <= units:
        return None
    return Violation(
        what="pipeline_model_parallel_size * virtual_pipeline_model_parallel_size",
        value=request.dims.num_chunks,
        limit=f"a stage without a unit makes GPUs wait for ever; the model has {units} units",
        fix="Use fewer stages.",
    )


DEGREE_RULES: tuple[Rule, ...] = (
    Rule(name="heads_over_tp", source="tc:925-945", check=_heads),
    Rule(name="ffn_over_tp", source="megatron/core/utils.py:468 (at build)", check=_dense_mlp),
    Rule(name="vocab_over_tp", source="tensor_parallel/utils.py:118 (at build)", check=_vocab),
    Rule(name="experts_over_ep", source="args:1025, tc experts", check=_experts),
    Rule(name="expert_bias", source="tc:1590, moe/shared_experts.py:47", check=_expert_bias),
    Rule(
        name="expert_gradients",
        source="tensor_parallel/layers.py:886, transformer_engine.py:1551 (run, silent)",
        check=_expert_gradients,
    ),
    Rule(name="sequence_pieces", source="args:818, mappings.py:69 (run)", check=_sequence),
    Rule(
        name="attention_under_cp",
        source="Transformer Engine's backend choice; pretrain_bert.py get_batch",
        check=_context_parallel,
    ),
    Rule(
        name="sequence_parallel",
        source="args:905, model_parallel_config.py:411, moe_layer.py:380 (run)",
        check=_sequence_parallel,
    ),
    Rule(name="rank_order", source="ps:811", check=_rank_order),
    Rule(name="whole_batch", source="num_microbatches_calculator.py:340", check=_batch),
    Rule(name="interleaving", source="args:575, schedules.py:995-1015", check=_interleaving),
    Rule(name="fsdp_no_pipeline", source="mcore_fsdp_adapter.py:369 (run)", check=_zero),
    Rule(
        name="fsdp_meta_device",
        source="training.py:1258, param_and_grad_buffer.py:2221 (run)",
        check=_meta_device,
    ),
    Rule(name="optimizer_zero", source="args:1184-1186", check=_optimizer),
    Rule(name="no_empty_stage", source="Megatron-LM issue 1852", check=_stage_count),
)
