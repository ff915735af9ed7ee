"""An application's composed configuration, as the planner looks at it.

A planned choice has a *place*: the field that holds it. Where the place holds ``${nest:NAME}`` the
plan writes it; where it holds anything else, somebody gave it, and it is kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nest_megatron.errors import UserInputError
from nest_megatron.integrations.hydra.settings import AppSettings, read_settings

#: Choices of a plan that NeMo 1 spells otherwise.
SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "recompute_granularity": ("activations_checkpoint_granularity",),
    "recompute_method": ("activations_checkpoint_method",),
    "recompute_num_layers": ("activations_checkpoint_num_layers",),
    "tp_comm_overlap": ("ub_tp_comm_overlap",),
}
_PLANNED = re.compile(r"\$\{\s*nest\s*:\s*(\w+)\s*\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AppView:
    """An application's configuration.

    Args:
        root: the whole configuration, a ``DictConfig``.
        raw: the application's own part of it as plain values, nothing resolved.
    """

    root: Any
    raw: Mapping[str, Any]
    settings: AppSettings

    def place(self, item: str) -> str | None:
        """Path of the field that holds a choice of the plan; ``None`` where there is none."""
        if item in self.settings.fields:
            return self.settings.fields[item]
        prefix = f"{self.settings.root}." if self.settings.root else ""
        names = [f"{prefix}{name}" for name in (item, *SPELLINGS.get(item, ()))]
        present = [path for path in names if _at(self.raw, path) is not _ABSENT]
        planned = [path for path in present if _PLANNED.search(str(_at(self.raw, path)))]
        return next(iter((*planned, *present)), None)

    def is_planned(self, item: str) -> bool:
        """Whether the plan decides a choice.

        Raises:
            UserInputError: if its place holds another choice of the plan.
        """
        path = self.place(item)
        found = _PLANNED.fullmatch(str(_at(self.raw, path)).strip()) if path else None
        if found is not None and found[1] != item:
            raise UserInputError(
                str(path),
                value=found[0],
                limit=f"it is the place of {item}",
                fix=f"Write ${{nest:{item}}}, or name the place of {item} in nest.fields.",
            )
        return found is not None

    def value(self, name: str) -> Any:
        """A setting of the application by Megatron's name, or ``None``.

        Raises:
            UserInputError: for a place in ``nest.fields`` that does not exist.
        """
        if name not in self.settings.fields:
            prefix = f"{self.settings.root}." if self.settings.root else ""
            return self.at(f"{prefix}{name}")
        path = self.settings.fields[name]
        if _at(self.raw, path) is _ABSENT:
            raise UserInputError(
                f"nest.fields.{name}",
                value=path,
                limit="the application has no such field",
                fix="Give the path of one that it has.",
            )
        return self.at(path)

    def at(self, path: str) -> Any:
        """The value at a path in plain types, or ``None`` if it is not there or the plan's.

        Raises:
            UserInputError: if it is computed from the plan.
        """
        from omegaconf import OmegaConf

        raw = _at(self.raw, path)
        if raw is _ABSENT or raw == "???" or self._holds_plan(path, raw):
            return None
        found = OmegaConf.select(self.root, path)
        return OmegaConf.to_container(found) if OmegaConf.is_config(found) else found

    def _holds_plan(self, path: str, raw: Any) -> bool:
        """Whether a field is the place of a planned choice; no other may need the plan."""
        found = _PLANNED.search(raw) if isinstance(raw, str) else None
        if found is not None and self.place(found[1]) != path:
            raise UserInputError(
                path,
                value=raw,
                limit="it is part of the job that is planned, and asks for the plan",
                fix="State it without the plan.",
            )
        return found is not None

    def require_places(self) -> None:
        """Every choice that the application asks the plan for has a place, even where it is given.

        Raises:
            UserInputError: naming the first that has none.
        """
        for path, item in self.uses():
            if self.place(item) is None:
                raise UserInputError(
                    f"nest.fields.{item}",
                    value=None,
                    limit=f"{path} asks the plan for it, and its place is not known, so a value "
                    "given by hand would not be seen",
                    fix=f"Add it to the application's group: nest.fields.{item}: {path}.",
                )

    def uses(self) -> Iterator[tuple[str, str]]:
        """Path and choice of every ``${nest:NAME}``."""
        for name, node in self.raw.items():
            if name != "nest":
                yield from _uses(node, name)


class _Absent:
    pass


_ABSENT = _Absent()


def view_of(root: Any) -> AppView:
    """Look at a composed configuration.

    Raises:
        UserInputError: if its ``nest`` node is wrong.
    """
    from omegaconf import OmegaConf

    raw = OmegaConf.to_container(root, resolve=False)
    if not isinstance(raw, Mapping):
        raise UserInputError(
            "configuration",
            value=type(raw).__name__,
            limit="${nest:...} belongs into a mapping",
            fix="Give the application's configuration names.",
        )
    own = {str(name): node for name, node in raw.items() if name != "hydra"}
    return AppView(root=root, raw=own, settings=read_settings(own.get("nest")))


def has_path(raw: Mapping[str, Any], path: str) -> bool:
    """Whether a configuration has a field.

    >>> has_path({"model": {"depth": 3}}, "model.depth"), has_path({"model": None}, "model.depth")
    (True, False)
    """
    return _at(raw, path) is not _ABSENT


def _at(raw: Any, path: str) -> Any:
    for step in path.split("."):
        if not isinstance(raw, Mapping) or step not in raw:
            return _ABSENT
        raw = raw[step]
    return raw


def _uses(node: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, str):
        yield from ((path, item) for item in _PLANNED.findall(node))
    elif isinstance(node, Mapping):
        for name, child in node.items():
            yield from _uses(child, f"{path}.{name}")
    elif isinstance(node, list):
        for index, child in enumerate(node):
            yield from _uses(child, f"{path}[{index}]")
