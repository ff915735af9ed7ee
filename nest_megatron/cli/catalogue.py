"""``nest-megatron models`` and ``clusters``."""

from __future__ import annotations

from functools import partial

import click

from nest_megatron.catalogue_files import catalogue_names
from nest_megatron.cli.command_kinds import command, json_option
from nest_megatron.cli.complete import completing


@command(
    "nest-megatron models",
    "nest-megatron models deepseek_v3",
    "nest-megatron models ./config.json",
)
@click.argument(
    "name",
    required=False,
    metavar="[NAME|PATH]",
    shell_complete=completing(partial(catalogue_names, "model")),
)
@json_option
def models(name: str | None, *, as_json: bool) -> None:
    """List the models of the catalogue, or show one, or that of a file.

    A file is a Hugging Face config.json or its folder, a description as the catalogue's (YAML or
    JSON), or a plan.
    """
    from nest_megatron.config.catalogue import named_model
    from nest_megatron.report.catalogue_tables import model_details, model_document, models_table
    from nest_megatron.report.console import show, show_json

    found = [named_model(each) for each in (catalogue_names("model") if name is None else (name,))]
    if as_json:
        documents = [model_document(*each) for each in found]
        show_json(documents[0] if name is not None else {"models": documents})
    elif name is None:
        show(models_table([spec for spec, _ in found]))
    else:
        spec, notes = found[0]
        show(model_details(spec), *(f"note: {note}" for note in notes))


@command(
    "nest-megatron clusters",
    "nest-megatron clusters h100_spine_leaf",
    "nest-megatron clusters ./mine.yaml",
)
@click.argument(
    "name",
    required=False,
    metavar="[NAME|PATH]",
    shell_complete=completing(partial(catalogue_names, "cluster")),
)
@json_option
def clusters(name: str | None, *, as_json: bool) -> None:
    """List the clusters of the catalogue, or show one, or that of a file.

    A file is a description as the catalogue's (YAML or JSON), which nest-megatron network import
    writes of measured collectives, or a plan.
    """
    from nest_megatron.config.catalogue import named_cluster
    from nest_megatron.report.catalogue_tables import (
        cluster_details,
        cluster_document,
        clusters_table,
    )
    from nest_megatron.report.console import show, show_json

    names = catalogue_names("cluster") if name is None else (name,)
    entries = [(each, named_cluster(each)) for each in names]
    if as_json:
        documents = [{"entry": each, **cluster_document(cluster)} for each, cluster in entries]
        show_json(documents[0] if name is not None else {"clusters": documents})
    else:
        show(cluster_details(entries[0][1]) if name is not None else clusters_table(entries))
