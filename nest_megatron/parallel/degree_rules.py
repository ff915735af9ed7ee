"""The rules on degrees in words: what a user is shown when a grid cannot be launched.

Every rule calls its predicate in ``rules``, so a search and a message never disagree.

Source lines are those of Megatron-LM core_v0.16.1; ``tc`` stands for
``megatron/core/transformer/transformer_config.py``, ``args`` for
``megatron/training/arguments.py``, ``ps`` for ``megatron/core/parallel_state.py``.
"""

from __future__ import annotations

import math

from nest_megatron.errors import UserInputError
from nest_megatron.model.shard import fits_fused_attention
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.parallel import rules
from nest_megatron.parallel.dims import ParallelDims
from nest_megatron.parallel.launch_rule import Rule, Violation, rule, violations
from nest_megatron.parallel.recompute import RecomputeMethod
from nest_megatron.parallel.rules import LaunchRequest
from nest_megatron.parallel.zero import DataParallelSharding


def require_legal(request: LaunchRequest) -> None:
    """Refuse a layout that breaks one of Megatron's rules on degrees.

    Raises:
        UserInputError: for the first rule broken.
    """
    for _, broken in violations(request, DEGREE_RULES):
        raise UserInputError(broken.what, value=broken.value, limit=broken.limit, fix=broken.fix)


def is_legal_grid(spec: TransformerSpec, dims: ParallelDims, *, sequence_parallel: bool) -> bool:
    """Whether Megatron builds this model on this grid, whatever the batch and the ZeRO stage."""
    request = LaunchRequest(
        spec=spec,
        dims=dims,
        micro_batch_size=1,
        global_batch_size=dims.world_size,
        sequence_parallel=sequence_parallel,
    )
    return not any(violations(request, DEGREE_RULES))


def _expert_degrees(request: LaunchRequest) -> tuple[int, int]:
    dims = request.dims
    return dims.expert_model_parallel_size, dims.expert_tensor_parallel_size


def _experts(request: LaunchRequest) -> Violation | None:
    spec, (ep, etp) = request.spec, _expert_degrees(request)
    if rules.divides_experts(spec, ep, etp):
        return None
    if spec.num_experts is None:
        limit, fix = "the model has no experts", "Use 1."
        return Violation(what="expert_model_parallel_size", value=ep, limit=limit, fix=fix)
    return Violation(
        what="expert_model_parallel_size, expert_tensor_parallel_size",
        value=(ep, etp),
        limit=f"they must divide the experts ({spec.num_experts}) and the size of one "
        f"({spec.expert_ffn_hidden_size})",
        fix="Use divisors.",
    )


def _expert_bias(request: LaunchRequest) -> Violation | None:
    etp, shared = _expert_degrees(request)[1], request.spec.moe_shared_expert_intermediate_size
    if rules.allows_expert_bias(request.spec, etp):
        return None
    if shared:
        limit = f"shared experts have no bias (moe_shared_expert_intermediate_size {shared})"
        fix = "Set add_bias_linear=False (--disable-bias-linear)."
        return Violation(what="add_bias_linear", value=True, limit=limit, fix=fix)
    limit = "experts with a linear bias (add_bias_linear) are not split"
    fix = "Use 1, or disable the bias."
    return Violation(what="expert_tensor_parallel_size", value=etp, limit=limit, fix=fix)


def _context_parallel(request: LaunchRequest) -> Violation | None:
    cp, local = request.dims.context_parallel_size, request.transformer_impl == "local"
    fused = request.fused_attention and not local
    if rules.allows_context_parallel(request.spec, cp, fused=fused):
        return None
    if local:
        limit = (
            "Megatron's own layers (--transformer-impl local) have no context parallelism: only "
            "Transformer Engine's attention splits the sequence"
        )
        fix = "Use 1, or transformer_impl transformer_engine."
        return Violation(what="context_parallel_size", value=cp, limit=limit, fix=fix)
    limit = (
        "the scripts of BERT and T5 do not split their batches, sliding windows or learnable "
        "softmax have no kernel with the ring exchange of keys and values, and sparse attention "
        "(dsa) is not planned with it"
    )
    fix = "Use 1."
    if not fits_fused_attention(request.spec):
        limit = (
            "the ring exchange of keys and values needs fused attention, whose heads have sizes "
            "that are multiples of 8 up to 256"
        )
    if rules.allows_context_parallel(request.spec, cp):
        limit = (
            "the ring exchange of keys and values needs fused attention; single precision and "
            "--attention-backend unfused run another"
        )
        fix = "Use 1, or fused attention in 16 bits (train.precision=bf16)."
    return Violation(what="context_parallel_size", value=cp, limit=limit, fix=fix)


