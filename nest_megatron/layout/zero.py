"""ZeRO stages, and what of Megatron's carries them."""

from __future__ import annotations

from enum import IntEnum

from nest_megatron.plain import Name


class DataParallelSharding(Name):
    """Which of Megatron's implementations divides states among data-parallel ranks.

    Each saves checkpoints of its own format, so a job stays with the one that it has.
    """

    DDP = "ddp"
    MEGATRON_FSDP = "megatron_fsdp"
    TORCH_FSDP2 = "torch_fsdp2"

    @property
    def zero_stages(self) -> tuple[ZeroStage, ...]:
        """The ZeRO stages that it has."""
        return {
            DataParallelSharding.DDP: (ZeroStage.NONE, ZeroStage.OPTIMIZER),
            DataParallelSharding.MEGATRON_FSDP: tuple(ZeroStage)[1:],
            DataParallelSharding.TORCH_FSDP2: (ZeroStage.WEIGHTS,),
        }[self]


class ZeroStage(IntEnum):
    """What each data-parallel rank holds a share of instead of a copy.

    * 0: nothing; plain ``DistributedDataParallel``, one all-reduce a step.
    * 1: optimizer state; ``--use-distributed-optimizer``.
    * 2: and gradients; Megatron-FSDP ``optim_grads``.
    * 3: and weights; Megatron-FSDP ``optim_grads_params``.

    Stages 2 and 3 run without pipeline parallelism only (``mcore_fsdp_adapter`` builds its device
    mesh from data, context, expert and tensor ranks alone).
    """

    NONE = 0
    OPTIMIZER = 1
    GRADIENTS = 2
    WEIGHTS = 3

    @property
    def is_fsdp(self) -> bool:
        """Whether Megatron-FSDP carries it, unless a job says otherwise."""
        return self >= ZeroStage.GRADIENTS

    @property
    def sharding(self) -> DataParallelSharding:
        """What carries it, unless a job says otherwise."""
        return DataParallelSharding.MEGATRON_FSDP if self.is_fsdp else DataParallelSharding.DDP


def uses_megatron_fsdp(zero: ZeroStage, sharding: DataParallelSharding | None) -> bool:
    """Whether ``--use-megatron-fsdp`` is on."""
    return (sharding or zero.sharding) is DataParallelSharding.MEGATRON_FSDP


def shards_optimizer(zero: ZeroStage, sharding: DataParallelSharding | None) -> bool:
    """Whether ``--use-distributed-optimizer`` is on: FSDP of PyTorch divides states itself."""
    divides = zero >= ZeroStage.OPTIMIZER or uses_megatron_fsdp(zero, sharding)
    return divides and sharding is not DataParallelSharding.TORCH_FSDP2


#: What Megatron-FSDP calls the stages.
STRATEGIES = {
    ZeroStage.NONE: "no_shard",
    ZeroStage.OPTIMIZER: "optim",
    ZeroStage.GRADIENTS: "optim_grads",
    ZeroStage.WEIGHTS: "optim_grads_params",
}
ZERO_STAGES = {strategy: zero for zero, strategy in STRATEGIES.items()}
