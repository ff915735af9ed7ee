"""``nest-megatron models`` and ``clusters``."""

from __future__ import annotations

import re
from collections.abc import Sequence

import click

from nest_megatron.catalogue_files import catalogue_names
from nest_megatron.cli.command_kinds import command, json_option
from nest_megatron.cli.complete import completing_catalogue
from nest_megatron.errors import UserInputError, nearest


@command(
    "nest-megatron models",
    "nest-megatron models qwen",
    "nest-megatron models deepseek_v3",
    "nest-megatron models ./config.json",
)
@click.argument(
    "name",
    required=False,
    metavar="[NAME|WORD|PATH]",
    shell_complete=completing_catalogue("model"),
)
@json_option
def models(name: str | None, *, as_json: bool) -> None:
    """List the models of the catalogue, or show one.

    WORD lists the names that contain it. NAME shows every field, its source, and the releases of
    each framework that can train the model. PATH is a Hugging Face config.json or its folder, a
    model file (YAML or JSON), or a plan.
    """
    from nest_megatron.config.catalogue import named_model
    from nest_megatron.report.catalogue_tables import model_details, model_document, models_table
    from nest_megatron.report.console import show_or_json

    if (names := _listed("model", name)) is not None:
        listed = [named_model(each) for each in names]
        show_or_json(
            lambda: {"models": [model_document(*each) for each in listed]},
            lambda: [models_table([spec for spec, _ in listed])],
            as_json=as_json,
        )
        return
    from nest_megatron.integrations.megatron_lm.attach import target_refusals

    assert name is not None, "without a name all are listed"
    spec, notes = named_model(name)
    refusals = target_refusals(spec)
    show_or_json(
        lambda: model_document(spec, notes, refusals),
        lambda: (model_details(spec, refusals), *(f"note: {note}" for note in notes)),
        as_json=as_json,
    )


@command(
    "nest-megatron clusters",
    "nest-megatron clusters h100",
    "nest-megatron clusters h100_spine_leaf",
    "nest-megatron clusters ./mine.yaml",
)
@click.argument(
    "name",
    required=False,
    metavar="[NAME|WORD|PATH]",
    shell_complete=completing_catalogue("cluster"),
)
@json_option
def clusters(name: str | None, *, as_json: bool) -> None:
    """List the clusters of the catalogue, or show one.

    WORD lists the names that contain it. PATH is a cluster file (YAML or JSON) or a plan.
    """
    from nest_megatron.config.catalogue import named_cluster
    from nest_megatron.report.catalogue_tables import (
        cluster_details,
        cluster_document,
        clusters_table,
    )
    from nest_megatron.report.console import show, show_json

    names = _listed("cluster", name)
    entries = [(each, named_cluster(each)) for each in ([str(name)] if names is None else names)]
    if as_json:
        documents = [{"entry": each, **cluster_document(cluster)} for each, cluster in entries]
        show_json(documents[0] if names is None else {"clusters": documents})
    else:
        show(cluster_details(entries[0][1]) if names is None else clusters_table(entries))


def _listed(group: str, word: str | None) -> Sequence[str] | None:
    """Names of the catalogue that contain a word; ``None`` where it names one entry or a file.

    Raises:
        UserInputError: if no name contains it.
    """
    from nest_megatron.config.overrides import is_path

    known = catalogue_names(group)
    if word is None:
        return known
    if word in known or is_path(word):
        return None
    plain = re.sub(r"[^a-z0-9]", "_", word.lower())
    if found := [name for name in known if plain in name]:
        return found
    raise UserInputError(
        group,
        word,
        f"no {group} of the catalogue has it in its name",
        f"{nearest(plain, known)} `nest-megatron {group}s` lists all; a path works as well.",
    )
