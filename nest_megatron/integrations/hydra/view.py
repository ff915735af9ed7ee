"""An application's composed configuration, as the planner looks at it, and its ``nest`` node.

A planned choice has a *place*: the field that holds it. Where the place holds ``${nest:NAME}`` the
plan writes it; where it holds anything else, somebody gave it, and it is kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from nest_megatron.config.defaults import with_defaults
from nest_megatron.config.launch import Mode
from nest_megatron.config.overrides import Setting, first_line, leaves, parse, value_text
from nest_megatron.errors import UserInputError, nearest
from nest_megatron.integrations.hydra.planned_fields import (
    PLANNED,
    moved_fields,
    planned_texts,
    with_moved,
)

#: Sections of a planning job that ``nest.num_gpus`` or the application itself decides.
_DECIDED = {"cluster.num_gpus": "nest.num_gpus", "model": "nest.model", "cluster": "nest.cluster"}


@dataclass(frozen=True, slots=True, kw_only=True)
class AppSettings:
    """What a user says of the plan; ``hydra_configs/hydra_app/nest/settings.yaml`` explains it."""

    mode: Mode = Mode.AUTO
    cluster: str | None = None
    num_gpus: int | None = None
    model: str | None = None
    root: str = "model"
    fields: Mapping[str, str] = field(default_factory=dict)
    overrides: Mapping[str, Any] = field(default_factory=dict)
    plan: str | None = None
    out: str | None = None
    may_differ: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("cluster", "model", "plan", "out", "root"):
            if not isinstance(value := getattr(self, name), str | None):
                raise _wrong(name, value, "it is a name or a path")
        count = self.num_gpus
        is_count = isinstance(count, int) and not isinstance(count, bool) and count >= 1
        if count is not None and not is_count:
            raise _wrong("num_gpus", count, "it is a whole number of at least 1")
        limit = "it is the path of a field, such as arch.depth"
        for name, path in self.fields.items():
            if not isinstance(path, str):
                raise _wrong(f"fields.{name}", path, limit)

    def settings(self, num_gpus: int | None) -> tuple[Setting, ...]:
        """The same as settings of the planning job; without a size, it has no cluster either."""
        given = parse(f"{key}={value_text(value)}" for key, value in leaves(self.overrides))
        for setting in given:
            if setting.key in _DECIDED:
                raise UserInputError(
                    f"nest.overrides.{setting.key}",
                    setting.value,
                    "it has a key of its own",
                    f"Use {_DECIDED[setting.key]}.",
                )
        named = [("model", self.model), ("cluster", self.cluster)]
        own = [Setting(key=key, value=value) for key, value in named if value is not None]
        if num_gpus is None:
            return tuple(s for s in (*own, *given) if s.key.partition(".")[0] != "cluster")
        settings = with_defaults((*own, *given))
        return (*settings, Setting(key="cluster.num_gpus", value=str(num_gpus)))


def read_settings(node: Any) -> AppSettings:
    """The settings of the ``nest`` node; an unknown key or a node of another kind is refused."""
    if not isinstance(node, Mapping | None):
        raise _wrong("", node, "the group nest was not composed, so nothing would be planned")
    values = dict(node or {})
    known = [f.name for f in dataclasses.fields(AppSettings)]
    for name, value in values.items():
        if name not in known:
            raise UserInputError(
                f"nest.{name}", value, "there is no such setting", nearest(str(name), known)
            )
    mode, modes = values.get("mode", Mode.AUTO.value), [Mode.AUTO.value, Mode.PINNED.value]
    if mode not in modes:
        raise _wrong("mode", mode, f"it is {' or '.join(modes)}")
    count = values.get("num_gpus")
    if isinstance(count, str) and count.isdecimal():  # of a variable of the environment
        values["num_gpus"] = int(count)
    for name in ("fields", "overrides"):
        given = values.get(name) or {}
        if not isinstance(given, Mapping):
            raise _wrong(name, given, f"it is a mapping, +nest.{name}.KEY=VALUE")
        values[name] = MappingProxyType(dict(given))
    given = values.get("may_differ") or ()
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list | tuple) or not all(isinstance(each, str) for each in names):
        raise _wrong("may_differ", given, "it is a list of names")
    return AppSettings(**{**values, "mode": Mode(mode), "may_differ": tuple(names)})


def _wrong(name: str, value: object, limit: str) -> UserInputError:
    what = f"nest.{name}" if name else "nest"
    return UserInputError(what, value, limit, fix="docs/hydra_apps.md shows each.")


#: Choices of a plan that NeMo 1 spells otherwise.
SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "recompute_granularity": ("activations_checkpoint_granularity",),
    "recompute_method": ("activations_checkpoint_method",),
    "recompute_num_layers": ("activations_checkpoint_num_layers",),
    "tp_comm_overlap": ("ub_tp_comm_overlap",),
}
_ABSENT = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class AppView:
    """An application's configuration.

    Args:
        root: the whole configuration, a ``DictConfig``.
        raw: the application's own part of it as plain values, nothing resolved, with the planned
            choices in their places.
        moved: where the group ``auto`` writes those that have another place, and that place.
    """

    root: Any
    raw: Mapping[str, Any]
    settings: AppSettings
    moved: Mapping[str, str] = field(default_factory=dict)

    def own_path(self, name: str) -> str:
        """Path of a name beside those of the model."""
        return f"{self.settings.root}.{name}" if self.settings.root else name

    def place(self, item: str) -> str | None:
        """Path of the field that holds a choice of the plan; ``None`` where there is none."""
        if item in self.settings.fields:
            return self.settings.fields[item]
        names = map(self.own_path, (item, *SPELLINGS.get(item, ())))
        present = [path for path in names if raw_value(self.raw, path) is not _ABSENT]
        planned = [path for path in present if PLANNED.search(str(raw_value(self.raw, path)))]
        return next(iter((*planned, *present)), None)

    def is_planned(self, item: str) -> bool:
        """Whether the plan decides a choice, in whose place no other may stand."""
        path = self.place(item)
        found = PLANNED.fullmatch(str(raw_value(self.raw, path)).strip()) if path else None
        if found is not None and found[1] != item:
            raise UserInputError(
                str(path),
                found[0],
                f"it is the place of {item}",
                f"Write ${{nest:{item}}}, or name the place of {item} in nest.fields.",
            )
        return found is not None

    def given(self, item: str) -> Any:
        """The value of the field that holds a choice, or ``None`` as for ``at``."""
        place = self.place(item)
        return None if place is None else self.at(place)

    def value(self, name: str) -> Any:
        """A setting of the application by Megatron's name, or ``None``; its place must exist."""
        if name not in self.settings.fields:
            return self.at(self.own_path(name))
        path = self.settings.fields[name]
        if raw_value(self.raw, path) is _ABSENT:
            raise UserInputError(
                f"nest.fields.{name}",
                path,
                "the application has no such field",
                "Give the path of one that it has.",
            )
        return self.at(path)

    def at(self, path: str) -> Any:
        """The value at a path in plain types, or ``None`` if it is not there or the plan's."""
        from omegaconf import OmegaConf

        raw = raw_value(self.raw, path)
        if raw is _ABSENT or raw == "???" or self._holds_plan(path, raw):
            return None
        found = OmegaConf.select(self.root, path)
        return OmegaConf.to_container(found) if OmegaConf.is_config(found) else found

    def _holds_plan(self, path: str, raw: Any) -> bool:
        """Whether a field is the place of a planned choice; no other may need the plan."""
        found = PLANNED.search(raw) if isinstance(raw, str) else None
        if found is not None and self.place(found[1]) != path:
            raise UserInputError(
                path,
                raw,
                "it is part of the job that is planned, and asks for the plan",
                "State it without the plan.",
            )
        return found is not None

    def require_places(self) -> None:
        """Every choice that the application asks for must have a place, even where it is given."""
        for path, item in self.uses():
            if self.place(item) is None:
                raise UserInputError(
                    f"nest.fields.{item}",
                    None,
                    limit=f"{path} asks the plan for it, and its place is not known, so a value "
                    "given by hand would not be seen",
                    fix=f"Add it to the application's group: nest.fields.{item}: {path}.",
                )

    def uses(self) -> Iterator[tuple[str, str]]:
        """Path and choice of every ``${nest:NAME}``."""
        for keys, text in planned_texts(self.raw):
            path = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
            yield from ((path[1:], item) for item in PLANNED.findall(text))


