"""YAML, JSON and CSV of other people: size, depth and aliases are bounded before anything is built.

A parser builds what a text says, however much that is: a few hundred bytes of aliases stand for
billions of nodes, and a deeply nested file overflows the stack of a parser written in C. Both are
seen in the stream of events, which takes no more memory than one event.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from nest_megatron.errors import UserInputError
from nest_megatron.files import MAX_BYTES, read_text

#: The parser in C where libyaml is there.
LOADER: type = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_FIX = "Check that it is the file you meant; it may be damaged."
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


#: Plans, profiles, artifact instances: the largest in use have some 10,000 nodes.
DATA = Limits(num_bytes=MAX_BYTES // 2, num_nodes=150_000)
#: Descriptions of a model or a cluster, which Hydra composes slowly.
DESCRIPTION = Limits(num_bytes=2**18, num_nodes=5_000)
#: Tables of measurements.
CSV = Limits(num_bytes=MAX_BYTES, num_nodes=2_000_000)
#: JSON takes a tenth of YAML's time and memory for a value.
JSON = Limits(num_bytes=MAX_BYTES, num_nodes=2_000_000)


def read_yaml(path: Path, what: str, limits: Limits = DATA) -> Any:
    """What a YAML file holds.

    Raises:
        UserInputError: if it cannot be read, is no YAML, or is beyond the limits.
    """
    return parse_yaml(_text(path, what, limits), what, name=str(path), limits=limits)


def read_json(path: Path, what: str, limits: Limits = JSON, *, unique_keys: bool = False) -> Any:
    """What a JSON file holds.

    Raises:
        UserInputError: if it cannot be read, is no JSON, or is beyond the limits; with
            ``unique_keys``, if an object repeats a key.
    """
    text, pairs = _text(path, what, limits), _unique if unique_keys else None
    return parse_json(text, what, name=str(path), limits=limits, pairs=pairs)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in sorted(keys) if keys.count(key) > 1)
        raise _refused("key", twice, "it stands twice in one object")
    return found


def read_csv(path: Path, what: str) -> tuple[tuple[str, ...], list[dict[str, str]]]:
    """The columns of a CSV file, and its rows with an empty text for a cell that is not there.

    Raises:
        UserInputError: if it cannot be read, is no CSV, or is beyond the limits.
    """
    text = _text(path, what, CSV)
    if text.count("\n") * max(1, text.partition("\n")[0].count(",")) > CSV.num_nodes:
        raise _refused(what, str(path), f"it has more than {CSV.num_nodes:,} cells")
    reader = csv.DictReader(io.StringIO(text), strict=True)
    try:
        rows = [{key: value or "" for key, value in row.items() if key} for row in reader]
    except csv.Error as error:
        limit = f"line {reader.line_num} is not CSV: {error}"
        raise _refused(what, str(path), limit) from error
    return tuple(reader.fieldnames or ()), rows


def _text(path: Path, what: str, limits: Limits) -> str:
    return read_text(path, what, most=limits.num_bytes)


def parse_yaml(text: str, what: str, *, name: str | None = None, limits: Limits = DATA) -> Any:
    """What a YAML text holds.

    Args:
        what, name: the kind of text and where it lies, for errors.

    Raises:
        UserInputError: if it is no YAML, or is beyond the limits.
    """
    check_yaml(text, what, name=name, limits=limits)
    try:
        return yaml.load(text, Loader=LOADER)
    except (yaml.YAMLError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise _not_yaml(what, name, error) from error


def check_yaml(text: str, what: str, *, name: str | None = None, limits: Limits = DATA) -> None:
    """Refuse a YAML text that is beyond the limits, without building anything.

    Raises:
        UserInputError: naming the limit, or the place where it stops being YAML.
    """
    try:
        _require_size(text, limits)
        _count(yaml.parse(text, Loader=LOADER), limits)
    except _LimitError as error:
        raise _refused(what, name, str(error)) from None
    except (yaml.YAMLError, ValueError) as error:
        raise _not_yaml(what, name, error) from error


def parse_json(
    text: str,
    what: str,
    *,
    name: str | None = None,
    limits: Limits = JSON,
    pairs: Callable[[list[tuple[str, Any]]], Any] | None = None,
) -> Any:
    """What a JSON text holds.

    Args:
        what, name: the kind of text and where it lies, for errors.
        pairs: makes an object of its pairs.

    Raises:
        UserInputError: if it is no JSON, or is beyond the limits.
    """
    try:
        _require_size(text, limits)
        _require_nodes(text.count("[") + text.count("{") + text.count(","), limits)
        _require_depth(_json_depth(text, limits.depth), limits)
        return json.loads(text, object_pairs_hook=pairs)
    except _LimitError as error:
        raise _refused(what, name, str(error)) from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, UserInputError):
            raise
        raise _refused(what, name, f"it is not readable JSON: {_reason(error)}") from error


class _LimitError(Exception):
    """A document is beyond a limit."""


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
            _require_depth(len(opened), limits)
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = opened.pop()
            if anchor:
                anchors[anchor] = total - before
        _require_nodes(total, limits)


def _json_depth(text: str, most: int) -> int:
    """How deep the brackets of a JSON text are nested; those inside strings do not count."""
    depth = deepest = 0
    for bracket in _NOT_BRACKETS.sub("", _STRING.sub("", text)):
        depth += 1 if bracket in "[{" else -1
        deepest = max(deepest, depth)
        if deepest > most:
            break
    return deepest


def _require_size(text: str, limits: Limits) -> None:
    if len(text) > limits.num_bytes:
        raise _LimitError(f"it is larger than {limits.num_bytes / 2**20:g} MiB")


def _require_nodes(number: int, limits: Limits) -> None:
    if number > limits.num_nodes:
        raise _LimitError(f"it has more than {limits.num_nodes:,} values, aliases written out")


def _require_depth(depth: int, limits: Limits) -> None:
    if depth > limits.depth:
        raise _LimitError(f"it is nested more than {limits.depth} deep")


def _not_yaml(what: str, name: str | None, error: BaseException) -> UserInputError:
    return _refused(what, name, f"it is not a readable YAML file: {_reason(error)}")


def _reason(error: BaseException) -> str:
    line = next(iter(str(error).splitlines()), type(error).__name__)
    return line if len(line) <= _MAX_REASON else f"{line[:_MAX_REASON]}..."


def _refused(what: str, name: str | None, limit: str) -> UserInputError:
    return UserInputError(what, value=name, limit=limit, fix=_FIX)
