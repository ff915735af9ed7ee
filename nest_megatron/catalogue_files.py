"""Where the catalogue's YAML files lie, and their names."""

from __future__ import annotations

import contextlib
import functools
import importlib.resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from nest_megatron.errors import UserInputError, nearest

PACKAGE = "nest_megatron.hydra_configs"
GROUPS = ("accelerator", "cluster", "model")


def catalogue_root() -> Traversable:
    """The directory that holds the groups: the installed package, or a source checkout's directory.

    Raises:
        UserInputError: if neither is there, which means a broken installation.
    """
    with contextlib.suppress(ModuleNotFoundError):
        return importlib.resources.files(PACKAGE)
    checkout = Path(__file__).resolve().parent.parent / "hydra_configs"
    if not checkout.is_dir():
        raise UserInputError(
            PACKAGE, None, "the catalogue is not installed", "Install nest-megatron again."
        )
    return checkout


def catalogue_entry(group: str, name: str) -> dict[str, Any]:
    """A file of the catalogue as it stands, by its folder and its name without ``.yaml``."""
    import yaml

    from nest_megatron.documents import LOADER

    text = catalogue_root().joinpath(group, f"{name}.yaml").read_text(encoding="utf-8")
    return dict(yaml.load(text, Loader=LOADER) or {})


@functools.cache
def _plan_file() -> dict[str, Any]:
    return catalogue_entry("", "plan")


def default_setting(key: str) -> Any:
    """The value of a setting where nobody says another: that of ``hydra_configs/plan.yaml``.

    >>> default_setting("search.max_seconds")
    60.0
    """
    section, _, name = key.partition(".")
    return _plan_file()[section][name]


@functools.cache
def catalogue_names(group: str) -> tuple[str, ...]:
    """Names of the entries in one group of the catalogue, sorted.

    Args:
        group: ``model``, ``cluster`` or ``accelerator``.

    Raises:
        UserInputError: if there is no such group.
    """
    if group not in GROUPS:
        limit = f"the groups are {', '.join(GROUPS)}"
        raise UserInputError("catalogue group", group, limit, nearest(group, GROUPS))
    files = (entry.name for entry in catalogue_root().joinpath(group).iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in files if name.endswith(".yaml")))
