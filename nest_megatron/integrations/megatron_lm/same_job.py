"""What must be the same on all ranks of a job, as text that can be compared and shown."""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import os
import platform
from argparse import Namespace
from collections.abc import Collection, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from nest_megatron.integrations.megatron_lm.layout_arguments import arguments_of
from nest_megatron.profile.installed import installed_versions
from nest_megatron.version import __version__

#: Megatron's arguments that may differ from rank to rank; all others must not.
MAY_DIFFER = frozenset(arguments_of("may_differ"))
#: Of these, names that mean something else in other people's configurations (LoRA's ``rank``).
_OF_MEGATRON_ALONE = frozenset({"rank", "profile"})
ABSENT = "not set"
_DEEPEST = 8
_LONGEST_VALUE, _MOST_NAMES, _MOST_HOSTS = 160, 60, 6
_PLAIN = (type(None), bool, int, float, str)


def versions() -> dict[str, str]:
    """Versions that all ranks must share, by what a message calls them."""
    installed = installed_versions()
    major, minor, _ = platform.python_version_tuple()
    packages = ("megatron_core", "torch", "transformer_engine")
    found = {name.replace("_", "-"): installed.get(name, ABSENT) for name in packages}
    own = {"nest-megatron": __version__, "Python": f"{major}.{minor}"}
    return {f"version of {name}": version for name, version in (own | found).items()}


def arguments(
    args: Namespace, flags: Mapping[str, str], may_differ: Collection[str] = ()
) -> dict[str, str]:
    """Everything of Megatron's arguments that must be the same on all ranks, by its flag."""
    return {
        flags.get(name, f"args.{name}"): comparable(value)
        for name, value in sorted(vars(args).items())
        if name not in MAY_DIFFER and name not in may_differ
    }


def fields(config: Any, name: str, may_differ: Collection[str] = ()) -> dict[str, str]:
    """The leaves of a configuration made of records and mappings, by their dotted names.

    Args:
        may_differ: more leaves that may differ by rank, by their last name, or whole dotted names
            of leaves and sections.
    """
    left_out = {*(MAY_DIFFER - _OF_MEGATRON_ALONE), *may_differ}
    return {
        path: text
        for path, text in _leaves(config, name, ())
        if path.rpartition(".")[2] not in left_out
        and not any(path == one or path.startswith(f"{one}.") for one in may_differ)
    }


def comparable(value: object, above: tuple[int, ...] = ()) -> str:
    """A value as text that is the same in every process that has an equal one.

    Objects are shown by their class and their own attributes, never by where they lie in memory.

    Args:
        above: what it is a part of, by ``id``.

    >>> comparable([None, 1e-4, "a", {"x", "y"}])
    "[None, 0.0001, 'a', {'x', 'y'}]"
    >>> comparable(Namespace(depth=2)), comparable(comparable)
    ('Namespace(depth=2)', 'nest_megatron.integrations.megatron_lm.same_job.comparable')
    """
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, os.PathLike):
        return repr(os.fspath(value))
    if type(value) in _PLAIN:
        return repr(value)
    if id(value) in above or len(above) > _DEEPEST:
        return type(value).__name__
    inside = (*above, id(value))
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k!r}: {v}" for k, v in _items(value, inside)) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(comparable(item, inside) for item in value)}]"
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(comparable(item, inside) for item in value)) + "}"
    return _object(value, inside)


def _object(value: object, inside: tuple[int, ...]) -> str:
    name = getattr(value, "__qualname__", None)
    if isinstance(name, str):  # a class or a function
        return f"{getattr(value, '__module__', '')}.{name}"
    kind = type(value).__name__
    attributes = _attributes(value)
    if attributes is not None:
        return f"{kind}({', '.join(f'{k}={v}' for k, v in _items(attributes, inside))})"
    if isinstance(value, _PLAIN) or kind in ("dtype", "device", "timedelta", "Size"):
        return repr(value)
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    return kind if shape is None else f"{kind}({shape}, {dtype})"


def _attributes(value: object) -> Mapping[str, Any] | None:
    """What an object is made of; ``None`` for one that keeps it to itself, such as a tensor."""
    if dataclasses.is_dataclass(value):
        return {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}
    if isinstance(value, Namespace | SimpleNamespace):
        return vars(value)
    if isinstance(value, functools.partial):
        return {"func": value.func, "args": value.args, **value.keywords}
    own = getattr(value, "__dict__", None)
    return own if isinstance(own, dict) and own and not hasattr(value, "dtype") else None


def _items(value: Mapping[Any, Any], inside: tuple[int, ...]) -> list[tuple[Any, str]]:
    pairs = [(key, comparable(each, inside)) for key, each in value.items()]
    return sorted(pairs, key=lambda pair: str(pair[0]))


def _leaves(node: Any, name: str, above: tuple[int, ...]) -> Iterable[tuple[str, str]]:
    inside = node if isinstance(node, Mapping) else None
    if dataclasses.is_dataclass(node) or isinstance(node, SimpleNamespace):
        inside = _attributes(node)
    if not inside or id(node) in above or len(above) > _DEEPEST:
        yield name, comparable(node)
        return
    for key, value in inside.items():
        yield from _leaves(value, f"{name}.{key}" if name else str(key), (*above, id(node)))


#: What to do about ranks that were started differently.
ADVICE = (
    "Start all ranks with the same command in the same environment; an argument of your own that "
    "has to differ goes into nest.may_differ=[NAME]"
)


def differences(
    of_ranks: Mapping[int, Mapping[str, str]],
    hosts: Mapping[int, str],
    *,
    head: str = "the ranks were not started with the same job",
    advice: str = ADVICE,
) -> str:
    """What differs between ranks, one name a line, with who has which value."""
    lines = []
    for name in dict.fromkeys(itertools.chain.from_iterable(of_ranks.values())):
        ranks_of: dict[str, list[int]] = {}
        for rank, values in of_ranks.items():
            ranks_of.setdefault(values.get(name, ABSENT), []).append(rank)
        if len(ranks_of) > 1:
            shown = (
                f"{text[:_LONGEST_VALUE]}{'...' * (len(text) > _LONGEST_VALUE)} on "
                f"{named(ranks, hosts)}"
                for text, ranks in ranks_of.items()
            )
            lines.append(f"\n  {name}: {'; '.join(shown)}")
    if len(lines) > _MOST_NAMES:
        lines[_MOST_NAMES:] = [f"\n  ... and {len(lines) - _MOST_NAMES} more"]
    return f"{head}:{''.join(lines)}\n{advice}"


def named(ranks: Iterable[int], hosts: Mapping[int, str]) -> str:
    """Ranks in words, with their hosts where these are known.

    >>> named([0, 1, 2, 5], {0: "a", 1: "a", 2: "b", 5: "b"}), named([3], {})
    ('ranks 0-2, 5 (a, b)', 'rank 3')
    """
    ranks = sorted(ranks)
    grouped = itertools.groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])
    found = [[rank for _, rank in run] for _, run in grouped]
    runs = (f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in found)
    known = list(dict.fromkeys(hosts[rank] for rank in ranks if rank in hosts))
    shown = [*known[:_MOST_HOSTS], *(["..."] if len(known) > _MOST_HOSTS else [])]
    there = f" ({', '.join(shown)})" if shown else ""
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(runs)}{there}"
