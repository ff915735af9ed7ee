"""Which calibration of the site stands behind a plan."""

from __future__ import annotations

from collections.abc import Mapping

from nest_megatron.cluster.discovery import is_same_device, known_gpus
from nest_megatron.cluster.records import Cluster
from nest_megatron.config.schema import PlanConfig
from nest_megatron.cost_model.site import Site
from nest_megatron.cost_model.site_file import find_site
from nest_megatron.errors import UserInputError
from nest_megatron.profile.installed import installed_versions, nccl_version


def choose_site(
    config: PlanConfig, cluster: Cluster, versions: Mapping[str, str] | None = None
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
    return Site(calibration, path.stem, _versions(cluster, versions)), ()


def _versions(cluster: Cluster, versions: Mapping[str, str] | None) -> Mapping[str, str] | None:
    """Those of the running job, or of this machine if it has the cluster's GPUs."""
    if versions is None:
        gpus = known_gpus()
        if gpus is None or not is_same_device(cluster.accelerator, gpus):
            return None
        versions = installed_versions()
    return {**versions, **nccl_version()}
