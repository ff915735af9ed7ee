"""An application's composed configuration, as the planner looks at it, and its ``nest`` node.

A planned choice has a *place*: the field that holds it. Where the place holds ``${nest:NAME}`` the
plan writes it; where it holds anything else, somebody gave it, and it is kept.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from nest_megatron.config.defaults import with_defaults
from nest_megatron.config.launch import Mode
from nest_megatron.config.overrides import Setting, first_line, is_path, leaves, parse, value_text
from nest_megatron.errors import UserInputError, nearest, require_known
from nest_megatron.files import expanded
from nest_megatron.integrations.fields import ABSENT
from nest_megatron.plain import Count, Source, from_plain, frozen

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

#: A node of a configuration, in plain types.
Node = Mapping[str, Any]
Keys = tuple[str | int, ...]


def moved_fields(raw: Node, root: str, fields: Mapping[str, str]) -> Mapping[str, str]:
    """The names by which the group ``auto`` writes choices, and where the application has them.

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
            moved[name] = target
    return moved


def with_moved_fields(
    raw: Node, moved: Mapping[str, str], typed: Collection[str]
) -> dict[str, Any]:
    """The configuration with the planned choices where the application has them.

    Args:
        typed: paths that the user's command gives, which it keeps.
    """
    changed = copy.deepcopy(dict(raw)) if moved else dict(raw)
    for name, target in moved.items():
        text = changed[AUTO_NODE].pop(name)
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


def value_named(values: Node, name: str) -> Any:
    """A value of a plan in plain types; ``UserInputError`` with the nearest if it has none."""
    if name not in values:
        raise UserInputError(
            f"${{nest:{name}}}", None, "a plan has no such value", nearest(name, values)
        )
    value = values[name]
    return list(value) if isinstance(value, tuple) else value


def planned_value(text: str, values: Node) -> Any:
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


def node_at(raw: Any, path: str) -> Node:
    """The mapping at a path; an empty one where there is none."""
    node = raw_value(raw, path)
    return node if isinstance(node, Mapping) else {}


#: Sections of a planning job that ``nest.num_gpus`` or the application itself decides.
_DECIDED = {
    "cluster.num_gpus": "nest.num_gpus",
    "model": "nest.model",
    "cluster": "nest.cluster",
    "out": "nest.out",
}


@frozen
class AppSettings:
    """What a user says of the plan; ``hydra_configs/hydra_app/nest/settings.yaml`` explains it."""

    mode: Mode = Mode.AUTO
    cluster: str | None = None
    num_gpus: Count | None = None
    model: str | None = None
    root: str = "model"
    fields: Mapping[str, str] = field(default_factory=dict)
    overrides: Node = field(default_factory=dict)
    plan: str | None = None
    out: str | None = None
    may_differ: tuple[str, ...] = ()

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
        return (
            *with_defaults((*own, *given)),
            Setting(key="cluster.num_gpus", value=str(num_gpus)),
        )


_WRITTEN = Source(correct="docs/hydra_apps.md shows each.")


def read_settings(node: Any) -> AppSettings:
    """The settings of the ``nest`` node; an unknown key or a node of another kind is refused."""
    if not isinstance(node, Mapping | None):
        raise UserInputError(
            "nest",
            node,
            "the group nest was not composed, so nothing would be planned",
            _WRITTEN.correct,
        )
    open_ = ("fields", "overrides", "may_differ")
    values = {name: each for name, each in (node or {}).items() if each or name not in open_}
    count = values.get("num_gpus")
    names = values.get("may_differ")
    if isinstance(count, str) and count.isdecimal():  # of a variable of the environment
        values["num_gpus"] = int(count)
    if isinstance(names, str):
        values["may_differ"] = [names]
    if "root" in values:
        values["root"] = values["root"] or ""
    if "mode" in values:
        require_known("nest.mode", values["mode"], (Mode.AUTO.value, Mode.PINNED.value))
    return from_plain(AppSettings, values, "nest", _WRITTEN)


