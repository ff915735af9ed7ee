"""Overrides as typed: which keys and names exist, and the values that Hydra's grammar reads."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from nest_megatron.catalogue_files import catalogue_names
from nest_megatron.cluster.records import Accelerator, NetworkLevel
from nest_megatron.config.schema import SECTIONS, is_numeric, section_keys
from nest_megatron.errors import UserInputError, message_line, nearest, require_known, typed_setting
from nest_megatron.layout.dims import SHORT_DEGREES
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.plain import frozen
from nest_megatron.units import is_quantity, read_quantity, without_suffix

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

Choice = TypeVar("Choice", bound=Enum)

#: As many nodes as a job may be asked to be planned for at once.
_MOST = 1000
_RANGE = re.compile(r"(\d{1,18})(?:\.\.(\d{1,18})(?::(\d{1,18}))?)?")

#: Groups of the catalogue that a job chooses from.
GROUPS = ("model", "cluster")
#: Short names of settings of several sections, alike in every command.
SHORT_KEYS = {
    "gpus": "cluster.num_gpus",
    "memory": "cluster.accelerator.memory_bytes",
    "max_seconds": "search.max_seconds",
}
#: Hydra's name for the accelerator of the chosen cluster.
ACCELERATOR_CHOICE = "accelerator@cluster.accelerator"
#: Most jobs of a sweep.
MAX_JOBS = 100_000
#: Longest setting, and how deep its brackets may be nested: Hydra's parser calls itself.
_MAX_LENGTH, _MAX_DEPTH = 20_000, 16
#: What stands before fields of a cluster's description whose names end with their units: of what.
_MACHINES = {"cluster.levels.": NetworkLevel, "cluster.accelerator.": Accelerator}
#: Values that are text whatever characters they hold.
_TEXT_KEYS = ("out", "flags", "parallel.pipeline_model_parallel_layout")
#: Overrides that need no grammar: of a whole number, a decimal fraction or a word.
_PLAIN = re.compile(
    r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*="
    r"(?:(0|[1-9]\d*)|((?:0|[1-9]\d*)\.\d+)|(?!(?i:inf|nan)$)([A-Za-z_][\w-]*))",
    re.ASCII,
)
#: Words that stand for other values, in lower case.
_CONSTANTS = {"null": None, "true": True, "false": False}


@frozen
class Setting:
    """One override: ``key=value``, or the removal of a key (``~key``, value ``None``).

    Args:
        origin: the file and the line of a site's default; ``None`` where a user gave it.
    """

    key: str
    value: str | None
    origin: str | None = None

    def __str__(self) -> str:
        return f"~{self.key}" if self.value is None else f"{self.key}={self.value}"


def parse(texts: Iterable[str]) -> tuple[Setting, ...]:
    """Read overrides and check their keys and the names they choose; errors name the nearest.

    A single text is a list of one.
    """
    settings = tuple(map(_setting, map(str, [texts] if isinstance(texts, str) else texts)))
    for setting in settings:
        _check_key(setting)
        key, name = setting.key, setting.key.rpartition(".")[2]
        if is_numeric(key) or (key.startswith(tuple(_MACHINES)) and without_suffix(name) != name):
            for value in filter(None, _values(setting)):
                if is_quantity(value):
                    read_quantity(value, name, key)
    return settings


def split_launcher(texts: Iterable[str]) -> tuple[list[str], tuple[Setting, ...]]:
    """Overrides apart from those of Hydra's launcher (``hydra/launcher``, ``hydra.launcher.KEY``).

    >>> split_launcher(["model=llama3_8b", "hydra/launcher=joblib"])[0]
    ['model=llama3_8b']
    """
    own: list[str] = []
    launcher: list[Setting] = []
    for text in texts:
        if text.lstrip("+").startswith(("hydra/launcher=", "hydra.launcher.")):
            launcher.append(_setting(text))
        else:
            own.append(text)
    return own, tuple(launcher)


def _setting(text: str) -> Setting:
    _require_readable(text)
    if text.startswith("~"):
        return Setting(key=text[1:].partition("=")[0], value=None)
    key, equals, value = text.partition("=")
    if not equals or not key:
        meant = (f"Did you mean {g}={text}?" for g in GROUPS if text in catalogue_names(g))
        raise UserInputError(
            "override",
            text,
            "settings are written key=value",
            next(meant, "For example model=llama3_70b cluster=dgx_h100 cluster.num_gpus=64."),
        )
    refuse_resolvers(key, [key, value])
    key = SHORT_KEYS.get(name := key.lstrip("+").strip(), name)
    if key == "model.hf":
        key = "model"
    return Setting(key=_whole_key(key), value=value.strip())


def refuse_resolvers(what: str, value: object, fix: str = "Write the value itself.") -> None:
    """Refuse a value, or one inside it, that has OmegaConf call a function (``${oc.env:HOME}``).

    What is typed, read of a file or sent by a browser is data: it reads no variable of the
    environment. A reference to another value (``${model.name}``) is none.

    Args:
        what: names the value in the error.
    """
    if isinstance(value, Mapping):
        value = (*value, *value.values())
    if isinstance(value, list | tuple):
        for each in value:
            refuse_resolvers(what, each, fix)
    if isinstance(value, str) and ":" in value.replace("\\", "").partition("${")[2]:
        limit = "it calls a resolver of OmegaConf, and values are only data"
        raise UserInputError(what, value, limit, fix)  # Hydra takes backslashes away


def _whole_key(key: str) -> str:
    """A key of the cluster whose last name lacks the unit that the field's own name ends with.

    >>> _whole_key("cluster.levels.leaf.bandwidth"), _whole_key("cluster.accelerator.memory")
    ('cluster.levels.leaf.bandwidth_bytes_per_s', 'cluster.accelerator.memory_bytes')
    """
    for prefix, record in _MACHINES.items():
        if key.startswith(prefix):
            before, dot, last = key.rpartition(".")
            names = (each.name for each in dataclasses.fields(record))
            whole = (name for name in names if name != last and without_suffix(name) == last)
            return f"{before}{dot}{next(whole, last)}"
    return key


def _require_readable(text: str) -> None:
    """Refuse what no setting is, before a parser looks at it."""
    key = text.partition("=")[0][:80]
    if len(text) > _MAX_LENGTH:
        raise UserInputError(
            key,
            len(text),
            f"a setting has at most {_MAX_LENGTH:,} characters",
            "Put what is longer into a file of your own (model=FILE, cluster=FILE).",
        )
    brackets = [1 if character in "[{(" else -1 for character in text if character in "[]{}()"]
    if max(itertools.accumulate(brackets), default=0) > _MAX_DEPTH:
        raise UserInputError(
            key,
            text[len(key) + 1 :],
            f"its brackets are nested more than {_MAX_DEPTH} deep",
            "Correct the value.",
        )


def _check_key(setting: Setting) -> None:
    key = setting.key
    if key == ACCELERATOR_CHOICE or key.partition(".")[0] in GROUPS:
        return
    if key not in section_keys():
        raise UserInputError(key, setting.value, "there is no such setting", _nearest_key(key))
    if setting.value is None:
        raise UserInputError(
            key,
            None,
            "only a key of the model or the cluster is removed with ~",
            f"Write {key}=null.",
        )


def _nearest_key(key: str) -> str:
    """The settings closest to a misspelt one, or those of its section."""
    section, _, name = key.rpartition(".")
    everywhere = [k for k in section_keys() if k.rpartition(".")[2] == name]
    if everywhere:
        return f"Did you mean {' or '.join(everywhere)}?"
    if meant := layout_key(key):
        return f"Did you mean {meant}?"
    if not section and key in {each.name for each in dataclasses.fields(TransformerSpec)}:
        return f"Did you mean model.{key}?"
    if section in SECTIONS:
        return nearest(key, [k for k in section_keys() if k.startswith(f"{section}.")], count=2)
    return nearest(key, [*section_keys(), *GROUPS, "cluster.num_gpus"], count=2)


#: Settings of a layout, by their names without the section and by short ones.
LAYOUT_KEYS = {
    **{key.partition(".")[2]: key for key in section_keys() if key.startswith("parallel.")},
    **{short.lower(): f"parallel.{name}" for name, short in SHORT_DEGREES.items()},
    **dict.fromkeys(("micro_batch_size", "mbs"), "train.micro_batch_size"),
    "vp": "parallel.virtual_pipeline_model_parallel_size",
    "zero": "parallel.zero_stage",
    "recompute": "parallel.recompute_granularity",
    # Megatron-LM's
    "num_virtual_stages_per_pipeline_rank": "parallel.virtual_pipeline_model_parallel_size",
}


def layout_key(word: str) -> str | None:
    """The setting that a word for a size of a layout says.

    >>> layout_key("tp"), layout_key("zero"), layout_key("max_seconds")
    ('parallel.tensor_model_parallel_size', 'parallel.zero_stage', None)
    """
    return LAYOUT_KEYS.get(word.lower())


def is_path(value: str) -> bool:
    """Whether a model or cluster is named by its file rather than by its catalogue name.

    >>> is_path("llama3_70b"), is_path("./config.json"), is_path("mine.yaml")
    (False, True, True)
    """
    text = value.strip("'\"")
    return "/" in text or text.startswith("~") or text.endswith((".json", ".yaml", ".yml"))


def check_choice(group: str, value: str, config_dir: Path | None) -> None:
    """Refuse a name that neither the catalogue nor the user's folder has, with the nearest."""
    names = {*catalogue_names(group)}
    if config_dir is not None:
        names |= {path.stem for path in (config_dir / group).glob("*.yaml")}
    if value not in names:
        limit, fix = f"there is no such {group} in the catalogue", nearest(value, names)
        if not value.strip("'\""):
            limit, fix = "it is empty", "Give a name."
        if group in GROUPS:
            fix += f" `nest-megatron {group}s` lists all; a path works as well."
        raise UserInputError(typed_setting(group), value, limit, fix)


