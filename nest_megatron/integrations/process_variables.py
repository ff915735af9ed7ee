"""The one place that changes the environment of this process, which all its threads share.

Megatron, torch, NCCL and CUDA read their variables from it, some as they start: ranks as ``srun``
gives them, the rank of a permuted placement, the connections to a device that an overlap needs.
Only a process that trains, or that stands for one, changes it, before the framework reads it. All
else gets its variables as a mapping, and a child process its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from nest_megatron.integrations.slurm import rank_variables


def set_variables(variables: Mapping[str, str | None]) -> None:
    """Set variables of this process; one that is ``None`` is unset."""
    for name, text in variables.items():
        if text is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = text


def set_rank_variables() -> None:
    """Set what torch reads of a rank where ``srun`` alone numbers them."""
    set_variables(rank_variables(os.environ))
