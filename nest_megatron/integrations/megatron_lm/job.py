"""A Megatron-LM training job as its user wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nest_megatron.cluster.records import Precision
from nest_megatron.cost_model.memory_flags import not_modelled, text
from nest_megatron.cost_model.target_defaults import MEGATRON_LM_0_16
from nest_megatron.cost_model.targets import Target
from nest_megatron.parallel.cuda_graphs import CudaGraphs
from nest_megatron.parallel.execution_argv import EXECUTION_ARGUMENTS
from nest_megatron.parallel.recompute import Recompute
from nest_megatron.parallel.zero import DataParallelSharding, ZeroStage

#: Arguments that say how many virtual stages a rank has.
VIRTUAL_STAGES = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
#: Arguments that state the recomputation.
RECOMPUTE = (
    "recompute_granularity",
    "recompute_activations",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "moe_layer_recompute",
)
#: Arguments that a plan may set; what a user gives of them stays fixed.
PARALLEL_ARGUMENTS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "sequence_parallel",
    "use_tp_pp_dp_mapping",
    *VIRTUAL_STAGES,
    "pipeline_model_parallel_layout",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "micro_batch_size",
    *RECOMPUTE,
    "use_distributed_optimizer",
    "use_megatron_fsdp",
    "use_torch_fsdp2",
    "data_parallel_sharding_strategy",
    "overlap_grad_reduce",
    "overlap_param_gather",
    *(name for names in EXECUTION_ARGUMENTS.values() for name in names),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronJob:
    """A training job as the user wrote it, the model's shape apart.

    Args:
        global_batch_size: ``None`` where the user leaves it to Megatron (one micro batch a rank).
        batch_unit: what every batch on the way up is a multiple of (``--rampup-batch-size``).
        fixed: the parallel choices that the user made, by Megatron's names.
        recompute: the user's recomputation, ``None`` if they said nothing of it.
        zero: the user's ZeRO stage, ``None`` if they said nothing of it.
        sharding: what divides states among the job's data-parallel ranks.
        ckpt_format: the checkpoint format, ``None`` if they said nothing of it.
        save_interval: steps between the checkpoints that it writes, if it writes any.
        memory_flags: what memory and traffic depend on beside the layout, by Megatron's names
            (``cost_model/memory_flags.py``).
        graphs: what of it CUDA graphs capture.
        capturable: its layers are Megatron's own, and every step runs as many micro batches of the
            same shapes, so that CUDA graphs could hold them.
        closed: fields of ``Execution`` that it leaves no room for.
        counts_on_host: numbers of tokens are read by the host before the exchange with experts.
        target: the framework and release whose defaults fill what it leaves open.
        world_size: number of ranks where the launcher says it.
        passthrough: flags that Megatron does not have, kept untouched.
        notes: what was assumed or will be ignored, one sentence each.
    """

    version: str
    script: str
    global_batch_size: int | None
    batch_unit: int | None
    micro_batch_size: int | None
    seq_length: int
    precision: Precision
    fp8_recipe: str
    transformer_impl: str
    attention_backend: str
    fixed: Mapping[str, Any]
    recompute: Recompute | None
    zero: ZeroStage | None
    sharding: DataParallelSharding = DataParallelSharding.DDP
    ckpt_format: str | None = None
    graphs: CudaGraphs | None = None
    capturable: bool = True
    closed: frozenset[str] = frozenset()
    counts_on_host: bool = False
    target: Target = MEGATRON_LM_0_16
    save_interval: int | None = None
    memory_flags: Mapping[str, Any]
    use_distributed_optimizer: bool
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    moe_grouped_gemm: bool
    world_size: int | None
    passthrough: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def not_modelled(self) -> tuple[str, ...]:
        """Flags whose effect on memory is not known here: Megatron's, and those that it lacks."""
        own = (word.partition("=")[0] for word in self.passthrough if word.startswith("--"))
        return tuple(dict.fromkeys((*not_modelled(self.memory_flags), *own)))

    @property
    def optimizer(self) -> str:
        """Its optimizer, by Megatron's name."""
        return text(self.memory_flags.get("optimizer") or "adam")
