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
from types import MappingProxyType, SimpleNamespace
from typing import Any

from nest_megatron.profile.installed import installed_versions
from nest_megatron.version import __version__

#: Megatron's arguments that may differ from rank to rank, with the reason; all others must not.
MAY_DIFFER: Mapping[str, str] = MappingProxyType(
    {
        "rank": "the rank itself",
        "local_rank": "the rank itself",
        "config_logger_dir": "written by each rank for itself",
        "data_cache_path": "a cache, which each host may have of its own",
        "dump_param_to_param_group_map": "written by each rank for itself",
        "flight_recorder_dump_path": "written by each rank for itself",
        "logits_save_dir": "written by each rank for itself",
        "memory_snapshot_path": "written by each rank for itself",
        "moe_routing_trace_path": "written by each rank for itself",
        "non_persistent_local_ckpt_dir": "a disk of the host's own",
        "object_storage_cache_path": "a cache, which each host may have of its own",
        "result_rejected_tracker_filename": "written by each rank for itself",
        "rl_profile_dir": "written by each rank for itself",
        "tensorboard_dir": "one rank writes it",
        "wandb_save_dir": "one rank writes it",
        "app_tag_run_name": "the name of a run, often with a time in it",
        "one_logger_run_name": "the name of a run, often with a time in it",
        "otel_service_name": "the name of a run, often with a time in it",
        "wandb_exp_name": "the name of a run, often with a time in it",
        "inference_coordinator_port": "a port of the host's own",
        "straggler_ctrlr_port": "a port of the host's own",
        "logging_level": "what a rank says of itself",
        "profile": "a profiler watches some ranks",
        "profile_ranks": "a profiler watches some ranks",
        "profile_step_end": "a profiler watches some ranks",
        "profile_step_start": "a profiler watches some ranks",
        "pytorch_profiler_collect_callstack": "a profiler watches some ranks",
        "pytorch_profiler_collect_chakra": "a profiler watches some ranks",
        "pytorch_profiler_collect_shapes": "a profiler watches some ranks",
        "record_memory_history": "a profiler watches some ranks",
        "use_pytorch_profiler": "a profiler watches some ranks",
    }
)
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
    return {
        "version of nest-megatron": __version__,
        "version of Python": f"{major}.{minor}",
        **{
            f"version of {said}": installed.get(name, ABSENT)
            for name, said in {
                "megatron_core": "megatron-core",
                "torch": "torch",
                "transformer_engine": "transformer-engine",
            }.items()
        },
    }


def arguments(
    args: Namespace, flags: Mapping[str, str], may_differ: Collection[str] = ()
) -> dict[str, str]:
    """Everything of Megatron's arguments that must be the same on all ranks, by its flag.

    Args:
        flags: the flag of each destination; one that has none is named as an argument.
        may_differ: more destinations that may differ by rank.
    """
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
    left_out = {*(MAY_DIFFER.keys() - _OF_MEGATRON_ALONE), *may_differ}
    return {
        path: text
        for path, text in _leaves(config, name, ())
        if path.rpartition(".")[2] not in left_out
        and not any(path == one or path.startswith(f"{one}.") for one in may_differ)
    }


def comparable(value: object) -> str:
    """A value as text that is the same in every process that has an equal one.

    Objects are shown by their class and their own attributes, never by where they lie in memory.

    >>> comparable([None, 1e-4, "a", {"x", "y"}])
    "[None, 0.0001, 'a', {'x', 'y'}]"
    >>> comparable(Namespace(depth=2)), comparable(comparable)
    ('Namespace(depth=2)', 'nest_megatron.integrations.megatron_lm.same_job.comparable')
    """
    return _text(value, ())


def _text(value: object, above: tuple[int, ...]) -> str:
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
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(_text(item, inside) for item in value)) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_text(item, inside) for item in value) + "]"
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
    pairs = [(key, _text(each, inside)) for key, each in value.items()]
    return sorted(pairs, key=lambda pair: str(pair[0]))


def _leaves(node: Any, name: str, above: tuple[int, ...]) -> Iterable[tuple[str, str]]:
    inside = node if isinstance(node, Mapping) else None
    if dataclasses.is_dataclass(node) or isinstance(node, SimpleNamespace):
        inside = _attributes(node)
    if not inside or id(node) in above or len(above) > _DEEPEST:
        yield name, comparable(node)
        return
    for key in inside:
        path = f"{name}.{key}" if name else str(key)
        yield from _leaves(inside[key], path, (*above, id(node)))


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
    """What differs between ranks, one name a line, with who has which value.

    Args:
        of_ranks: each rank's values by name; a name that a rank lacks is not set there.
    """
    names = dict.fromkeys(name for values in of_ranks.values() for name in values)
    lines = []
    for name in names:
        ranks_of: dict[str, list[int]] = {}
        for rank, values in of_ranks.items():
            ranks_of.setdefault(values.get(name, ABSENT), []).append(rank)
        if len(ranks_of) > 1:
            shown = [f"{_short(v)} on {named(ranks, hosts)}" for v, ranks in ranks_of.items()]
            lines.append(f"\n  {name}: {'; '.join(shown)}")
    more = [f"\n  ... and {len(lines) - _MOST_NAMES} more"] if len(lines) > _MOST_NAMES else []
    return f"{head}:{''.join(lines[:_MOST_NAMES])}{''.join(more)}\n{advice}"


def named(ranks: Iterable[int], hosts: Mapping[int, str]) -> str:
    """Ranks in words, with their hosts where these are known.

    >>> named([0, 1, 2, 5], {0: "a", 1: "a", 2: "b", 5: "b"}), named([3], {})
    ('ranks 0-2, 5 (a, b)', 'rank 3')
    """
    ranks = sorted(ranks)
    runs: list[str] = []
    for _, run in itertools.groupby(enumerate(ranks), lambda pair: pair[1] - pair[0]):
        found = [rank for _, rank in run]
        runs.append(f"{found[0]}-{found[-1]}" if len(found) > 1 else str(found[0]))
    known = list(dict.fromkeys(hosts[rank] for rank in ranks if rank in hosts))
    shown = [*known[:_MOST_HOSTS], *(["..."] if len(known) > _MOST_HOSTS else [])]
    there = f" ({', '.join(shown)})" if shown else ""
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(runs)}{there}"


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."
