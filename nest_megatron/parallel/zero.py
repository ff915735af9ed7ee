"""ZeRO stages in the forms that Megatron launches."""

from __future__ import annotations

from enum import IntEnum


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
        """Whether Megatron-FSDP carries it."""
        return self >= ZeroStage.GRADIENTS
