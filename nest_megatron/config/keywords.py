"""Settings of a Python call, and layouts in a few words, in the form of the command line."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from nest_megatron.cluster.records import Cluster
from nest_megatron.config.compose import Fields, Settings, compose, record_fields
from nest_megatron.config.defaults import with_defaults
from nest_megatron.config.overrides import (
    GROUPS,
    LAYOUT_KEYS,
    SHORT_KEYS,
    layout_key,
    parse,
    refuse_sweeps,
    value_text,
)
from nest_megatron.config.schema import SECTIONS, section_keys
from nest_megatron.errors import UserInputError, nearest
from nest_megatron.layout.dims import RankOrder
from nest_megatron.model.spec import TransformerSpec

#: A path, as text or as an object.
StrPath = str | os.PathLike[str]
#: How a model or a cluster is given: a name or a path as text, a path, or the fields of its file.
Source = StrPath | Fields


def path_of(what: str, given: StrPath) -> Path:
    """A path of a call.

    Args:
        what: the argument's name, for errors.
    """
    with contextlib.suppress(TypeError, ValueError):  # ValueError: no file system has such a name
        if b"\0" not in os.fsencode(given):
            return Path(given)
    raise UserInputError(what, given, "it is no path", "Give a text or a pathlib.Path.")


def words_of(what: str, given: object) -> tuple[str, ...]:
    """One text of a call, or several; a path counts as its text."""
    words = (given,) if isinstance(given, str) else given
    if isinstance(words, Iterable) and not isinstance(words, bytes):
        words = tuple(words)
        if all(isinstance(each, str | os.PathLike) for each in words):
            return tuple(map(os.fspath, words))
    limit = "it is neither a text nor a list of texts"
    raise UserInputError(what, given, limit, "Put each word into quotes.")


def require_function(what: str, given: object) -> None:
    """Refuse what a call hands over in the place of a function; ``None`` stands for none."""
    if given is not None and not callable(given):
        raise UserInputError(what, given, "it is no function", "Give one, or leave it out.")


def require_release(given: object) -> None:
    """Refuse a release of a call that is no text: of the number 0.20 nothing but 0.2 is left."""
    if given is not None and not isinstance(given, str):
        limit = "a release is a text"
        raise UserInputError("megatron_version", given, limit, f"Write it as '{given}'.")


def compose_keywords(
    model: Source | TransformerSpec | None,
    cluster: Source | Cluster,
    keywords: Mapping[str, object],
    config_dir: StrPath | None = None,
    num_gpus: int | None = None,
    global_batch_size: int | None = None,
) -> Settings:
    """A job of records and keywords (as for ``setting_texts``), as the command line composes it.

    The defaults of the site stand behind what is given.

    Args:
        model: ``None`` where a command describes it.
        num_gpus, global_batch_size: sizes, which no keyword says then.
    """
    sizes = {"cluster.num_gpus": num_gpus, "train.global_batch_size": global_batch_size}
    stated = {key: str(size) for key, size in sizes.items() if size is not None}
    texts = setting_texts(keywords)
    for text in texts:
        key, _, value = text.partition("=")
        if (said := stated.setdefault(key, value)) != value:
            raise UserInputError(
                key, value, f"another argument says {said}", "Leave one of the two out."
            )
    if "out" in keywords:
        raise UserInputError("out", keywords["out"], "a call writes no file", "Use Plan.save.")
    named: dict[str, object] = {}
    described: dict[str, Fields] = {}
    for group, source in (("model", model), ("cluster", cluster)):
        if source is None and group == "model":
            continue
        if isinstance(source, str | os.PathLike):
            named[group] = typed_path(source)
        elif isinstance(source, TransformerSpec if group == "model" else Cluster):
            described[group] = record_fields(source)
        elif isinstance(source, Mapping):
            described[group] = source
        else:
            raise UserInputError(
                group,
                type(source).__name__,
                "it is none of a name, a path, a record and a mapping of fields",
                f"For example {group}='NAME', of nest_megatron.{group}s().",
            )
    folder = None if config_dir is None else path_of("config_dir", config_dir)
    own = {key: value for key, value in {**named, **sizes}.items() if value is not None}
    given = parse([*(f"{key}={value}" for key, value in own.items()), *texts])
    parsed = with_defaults(given, names_cluster="cluster" in described)
    refuse_sweeps(parsed)
    return compose(parsed, folder, described=described)


def typed_path(source: StrPath) -> str:
    """A name or a path as it is typed: a path has a slash."""
    text = os.fspath(source)
    return text if isinstance(source, str) or "/" in text else f"./{text}"


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
        keywords = {**keywords, "flags": shlex.join(words_of("flags", flags))}
    for key, value in keywords.items():
        if isinstance(value, Mapping) and key in (*SECTIONS, *GROUPS):
            texts += [f"{key}.{name}={value_text(inner)}" for name, inner in value.items()]
            continue
        if key == "overrides" and isinstance(value, list | tuple):
            texts += map(str, value)
            continue
        if key in ("nodes", "num_nodes"):
            raise UserInputError(
                key,
                value,
                "a job's size is its number of GPUs",
                "Give num_gpus=16; nest_megatron.plan_table(nodes=[2, 4]) plans for several.",
            )
        found = [known for known in keys if known.rpartition(".")[2] == key]
        only = found[0] if len(found) == 1 and key not in keys else None
        whole = only or SHORT_KEYS.get(key) or layout_key(key) or key
        texts.append(f"{whole}={value_text(value)}")
    return texts


#: Megatron's switches, as settings.
_SWITCHES = {
    "sequence_parallel": ("parallel.sequence_parallel", "true"),
    "use_distributed_optimizer": ("parallel.zero_stage", "1"),
    "use_tp_pp_dp_mapping": ("parallel.rank_order", RankOrder.TP_CP_EP_PP_DP.value),
}
#: A comma outside brackets, before another name.
_COMMA = re.compile(r",(?=\s*[A-Za-z_.\-]+\s*=)|,\s*(?=--)")


def read_layout(text: str, option: str) -> Settings:
    """The settings of a layout, checked.

    Args:
        text: ``tp=8,pp=4,mbs=1``, ``parallel.tensor_model_parallel_size=8``, or
            ``--tensor-model-parallel-size 8 --pipeline-model-parallel-size 4``.
        option: that it was given to, for errors.

    Raises:
        UserInputError: for a word that says nothing of a layout, or a value of the wrong type.
    """
    if not isinstance(text, str):
        raise UserInputError(option, text, "a layout is a text", "For example tp=8,pp=4.")
    found: dict[str, str] = {}
    for name, given in _pairs(text, option):
        key, value = _setting(name, given, option)
        if found.setdefault(key, value) != value:
            raise UserInputError(
                option, f"{name}={value}", f"{key}={found[key]} is given as well", "Give one."
            )
    if not found:
        raise UserInputError(option, text, "it names no size", "For example tp=8,pp=4.")
    settings = parse(f"{key}={value}" for key, value in found.items())
    return compose(settings)


def _pairs(text: str, option: str) -> Iterator[tuple[str, str | None]]:
    """Names with their values, ``None`` for a switch."""
    try:
        words = [word for part in _COMMA.split(text) for word in shlex.split(part)]
    except ValueError as error:
        raise UserInputError(option, text, str(error), "Close the quotes.") from error
    while words:
        name, equals, value = words.pop(0).partition("=")
        if equals:
            yield name, value
        elif name.startswith("--") and words and not words[0].startswith("--"):
            yield name, words.pop(0)
        else:
            yield name, None


def _setting(name: str, value: str | None, option: str) -> tuple[str, str]:
    plain = name.lstrip("-").replace("-", "_")
    plain = re.sub(r"^(parallel|train)\.", "", plain)
    if plain in _SWITCHES and value is None:
        return _SWITCHES[plain]
    key = layout_key(plain)
    if key is None or value in (None, "null"):
        raise UserInputError(
            option,
            name,
            "it has no value" if key else "it says nothing of a layout",
            "For example tp=8." if key else nearest(plain, {*LAYOUT_KEYS, *_SWITCHES}),
        )
    if "," in value and not value.startswith("[") and not key.endswith("_layout"):
        raise UserInputError(option, f"{name}={value}", "it has several values", "Give one layout.")
    return key, value
