"""YAML, JSON and CSV of other people: size, depth and aliases are bounded before anything is built.

A parser builds what a text says, however much that is: a few hundred bytes of aliases stand for
billions of nodes, and a deeply nested file overflows the stack of a parser written in C. Both are
seen in the stream of events, which takes no more memory than one event. A key that stands twice is
refused there too: parsers keep the last one, and who reads the text may see the first.
"""

from __future__ import annotations

import importlib.resources
import io
import json
import re
import tomllib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from nest_megatron.errors import UserInputError, message_line, shortened
from nest_megatron.files import MAX_BYTES, read_text
from nest_megatron.plain import frozen
from nest_megatron.printing import cleaned

#: The parser in C where libyaml is there.
LOADER: type = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
#: A string, to the end of the text where nothing closes it: each character is looked at once.
_STRING = re.compile(r'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
#: Characters of a scalar without quotes: YAML makes numbers of them, some in quadratic time.
_MAX_PLAIN = 20_000
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?(e[+-]?\d+)?")
_NOT_BRACKETS = re.compile(r"[^][{}]+")


@frozen
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


_DAMAGED = "Check that it is the file you meant; it may be damaged."


class _LimitError(Exception):
    """A document is beyond a limit."""

    def __init__(self, limit: str, fix: str = _DAMAGED) -> None:
        super().__init__(limit)
        self.fix = fix


def _repeats(key: str, where: str = "") -> _LimitError:
    return _LimitError(f"the key {key!r} stands twice in one mapping{where}", "Leave one of them.")


#: Plans, profiles, artifact instances: the largest in use have some 10,000 nodes.
DATA = Limits(num_bytes=MAX_BYTES // 2, num_nodes=150_000)
#: Descriptions of a model or a cluster, which OmegaConf merges slowly.
DESCRIPTION = Limits(num_bytes=2**18, num_nodes=5_000)
#: Tables of measurements, and JSON, which takes a tenth of YAML's time and memory for a value.
JSON = CSV = Limits(num_bytes=MAX_BYTES, num_nodes=2_000_000)


def packaged(package: str, name: str) -> Any:
    """What a TOML, YAML or JSON file of one of our packages holds."""
    text = importlib.resources.files(package).joinpath(name).read_text(encoding="utf-8")
    if name.endswith(".toml"):
        return tomllib.loads(text)
    return json.loads(text) if name.endswith(".json") else yaml.load(text, Loader=LOADER)


def read_yaml(path: Path, what: str) -> Any:
    """What a YAML file holds; see ``parse_yaml``."""
    return parse_yaml(read_text(path, what, most=DATA.num_bytes), what, name=str(path))


def read_json(path: Path, what: str) -> Any:
    """What a JSON file holds; see ``parse_json``."""
    return parse_json(read_text(path, what, most=JSON.num_bytes), what, name=str(path))


def read_csv(path: Path, what: str) -> tuple[tuple[str, ...], list[dict[str, str]]]:
    """The columns of a CSV file, and its rows with an empty text for a cell that is not there.

    Raises:
        UserInputError: if it cannot be read, is no CSV, or is beyond the limits.
    """
    import csv

    text = read_text(path, what, most=CSV.num_bytes)
    if text.count("\n") * max(1, text.partition("\n")[0].count(",")) > CSV.num_nodes:
        raise _refused(what, str(path), f"it has more than {CSV.num_nodes:,} cells")
    reader = csv.DictReader(io.StringIO(text), strict=True)
    try:
        rows = [{key: value or "" for key, value in row.items() if key} for row in reader]
    except csv.Error as error:
        raise _refused(what, str(path), f"line {reader.line_num} is not CSV: {error}") from error
    columns = tuple(reader.fieldnames or ())
    if (twice := _repeated(name for name in columns if name)) is not None:
        raise _refused(what, str(path), f"the column {twice!r} stands twice in it")
    return columns, rows


def csv_text(rows: Sequence[Mapping[str, object]]) -> str:
    """Rows of the same columns as CSV with a head, without texts that a spreadsheet runs."""
    import csv

    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _no_formula(value) for name, value in row.items()} for row in rows)
    return stream.getvalue()


def _no_formula(value: object) -> object:
    """A text as such: spreadsheets take one that begins so for a formula, and run it.

    Source: https://owasp.org/www-community/attacks/CSV_Injection, which says what to put before.
    """
    if not isinstance(value, str):
        return value
    text = cleaned(value)
    return f"'{text}" if text.startswith(tuple("=+-@\t")) and not _NUMBER.fullmatch(text) else text


