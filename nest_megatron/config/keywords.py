"""Models, clusters and settings of a Python call, in the form of the command line."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nest_megatron.catalogue_files import catalogue_root
from nest_megatron.cluster.catalogue import cluster_from_mapping
from nest_megatron.cluster.records import Cluster
from nest_megatron.config.compose import Composed, compose, model_fields
from nest_megatron.config.defaults import with_defaults
from nest_megatron.config.layout_words import layout_key
from nest_megatron.config.overrides import (
    GROUPS,
    check_choice,
    is_path,
    parse,
    refuse_sweeps,
    value_text,
)
from nest_megatron.config.request import read_cluster, read_spec
from nest_megatron.config.schema import SECTIONS, section_keys
from nest_megatron.errors import UserInputError
from nest_megatron.model.catalogue import spec_from_mapping
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.plain import to_plain


def model_entry(name: str) -> TransformerSpec:
    """A model by its name or its file; ``UserInputError`` if there is none, or it is wrong."""
    return read_model(name)[0]


def read_model(name: str) -> tuple[TransformerSpec, tuple[str, ...]]:
    """A model by its name or its file, and what was not read of the file; errors alike."""
    if is_path(name):
        composed = compose(parse([f"model={name}"]))
        return read_spec(composed.config), composed.notes
    return spec_from_mapping(_entry("model", name)), ()


def cluster_entry(name: str) -> Cluster:
    """A cluster by its name or its file, at the size that its description gives; errors alike."""
    if is_path(name):
        return read_cluster(compose(parse([f"cluster={name}"])).config)
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


#: Short names of settings of several sections; those of a layout are ``layout_key``'s.
SHORT_KEYS = {
    "gpus": "cluster.num_gpus",
    "memory": "cluster.accelerator.memory_bytes",
    "max_seconds": "search.max_seconds",
}
#: How a model or a cluster is given: a name or a path as text, a path, or the fields of its file.
Source = str | os.PathLike[str] | Mapping[str, Any]


def compose_keywords(
    model: Source | TransformerSpec | None,
    cluster: Source | Cluster,
    settings: Mapping[str, object],
    config_dir: str | os.PathLike[str] | None = None,
) -> Composed:
    """A job of records and keywords (as for ``setting_texts``), as the command line composes it.

    The defaults of the site stand behind what is given.

    Args:
        model: ``None`` where a command describes it.
    """
    if "out" in settings:
        limit, fix = "a call writes no file", "Use Plan.save."
        raise UserInputError("out", value=settings["out"], limit=limit, fix=fix)
    named: dict[str, object] = {}
    described: dict[str, Mapping[str, Any]] = {}
    for group, source in (("model", model), ("cluster", cluster)):
        if source is None and group == "model":
            continue
        if isinstance(source, str):
            named[group] = source
        elif isinstance(source, os.PathLike):
            path = str(source)
            named[group] = path if "/" in path else f"./{path}"
        else:
            described[group] = _fields(group, source)
    folder = None if config_dir is None else Path(config_dir)
    given = parse(setting_texts({**named, **settings}))
    parsed = with_defaults(given, names_cluster="cluster" in described)
    for setting in parsed if isinstance(cluster, Cluster) else ():
        if setting.key == "cluster.oversubscription":
            limit = "a record holds the bandwidth that its own oversubscription leaves"
            fix = "Give the cluster by its name or as the fields of its file."
            raise UserInputError(setting.key, value=setting.value, limit=limit, fix=fix)
    refuse_sweeps(parsed)
    return compose(parsed, folder, described=described)


def _fields(group: str, source: object) -> Mapping[str, Any]:
    if group == "model" and isinstance(source, TransformerSpec):
        return model_fields(source)
    if group == "cluster" and isinstance(source, Cluster):
        fields: Mapping[str, Any] = to_plain(source)
        return fields
    if isinstance(source, Mapping):
        return source
    limit = "it is none of a name, a path, a record and a mapping of fields"
    fix = f"For example {group}='NAME', of nest_megatron.{group}s()."
    raise UserInputError(group, value=type(source).__name__, limit=limit, fix=fix)


def setting_texts(keywords: Mapping[str, object]) -> list[str]:
    """Keywords as ``key=value``, to be checked by ``parse``.

    A name that only one section has needs no section; others are given as the section's mapping or
    with a dot. Sizes of a layout may be short (``tp``); ``overrides`` are texts of this form.

    >>> setting_texts({"tensor_model_parallel_size": 8, "search": {"max_seconds": 5}})
    ['parallel.tensor_model_parallel_size=8', 'search.max_seconds=5']
    >>> setting_texts({"tp": 2, "max_seconds": 5, "overrides": ["train.seq_length=4096"]})
    ['parallel.tensor_model_parallel_size=2', 'search.max_seconds=5', 'train.seq_length=4096']
    >>> setting_texts({"cluster.oversubscription": 4, "recompute_modules": ["mlp", "core_attn"]})
    ['cluster.oversubscription=4', 'parallel.recompute_modules=[mlp,core_attn]']
    """
    keys = section_keys()
    texts = []
    if isinstance(flags := keywords.get("flags", ""), list | tuple):
        keywords = {**keywords, "flags": shlex.join(flags)}
    for key, value in keywords.items():
        if isinstance(value, Mapping) and key in (*SECTIONS, *GROUPS):
            texts += [f"{key}.{name}={value_text(inner)}" for name, inner in value.items()]
            continue
        if key == "overrides" and isinstance(value, list | tuple):
            texts += map(str, value)
            continue
        if key in ("nodes", "num_nodes"):
            limit = "a job's size is its number of GPUs"
            fix = "Give num_gpus=16; nest_megatron.plan_table(nodes=[2, 4]) plans for several."
            raise UserInputError(key, value=value, limit=limit, fix=fix)
        found = [known for known in keys if known.rpartition(".")[2] == key]
        only = found[0] if len(found) == 1 and key not in keys else None
        whole = only or SHORT_KEYS.get(key) or layout_key(key) or key
        texts.append(f"{whole}={value_text(value)}")
    return texts