def view_of(root: Any) -> AppView:
    """Look at a composed configuration; ``UserInputError`` if its ``nest`` node is wrong."""
    from omegaconf import OmegaConf

    raw = OmegaConf.to_container(root, resolve=False)
    if not isinstance(raw, Mapping):
        raise UserInputError(
            "configuration",
            type(raw).__name__,
            "${nest:...} belongs into a mapping",
            "Give the application's configuration names.",
        )
    own = {str(name): node for name, node in raw.items() if name != "hydra"}
    settings = read_settings(_resolved(root, own.get("nest")))
    moved = moved_fields(own, settings.root, settings.fields, SPELLINGS)
    own = dict(with_moved(own, moved, _typed(root) if moved else ()))
    return AppView(root=root, raw=own, settings=settings, moved=moved)


def _resolved(root: Any, node: Any) -> Any:
    """The ``nest`` node with what it takes from the application's configuration."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if not isinstance(node, Mapping):
        return node
    if any(planned_texts({"own": node})):
        raise UserInputError(
            "nest",
            None,
            "it says what is planned, and asks for the plan",
            "State it without the plan.",
        )
    try:
        return OmegaConf.to_container(root.nest, resolve=True)
    except OmegaConfBaseException as error:
        raise UserInputError(
            "nest", None, first_line(error), "Correct it; docs/hydra_apps.md shows each setting."
        ) from error


def _typed(root: Any) -> frozenset[str]:
    """Paths that the command of the application gives, where it has one."""
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    task = OmegaConf.select(root, "hydra.overrides.task")
    if task is None and HydraConfig.initialized():
        task = HydraConfig.get().overrides.task
    return frozenset(str(each).lstrip("+~").partition("=")[0] for each in task or ())


def require_own_fields(view: AppView, own: Mapping[str, Any]) -> tuple[str, ...]:
    """Refuse to plan where the application would not read the plan.

    Args:
        own: the application's configuration as it is without the group ``nest``.

    Returns:
        Planned fields that it lacks, though not all: it may read them all the same, as NeMo does.
    """
    places = {view.place(item) for _, item in view.uses()}
    planned = tuple(p for p, item in view.uses() if p in places and view.is_planned(item))
    lacking = tuple(path for path in planned if not has_path(own, path))
    if planned and lacking == planned:
        raise UserInputError(
            "+nest",
            ", ".join(planned[:3]),
            limit="none of the planned fields is in the application's own configuration, so it "
            "would train without the plan",
            fix="Write a group nest with the application's own fields (docs/hydra_apps.md).",
        )
    return lacking


def has_path(raw: Mapping[str, Any], path: str) -> bool:
    """Whether a configuration has a field.

    >>> has_path({"model": {"depth": 3}}, "model.depth"), has_path({"model": None}, "model.depth")
    (True, False)
    """
    return raw_value(raw, path) is not _ABSENT


def raw_value(raw: Any, path: str) -> Any:
    """What stands at a path, nothing resolved; where there is nothing, an object of its own."""
    for step in path.split("."):
        if not isinstance(raw, Mapping) or step not in raw:
            return _ABSENT
        raw = raw[step]
    return raw