#: The tables of the grammar are the process's, and filled as they are used.
_LOCK = threading.Lock()


def _parsed(text: str) -> Override:
    """An override by Hydra's grammar; ``HydraException`` if it cannot be read."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    with _LOCK:
        return OverridesParser.create().parse_override(text)


def typed_value(setting: Setting, what: str) -> Any:
    """The value of a setting by Hydra's grammar, a number without its unit.

    Args:
        what: names the setting in errors.

    Raises:
        UserInputError: for a value that cannot be read, or several.
    """
    key, value = setting.key, setting.value or ""
    if is_numeric(key) and is_quantity(value):
        return read_quantity(value, key.rpartition(".")[2], what)
    text = f"{key}={quoted(value) if key in _TEXT_KEYS else value}"
    if plain := _PLAIN.fullmatch(text):
        whole, decimal, word = plain.groups()
        if word:
            return _CONSTANTS.get(word.lower(), word)
        return int(whole) if whole else float(decimal)

    from hydra.errors import HydraException

    try:
        found = _parsed(text)
    except HydraException as error:
        raise unreadable(what, value, error) from error
    if found.is_sweep_override():
        raise _several(setting)
    return found.value()


def choice(what: str, value: str, kind: type[Choice]) -> Choice:
    """A member of an enum by its name; any other is an error that names them."""
    require_known(what, value, [member.value for member in kind])
    return kind(value)


def quoted(value: str) -> str:
    """Text in the quotes of Hydra's grammar; ``null`` and quoted text stay as they are."""
    if value == "null" or (len(value) > 1 and value[0] == value[-1] and value[0] in "'\""):
        return value
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def expand(settings: Sequence[Setting]) -> Iterator[tuple[Setting, ...]]:
    """Every combination of a sweep's values, by Hydra's grammar (``1,2``, ``range(1,5)``)."""
    axes = [_values(setting) for setting in settings]
    _require_jobs("--multirun", math.prod(map(len, axes)))
    for values in itertools.product(*axes):
        yield tuple(
            Setting(key=s.key, value=value) for s, value in zip(settings, values, strict=True)
        )


