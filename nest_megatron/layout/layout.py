"""How a job is laid over its ranks: degrees, batch split, stages, recomputation and sharding."""

from __future__ import annotations

import dataclasses

from nest_megatron.errors import UserInputError
from nest_megatron.layout.dims import ParallelDims
from nest_megatron.layout.partition import StagePartition
from nest_megatron.layout.recompute import NO_RECOMPUTE, Recompute
from nest_megatron.layout.zero import DataParallelSharding, ZeroStage, shards_optimizer
from nest_megatron.model.execution import PLAIN, Execution
from nest_megatron.plain import frozen_record


@frozen_record
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

    def with_stages(
        self, partition: StagePartition, sharding: DataParallelSharding | None = None
    ) -> Layout:
        """The whole layout.

        Args:
            sharding: what divides states among replicas; ``None`` is what carries the ZeRO stage.
        """
        decided = {each.name: getattr(self, each.name) for each in _DECIDED}
        return Layout(**decided, partition=partition, sharding=sharding or self.zero.sharding)


_DECIDED = dataclasses.fields(PartialLayout)


@frozen_record
class Layout(PartialLayout):
    """A whole layout, as a launch needs it.

    Args:
        partition: which units of the model each stage holds.
        sharding: what divides states among replicas.
        overlap_grad_reduce: gradients are reduced beside backward passes.
        overlap_param_gather: divided weights are gathered beside forward passes.
    """

    partition: StagePartition
    sharding: DataParallelSharding
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True

    def without_stages(self) -> PartialLayout:
        """What is decided of it before its stages are."""
        return PartialLayout(**{each.name: getattr(self, each.name) for each in _DECIDED})

    @property
    def shards_optimizer(self) -> bool:
        """Whether ``--use-distributed-optimizer`` is on."""
        return shards_optimizer(self.zero, self.sharding)

    @property
    def uses_megatron_fsdp(self) -> bool:
        """Whether ``--use-megatron-fsdp`` is on."""
        return self.sharding is DataParallelSharding.MEGATRON_FSDP
