"""The degrees of parallelism of a job, as one small validated value."""

from __future__ import annotations

from operator import attrgetter

from nest_megatron.errors import UserInputError
from nest_megatron.plain import Name, frozen


class RankOrder(Name):
    """How Megatron numbers ranks over the grid; the leftmost dimension varies fastest.

    Source: ``megatron.training.initialize``; the second is ``--use-tp-pp-dp-mapping``.
    """

    TP_CP_EP_DP_PP = "tp-cp-ep-dp-pp"
    TP_CP_EP_PP_DP = "tp-cp-ep-pp-dp"


#: Fields of ``ParallelDims`` that are degrees, as tables name them.
SHORT_DEGREES = {
    "tensor_model_parallel_size": "TP",
    "pipeline_model_parallel_size": "PP",
    "virtual_pipeline_model_parallel_size": "VPP",
    "context_parallel_size": "CP",
    "data_parallel_size": "DP",
    "expert_model_parallel_size": "EP",
    "expert_tensor_parallel_size": "ETP",
}
DEGREES = tuple(SHORT_DEGREES)
#: Degrees that change what one rank does in a layer.
LAYER_DEGREES = (
    "tensor_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
#: Degrees whose product is the ranks of one replica.
REPLICA_DEGREES = (
    "tensor_model_parallel_size",
    "context_parallel_size",
    "pipeline_model_parallel_size",
)
_values = attrgetter(*DEGREES)


@frozen
class ParallelDims:
    """Degrees, spelled as Megatron spells them.

    Args:
        data_parallel_size: replicas of the dense part.
        virtual_pipeline_model_parallel_size: model chunks on each pipeline rank; 1 means the plain
            1F1B schedule (Megatron writes ``None``).

    Raises:
        UserInputError: if a degree is not a positive whole number, or the expert grid
            ``etp * ep * edp * pp`` cannot be laid over the same ranks.
    """

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    data_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int = 1
    rank_order: RankOrder = RankOrder.TP_CP_EP_DP_PP

    def __post_init__(self) -> None:
        for name, value in zip(DEGREES, _values(self), strict=True):
            if type(value) is not int or value < 1:
                raise UserInputError(
                    f"parallel.{name}",
                    value,
                    "a degree is a whole number of at least 1",
                    "Give a positive whole number.",
                )
        if self.ranks_per_stage % self.expert_ranks:
            raise UserInputError(
                "parallel.expert_model_parallel_size * parallel.expert_tensor_parallel_size",
                self.expert_ranks,
                f"it must divide the {self.ranks_per_stage} ranks of one pipeline stage (tp*cp*dp)",
                "Lower one of the two, or raise the data-parallel size.",
            )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.ranks_per_stage * self.pipeline_model_parallel_size

    @property
    def degrees(self) -> dict[str, int]:
        """The degrees by Megatron's names."""
        return {name: getattr(self, name) for name in DEGREES}

    @property
    def ranks_per_stage(self) -> int:
        """Ranks that hold the same layers: ``tp * cp * dp``."""
        tp, cp = self.tensor_model_parallel_size, self.context_parallel_size
        return tp * cp * self.data_parallel_size

    @property
    def expert_ranks(self) -> int:
        """Ranks that together hold one copy of a layer's experts: ``etp * ep``."""
        return self.expert_tensor_parallel_size * self.expert_model_parallel_size

    @property
    def expert_data_parallel_size(self) -> int:
        """Replicas of the experts."""
        return self.ranks_per_stage // self.expert_ranks

    @property
    def num_chunks(self) -> int:
        """Virtual stages in the whole pipeline."""
        return self.pipeline_model_parallel_size * self.virtual_pipeline_model_parallel_size

    @property
    def is_one_stage(self) -> bool:
        """Whether one rank holds all layers."""
        return self.pipeline_model_parallel_size == 1
