"""Sizes of Slurm's jobs: what ``sbatch`` and ``#SBATCH`` lines say, and ``srun`` takes over."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from nest_megatron.integrations.shell_script.values import unknown

#: Options of a job, and the variables that say them inside of it.
_VARIABLES = {
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
}
_SHORT = {"N": "nodes", "n": "ntasks"}
#: What Slurm tells each job or task alone.
_OF_A_RUN = ("JOB_ID", "JOBID", "JOB_NODELIST", "NODELIST", "PROCID", "NODEID", "LOCALID")
_STATED = re.compile(r"-[Nn]\d*|--(nodes|ntasks|ntasks-per-node)(=.*)?")


def options_of(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The sizes among the options of ``sbatch``.

    >>> dict(options_of(["-N", "4", "--ntasks-per-node=8", "--gpus-per-node=h100:8"]))
    {'nodes': '4', 'ntasks-per-node': '8', 'gpus-per-node': '8'}
    """
    for place, word in enumerate(words):
        found = re.fullmatch(r"--([a-z-]+)(?:=(.*))?|-([Nn])(.*)", word)
        if found is None:
            continue
        following = words[place + 1] if place + 1 < len(words) else ""
        name = found[1] or _SHORT[found[3]]
        value = (found[2] or found[4] or following).rpartition(":")[2]
        if name in _VARIABLES and value.isdigit():
            yield name, value


def directives(source: str) -> dict[str, str]:
    """The sizes on the ``#SBATCH`` lines of a script."""
    lines = re.findall(r"^#SBATCH[ \t]+([^#\n]+)", source, re.MULTILINE)
    return dict(options_of([word for line in lines for word in line.split()]))


def variables(options: Mapping[str, str]) -> dict[str, str]:
    """The variables of a job that was given these options."""
    found = {name: value for option, value in options.items() for name in _VARIABLES[option]}
    return found | {f"SLURM_{name}": unknown(f"$SLURM_{name}") for name in _OF_A_RUN}


def with_sizes(words: tuple[str, ...], options: Mapping[str, str]) -> tuple[str, ...]:
    """``srun`` with the sizes of its job, unless it states its own."""
    if words[0].rpartition("/")[2] != "srun" or any(map(_STATED.fullmatch, words)):
        return words
    names = ("nodes", "ntasks-per-node", "ntasks")
    sizes = [f"--{name}={options[name]}" for name in names if name in options]
    return (words[0], *sizes, *words[1:])
