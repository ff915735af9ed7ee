"""Fields of an application that hold the plan: where they are, and their values once planned."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from nest_megatron.errors import UserInputError, nearest
from nest_megatron.integrations.fields import ABSENT

#: A value of the plan; the group ``auto`` writes each under a name of this node.
PLANNED = re.compile(r"\$\{\s*nest\s*:\s*(\w+)\s*\}")
AUTO_NODE = "model"
#: Text that needs no quotes inside a call of a resolver.
_BARE = re.compile(r"[\w.+-]+")

#: Choices of a plan that NeMo 1 spells otherwise.
_SPELLINGS = {
    "recompute_granularity": ("activations_checkpoint_granularity",),
    "recompute_method": ("activations_checkpoint_method",),
    "recompute_num_layers": ("activations_checkpoint_num_layers",),
    "tp_comm_overlap": ("ub_tp_comm_overlap",),
}

Keys = tuple[str | int, ...]


def moved_fields(raw: Mapping[str, Any], root: str, fields: Mapping[str, str]) -> Mapping[str, str]:
    """Where the group ``auto`` writes a planned choice, and where the application has it.

    Args:
        raw: the application's configuration, nothing resolved.
        root, fields: of the ``nest`` node.
    """
    moved: dict[str, str] = {}
    for name, text in node_at(raw, AUTO_NODE).items():
        found = PLANNED.fullmatch(text.strip()) if isinstance(text, str) else None
        if found is None or name not in (names := names_of(found[1])):
            continue
        target = fields.get(found[1])
        if target is None:
            own = [each for each in names if each in node_at(raw, root)]
            target = ".".join(filter(None, (root, *(own or [name])[:1])))
            target = f"{AUTO_NODE}.{name}" if root == AUTO_NODE else target
        other = PLANNED.search(str(raw_value(raw, target)))
        is_of_another = other is not None and other[1] != found[1]
        if target != f"{AUTO_NODE}.{name}" and not is_of_another:
            moved[f"{AUTO_NODE}.{name}"] = target
    return moved


def with_moved(
    raw: Mapping[str, Any], moved: Mapping[str, str], typed: Collection[str]
) -> dict[str, Any]:
    """The configuration with the planned choices where the application has them.

    Args:
        typed: paths that the user's command gives, which it keeps.
    """
    changed = copy.deepcopy(dict(raw)) if moved else dict(raw)
    for source, target in moved.items():
        text = changed[AUTO_NODE].pop(source.removeprefix(f"{AUTO_NODE}."))
        if any(f"{target}.".startswith(f"{path}.") for path in typed):
            continue
        *parents, last = target.split(".")
        inside = changed
        for key in parents:
            if not isinstance(inside.get(key), dict):
                inside[key] = {}
            inside = inside[key]
        inside[last] = text
    if moved and not changed[AUTO_NODE]:
        del changed[AUTO_NODE]
    return changed


def planned_texts(node: Any, keys: Keys = ()) -> Iterator[tuple[Keys, str]]:
    """Keys and text of every field that asks for the plan, but for those of ``nest`` itself."""
    if isinstance(node, str):
        if PLANNED.search(node):
            yield keys, node
    elif isinstance(node, Mapping):
        for name, child in node.items():
            if keys or name != "nest":
                yield from planned_texts(child, (*keys, name))
    elif isinstance(node, list):
        for index, child in enumerate(node):
            yield from planned_texts(child, (*keys, index))


def value_named(values: Mapping[str, Any], name: str) -> Any:
    """A value of a plan in plain types; ``UserInputError`` with the nearest if it has none."""
    if name not in values:
        raise UserInputError(
            f"${{nest:{name}}}", None, "a plan has no such value", nearest(name, values)
        )
    value = values[name]
    return list(value) if isinstance(value, tuple) else value


def planned_value(text: str, values: Mapping[str, Any]) -> Any:
    """The value of a text that asks for the plan; what else it asks for stays.

    >>> planned_value("${nest:tp}", {"tp": 8}), planned_value("${mul:${nest:tp},2}", {"tp": 8})
    (8, '${mul:8,2}')
    """
    found = PLANNED.fullmatch(text.strip())
    if found is not None:
        return value_named(values, found[1])

    def written(match: re.Match[str]) -> str:
        value = value_named(values, match[1])
        shown = "null" if value is None else str(value)
        before = text[: match.start()]
        is_inside = before.count("${") > before.count("}")
        return repr(shown) if is_inside and not _BARE.fullmatch(shown) else shown

    return PLANNED.sub(written, text)


def names_of(item: str) -> tuple[str, ...]:
    """A choice by its name, and by those of other frameworks."""
    return item, *_SPELLINGS.get(item, ())


def raw_value(raw: Any, path: str) -> Any:
    """What stands at a path, nothing resolved; ``ABSENT`` where there is nothing.

    >>> raw_value({"model": {"depth": 3}}, "model.depth")
    3
    >>> raw_value({"model": None}, "model.depth") is ABSENT
    True
    """
    for step in path.split(".") if path else ():
        if not isinstance(raw, Mapping) or step not in raw:
            return ABSENT
        raw = raw[step]
    return raw


def node_at(raw: Any, path: str) -> Mapping[str, Any]:
    """The mapping at a path; an empty one where there is none."""
    node = raw_value(raw, path)
    return node if isinstance(node, Mapping) else {}