def _two_stacks(request: LaunchRequest) -> Violation | None:
    pp, method = request.dims.pipeline_model_parallel_size, request.recompute.method
    if not rules.allows_pipeline(request.spec, pp):
        limit = "pretrain_t5.py keeps both stacks of the model on one pipeline rank"
        return Violation(what="pipeline_model_parallel_size", value=pp, limit=limit, fix="Use 1.")
    if method is RecomputeMethod.BLOCK and not rules.allows_blocks(request.spec):
        limit = "it would count layers of the encoder and of the decoder, which is not planned"
        fix = "Use uniform."
        return Violation(what="recompute_method", value=method.value, limit=limit, fix=fix)
    return None


def _interleaving(request: LaunchRequest) -> Violation | None:
    dims, count = request.dims, request.num_microbatches
    pp, vpp = dims.pipeline_model_parallel_size, dims.virtual_pipeline_model_parallel_size
    group = request.microbatch_group_size_per_vp_stage
    grows = request.batch_schedule is not None
    if rules.allows_interleaving(pp, vpp, count, group, whole=grows):
        return None
    limit, fix = "it needs a pipeline", "Use 1, or pipeline_model_parallel_size above 1."
    if pp > 1:
        rounds = f"whole rounds of {pp} micro batches, one a pipeline rank"
        if group:
            rounds = (
                f"rounds of {group} micro batches (microbatch_group_size_per_vp_stage), none "
                f"smaller than the {pp} pipeline ranks"
            )
        limit = (
            f"virtual stages work in {rounds}, and there are {count} (global batch "
            f"{request.batch_unit} / (micro batch {request.micro_batch_size} * data-parallel size "
            f"{dims.data_parallel_size}))"
        )
        fix = "Use 1, or a batch or micro batch that makes whole rounds."
    what = "virtual_pipeline_model_parallel_size"
    return Violation(what=what, value=vpp, limit=limit, fix=fix)


def _mamba(request: LaunchRequest) -> Violation | None:
    spec, dims = request.spec, request.dims
    tp, cp = dims.tensor_model_parallel_size, dims.context_parallel_size
    if rules.divides_mamba(spec, tp, cp):
        return None
    heads, groups = spec.num_mamba_heads, spec.mamba_num_groups
    if heads % groups:
        return Violation(
            what="mamba_num_heads",
            value=heads,
            limit=f"it must be a multiple of the {groups} groups of Mamba layers "
            "(--mamba-num-groups, 8 where nobody says)",
            fix=f"Use --mamba-num-groups {math.gcd(heads, groups)}, or more heads.",
        )
    return Violation(
        what="tensor_model_parallel_size, context_parallel_size",
        value=(tp, cp),
        limit=f"the first must divide the {groups} groups of Mamba layers; both together their "
        f"{heads} heads, and the second be a multiple or a divisor of a rank's groups",
        fix="Use powers of two no larger than the groups.",
    )


