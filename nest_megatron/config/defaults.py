"""Defaults of a site: values that operators give ``nest.*``, below what a user types.

Files lie beside the policies. A later one wins: ``/etc/nest-megatron/defaults.yaml``, the user's
own, and the file that ``NEST_MEGATRON_DEFAULTS`` names.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from nest_megatron.config.overrides import Setting, leaves, quoted, refuse_resolvers, value_text
from nest_megatron.config.schema import launch_keys, section_keys
from nest_megatron.documents import DESCRIPTION, LOADER, parse_yaml
from nest_megatron.errors import UserInputError, nearest, typed_setting
from nest_megatron.files import expanded, read_text, user_folder

#: The operators' folder, which no user can write to.
SYSTEM_FOLDER: Final = Path("/etc/nest-megatron")
#: Names another file of defaults.
VARIABLE: Final = "NEST_MEGATRON_DEFAULTS"
_NAME: Final = "defaults.yaml"
#: What a job says itself, section by section and key by key.
_OF_JOBS: Final = ("model", "train", "peft", "parallel", "out", "target", "plan", "free", "dry_run")
_ALSO_OF_JOBS: Final = (
    "flags",
    "stop_before_training",
    "alternative",
    "port",
    "cluster.num_gpus",
    "on_mismatch",  # a policy gives its default
)
_PLAIN = re.compile(r"[\w./@%+-]+")


def with_defaults(
    settings: Sequence[Setting], *, names_cluster: bool = False, of_launch: bool = False
) -> tuple[Setting, ...]:
    """Settings behind the defaults of the site that they leave.

    Args:
        settings: those that a user gave.
        names_cluster: the user names a cluster elsewhere, for which no default of the site holds.
        of_launch: they are those of ``LaunchConfig``, and not of the planning job.

    Raises:
        UserInputError: for a file that cannot be read or says something unknown.
    """
    given = {setting.key for setting in settings}
    named = names_cluster or "cluster" in given
    return (
        *(
            each
            for each in read_defaults()
            if each.key not in given
            and not (named and each.key.partition(".")[0] == "cluster")
            and (each.key in launch_keys()) == of_launch
        ),
        *settings,
    )


def read_defaults() -> tuple[Setting, ...]:
    """The defaults of the site, each with its file and line; raises as ``with_defaults``."""
    found: dict[str, Setting] = {}
    for path in site_files(_NAME, VARIABLE):
        own = {setting.key: setting for setting in _read(path)}
        if "cluster" in own:  # what was said of another one
            found = {key: each for key, each in found.items() if not key.startswith("cluster")}
        found |= own
    return tuple(found.values())


def _read(path: Path) -> Iterator[Setting]:
    fix = "Write KEY: VALUE lines, such as search.max_seconds: 30."
    fields, lines = read_site_file(path, "defaults", fix)
    for name, value in leaves(fields):
        where = f"{path} line {lines.get(name, 1)}"
        _check(name, value, where)
        refuse_resolvers(f"nest.{name}", value, f"Write the value itself ({where}).")
        key = "watch.steps" if name == "watch" else name
        is_special = isinstance(value, str) and not _PLAIN.fullmatch(value)
        yield Setting(
            key=key, value=quoted(value) if is_special else value_text(value), origin=where
        )


def _check(name: str, value: object, where: str) -> None:
    """Refuse a name that is none, or that of something that each job says itself."""
    first = name.partition(".")[0]
    if first in _OF_JOBS or name in _ALSO_OF_JOBS:
        raise UserInputError(
            f"nest.{name}",
            value,
            f"a site has no default of it ({where})",
            "Leave it out: a job says it itself, and policies set limits (docs/policy.md).",
        )
    known = (*section_keys(), *launch_keys())
    if first != "cluster" and name not in known:
        names = [each for each in known if each.partition(".")[0] not in _OF_JOBS]
        raise UserInputError(
            f"nest.{name}",
            value,
            f"there is no such setting ({where})",
            nearest(name, ["cluster", *names], count=2),
        )


@contextlib.contextmanager
def naming_defaults(settings: Sequence[Setting]) -> Iterator[None]:
    """Say of a wrong value that no user typed where it is from."""
    origins = {each.key: each.origin for each in settings if each.origin is not None}
    try:
        yield
    except UserInputError as error:
        origin = origins.get(error.what.removeprefix(typed_setting("")).removeprefix("nest."))
        if origin is None or origin in error.limit or type(error) is not UserInputError:
            raise
        raise UserInputError(
            error.what, error.value, f"{error.limit} (from {origin})", error.fix
        ) from error


def site_files(name: str, variable: str) -> Iterator[Path]:
    """Files of a name that hold here: the operators', the user's own, and that of a variable."""
    for folder in (SYSTEM_FOLDER, user_folder("config")):
        # one that cannot be followed, or that lies in a closed folder, is refused, not missed
        is_closed = os.path.lexists(folder) and not os.access(folder, os.X_OK)
        if is_closed or os.path.lexists(folder / name):
            yield folder / name
    if named := os.environ.get(variable):
        yield expanded(Path(named), variable)


def read_site_file(path: Path, what: str, fix: str) -> tuple[Mapping[str, Any], Mapping[str, int]]:
    """The fields of a site's YAML file, and the line of every key by its dotted name.

    Args:
        what: the file is, for errors.
        fix: what to write into one that holds no mapping.

    Raises:
        UserInputError: for a file that cannot be read, or holds no mapping.
    """
    text = read_text(path, what, most=DESCRIPTION.num_bytes)
    fields = parse_yaml(text, what, name=str(path))
    if not isinstance(fields, Mapping | None):
        raise UserInputError(what, str(path), "it is no mapping", fix)
    return fields or {}, dict(_lines(yaml.compose(text, Loader=LOADER)))


def _lines(node: Any, prefix: str = "") -> Iterator[tuple[str, int]]:
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        name = f"{prefix}{key.value}"
        yield name, key.start_mark.line + 1
        yield from _lines(value, f"{name}.")
