"""Which units of the layer sequence each virtual stage holds."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from nest_megatron.errors import UserInputError


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePartition:
    """The layer sequence cut into virtual stages, as in ``PipelineParallelLayerLayout``.

    Chunk ``k`` holds units ``boundaries[k] .. boundaries[k+1]`` and lies on pipeline rank ``k %
    pp`` as its virtual stage ``k // pp``.

    Args:
        boundaries: ``pp * vpp + 1`` unit indices, strictly increasing from 0 to the number of units
            (a chunk without units makes Megatron's GPUs wait for ever, issue 1852).
        pipeline_model_parallel_size: number of pipeline ranks.
    """

    boundaries: tuple[int, ...]
    pipeline_model_parallel_size: int

    def __post_init__(self) -> None:
        rises = all(a < b for a, b in pairwise(self.boundaries))
        if self.boundaries[:1] != (0,) or self.num_chunks < 1 or not rises:
            raise UserInputError(
                "stage partition boundaries",
                self.boundaries,
                "they rise strictly from 0, so that every virtual stage holds a unit",
                "Use fewer stages than units.",
            )
        if self.num_chunks % self.pipeline_model_parallel_size:
            raise UserInputError(
                "stage partition",
                self.num_chunks,
                f"chunks come in whole rounds of {self.pipeline_model_parallel_size} ranks",
                "Give every rank the same number of virtual stages.",
            )

    @property
    def num_chunks(self) -> int:
        """Virtual stages in the whole pipeline."""
        return len(self.boundaries) - 1

    def chunk(self, index: int) -> range:
        """Units of one chunk."""
        return range(self.boundaries[index], self.boundaries[index + 1])

    def chunks_of_rank(self, pipeline_rank: int) -> tuple[range, ...]:
        """Units of each virtual stage of one pipeline rank, in order of virtual stage."""
        step = self.pipeline_model_parallel_size
        return tuple(self.chunk(k) for k in range(pipeline_rank, self.num_chunks, step))