def parse_yaml(text: str, what: str, *, name: str | None = None) -> Any:
    """What a YAML text holds.

    Args:
        what, name: the kind of text and where it lies, for errors.

    Raises:
        UserInputError: if it is no YAML, repeats a key, or is beyond the limits.
    """
    check_yaml(text, what, name=name)
    try:
        return yaml.load(text, Loader=LOADER)
    except (yaml.YAMLError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise _unreadable(what, name, "a readable YAML file", error) from error


def check_yaml(text: str, what: str, *, name: str | None, limits: Limits = DATA) -> None:
    """Refuse a YAML text that repeats a key or is beyond the limits, without building anything.

    Raises:
        UserInputError: naming the limit, or the place where it stops being YAML.
    """
    try:
        limits.check(text=text)
        count = _Count(limits)
        for event in yaml.parse(text, Loader=LOADER):
            count.add(event)
    except _LimitError as error:
        raise _refused(what, name, str(error), error.fix) from None
    except (yaml.YAMLError, ValueError) as error:
        raise _unreadable(what, name, "a readable YAML file", error) from error


def parse_json(text: str, what: str, *, name: str | None = None, limits: Limits = JSON) -> Any:
    """What a JSON text holds.

    Args:
        what, name: the kind of text and where it lies, for errors.

    Raises:
        UserInputError: if it is no JSON, repeats a key, or is beyond the limits.
    """
    try:
        limits.check(text=text, nodes=text.count("[") + text.count("{") + text.count(","))
        limits.check(depth=_json_depth(text, limits.depth))
        return json.loads(text, object_pairs_hook=_unique)
    except _LimitError as error:
        raise _refused(what, name, str(error), error.fix) from None
    except (ValueError, RecursionError) as error:
        raise _unreadable(what, name, "readable JSON", error) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _repeats(str(_repeated(key for key, _ in pairs)))
    return found


def _repeated(names: Iterable[str]) -> str | None:
    """The first, in order of the alphabet, of the names that stand twice."""
    return next((name for name, after in pairwise(sorted(names)) if name == after), None)


@dataclass(slots=True)
class _Opened:
    """A list or a mapping whose end has not come.

    Args:
        before: nodes before it.
        is_next_key: what comes next is a key.
    """

    anchor: str | None
    before: int
    is_mapping: bool
    is_next_key: bool = True
    keys: set[object] = field(default_factory=set)


class _Count:
    """Adds up nodes; an alias counts for all that its anchor holds."""

    def __init__(self, limits: Limits) -> None:
        self._limits, self._total = limits, 0
        self._anchors: dict[str, int] = {}
        self._opened: list[_Opened] = []

    def add(self, event: yaml.Event) -> None:
        """Count an event, and refuse what it takes beyond a limit, or a key that was there."""
        if isinstance(event, yaml.NodeEvent):
            self._check_key(event)
        if isinstance(event, yaml.AliasEvent):
            if any(each.anchor == event.anchor for each in self._opened):
                raise _LimitError(f"the alias *{event.anchor} refers to what it is in")
            self._total += self._anchors.get(event.anchor, 1)
        elif isinstance(event, yaml.ScalarEvent):
            self._total += 1
            if not event.style and len(event.value) > _MAX_PLAIN:
                raise _LimitError(f"it has a word of more than {_MAX_PLAIN:,} characters")
            if event.anchor:
                self._anchors[event.anchor] = 1
        elif isinstance(event, yaml.CollectionStartEvent):
            is_mapping = isinstance(event, yaml.MappingStartEvent)
            self._opened.append(_Opened(event.anchor, self._total, is_mapping))
            self._total += 1
            self._limits.check(depth=len(self._opened))
        elif isinstance(event, yaml.CollectionEndEvent):
            ended = self._opened.pop()
            if ended.anchor:
                self._anchors[ended.anchor] = self._total - ended.before
        self._limits.check(nodes=self._total)

    def _check_key(self, event: yaml.NodeEvent) -> None:
        parent = self._opened[-1] if self._opened else None
        if parent is None or not parent.is_mapping:
            return
        if parent.is_next_key:
            if not isinstance(event, yaml.ScalarEvent) or event.tag not in (None, "!", _TEXT):
                raise _LimitError("a key in it is no plain text or number")
            key = _key(event)
            if key in parent.keys:
                raise _repeats(event.value, f", the second on line {event.start_mark.line + 1}")
            parent.keys.add(key)
        parent.is_next_key = not parent.is_next_key


_TEXT = "tag:yaml.org,2002:str"
#: What a word without quotes may be instead of a text, by its first character.
_OTHERS: Any = yaml.SafeLoader.yaml_implicit_resolvers


def _key(event: yaml.ScalarEvent) -> object:
    """A key as it is built: ``on`` and ``yes`` are one, and so are 1 and 0x1."""
    value = event.value
    others = _OTHERS.get(value[:1], ())
    if event.style or event.tag == _TEXT or not any(word.match(value) for _, word in others):
        return value
    try:
        key = yaml.load(value, Loader=LOADER)
    except (yaml.YAMLError, ValueError):
        return value
    return key if isinstance(key, Hashable) else value


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
    return _refused(what, name, f"it is not {wanted}: {shortened(message_line(error))}")


def _refused(what: str, name: str | None, limit: str, fix: str = _DAMAGED) -> UserInputError:
    return UserInputError(what, name, limit, fix)
