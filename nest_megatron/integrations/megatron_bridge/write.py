"""What a plan changes, as overrides of Megatron-Bridge.

For the framework's own override machinery it is a dotlist, or a YAML file to merge: both go to
``process_config_with_overrides``, as ``cli_overrides=to_dotlist(changes)`` or as
``config_filepath=`` a file with the text of ``to_yaml(changes)``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from nest_megatron.layout.diff import Change

#: A value that Hydra's grammar and YAML read alike; of other objects (torch types) the text.
_text = partial(json.dumps, default=str)


def to_dotlist(changes: Iterable[Change]) -> list[str]:
    """Changes as overrides in Hydra's grammar, one a field.

    >>> to_dotlist([Change(field="model.recompute_modules", before=None, after=["mlp"], reason="")])
    ['model.recompute_modules=["mlp"]']
    """
    words = []
    for change in changes:
        removed = _removed(change)
        words += [f"~{path}" for path in removed] or [f"{change.field}={_text(change.after)}"]
    return words


def to_yaml(changes: Iterable[Change]) -> str:
    """Changes as a YAML overlay, each field with its reason."""
    tree: dict[str, Any] = {}
    for change in changes:
        *parents, name = change.field.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = change
    return "\n".join([*_lines(tree, ""), ""])


def _lines(tree: dict[str, Any], indent: str) -> list[str]:
    lines = []
    for name, node in tree.items():
        if isinstance(node, Change) and (removed := _removed(node)):
            lines.append(f"{indent}# take {', '.join(removed)} out: {node.reason}")
        elif isinstance(node, Change):
            lines.append(f"{indent}# {node.reason}")
            lines.append(f"{indent}{name}: {_text(node.after)}")
        else:
            lines += [f"{indent}{name}:", *_lines(node, f"{indent}  ")]
    return lines


def _removed(change: Change) -> list[str]:
    """Entries of a mapping that a change takes out, which a file to merge cannot say."""
    if not (isinstance(change.before, Mapping) and isinstance(change.after, Mapping)):
        return []
    return [f"{change.field}.{name}" for name in change.before.keys() - change.after.keys()]