def swept(settings: Sequence[Setting]) -> tuple[str, ...]:
    """Keys that have more than one value."""
    return tuple(s.key for s in settings if len(_values(s)) > 1)


def refuse_sweeps(settings: Sequence[Setting]) -> None:
    """Refuse several values for one key where one job is planned."""
    for setting in settings:
        if len(_values(setting)) > 1:
            raise _several(setting)


def _several(setting: Setting) -> UserInputError:
    limit = "it has several values, and one job is planned"
    fix = "Give one value; `nest-megatron plan --multirun` plans each."
    return UserInputError(setting.key, setting.value, limit, fix)


def _values(setting: Setting) -> list[str | None]:
    value = setting.value
    if value is None or setting.key in _TEXT_KEYS or not set(value) & set(",("):
        return [value]
    from hydra.errors import HydraException

    try:
        parsed = _parsed(str(setting))
        if not parsed.is_sweep_override():
            return [value]
        values: list[str | None] = list(
            itertools.islice(parsed.sweep_string_iterator(), MAX_JOBS + 1)
        )
    except (HydraException, ValueError, TypeError, ArithmeticError) as error:
        raise unreadable(setting.key, value, error) from error
    _require_jobs(setting.key, len(values))
    return values


def _require_jobs(what: str, number: int) -> None:
    if number > MAX_JOBS:
        raise UserInputError(
            what,
            number,
            f"a sweep has at most {MAX_JOBS:,} jobs",
            "Leave some of the values out.",
        )


