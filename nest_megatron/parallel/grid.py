"""Everything a launch fixes except which stage holds which layers."""

from __future__ import annotations

from dataclasses import dataclass

from nest_megatron.errors import UserInputError
from nest_megatron.model.execution import PLAIN, Execution
from nest_megatron.parallel.dims import ParallelDims
from nest_megatron.parallel.recompute import NO_RECOMPUTE, Recompute
from nest_megatron.parallel.zero import ZeroStage


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Degrees, batch split, recomputation, ZeRO stage and execution of a job.

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
            what = "train.global_batch_size"
            limit = f"it must be a multiple of micro batch times data-parallel size ({together})"
            fix = "Change the global batch, the micro batch, or the degrees."
            raise UserInputError(what, value=self.global_batch_size, limit=limit, fix=fix)

    @property
    def num_microbatches(self) -> int:
        """Micro batches that each replica works through in one step."""
        return self.global_batch_size // (self.micro_batch_size * self.dims.data_parallel_size)
