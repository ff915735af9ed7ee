"""YAML, JSON and CSV of other people: size, depth and aliases are bounded before anything is built.

A parser builds what a text says, however much that is: a few hundred bytes of aliases stand for
billions of nodes, and a deeply nested file overflows the stack of a parser written in C. Both are
seen in the stream of events, which takes no more memory than one event.
"""

from __future__ import annotations

import csv
import importlib.resources
import io
import json
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from nest_megatron.errors import UserInputError
from nest_megatron.files import MAX_BYTES, read_text

#: The parser in C where libyaml is there.
LOADER: type = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
#: A string, to the end of the text where nothing closes it: each character is looked at once.
_STRING = re.compile(r'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
#: Characters of a scalar without quotes: YAML makes numbers of them, some in quadratic time.
_MAX_PLAIN = 20_000
_MAX_REASON = 200
_NOT_BRACKETS = re.compile(r"[^][{}]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How large a document may be.

    Args:
        num_bytes: of its text.
        num_nodes: values, with what each alias stands for.
        depth: nesting.
    """

    num_bytes: int
    num_nodes: int
    depth: int = 64

    def check(self, *, text: str = "", nodes: int = 0, depth: int = 0) -> None:
        """Refuse what is beyond a limit."""
        if len(text) > self.num_bytes:
            raise _LimitError(f"it is larger than {self.num_bytes / 2**20:g} MiB")
        if nodes > self.num_nodes:
            raise _LimitError(f"it has more than {self.num_nodes:,} values, aliases written out")
        if depth > self.depth:
            raise _LimitError(f"it is nested more than {self.depth} deep")


class _LimitError(Exception):
    """A document is beyond a limit."""


#: Plans, profiles, artifact instances: the largest in use have some 10,000 nodes.
DATA = Limits(num_bytes=MAX_BYTES // 2, num_nodes=150_000)
#: Descriptions of a model or a cluster, which Hydra composes slowly.
DESCRIPTION = Limits(num_bytes=2**18, num_nodes=5_000)
#: Tables of measurements, and JSON, which takes a tenth of YAML's time and memory for a value.
JSON = CSV = Limits(num_bytes=MAX_BYTES, num_nodes=2_000_000)


def packaged(package: str, name: str) -> Any:
    """What a TOML, YAML or JSON file of one of our own packages holds."""
    text = importlib.resources.files(package).joinpath(name).read_text(encoding="utf-8")
    if name.endswith(".toml"):
        return tomllib.loads(text)
    return json.loads(text) if name.endswith(".json") else yaml.load(text, Loader=LOADER)


def read_yaml(path: Path, what: str) -> Any:
    """What a YAML file holds; see ``parse_yaml``."""
    return parse_yaml(read_text(path, what, most=DATA.num_bytes), what, name=str(path))


def read_json(path: Path, what: str, *, unique_keys: bool = False) -> Any:
    """What a JSON file holds; see ``parse_json``."""
    text = read_text(path, what, most=JSON.num_bytes)
    return parse_json(text, what, name=str(path), unique_keys=unique_keys)


def read_csv(path: Path, what: str) -> tuple[tuple[str, ...], list[dict[str, str]]]:
    """The columns of a CSV file, and its rows with an empty text for a cell that is not there.

    Raises:
        UserInputError: if it cannot be read, is no CSV, or is beyond the limits.
    """
    text = read_text(path, what, most=CSV.num_bytes)
    if text.count("\n") * max(1, text.partition("\n")[0].count(",")) > CSV.num_nodes:
        raise _refused(what, str(path), f"it has more than {CSV.num_nodes:,} cells")
    reader = csv.DictReader(io.StringIO(text), strict=True)
    try:
        rows = [{key: value or "" for key, value in row.items() if key} for row in reader]
    except csv.Error as error:
        limit = f"line {reader.line_num} is not CSV: {error}"
        raise _refused(what, str(path), limit) from error
    return tuple(reader.fieldnames or ()), rows


def parse_yaml(text: str, what: str, *, name: str | None = None) -> Any:
    """What a YAML text holds.

    Args:
        what, name: the kind of text and where it lies, for errors.

    Raises:
        UserInputError: if it is no YAML, or is beyond the limits.
    """
    check_yaml(text, what, name=name)
    try:
        return yaml.load(text, Loader=LOADER)
    except (yaml.YAMLError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise _unreadable(what, name, "a readable YAML file", error) from error


def check_yaml(text: str, what: str, *, name: str | None = None, limits: Limits = DATA) -> None:
    """Refuse a YAML text that is beyond the limits, without building anything.

    Raises:
        UserInputError: naming the limit, or the place where it stops being YAML.
    """
    try:
        limits.check(text=text)
        _count(yaml.parse(text, Loader=LOADER), limits)
    except _LimitError as error:
        raise _refused(what, name, str(error)) from None
    except (yaml.YAMLError, ValueError) as error:
        raise _unreadable(what, name, "a readable YAML file", error) from error


def parse_json(text: str, what: str, *, name: str | None = None, unique_keys: bool = False) -> Any:
    """What a JSON text holds.

    Args:
        what, name: the kind of text and where it lies, for errors.
        unique_keys: refuse an object that repeats a key.

    Raises:
        UserInputError: if it is no JSON, or is beyond the limits.
    """
    try:
        JSON.check(text=text, nodes=text.count("[") + text.count("{") + text.count(","))
        JSON.check(depth=_json_depth(text, JSON.depth))
        return json.loads(text, object_pairs_hook=_unique if unique_keys else None)
    except _LimitError as error:
        raise _refused(what, name, str(error)) from None
    except UserInputError:
        raise
    except (ValueError, RecursionError) as error:
        raise _unreadable(what, name, "readable JSON", error) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = sorted(key for key, _ in pairs)
        twice = next(key for key, after in pairwise(keys) if key == after)
        raise _refused("key", twice, "it stands twice in one object")
    return found


def _count(events: Iterable[yaml.Event], limits: Limits) -> None:
    """Add up nodes; an alias counts for all that its anchor holds."""
    anchors: dict[str, int] = {}
    opened: list[tuple[str | None, int]] = []
    total = 0
    for event in events:
        if isinstance(event, yaml.AliasEvent):
            if any(anchor == event.anchor for anchor, _ in opened):
                raise _LimitError(f"the alias *{event.anchor} refers to what it is in")
            total += anchors.get(event.anchor, 1)
        elif isinstance(event, yaml.ScalarEvent):
            total += 1
            if not event.style and len(event.value) > _MAX_PLAIN:
                raise _LimitError(f"it has a word of more than {_MAX_PLAIN:,} characters")
            if event.anchor:
                anchors[event.anchor] = 1
        elif isinstance(event, yaml.CollectionStartEvent):
            opened.append((event.anchor, total))
            total += 1
            limits.check(depth=len(opened))
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = opened.pop()
            if anchor:
                anchors[anchor] = total - before
        limits.check(nodes=total)


def _json_depth(text: str, most: int) -> int:
    """How deep the brackets of a JSON text are nested; those inside strings do not count."""
    depth = deepest = 0
    for bracket in _NOT_BRACKETS.sub("", _STRING.sub("", text)):
        depth += 1 if bracket in "[{" else -1
        deepest = max(deepest, depth)
        if deepest > most:
            break
    return deepest


def _unreadable(what: str, name: str | None, wanted: str, error: BaseException) -> UserInputError:
    line = next(iter(str(error).splitlines()), type(error).__name__)
    reason = line if len(line) <= _MAX_REASON else f"{line[:_MAX_REASON]}..."
    return _refused(what, name, f"it is not {wanted}: {reason}")


def _refused(what: str, name: str | None, limit: str) -> UserInputError:
    fix = "Check that it is the file you meant; it may be damaged."
    return UserInputError(what, value=name, limit=limit, fix=fix)
