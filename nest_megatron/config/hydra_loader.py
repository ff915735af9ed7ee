"""Hydra without its singletons: threads, and an application of Hydra that runs us, share nothing.

``hydra.compose`` works on ``GlobalHydra`` and ``ConfigStore``, of which a process has one each.
Here every composition has its own search path and store.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra.core.config_store import ConfigStore
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

#: The tables of the grammar and the list of plugins are the process's, and filled as they are used.
_LOCK = threading.RLock()
#: Entries of every process's store that Hydra's own configuration is made of.
_HYDRAS_OWN = ("hydra", "_dummy_empty_config_.yaml")


def config_loader(
    folders: Sequence[Path], entries: Mapping[tuple[str | None, str], Any]
) -> ConfigLoaderImpl:
    """What loads configurations of folders.

    Args:
        folders: absolute; the first that has a file of a name is read.
        entries: configurations of no file, by their group (``None`` has none) and name.
    """
    from hydra import version
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
    from hydra.core.plugins import Plugins

    with _LOCK:
        Plugins.instance()  # knows how files and packages are read
        if not hasattr(version.getbase(), "major"):  # no application has named one
            version.setbase("1.3")
        path = ConfigSearchPathImpl()
        path.append("hydra", "pkg://hydra.conf")
        for number, folder in enumerate(folders):
            path.append("folder" if number else "main", f"file://{folder}")
        path.append("schema", "structured://")
        loader = ConfigLoaderImpl(config_search_path=path)
        schema: Any = loader.repository.get_schema_source()
        schema.store = _own_store(entries)
    return loader


def _own_store(entries: Mapping[tuple[str | None, str], Any]) -> ConfigStore:
    from hydra.core.config_store import ConfigStore

    store = object.__new__(ConfigStore)  # a call returns the only one of the process
    shared = ConfigStore.instance().repo
    store.repo = {name: shared[name] for name in _HYDRAS_OWN if name in shared}
    for (group, name), node in entries.items():
        store.store(name=name, node=node, group=group)
    return store


def compose_config(
    name: str,
    overrides: Sequence[str],
    folders: Sequence[Path],
    entries: Mapping[tuple[str | None, str], Any],
) -> DictConfig:
    """A configuration without Hydra's own part; see ``config_loader``."""
    from hydra.types import RunMode
    from omegaconf import open_dict

    with _LOCK:
        config = config_loader(folders, entries).load_configuration(
            name, list(overrides), RunMode.RUN, from_shell=False
        )
    with open_dict(config):
        del config["hydra"]
    return config


def parse_override(text: str) -> Override:
    """An override by Hydra's grammar.

    Raises:
        HydraException: if it cannot be read.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    with _LOCK:
        return OverridesParser.create().parse_override(text)
