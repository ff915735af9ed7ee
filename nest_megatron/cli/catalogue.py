"""``models`` and ``clusters``."""

from __future__ import annotations

from typing import Any

from nest_megatron.catalogue_files import catalogue_names, catalogue_root
from nest_megatron.cluster.catalogue import cluster_from_mapping
from nest_megatron.cluster.records import Cluster
from nest_megatron.config.overrides import check_choice, is_path
from nest_megatron.config.schema import PlanConfig
from nest_megatron.errors import OK
from nest_megatron.model.catalogue import spec_from_mapping
from nest_megatron.model.parameters import active_parameters, total_parameters
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.plain import to_plain
from nest_megatron.report.console import show, show_json


def run_models(name: str | None, *, as_json: bool) -> int:
    """List the models, or show one."""
    names = catalogue_names("model") if name is None else (name,)
    specs = [_model(each) for each in names]
    if as_json:
        documents = [_model_document(spec) for spec in specs]
        show_json({"models": documents} if name is None else documents[0])
        return OK
    from nest_megatron.report.catalogue_tables import model_details, models_table

    show(models_table(specs) if name is None else model_details(specs[0]))
    return OK


def run_clusters(name: str | None, *, as_json: bool) -> int:
    """List the clusters, or show one."""
    names = catalogue_names("cluster") if name is None else (name,)
    entries = [(each, _cluster(each)) for each in names]
    if as_json:
        documents = [{"entry": each, **to_plain(cluster)} for each, cluster in entries]
        show_json({"clusters": documents} if name is None else documents[0])
        return OK
    from nest_megatron.report.catalogue_tables import cluster_details, clusters_table

    show(clusters_table(entries) if name is None else cluster_details(entries[0][1]))
    return OK


def _model(name: str) -> TransformerSpec:
    if is_path(name):
        from nest_megatron.config.request import read_spec

        return read_spec(_composed("model", name))
    return spec_from_mapping(_entry("model", name))


def _model_document(spec: TransformerSpec) -> dict[str, Any]:
    counts = {"parameters": total_parameters(spec), "active_parameters": active_parameters(spec)}
    return {**to_plain(spec), **counts}


def _composed(group: str, path: str) -> PlanConfig:
    """A file of the user, read as ``plan`` reads it."""
    from nest_megatron.config.compose import compose
    from nest_megatron.config.overrides import parse

    return compose(parse([f"{group}={path}"])).config


def _cluster(name: str) -> Cluster:
    if is_path(name):
        from nest_megatron.config.request import read_cluster

        return read_cluster(_composed("cluster", name))
    entry = _entry("cluster", name)
    for choice in entry.pop("defaults", ()):
        if isinstance(choice, dict):
            device = next(iter(choice.values()))
            entry["accelerator"] = _entry("accelerator", device)
    return cluster_from_mapping(entry)


def _entry(group: str, name: str) -> dict[str, Any]:
    """One catalogue file as it stands: a list of them needs none of Hydra's composition."""
    from omegaconf import OmegaConf

    check_choice(group, name, None)
    text = catalogue_root().joinpath(group, f"{name}.yaml").read_text(encoding="utf-8")
    entry = OmegaConf.to_container(OmegaConf.create(text))
    assert isinstance(entry, dict)
    return {str(key): value for key, value in entry.items()}
