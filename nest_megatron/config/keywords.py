"""Settings of a job as keywords of a Python call, in the form of the command line."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from nest_megatron.cluster.records import Cluster
from nest_megatron.config.compose import Composed, compose, model_fields
from nest_megatron.config.overrides import GROUPS, parse, refuse_sweeps
from nest_megatron.config.schema import SECTIONS, section_keys
from nest_megatron.errors import UserInputError
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.plain import to_plain

#: How a model or a cluster is given: a name or a path as text, a path, or the fields of its file.
Source = str | os.PathLike[str] | Mapping[str, Any]


def compose_keywords(
    model: Source | TransformerSpec,
    cluster: Source | Cluster,
    settings: Mapping[str, object],
    config_dir: str | os.PathLike[str] | None = None,
) -> Composed:
    """A job as the command line composes it, of records and keywords.

    Args:
        settings: as for ``setting_texts``.
        config_dir: a folder of the user's own groups, searched beside the catalogue.

    Raises:
        UserInputError: as the command line does.
    """
    if "out" in settings:
        raise UserInputError(
            "out", value=settings["out"], limit="a call writes no file", fix="Use Plan.save."
        )
    named: dict[str, object] = {}
    described: dict[str, Mapping[str, Any]] = {}
    for group, source in (("model", model), ("cluster", cluster)):
        fields = _fields(group, source)
        if fields is None:
            named[group] = _name(source)
        else:
            described[group] = fields
    folder = None if config_dir is None else Path(config_dir)
    parsed = parse(setting_texts({**named, **settings}), folder)
    for setting in parsed if isinstance(cluster, Cluster) else ():
        if setting.key == "cluster.oversubscription":
            raise UserInputError(
                setting.key,
                value=setting.value,
                limit="a record holds the bandwidth that its own oversubscription leaves",
                fix="Give the cluster by its name or as the fields of its file.",
            )
    refuse_sweeps(parsed)
    return compose(parsed, folder, described=described)


def _name(source: object) -> str:
    """A catalogue name as it is; a path so that it is seen to be one."""
    if isinstance(source, str):
        return source
    path = str(source)
    return path if "/" in path else f"./{path}"


def _fields(group: str, source: object) -> Mapping[str, Any] | None:
    """The fields of a model or a cluster that is described; ``None`` for one that is named."""
    if isinstance(source, str | os.PathLike):
        return None
    if group == "model" and isinstance(source, TransformerSpec):
        return model_fields(source)
    if group == "cluster" and isinstance(source, Cluster):
        fields: Mapping[str, Any] = to_plain(source)
        return fields
    if isinstance(source, Mapping):
        return source
    raise UserInputError(
        group,
        value=type(source).__name__,
        limit="it is none of a name, a path, a record and a mapping of fields",
        fix=f"For example {group}='NAME', of nest_megatron.{group}s().",
    )


def setting_texts(keywords: Mapping[str, object]) -> list[str]:
    """Keywords as ``key=value``.

    A name that only one section has needs no section; others are given as the section's mapping or
    with a dot. Whether a setting exists is checked where all settings are, by ``parse``.

    >>> setting_texts({"tensor_model_parallel_size": 8, "search": {"max_seconds": 5}})
    ['parallel.tensor_model_parallel_size=8', 'search.max_seconds=5']
    >>> setting_texts({"cluster.oversubscription": 4, "recompute_modules": ["mlp", "core_attn"]})
    ['cluster.oversubscription=4', 'parallel.recompute_modules=[mlp,core_attn]']
    """
    return [f"{_whole_key(key)}={_text(value)}" for key, value in _flat(keywords)]


def _flat(keywords: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for key, value in keywords.items():
        if isinstance(value, Mapping) and key in (*SECTIONS, *GROUPS):
            yield from ((f"{key}.{name}", inner) for name, inner in value.items())
        else:
            yield key, value


def _whole_key(key: str) -> str:
    """A setting's key with its section, where only one section has it."""
    if "." in key or key in section_keys():
        return key
    found = [known for known in section_keys() if known.rpartition(".")[2] == key]
    return found[0] if len(found) == 1 else key


def _text(value: object) -> str:
    """A value as it is typed.

    >>> [_text(value) for value in (None, True, 1e-05, "bf16", ("a", "b"))]
    ['null', 'true', '1e-05', 'bf16', '[a,b]']
    """
    if value is None:
        return "null"
    if isinstance(value, Enum):
        return _text(value.value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, os.PathLike):
        return str(value)
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_text, value))}]"
    return str(value)
