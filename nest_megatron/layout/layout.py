"""How a job is laid over its ranks: degrees, batch split, stages, recomputation and sharding.

``layout_arguments`` names it in Megatron's words.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from nest_megatron.errors import UserInputError
from nest_megatron.layout.dims import DEGREES, ParallelDims
from nest_megatron.layout.recompute import (
    NO_RECOMPUTE,
    RECOMPUTE_ARGUMENTS,
    Recompute,
    RecomputeGranularity,
)
from nest_megatron.layout.stage_layout import StagePartition, layout_string
from nest_megatron.layout.zero import STRATEGIES, DataParallelSharding, ZeroStage, shards_optimizer
from nest_megatron.model.execution import PLAIN, Execution
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.plain import frozen


@frozen
class PartialLayout:
    """A layout whose stages are not decided.

    Args:
        global_batch_size: sequences of one optimizer step.
        micro_batch_size: sequences that one replica works on at a time.

    Raises:
        UserInputError: if the micro batches do not divide the global batch over the replicas.
    """

    dims: ParallelDims
    global_batch_size: int
    micro_batch_size: int
    sequence_parallel: bool
    recompute: Recompute = NO_RECOMPUTE
    zero: ZeroStage = ZeroStage.OPTIMIZER
    execution: Execution = PLAIN

    def __post_init__(self) -> None:
        together = self.micro_batch_size * self.dims.data_parallel_size
        if self.micro_batch_size < 1 or self.global_batch_size % together:
            raise UserInputError(
                "train.global_batch_size",
                self.global_batch_size,
                f"it must be a multiple of micro batch times data-parallel size ({together})",
                "Change the global batch, the micro batch, or the degrees.",
            )

    @property
    def num_gpus(self) -> int:
        """Ranks that it is laid over."""
        return self.dims.world_size

    @property
    def num_microbatches(self) -> int:
        """Micro batches that each replica works through in one step."""
        return self.global_batch_size // (self.micro_batch_size * self.dims.data_parallel_size)

    @property
    def sizes(self) -> dict[str, int]:
        """The degrees and the micro batch, by Megatron's names."""
        return {**self.dims.degrees, "micro_batch_size": self.micro_batch_size}

    def partial_fields(self) -> dict[str, Any]:
        """What is decided before the stages are, by name."""
        return {each.name: getattr(self, each.name) for each in dataclasses.fields(PartialLayout)}

    def with_stages(
        self, partition: StagePartition, sharding: DataParallelSharding | None = None
    ) -> Layout:
        """The whole layout.

        Args:
            sharding: what divides states among replicas; ``None`` is what carries the ZeRO stage.
        """
        sharding = sharding or self.zero.sharding
        return Layout(**self.partial_fields(), partition=partition, sharding=sharding)


@frozen
class Layout(PartialLayout):
    """A whole layout, as a launch needs it.

    Args:
        partition: which units of the model each stage holds.
        sharding: what divides states among replicas.
        overlap_grad_reduce: gradients are reduced during backward passes.
        overlap_param_gather: divided weights are gathered during forward passes.
    """

    partition: StagePartition
    sharding: DataParallelSharding
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True

    def without_stages(self) -> PartialLayout:
        """What is decided of it before its stages are."""
        return PartialLayout(**self.partial_fields())

    @property
    def shards_optimizer(self) -> bool:
        """Whether ``--use-distributed-optimizer`` is on."""
        return shards_optimizer(self.zero, self.sharding)

    @property
    def uses_megatron_fsdp(self) -> bool:
        """Whether ``--use-megatron-fsdp`` is on."""
        return self.sharding is DataParallelSharding.MEGATRON_FSDP


#: Names that ``layout_arguments`` gives a value.
LAYOUT_ARGUMENTS = (
    *DEGREES,
    "sequence_parallel",
    "pipeline_model_parallel_layout",
    *RECOMPUTE_ARGUMENTS,
    "use_distributed_optimizer",
    "use_megatron_fsdp",
    "data_parallel_sharding_strategy",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "use_torch_fsdp2",
)


def layout_arguments(spec: TransformerSpec, layout: Layout) -> dict[str, Any]:
    """What a layout sets in a job, by Megatron's names; ``None`` is a flag left out."""
    recompute, granularity = layout.recompute, layout.recompute.granularity
    virtual = layout.dims.virtual_pipeline_model_parallel_size
    fsdp = layout.uses_megatron_fsdp
    return {
        **layout.dims.degrees,
        "virtual_pipeline_model_parallel_size": virtual if virtual > 1 else None,
        "sequence_parallel": layout.sequence_parallel,
        "pipeline_model_parallel_layout": (
            None if layout.dims.is_one_stage else layout_string(spec, layout.partition)
        ),
        "recompute_granularity": None if granularity is RecomputeGranularity.NONE else granularity,
        "recompute_method": recompute.method,
        "recompute_num_layers": recompute.num_layers,
        "recompute_modules": recompute.modules,
        "use_distributed_optimizer": layout.shards_optimizer,
        "use_megatron_fsdp": fsdp,
        "data_parallel_sharding_strategy": STRATEGIES[layout.zero] if fsdp else None,
        "overlap_grad_reduce": layout.overlap_grad_reduce,
        "overlap_param_gather": layout.shards_optimizer and layout.overlap_param_gather,
        "use_torch_fsdp2": layout.sharding is DataParallelSharding.TORCH_FSDP2,
    }
