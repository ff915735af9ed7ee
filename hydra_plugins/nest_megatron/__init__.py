"""Puts the group ``nest`` on the search path of every Hydra application that does not mean another.

Hydra takes ``nest=birds`` and ``+nest=birds`` for values where there is no group of that name, and
for choices of it where there is one. An application whose command says such a thing means a group
or a field of its own, and ours stays away: only ``auto`` and ``pinned`` are ours.

Hydra imports this in each of them, so it loads Hydra's own classes alone, and nothing that goes
wrong here may end an application that does not ask for a plan. One that does ask is stopped by
``nest_megatron.integrations.megatron_lm.hook.after_hydra``.
"""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Sequence

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

#: Our group, and what it offers.
_GROUP, _OURS = "nest", ("auto", "pinned")


class NestSearchPath(SearchPathPlugin):
    """Adds nest-megatron's configurations and the resolver ``${nest:NAME}``."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append behind all others, so that an application's own group ``nest`` comes first."""
        if means_another(sys.argv[1:]) and not _has_group(search_path):
            return
        try:
            from nest_megatron.integrations.hydra import register

            register()
        except Exception as error:  # noqa: BLE001 - other people's applications must go on
            warnings.warn(f"nest-megatron is not available: {error!r}", stacklevel=2)
            return
        search_path.append("nest-megatron", "pkg://nest_megatron.hydra_configs.hydra_app")


def means_another(words: Sequence[str]) -> bool:
    """Whether a command line chooses something else of that name than we offer.

    >>> means_another(["+nest=auto"]), means_another(["nest.cluster=dgx_h100"])
    (False, False)
    >>> means_another(["+nest=birds"]), means_another(["nest=birds"])
    (True, True)
    >>> means_another(["+nest=atuo"])  # misspelt, so that Hydra has to say what there is
    False
    """
    choices = (word.lstrip("+~").partition("=") for word in words)
    return any(
        key == _GROUP and not difflib.get_close_matches(each.strip(), _OURS, cutoff=0.7)
        for key, _, value in choices
        for each in value.split(",")
    )


def _has_group(search_path: ConfigSearchPath) -> bool:
    """Whether the application has a group of that name, which may be built on ours."""
    from hydra._internal.config_repository import ConfigRepository

    if any(word.startswith("hydra.searchpath=") for word in sys.argv):
        return True  # it may lie there
    try:
        return bool(ConfigRepository(config_search_path=search_path).group_exists(_GROUP))
    except Exception:  # noqa: BLE001 - Hydra itself will say what is wrong with the search path
        return False
