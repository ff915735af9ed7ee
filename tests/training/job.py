"""A plan's model on one rank, ready to train with megatron-core's own parts, and one step of it.

The model, the gradient buffers, the optimizer and the pipeline schedule are megatron-core's; what
Megatron-LM's ``megatron.training`` adds around them is written here, and names its source. Tests of
training use it, and the benchmark that compares predicted steps with real ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.rulebook.degrees import launched_expert_tensor_size
from tests.contract.megatron_model import transformer_config

#: How training here differs from Megatron's usual configuration: in 32 bits, so that sums differ by
#: their order alone, and without fused kernels, which are a GPU's.
CHANGES = {
    "bf16": False,
    "params_dtype": torch.float32,
    "pipeline_dtype": torch.float32,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A plan's model on this rank, ready to train."""

    plan: ParallelPlan
    chunks: list[Any]
    optimizer: Any


def initialize_model_parallel(plan: ParallelPlan) -> None:
    """Make Megatron's groups in the process group of the job.

    Source: ``megatron.training.initialize._initialize_distributed``.
    """
    chosen = plan.arguments
    parallel_state.initialize_model_parallel(
        chosen["tensor_model_parallel_size"],
        chosen["pipeline_model_parallel_size"],
        chosen["virtual_pipeline_model_parallel_size"],
        context_parallel_size=chosen["context_parallel_size"],
        expert_model_parallel_size=chosen["expert_model_parallel_size"],
        expert_tensor_parallel_size=launched_expert_tensor_size(plan.model, plan.layout.dims),
        order=plan.layout.dims.rank_order.value,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def config_of(plan: ParallelPlan) -> Any:
    """The plan's ``TransformerConfig``, with ``CHANGES``.

    Source: ``megatron.training.arguments.core_transformer_config_from_args``. Overlapped, Megatron
    frees a stage's output while it is on its way: NCCL's stream keeps it until then, gloo does not.
    """
    chosen, spec = plan.arguments, plan.model
    interleaved = chosen["virtual_pipeline_model_parallel_size"] is not None
    return transformer_config(
        spec,
        plan.layout.dims,
        sequence_parallel=chosen["sequence_parallel"],
        recompute=plan.layout.recompute,
        pipeline_model_parallel_layout=chosen["pipeline_model_parallel_layout"],
        perform_initialization=True,  # this is where Megatron marks what tensor ranks share
        hidden_dropout=spec.hidden_dropout,
        attention_dropout=spec.attention_dropout,
        deallocate_pipeline_outputs=not interleaved,
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        finalize_model_grads_func=finalize_model_grads,
        **CHANGES,
    )


def models_of(plan: ParallelPlan, config: Any) -> list[Any]:
    """The model of each of this rank's virtual stages."""
    return [_model(plan, config, vp_stage) for vp_stage in _virtual_stages(plan)]


def _virtual_stages(plan: ParallelPlan) -> list[int | None]:
    count = plan.arguments["virtual_pipeline_model_parallel_size"]
    return [None] if count is None else list(range(count))


def _model(plan: ParallelPlan, config: Any, vp_stage: int | None) -> Any:
    """One virtual stage. Source: ``gpt_builders.gpt_builder`` with the local layers."""
    spec = plan.model
    where = {"ignore_virtual": False, "vp_stage": vp_stage}
    layers = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=False,
        normalization=spec.normalization,
        vp_stage=vp_stage,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=layers,
        vocab_size=spec.padded_vocab_size(plan.layout.dims.tensor_model_parallel_size),
        max_sequence_length=spec.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(**where),
        post_process=parallel_state.is_pipeline_last_stage(**where),
        share_embeddings_and_output_weights=not spec.untie_embeddings_and_output_weights,
        position_embedding_type=spec.position_embedding_type,
        rotary_percent=spec.rotary_percent,
        rotary_base=spec.rotary_base,
        vp_stage=vp_stage,
    )
    model.model_type = ModelType.encoder_or_decoder
    return model