@frozen
class AppView:
    """An application's configuration.

    Args:
        root: the whole configuration, a ``DictConfig``.
        raw: the application's own part of it as plain values, nothing resolved, with the planned
            choices in their places.
        moved: those that the group ``auto`` writes elsewhere, by its names, and their places.
    """

    root: Any
    raw: Node
    settings: AppSettings
    moved: Mapping[str, str]

    def own_path(self, name: str) -> str:
        """Path of a name beside those of the model."""
        return f"{self.settings.root}.{name}" if self.settings.root else name

    def has(self, path: str) -> bool:
        """Whether there is such a field."""
        return raw_value(self.raw, path) is not ABSENT

    def place(self, item: str) -> str | None:
        """Path of the field that holds a choice of the plan; ``None`` where there is none."""
        if item in self.settings.fields:
            return self.settings.fields[item]
        present = [path for path in map(self.own_path, names_of(item)) if self.has(path)]
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

    def value_of_choice(self, item: str) -> Any:
        """The value of the field that holds a choice, or ``None`` as for ``at``."""
        place = self.place(item)
        return None if place is None else self.at(place)

    def value(self, name: str) -> Any:
        """A setting of the application by Megatron's name, or ``None``; its place must exist."""
        if name not in self.settings.fields:
            return self.at(self.own_path(name))
        path = self.settings.fields[name]
        if not self.has(path):
            raise UserInputError(
                f"nest.fields.{name}",
                path,
                "the application has no such field",
                "Give the path of one that it has.",
            )
        return self.at(path)

    def at(self, path: str) -> Any:
        """The value at a path in plain types, or ``None`` if it is not there or the plan's."""
        raw = raw_value(self.raw, path)
        planned = PLANNED.search(raw) if isinstance(raw, str) else None
        if planned is not None and self.place(planned[1]) != path:
            raise UserInputError(
                path,
                raw,
                "it is part of the job that is planned, and asks for the plan",
                "State it without the plan.",
            )
        if planned is not None or raw is ABSENT or raw == "???":
            return None
        found = OmegaConf.select(self.root, path)
        return OmegaConf.to_container(found) if OmegaConf.is_config(found) else found

    def require_places(self) -> None:
        """Every choice that the application asks for must have a place, even where it is given."""
        for path, item in self.uses():
            if self.place(item) is None:
                raise UserInputError(
                    f"nest.fields.{item}",
                    None,
                    f"{path} asks the plan for it, and its place is not known, so a value "
                    "given by hand would not be seen",
                    f"Add it to the application's group: nest.fields.{item}: {path}.",
                )

    def uses(self) -> Iterator[tuple[str, str]]:
        """Path and choice of every ``${nest:NAME}``."""
        for keys, text in planned_texts(self.raw):
            path = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
            yield from ((path[1:], item) for item in PLANNED.findall(text))

    def write(self, values: Node, *, is_read: bool = False) -> None:
        """Write a plan's values into the configuration, which then asks for no plan.

        Args:
            is_read: it is being read: only what is elsewhere than the group ``auto`` has it is
                written.
        """
        for keys, text in planned_texts(self.raw):
            if is_read and ".".join(map(str, keys)) not in self.moved.values():
                continue
            node = self.root
            for key in keys[:-1]:
                with read_write(node), open_dict(node):
                    if isinstance(node, DictConfig) and node._get_node(key) is None:
                        node[key] = {}
                node = node._get_node(key)
            with read_write(node), open_dict(node):
                node[keys[-1]] = planned_value(text, values)
        if is_read or not self.moved:
            return
        node = self.root._get_node(AUTO_NODE)
        with read_write(node), open_dict(node):
            for name in self.moved:
                node.pop(name)
        if AUTO_NODE not in self.raw:
            with read_write(self.root), open_dict(self.root):
                self.root.pop(AUTO_NODE)


def view_of(root: Any) -> AppView:
    """Look at a composed configuration; ``UserInputError`` if its ``nest`` node is wrong."""
    from hydra.core.hydra_config import HydraConfig
    from omegaconf.errors import OmegaConfBaseException

    raw = OmegaConf.to_container(root, resolve=False)
    if not isinstance(raw, Mapping):
        raise UserInputError(
            "configuration",
            type(raw).__name__,
            "${nest:...} belongs into a mapping",
            "Give the application's configuration names.",
        )
    own = {str(name): node for name, node in raw.items() if name != "hydra"}
    node = own.get("nest")
    if isinstance(node, Mapping):
        if any(planned_texts({"own": node})):
            raise UserInputError(
                "nest",
                None,
                "it says what is planned, and asks for the plan",
                "State it without the plan.",
            )
        try:  # what it takes from the application's configuration
            node = OmegaConf.to_container(root.nest, resolve=True)
        except OmegaConfBaseException as error:
            raise UserInputError(
                "nest",
                None,
                first_line(error),
                "Correct it; docs/hydra_apps.md shows each setting.",
            ) from error
    begun_in = OmegaConf.select(root, "hydra.runtime.cwd")
    settings = _at_home(read_settings(node), None if begun_in is None else Path(begun_in))
    moved = moved_fields(own, settings.root, settings.fields)
    task = OmegaConf.select(root, "hydra.overrides.task") if moved else ()  # it may ask for a plan
    if task is None and HydraConfig.initialized():
        task = HydraConfig.get().overrides.task
    typed = [str(each).lstrip("+~").partition("=")[0] for each in task or ()]
    own = with_moved_fields(own, moved, typed)
    return AppView(root=root, raw=own, settings=settings, moved=moved)


def _at_home(settings: AppSettings, begun_in: Path | None) -> AppSettings:
    """Settings whose paths are as they were typed: Hydra may start a job in a folder of its own."""
    if begun_in is None or begun_in == Path.cwd():
        return settings
    there: dict[str, Any] = {}
    for name in ("plan", "out", "cluster", "model"):
        value = getattr(settings, name)
        is_file = value not in (None, "-") and (name in ("plan", "out") or is_path(value))
        if is_file:
            there[name] = str(begun_in / expanded(Path(value), f"nest.{name}"))
    return dataclasses.replace(settings, **there)


def require_own_fields(view: AppView, own: Node) -> None:
    """Refuse to plan where the application would read nothing of the plan.

    Some fields may be lacking: it may read them all the same, as NeMo does.

    Args:
        own: the application's configuration as it is without the group ``nest``.
    """
    places = {view.place(item) for _, item in view.uses()}
    planned = [p for p, item in view.uses() if p in places and view.is_planned(item)]
    if planned and all(raw_value(own, path) is ABSENT for path in planned):
        raise UserInputError(
            "+nest",
            ", ".join(planned[:3]),
            "none of the planned fields is in the application's own configuration, so it "
            "would train without the plan",
            "Write a group nest with the application's own fields (docs/hydra_apps.md).",
        )
