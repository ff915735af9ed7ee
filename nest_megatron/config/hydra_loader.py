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
    from hydra.plugins.config_source import ConfigSource
    from omegaconf import DictConfig

#: Configurations of no file, by their group (``None`` has none) and name.
Entries = Mapping[tuple[str | None, str], Any]
#: The tables of the grammar and the list of plugins are the process's, and filled as they are used.
_LOCK = threading.RLock()
#: Entries of every process's store that Hydra's own configuration is made of.
_HYDRAS_OWN = ("hydra", "_dummy_empty_config_.yaml")


def config_loader(folders: Sequence[Path], entries: Entries) -> ConfigLoaderImpl:
    """What loads configurations of folders.

    Args:
        folders: absolute; the first that has a file of a name is read.
    """
    import hydra
    from hydra import version
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
    from hydra.core.plugins import Plugins

    with _LOCK:
        Plugins.instance()  # knows how files and packages are read
        # no application has named one, which Hydra 1.4 asks for no more
        if hydra.__version__.startswith("1.3.") and not hasattr(version.getbase(), "major"):
            version.setbase("1.3")
        path = ConfigSearchPathImpl()
        path.append("hydra", "pkg://hydra.conf")
        for number, folder in enumerate(folders):
            path.append("folder" if number else "main", f"file://{folder}")
        path.append("schema", "structured://")
        loader = ConfigLoaderImpl(config_search_path=path)
        loader.repository.sources[-1] = _schema_source(_own_store(entries))
    return loader


def _schema_source(store: ConfigStore) -> ConfigSource:
    """A store of its own in the place of the process's, which Hydra 1.4 always asks."""
    from hydra.core.object_type import ObjectType
    from hydra.plugins.config_source import ConfigResult, ConfigSource

    class StructuredConfigSource(ConfigSource):  # a repository knows its last source by this name
        def __init__(self) -> None:
            super().__init__(provider="schema", path="structured://")

        @staticmethod
        def scheme() -> str:
            return "structured"

        def load_config(self, config_path: str) -> ConfigResult:
            found = store.load(config_path=self._normalize_file_name(config_path))
            return ConfigResult(
                config=found.node,
                path="structured://",
                provider=found.provider or self.provider,
                header={"package": found.package},
            )

        def available(self) -> bool:
            return True

        def is_group(self, config_path: str) -> bool:
            return bool(store.get_type(config_path.rstrip("/")) == ObjectType.GROUP)

        def is_config(self, config_path: str) -> bool:
            name = self._normalize_file_name(config_path.rstrip("/"))
            return bool(store.get_type(name) == ObjectType.CONFIG)

        def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
            found: list[str] = []
            for name in store.list(config_path):
                path = f"{config_path}/{name}"
                self._list_add_result(found, path, name, results_filter)
            return sorted({*found})

    return StructuredConfigSource()


def _own_store(entries: Entries) -> ConfigStore:
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
    entries: Entries,
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
