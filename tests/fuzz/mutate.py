"""Broken documents from sound ones: by characters, by words, and by values of a parsed tree."""

from __future__ import annotations

import copy
import json
import re
from random import Random
from typing import Any

import yaml

#: Values that stand at the edge of something.
EDGES = (
    *("0", "-1", "1", "2", "1e9", "1e308", "-1e308", "1e400", "nan", ".nan", "inf", "-.inf"),
    *("18446744073709551616", "-9223372036854775809", "2147483648", "0.1", "1e-320", "1_000"),
    *("null", "~", "true", "off", "''", '""', "[]", "{}", "x", "\u202e", "\x00", "é", "\ud7ff"),
    *("1:30", "0x7f", "0o17", "2001-99-99", "!!python/object:os.system x", "&a [*a]", "*a", "<<"),
    *("${a}", "${oc.env:HOME}", "${", "$(id)", "%", "- ", ": ", "? ", "#", "|", ">", "---", "..."),
    *("\ufeff", "\t", "\n", "\r\n", "9" * 30, "9" * 5000, "[" * 100, "{a: " * 100, "(" * 50, ","),
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 3, 7, 1.5, -0.0, 1e9, 1e308, 5e-324, float("nan")),
    *(float("inf"), 2**31, 2**63, 2**64, -(2**63) - 1, 10**30, "", "x", "0", "1e9", "nan", "é"),
    *([], {}, [[]], [0], [None], {"x": 1}, {"": {}}, ["a", 1, None], [1] * 300, "a" * 3000),
)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")


def characters(text: str, other: str, random: Random) -> str:
    """A text with one to four spans removed, doubled, moved, replaced or cut off."""
    for _ in range(random.randint(1, 4)):
        at = random.randint(0, len(text))
        end = min(len(text), at + random.choice((1, 1, 2, 5, 20, 200)))
        match random.randrange(8):
            case 0:
                text = text[:at] + text[end:]
            case 1:
                text = text[:end] + text[at:end] * random.choice((1, 3, 20)) + text[end:]
            case 2:
                text = text[:at] + random.choice(EDGES) + text[end:]
            case 3:
                text = text[:at] + random.choice(EDGES) + text[at:]
            case 4:
                text = (
                    text[:at] + chr(random.choice((0, 9, 10, 34, 45, 58, 91, 123, 255))) + text[at:]
                )
            case 5:
                text = number(text, random)
            case 6:
                start = random.randint(0, len(other))
                text = text[:at] + other[start : start + random.choice((5, 50, 500))] + text[end:]
            case _:
                text = text[:at] if random.random() < 0.3 else text[end:] + text[:at]
    return text[:200_000]


def number(text: str, random: Random) -> str:
    """A text with one of its numbers replaced by an edge."""
    found = list(_NUMBER.finditer(text))
    if not found:
        return text
    one = random.choice(found)
    return text[: one.start()] + random.choice(EDGES) + text[one.end() :]


def tree(document: Any, random: Random) -> Any:
    """A parsed document with one to three of its values replaced, removed, renamed or doubled."""
    whole = {"root": copy.deepcopy(document)}
    for _ in range(random.randint(1, 3)):
        place, key = _place(whole, random)
        match random.randrange(5):
            case 0 if isinstance(place, list) or place is not whole:
                del place[key]
            case 1 if isinstance(place, dict) and place is not whole:
                place[random.choice(("", "x", 3, None, f"{key}s"))] = place.pop(key)
            case 2 if isinstance(place, list):
                place.insert(0, copy.deepcopy(place[key]))
            case 3 if isinstance(place[key], int | float):
                place[key] = random.choice((-1, 0, 1, 2, 3, 1.5, 1e9, 10**12, place[key] * 2))
            case _:
                place[key] = copy.deepcopy(random.choice(VALUES))
    return whole.get("root")


def _place(node: Any, random: Random) -> tuple[Any, Any]:
    """A random list or mapping of a tree, and a key of it."""
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = random.choice(keys)
        child = node[key]
        if isinstance(child, dict | list) and child and random.random() < 0.75:
            node = child
            continue
        return node, key


def as_text(document: Any, kind: str) -> str:
    """A tree as the text of its format."""
    if kind == "json":
        return json.dumps(document, default=str, skipkeys=True)
    return str(yaml.dump(document, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper)))
