"""Fields of an application that hold the plan: where they are, and their values once planned."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from nest_megatron.errors import UserInputError, nearest

#: A value of the plan; the group ``auto`` writes each under a name of this node.
PLANNED = re.compile(r"\$\{\s*nest\s*:\s*(\w+)\s*\}")
AUTO_NODE = "model"
#: Text that needs no quotes inside a call of a resolver.
_BARE = re.compile(r"[\w.+-]+")

Keys = tuple[str | int, ...]


def moved_fields(
    raw: Mapping[str, Any],
    root: str,
    fields: Mapping[str, str],
    spellings: Mapping[str, tuple[str, ...]],
) -> Mapping[str, str]:
    """Where the group ``auto`` writes a planned choice, and where the application has it.

    Args:
        raw: the application's configuration, nothing resolved.
        root, fields: of the ``nest`` node.
        spellings: other names of choices.
    """
    node = raw.get(AUTO_NODE)
    moved: dict[str, str] = {}
    for name, text in node.items() if isinstance(node, Mapping) else ():
        found = PLANNED.fullmatch(text.strip()) if isinstance(text, str) else None
        if found is None or name not in (found[1], *spellings.get(found[1], ())):
            continue
        target = fields.get(found[1])
        if target is None and root != AUTO_NODE:
            own = value_at(raw, tuple(root.split(".")) if root else ())
            names = (found[1], *spellings.get(found[1], ()))
            present = [each for each in names if isinstance(own, Mapping) and each in own]
            target = ".".join(filter(None, (root, *(present or [name])[:1])))
        if target in (None, f"{AUTO_NODE}.{name}"):
            continue
        other = PLANNED.search(str(value_at(raw, tuple(str(target).split(".")))))
        if other is None or other[1] == found[1]:  # else it is the place of another choice
            moved[f"{AUTO_NODE}.{name}"] = str(target)
    return moved


def with_moved(
    raw: Mapping[str, Any], moved: Mapping[str, str], typed: Collection[str]
) -> Mapping[str, Any]:
    """The configuration with the planned choices where the application has them.

    Args:
        typed: paths that the user's command gives, which it keeps.
    """
    if not moved:
        return raw
    changed: Any = copy.deepcopy(dict(raw))
    for source, target in moved.items():
        node, name = changed[AUTO_NODE], source.removeprefix(f"{AUTO_NODE}.")
        text = node.pop(name)
        if any(f"{target}.".startswith(f"{path}.") for path in typed):
            continue
        *parents, last = target.split(".")
        inside = changed
        for key in parents:
            if not isinstance(inside.get(key), dict):
                inside[key] = {}
            inside = inside[key]
        inside[last] = text
    if not changed[AUTO_NODE]:
        del changed[AUTO_NODE]
    return changed  # type: ignore[no-any-return]


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


def write_values(
    root: Any, raw: Mapping[str, Any], values: Mapping[str, Any], moved: Mapping[str, str]
) -> None:
    """Write a plan's values into a composed configuration, which then asks for no plan.

    Args:
        raw: the configuration as ``with_moved`` has it.
        moved: places of the group ``auto`` that the application does not have.
    """
    for keys, text in planned_texts(raw):
        _write(root, keys, planned_value(text, values))
    for path in moved:
        _remove(root, tuple(path.split(".")))
    if moved and AUTO_NODE not in raw:
        _remove(root, (AUTO_NODE,))


def write_moved(
    root: Any, raw: Mapping[str, Any], values: Mapping[str, Any], moved: Mapping[str, str]
) -> None:
    """Write what the group ``auto`` has elsewhere, while the configuration is being read."""
    for target in moved.values():
        text = value_at(raw, tuple(target.split(".")))
        if isinstance(text, str) and PLANNED.search(text):
            _write(root, tuple(target.split(".")), planned_value(text, values))


def value_at(raw: Any, keys: Keys) -> Any:
    """What stands there, or ``None``."""
    for key in keys:
        raw = raw.get(key) if isinstance(raw, Mapping) else None
    return raw


def _write(root: Any, keys: Keys, value: Any) -> None:
    from omegaconf import DictConfig, open_dict, read_write

    node = root
    for key in keys[:-1]:
        with read_write(node), open_dict(node):
            if isinstance(node, DictConfig) and node._get_node(key) is None:
                node[key] = {}
        node = node._get_node(key)
    with read_write(node), open_dict(node):
        node[keys[-1]] = value


def _remove(root: Any, keys: Keys) -> None:
    from omegaconf import open_dict, read_write

    node = root
    for key in keys[:-1]:
        node = None if node is None else node._get_node(key)
    if node is not None and keys[-1] in node._content:
        with read_write(node), open_dict(node):
            node.pop(keys[-1])