DEGREE_RULES: tuple[Rule, ...] = (
    rule(
        "heads_over_tp",
        "tc:925-945",
        lambda job: rules.divides_heads(job.spec, job.dims.tensor_model_parallel_size),
        what="tensor_model_parallel_size",
        limit="it must divide the {num_attention_heads} attention heads and be a multiple or "
        "a divisor of the {query_groups} query groups",
        fix="Use a common divisor of both.",
    ),
    rule(
        "ffn_over_tp",
        "megatron/core/utils.py:468 (at build)",
        lambda job: rules.divides_dense_mlp(job.spec, job.dims.tensor_model_parallel_size),
        what="tensor_model_parallel_size",
        limit="it must divide ffn_hidden_size ({ffn_hidden_size}) and the shared experts' size "
        "({moe_shared_expert_intermediate_size})",
        fix="Use a divisor.",
    ),
    Rule(
        name="mamba_over_tp_and_cp",
        source="ssm/mamba_mixer.py:227-247, ssm/mamba_context_parallel.py:91-117 (at build)",
        check=_mamba,
    ),
    rule(
        "linear_replacements",
        "transformer/heterogeneous/linear_replacements.py (run)",
        lambda job: rules.allows_linear_for_tp(
            job.spec,
            job.dims.tensor_model_parallel_size,
            sequence_parallel=job.sequence_parallel,
        ),
        what="tensor_model_parallel_size",
        limit="a linear layer in the place of attention or an MLP does not run with sequence "
        "parallelism",
        fix="Use 1.",
    ),
    rule(
        "heterogeneous_virtual_stages",
        "transformer_layer.py:97, 0.20 transformer_layer.py (at build)",
        lambda job: rules.allows_virtual_stages(
            job.spec, job.dims.virtual_pipeline_model_parallel_size
        ),
        what="virtual_pipeline_model_parallel_size",
        value=lambda job: job.dims.virtual_pipeline_model_parallel_size,
        limit="heterogeneous layers are built for one stage a rank",
        fix="Use 1.",
    ),
    rule(
        "linear_over_tp_and_cp",
        "tc:964-980",
        lambda job: rules.divides_linear(
            job.spec,
            job.dims.tensor_model_parallel_size,
            job.dims.context_parallel_size,
            job.version,
        ),
        what="tensor_model_parallel_size, context_parallel_size",
        value=lambda job: (job.dims.tensor_model_parallel_size, job.dims.context_parallel_size),
        limit="their product must divide the {linear_num_key_heads} key heads and "
        "{linear_num_value_heads} value heads of gated delta nets, and 0.16.1 has no context "
        "parallelism with them",
        fix="Use smaller sizes.",
    ),
    rule(
        "vocab_over_tp",
        "tensor_parallel/utils.py:118 (at build)",
        lambda job: rules.divides_vocab(job.spec, job.dims.tensor_model_parallel_size),
        what="tensor_model_parallel_size",
        limit="it must divide the padded vocabulary ({vocab_size}), which stays as it is",
        fix="Use a divisor.",
    ),
    rule(
        "adapters_over_tp",
        "megatron.bridge.peft.utils.ParallelLinearAdapter (at build)",
        lambda job: rules.divides_adapters(job.spec, job.dims.tensor_model_parallel_size),
        what="tensor_model_parallel_size",
        limit="it must divide the rank of the adapters",
        fix="Use a divisor, or another peft.dim.",
    ),
    Rule(name="experts_over_ep", source="args:1025, tc experts", check=_experts),
    Rule(name="expert_bias", source="tc:1590, moe/shared_experts.py:47", check=_expert_bias),
    rule(
        "expert_gradients",
        "tensor_parallel/layers.py:886, transformer_engine.py:1551 (run, silent)",
        lambda job: rules.reduces_expert_gradients(
            job.spec, job.dims.tensor_model_parallel_size, *_expert_degrees(job)
        ),
        what="expert_tensor_parallel_size",
        limit="without expert parallelism it must be tensor_model_parallel_size "
        "({tensor_model_parallel_size}), or copies of an expert drift apart",
        fix="Make both equal, or raise expert_model_parallel_size.",
    ),
    rule(
        "sequence_pieces",
        "args:818, mappings.py:69 (run)",
        lambda job: rules.divides_sequence(
            job.spec,
            job.dims.tensor_model_parallel_size,
            job.dims.context_parallel_size,
            job.sequence_parallel,
        ),
        what="seq_length",
        limit="it must be a multiple of 2 * {context_parallel_size} with context parallelism, and "
        "each rank's share of {tensor_model_parallel_size} with sequence parallelism",
        fix="Lower one of the degrees.",
    ),
    Rule(
        name="attention_under_cp",
        source="Transformer Engine's backend choice; dot_product_attention.py:58 (run); "
        "pretrain_bert.py get_batch",
        check=_context_parallel,
    ),
    rule(
        "sequence_parallel",
        "args:905, model_parallel_config.py:411, moe_layer.py:380 (run)",
        lambda job: (
            job.dims.tensor_model_parallel_size > 1
            if job.sequence_parallel
            else job.dims.tensor_model_parallel_size == 1 or not job.spec.is_moe
        ),
        what="sequence_parallel",
        limit="it needs tensor_model_parallel_size above 1, and experts with such a size need it",
        fix="Set it exactly when tensor_model_parallel_size is above 1.",
    ),
    rule(
        "rank_order",
        "ps:811",
        lambda job: rules.allows_rank_order(job.spec, job.dims),
        what="use_tp_pp_dp_mapping",
        value=lambda job: job.dims.expert_ranks,
        limit="with a pipeline, etp * ep must equal tp * cp in this rank order",
        fix="Use the default rank order.",
    ),
    rule(
        "encoder",
        "pretrain_vlm.py model_provider",
        lambda job: rules.allows_encoder(job.spec, job.dims),
        what="pipeline_model_parallel_size",
        limit="pretrain_vlm.py takes a pipeline or context parallelism "
        "({context_parallel_size}), and no virtual stages ({virtual_pipeline_model_parallel_size})",
        fix="Use 1, or context_parallel_size=1 without virtual stages.",
    ),
    rule(
        "encoder_zero",
        "fsdp units are TransformerLayers; an encoder's are not planned",
        lambda job: job.spec.vision is None or not job.zero.is_fsdp,
        what="data_parallel_sharding_strategy",
        value=lambda job: job.zero.name,
        limit="a model with an encoder of images is not planned with FSDP",
        fix="Use the distributed optimizer.",
    ),
    rule(
        "whole_batch",
        "num_microbatches_calculator.py:340",
        lambda job: min(job.micro_batch_size, job.batch_unit) > 0 and job.num_microbatches > 0,
        what="global_batch_size",
        value=lambda job: job.batch_schedule.words() if job.batch_schedule else job.batch_unit,
        limit="it must be a multiple of micro_batch_size * data_parallel_size "
        "({micro_batch_size} * {data_parallel_size}) at every size",
        fix="Change the micro batch or the data-parallel size.",
    ),
    Rule(name="two_stacks", source="pretrain_t5.py model_provider", check=_two_stacks),
    Rule(name="interleaving", source="args:575, schedules.py:995-1015", check=_interleaving),
    rule(
        "hybrid_virtual_stages",
        "ssm/mamba_block.py (at build)",
        lambda job: (
            job.dims.virtual_pipeline_model_parallel_size == 1
            or rules.cuts_anywhere(job.spec, job.version)
        ),
        what="virtual_pipeline_model_parallel_size",
        limit="Megatron-LM {version} has no virtual stages for hybrid models",
        fix="Use 1, or Megatron-LM 0.20.",
    ),
    rule(
        "fsdp_no_pipeline",
        "mcore_fsdp_adapter.py:369 (run), args:606",
        lambda job: (
            rules.allows_zero(job.zero, job.dims.num_chunks)
            and (job.dims.num_chunks == 1 or job.sharding in (None, DataParallelSharding.DDP))
        ),
        what="data_parallel_sharding_strategy",
        value=lambda job: job.zero.name,
        limit="the device mesh of FSDP has no pipeline dimension",
        fix="Use pipeline_model_parallel_size 1, or the distributed optimizer.",
    ),
    rule(
        "fsdp_meta_device",
        "training.py:1258, param_and_grad_buffer.py:2221 (run)",
        lambda job: (
            not (job.zero.is_fsdp and job.sharding is None)
            or rules.initializes_on_meta_device(job.spec)
        ),
        what="data_parallel_sharding_strategy",
        value=lambda job: job.zero.name,
        limit="Megatron-FSDP needs --init-model-with-meta-device, or every GPU first holds the "
        "whole model; learned positions and token types would then start with a deviation of 1",
        fix="Use rotary positions (rope), or parallel.zero_stage=1.",
    ),
    rule(
        "optimizer_zero",
        "args:1184-1186",
        lambda job: rules.allows_optimizer(job.optimizer, job.zero, job.version),
        what="optimizer",
        limit="Megatron-LM {version} does not divide its state (ZeRO-{zero:d})",
        fix="Use parallel.zero_stage=0, or adam.",
    ),
    rule(
        "no_empty_stage",
        "Megatron-LM issue 1852",
        lambda job: job.dims.num_chunks <= job.spec.num_units,
        what="pipeline_model_parallel_size * virtual_pipeline_model_parallel_size",
        value=lambda job: job.dims.num_chunks,
        limit="a stage without a unit makes GPUs wait for ever; the model has {num_units} units",
        fix="Use fewer stages.",
    ),
)
