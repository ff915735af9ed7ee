"""Models and clusters of the catalogue, and of the user's own files, as records."""

from __future__ import annotations

from typing import Any

from nest_megatron.catalogue_files import catalogue_root
from nest_megatron.cluster.catalogue import cluster_from_mapping
from nest_megatron.cluster.records import Cluster
from nest_megatron.config.compose import compose
from nest_megatron.config.overrides import check_choice, is_path, parse
from nest_megatron.config.request import read_cluster, read_spec
from nest_megatron.config.schema import PlanConfig
from nest_megatron.model.catalogue import spec_from_mapping
from nest_megatron.model.spec import TransformerSpec


def model_entry(name: str) -> TransformerSpec:
    """A model by its name or its file.

    Raises:
        UserInputError: if there is none, or its description is wrong.
    """
    if is_path(name):
        return read_spec(_composed("model", name))
    return spec_from_mapping(_entry("model", name))


def cluster_entry(name: str) -> Cluster:
    """A cluster by its name or its file, at the size that its description gives.

    Raises:
        UserInputError: if there is none, or its description is wrong.
    """
    if is_path(name):
        return read_cluster(_composed("cluster", name))
    entry = _entry("cluster", name)
    for choice in entry.pop("defaults", ()):
        if isinstance(choice, dict):
            device = next(iter(choice.values()))
            entry["accelerator"] = _entry("accelerator", device)
    return cluster_from_mapping(entry)


def _composed(group: str, path: str) -> PlanConfig:
    """A file of the user, read as ``plan`` reads it."""
    return compose(parse([f"{group}={path}"])).config


def _entry(group: str, name: str) -> dict[str, Any]:
    """One catalogue file as it stands: a list of them needs none of Hydra's composition."""
    from omegaconf import OmegaConf

    check_choice(group, name, None)
    text = catalogue_root().joinpath(group, f"{name}.yaml").read_text(encoding="utf-8")
    entry = OmegaConf.to_container(OmegaConf.create(text))
    assert isinstance(entry, dict)
    return {str(key): value for key, value in entry.items()}
