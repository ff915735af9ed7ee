"""What Slurm tells a job in variables."""

from __future__ import annotations

from collections.abc import Mapping

from nest_megatron.integrations.launchers import SLURM_VARIABLES
from nest_megatron.integrations.shell_script.values import unknown

#: What Slurm tells each job or task alone.
_OF_A_RUN = ("JOB_ID", "JOBID", "JOB_NODELIST", "NODELIST", "PROCID", "NODEID", "LOCALID")


def variables(options: Mapping[str, str]) -> dict[str, str]:
    """The variables of a job that was given these options."""
    found = {name: value for option, value in options.items() for name in SLURM_VARIABLES[option]}
    return found | {f"SLURM_{name}": unknown(f"$SLURM_{name}") for name in _OF_A_RUN}
