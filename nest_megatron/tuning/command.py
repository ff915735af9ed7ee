"""The command of a run: the user's own, with a plan's flags, short, and leaving nothing behind."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nest_megatron.cluster.placement import torchrun_words
from nest_megatron.config.job import ReadCommand
from nest_megatron.errors import UserInputError
from nest_megatron.history.store import VARIABLE
from nest_megatron.integrations.launchers import TORCHRUN
from nest_megatron.integrations.megatron_lm.attach import LAUNCHER
from nest_megatron.integrations.megatron_lm.short_run import short_run
from nest_megatron.layout.plan import ParallelPlan, launch_size, script_words

#: Options of torchrun that say where its agents meet.
_MEETING = ("--standalone", "--rdzv", "--master-addr", "--master-port")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCommand:
    """What starts a run, in parts that launchers put together.

    Args:
        launcher: what the user starts the script with (``torchrun ...``, ``srun python``).
        script: the training script, or ``-m`` and a module.
        argv: its arguments, ours among them.
        environment: variables to set, or, where ``None``, not to set.
    """

    launcher: tuple[str, ...]
    script: tuple[str, ...]
    argv: tuple[str, ...]
    environment: Mapping[str, str | None]
    num_nodes: int
    gpus_per_node: int

    def words(self) -> list[str]:
        """The whole command, as it is started on one host."""
        return [*self.launcher, *self.script, *self.argv]

    def variables(self) -> dict[str, str]:
        """The environment of the process that is started."""
        merged = {**os.environ, **self.environment}
        return {name: value for name, value in merged.items() if value is not None}

    @property
    def starts_ranks(self) -> bool:
        """Whether the user's own launcher starts ranks on every host (``srun``, ``mpirun``)."""
        return bool(self.launcher) and not self.is_torchrun and not _is_python(self.launcher[0])

    @property
    def is_torchrun(self) -> bool:
        """Whether the first program of the command is torchrun."""
        return is_torchrun(self.launcher)


def run_command(
    command: ReadCommand, plan: ParallelPlan, pinned: Path, iterations: int, history: Path
) -> RunCommand:
    """The command of a short run of a pinned plan.

    Args:
        command: the user's own; the flags of the plan are those of its ``launch``.
        pinned: the plan's file.
        iterations: steps to watch; one more begins, which ends the last of them.
        history: the file that the run's record is added to.

    Raises:
        UserInputError: for a command without a script, or a job that cannot be run for a while.
    """
    if not command.script:
        raise UserInputError(
            "--from",
            " ".join(command.argv[:4]),
            "it has no training script, so it cannot be started",
            "Give the whole command: torchrun ... pretrain_gpt.py <flags>.",
        )
    launch = plan.launch[LAUNCHER]
    ours = ("+nest=pinned", f"nest.plan={pinned}", f"nest.watch={iterations}")
    num_nodes, per_node = launch_size(plan)
    launcher = command.launcher or tuple(torchrun_words(num_nodes, per_node))
    return RunCommand(
        launcher=_once(launcher) if is_torchrun(launcher) else launcher,
        script=script_words(command.script),
        argv=(*short_run(launch.argv, command.version, iterations + 1), *ours),
        environment={**command.environment, **launch.environment, VARIABLE: str(history)},
        num_nodes=num_nodes,
        gpus_per_node=per_node,
    )


def is_torchrun(launcher: tuple[str, ...]) -> bool:
    """Whether a launcher's first program is torchrun.

    >>> is_torchrun(("python", "-m", "torch.distributed.run", "--nnodes", "2"))
    True
    >>> is_torchrun(("srun", "torchrun", "--nnodes", "2"))
    False
    """
    first = launcher[0].rpartition("/")[2] if launcher else ""
    return first in TORCHRUN or (_is_python(first) and any(t in launcher for t in TORCHRUN))


def _is_python(word: str) -> bool:
    return word.rpartition("/")[2].startswith("python")


def meets(launcher: tuple[str, ...]) -> bool:
    """Whether torchrun's options say where its agents meet."""
    return any(word.replace("_", "-").startswith(_MEETING) for word in launcher)


def _once(launcher: tuple[str, ...]) -> tuple[str, ...]:
    """Torchrun without restarts: a run that fails has told what there is to know."""
    restarts = any(word.replace("_", "-").startswith("--max-restarts") for word in launcher)
    return (*launcher, "--max-restarts=0") if restarts else launcher
