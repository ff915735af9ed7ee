"""Which calibration of the site stands behind a plan."""

from __future__ import annotations

from collections.abc import Mapping

from nest_megatron.cluster.records import Cluster
from nest_megatron.config.schema import PlanConfig
from nest_megatron.cost_model.site import Site
from nest_megatron.cost_model.site_file import find_site
from nest_megatron.errors import UserInputError


def choose_site(
    config: PlanConfig, cluster: Cluster, versions: Mapping[str, str] | None
) -> tuple[Site | None, tuple[str, ...]]:
    """The calibration of the site, and what to say where it cannot be used."""
    if not config.profile.site:
        return None, ()
    try:
        found = find_site(cluster)
    except UserInputError as error:
        return None, (f"No calibration of the site is used: {error.value}: {error.limit}.",)
    if found is None:
        return None, ()
    path, calibration = found
    return Site(calibration, path.stem, versions), ()
