"""Where the catalogue's YAML files lie, and their names."""

from __future__ import annotations

import importlib.resources
from importlib.resources.abc import Traversable
from pathlib import Path

from nest_megatron.errors import UserInputError, nearest

PACKAGE = "nest_megatron.hydra_configs"
GROUPS = ("accelerator", "cluster", "model")


def catalogue_root() -> Traversable:
    """The directory that holds the groups: the installed package, or a source checkout's directory.

    Raises:
        UserInputError: if neither is there, which means a broken installation.
    """
    try:
        return importlib.resources.files(PACKAGE)
    except ModuleNotFoundError:
        checkout = Path(__file__).resolve().parent.parent / "hydra_configs"
    if not checkout.is_dir():
        raise UserInputError(
            PACKAGE,
            value=None,
            limit="the catalogue is not installed",
            fix="Install nest-megatron again.",
        )
    return checkout


def catalogue_names(group: str, root: Traversable | None = None) -> tuple[str, ...]:
    """Names of the entries in one group of the catalogue, sorted.

    Args:
        group: ``model``, ``cluster`` or ``accelerator``.
        root: directory of the groups; the installed catalogue if not given.

    Raises:
        UserInputError: if there is no such group.
    """
    if group not in GROUPS:
        raise UserInputError(
            "catalogue group",
            value=group,
            limit=f"the groups are {', '.join(GROUPS)}",
            fix=nearest(group, GROUPS),
        )
    folder = (catalogue_root() if root is None else root).joinpath(group)
    return tuple(
        sorted(
            entry.name.removesuffix(".yaml")
            for entry in folder.iterdir()
            if entry.name.endswith(".yaml")
        )
    )