#: What Hydra's parser says of a value, and what it means.
_UNREAD = {
    "token recognition error": "a character stands in quotes alone, or a quote is not closed",
    "extraneous input": "its brackets do not match, or a character is too much",
}


def unreadable(key: str, value: object, error: Exception) -> UserInputError:
    """The error for a value that Hydra's grammar does not take."""
    said = first_line(error).partition(" expecting {")[0]  # and all that its lexer knows
    said = next((words for start, words in _UNREAD.items() if said.startswith(start)), said)
    return UserInputError(
        key,
        value,
        f"it cannot be read: {said}",
        "Put text with special characters into quotes: key=\"'text'\".",
    )


def value_text(value: object) -> str:
    """A value as it is typed.

    >>> [value_text(value) for value in (None, True, 1e-05, "bf16", ("a", "b"))]
    ['null', 'true', '1e-05', 'bf16', '[a,b]']
    """
    if value is None:
        return "null"
    if isinstance(value, Enum):
        return value_text(value.value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{','.join(map(value_text, value))}]"
    return str(value)


def leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and value of everything in a nested mapping."""
    for name, value in node.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def first_line(error: BaseException) -> str:
    """The first line of an error's text, for one line of ours."""
    return message_line(error).rstrip(".")


#: What OmegaConf says of a value of the wrong type, and what the value must be.
_TYPES = {
    "could not be converted to Integer": "a whole number",
    "could not be converted to Float": "a number",
    "is not a valid bool": "true or false",
    "is not a DictConfig": "several settings, {NAME: VALUE}",
    "ListConfig": "a list, [A,B]",  # it is not one, or cannot be merged with one
}


def type_limit(error: BaseException) -> str:
    """What a setting must be that OmegaConf refuses for its type; else the error's first line."""
    said = first_line(error)
    kind = next((kind for words, kind in _TYPES.items() if words in said), None)
    return said if kind is None else f"it must be {kind}"


def read_counts(text: str, option: str, *, doubling: bool = False) -> tuple[int, ...]:
    """Numbers of nodes or GPUs: ``16``, ``120..128`` or ``96..128:8``.

    Args:
        option: what takes them, in errors.
        doubling: a range without a step doubles, and does not grow by 1.

    Raises:
        UserInputError: for anything else, a range that is empty, or one of more than 1,000.

    >>> read_counts("12..16:2", "--for-nodes"), read_counts("64..300", "GPUs", doubling=True)
    ((12, 14, 16), (64, 128, 256))
    """
    of, example = "nodes", "120..128, or 96..128:8"
    if doubling:
        of, example = "GPUs", "64..4096, which doubles, or 64..512:64"

    def wrong(limit: str) -> UserInputError:
        return UserInputError(option, text, limit, f"Write for example {option} {example}.")

    if (found := _RANGE.fullmatch(text.strip())) is None:
        raise wrong(f"it is a number of {of}, or the first and the last of a range")
    begins, ends, apart = found.groups()
    first, last, step = int(begins), int(ends or begins), int(apart or 1)
    if first < 1 or step < 1:
        raise wrong(f"{of}, and the step between two numbers of them, are at least 1")
    if last < first:
        raise wrong(f"the range goes up, and {last} is below {first}")
    counts: Sequence[int] = range(first, last + 1, step)
    if doubling and apart is None:
        counts = [first << power for power in range((last // first).bit_length())]
    if len(counts) > _MOST:
        raise wrong(f"it is {len(counts)} numbers, and at most {_MOST} are planned at once")
    return tuple(counts)
