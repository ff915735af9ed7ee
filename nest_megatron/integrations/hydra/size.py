"""How many GPUs an application runs on, and whether this process is one of several."""

from __future__ import annotations

from collections.abc import Mapping

from nest_megatron.errors import UserInputError
from nest_megatron.integrations.hydra.view import AppView
from nest_megatron.integrations.slurm import rank_variables

#: Variables that a launcher gives to each of the processes that it starts.
_OF_LAUNCHERS = ("WORLD_SIZE", "LOCAL_RANK")


def launched(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with what ``srun`` says in the names of torch."""
    return {**environment, **rank_variables(environment)}


def is_launched(environment: Mapping[str, str]) -> bool:
    """Whether a launcher started this process for training; otherwise somebody is looking."""
    return any(name in environment for name in _OF_LAUNCHERS)


def is_first(environment: Mapping[str, str]) -> bool:
    """Whether this is the process that speaks for all."""
    rank = environment.get("RANK", environment.get("LOCAL_RANK", "0"))
    return rank == "0" and environment.get("NODE_RANK", "0") == "0"


def num_gpus(view: AppView, environment: Mapping[str, str]) -> int:
    """Ranks of the job: said by the user, by the application's trainer, or by its launcher.

    Raises:
        UserInputError: if none of them says it, or two disagree.
    """
    said = {
        "nest.num_gpus": view.settings.num_gpus,
        "trainer.devices * trainer.num_nodes": _of_trainer(view),
        "WORLD_SIZE": _world_size(environment),
    }
    found = {where: count for where, count in said.items() if count is not None}
    if not found:
        raise UserInputError(
            "nest.num_gpus",
            value=None,
            limit="neither the application nor a launcher says how many GPUs there are",
            fix="Give nest.num_gpus=64.",
        )
    if len(set(found.values())) > 1:
        raise UserInputError(
            " / ".join(found),
            value=list(found.values()),
            limit="they are the same number of ranks",
            fix="Correct the one that is wrong; nest.num_gpus is not needed.",
        )
    return next(iter(found.values()))


def _of_trainer(view: AppView) -> int | None:
    """Lightning's words; ``-1`` and ``auto`` leave the number to the host."""
    devices, nodes = view.at("trainer.devices"), view.at("trainer.num_nodes")
    count = len(devices) if isinstance(devices, list) else devices
    if not isinstance(count, int) or count < 1:
        return None
    return count * (nodes if isinstance(nodes, int) else 1)


def _world_size(environment: Mapping[str, str]) -> int | None:
    text = environment.get("WORLD_SIZE", "")
    return int(text) if text.isdigit() else None
