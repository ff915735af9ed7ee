"""The ``nest`` node of an application's configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from nest_megatron.config.launch import Mode
from nest_megatron.config.overrides import Setting, parse
from nest_megatron.errors import UserInputError, nearest

#: Sections of a planning job that ``nest.num_gpus`` or the application itself decides.
_DECIDED = {"cluster.num_gpus": "nest.num_gpus", "model": "nest.model", "cluster": "nest.cluster"}


@dataclass(frozen=True, slots=True, kw_only=True)
class AppSettings:
    """What a user says of the plan; ``hydra_configs/hydra_app/nest/settings.yaml`` explains each.

    Raises:
        UserInputError: for a value of the wrong kind.
    """

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
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise _wrong(name, value, "it is a name or a path")
        if self.num_gpus is not None and not _is_count(self.num_gpus):
            raise _wrong("num_gpus", self.num_gpus, "it is a whole number of at least 1")
        for name, path in self.fields.items():
            if not isinstance(path, str):
                raise _wrong(
                    f"fields.{name}", path, "it is the path of a field, such as arch.depth"
                )

    def settings(self, num_gpus: int | None) -> tuple[Setting, ...]:
        """The same as settings of the planning job.

        Args:
            num_gpus: size of the cluster; ``None`` leaves the cluster out.

        Raises:
            UserInputError: for an override that is none, or that has a key of its own here.
        """
        given = parse(_texts(self.overrides, ""))
        for setting in given:
            if setting.key in _DECIDED:
                raise UserInputError(
                    f"nest.overrides.{setting.key}",
                    value=setting.value,
                    limit="it has a key of its own",
                    fix=f"Use {_DECIDED[setting.key]}.",
                )
        named = [("model", self.model), ("cluster", self.cluster)]
        own = [Setting(key=key, value=value) for key, value in named if value is not None]
        if num_gpus is None:
            return tuple(s for s in (*own, *given) if s.key.partition(".")[0] != "cluster")
        return (*own, *given, Setting(key="cluster.num_gpus", value=str(num_gpus)))


def read_settings(node: Any) -> AppSettings:
    """The settings of a plain mapping.

    Args:
        node: the ``nest`` node; ``None`` where the application has none.

    Raises:
        UserInputError: for an unknown key or a wrong value, and for a node that is no mapping:
            then nothing of this package composed it.
    """
    if not isinstance(node, Mapping | None):
        raise _wrong("", node, "the group nest was not composed, so nothing would be planned")
    values = dict(node or {})
    known = [f.name for f in dataclasses.fields(AppSettings)]
    for name, value in values.items():
        if name not in known:
            raise UserInputError(
                f"nest.{name}",
                value=value,
                limit="there is no such setting",
                fix=nearest(str(name), known),
            )
    values["mode"] = _mode(values.get("mode", Mode.AUTO.value))
    for name in ("fields", "overrides"):
        given = values.get(name) or {}
        if not isinstance(given, Mapping):
            raise _wrong(name, given, f"it is a mapping, +nest.{name}.KEY=VALUE")
        values[name] = MappingProxyType(dict(given))
    values["may_differ"] = _names("may_differ", values.get("may_differ") or ())
    return AppSettings(**values)


def _names(name: str, value: Any) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(each, str) for each in names):
        raise _wrong(name, value, "it is a list of names")
    return tuple(names)


def _texts(node: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """``key=value`` for each leaf, as it is typed."""
    for name, value in node.items():
        if isinstance(value, Mapping):
            yield from _texts(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}={_text(value)}"


def _text(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(_text, value))}]"
    return "null" if value is None else str(value)


def _mode(text: Any) -> Mode:
    known = [Mode.AUTO.value, Mode.PINNED.value]
    if text not in known:
        raise _wrong("mode", text, f"it is {' or '.join(known)}")
    return Mode(text)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _wrong(name: str, value: object, limit: str) -> UserInputError:
    what = f"nest.{name}" if name else "nest"
    return UserInputError(what, value=value, limit=limit, fix="docs/hydra_apps.md shows each.")