def job_of(
    plan: ParallelPlan, config: Any, models: list[Any], *, bucket_size: int | None = None
) -> Job:
    """Gradient buffers and optimizer, and when gradients are reduced.

    Args:
        bucket_size: parameters that are reduced together; ``None`` takes Megatron's own size.

    Source: ``megatron.training.training.get_model`` and ``train``.
    """
    chosen = plan.arguments
    buffers = _buffer_config(plan, bucket_size)
    chunks = [
        DistributedDataParallel(config, buffers, model, disable_bucketing=index > 0)
        for index, model in enumerate(models)
    ]
    if chosen["overlap_grad_reduce"]:
        config.no_sync_func = _one_or_all([chunk.no_sync for chunk in chunks])
        config.grad_sync_func = _one_or_all([chunk.start_grad_sync for chunk in chunks])
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            params_dtype=torch.float32,
            use_distributed_optimizer=chosen["use_distributed_optimizer"],
            overlap_param_gather=chosen["overlap_param_gather"],
            clip_grad=1.0,
        ),
        chunks,
    )
    return Job(plan=plan, chunks=chunks, optimizer=optimizer)


def _buffer_config(plan: ParallelPlan, bucket_size: int | None) -> Any:
    chosen = plan.arguments
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        check_for_nan_in_grad=True,
        bucket_size=bucket_size,
        overlap_grad_reduce=chosen["overlap_grad_reduce"],
        overlap_param_gather=chosen["overlap_param_gather"],
        use_distributed_optimizer=chosen["use_distributed_optimizer"],
    )


def _one_or_all(items: list[Any]) -> Any:
    return items[0] if len(items) == 1 else items


def step(job: Job, number: int) -> tuple[float | None, float]:
    """One step: the loss, known to the last stage alone, and the norm of all gradients."""
    for chunk in job.chunks:
        chunk.zero_grad_buffer()
    job.optimizer.zero_grad()
    plan, grid = job.plan, job.plan.layout
    losses = get_forward_backward_func()(
        forward_step_func=_forward,
        data_iterator=_one_or_all([_micro_batches(plan, number) for _ in job.chunks]),
        model=_one_or_all(job.chunks),
        num_microbatches=grid.num_microbatches,
        seq_length=plan.train.seq_length,
        micro_batch_size=grid.micro_batch_size,
        forward_only=False,
    )
    stepped, norm, _ = job.optimizer.step()
    assert stepped, "the optimizer refused the gradients"
    if not losses:
        return None, float(norm)
    loss = torch.stack([micro["loss"] for micro in losses]).mean()
    group = parallel_state.get_data_parallel_group()
    torch.distributed.all_reduce(loss, group=group)
    return float(loss) / group.size(), float(norm)


def _micro_batches(plan: ParallelPlan, step: int) -> Iterator[torch.Tensor]:
    """This replica's share of a step's tokens, which are the same in every layout."""
    spec, grid = plan.model, plan.layout
    shape = (grid.global_batch_size, spec.seq_length + 1)
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(spec.vocab_size, shape, generator=generator)
    shares = tokens.chunk(parallel_state.get_data_parallel_world_size())
    yield from shares[parallel_state.get_data_parallel_rank()].split(grid.micro_batch_size)


def _forward(batches: Iterator[torch.Tensor], chunk: Any) -> tuple[torch.Tensor, Any]:
    """Source: ``pretrain_gpt.forward_step``."""
    batch = next(batches)
    tokens, labels = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
    length = tokens.shape[1]
    positions = torch.arange(length).expand_as(tokens)
    hidden = torch.ones(1, 1, length, length).tril() < 0.5

    def loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mean = output.mean()
        return mean, {"loss": mean.detach().clone()}  # the schedule divides the mean in place

    return chunk(tokens, positions, hidden, labels=labels), loss
