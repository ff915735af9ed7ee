"""The one place that changes the environment of this process, which all its threads share.

Megatron, torch, NCCL and CUDA read their variables from it, some as they start: ranks as ``srun``
gives them, the rank of a permuted placement, the connections to a device that an overlap needs.
Only a process that trains, or that stands for one, changes it, before the framework reads it. All
else gets its variables as a mapping, and a child process its own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from nest_megatron.cluster.topology import hosts_of

#: Variables of a process.
Environment = Mapping[str, str]
#: Ports for ``MASTER_PORT``: below Linux's ephemeral range, one for each of many jobs.
_FIRST_PORT, _NUM_PORTS = 15_000, 10_000


def rank_variables(environment: Environment) -> dict[str, str]:
    """``RANK`` and its kin for a task of ``srun`` that has none of them; nothing outside Slurm.

    A script that exports them itself is left alone, and so is a step of one task.
    """
    said = {"RANK", "WORLD_SIZE"} & environment.keys()
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "1")
    if said or "SLURM_PROCID" not in environment or int(tasks) <= 1:
        return {}
    hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", "")
    job, step = (
        int(re.sub(r"\D", "", environment.get(name, "")) or 0)
        for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")
    )
    own = {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "MASTER_ADDR": first_host(hosts) or "localhost",
        "MASTER_PORT": str(_FIRST_PORT + (job * 16 + step) % _NUM_PORTS),
    }
    return {name: value for name, value in own.items() if name not in environment}


def with_rank_variables(environment: Environment) -> dict[str, str]:
    """The environment of a process with what ``srun`` says in the names of torch."""
    return {**environment, **rank_variables(environment)}


def first_host(nodelist: str) -> str:
    """The first host of a Slurm node list; nothing of an empty one."""
    return next(iter(hosts_of(nodelist)), "")


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
