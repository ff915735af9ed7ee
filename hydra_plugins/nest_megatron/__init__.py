"""Puts the group ``nest`` on the search path of every Hydra application on this machine.

Hydra imports this in each of them, so it loads Hydra's own classes alone, and nothing that goes
wrong here may end an application that does not ask for a plan. One that does ask is stopped by
``nest_megatron.app.hook.after_hydra``.
"""

from __future__ import annotations

import warnings

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class NestSearchPath(SearchPathPlugin):
    """Adds nest-megatron's configurations and the resolver ``${nest:NAME}``."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append behind all others, so that an application's own group ``nest`` comes first."""
        try:
            from nest_megatron.hydra_app.resolver import register

            register()
        except Exception as error:  # noqa: BLE001 - other people's applications must go on
            warnings.warn(f"nest-megatron is not available: {error!r}", stacklevel=2)
            return
        search_path.append("nest-megatron", "pkg://nest_megatron.hydra_configs.hydra_app")
