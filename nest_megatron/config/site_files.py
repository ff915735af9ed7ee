"""Files of a site: which there are of a name, and on which line each of their keys is."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from nest_megatron.documents import LOADER
from nest_megatron.files import expanded, user_folder

#: The operators' folder, which no user can write to.
SYSTEM_FOLDER: Final = Path("/etc/nest-megatron")


def site_files(name: str, variable: str, environment: Mapping[str, str]) -> Iterator[Path]:
    """Files of a name that hold here: the operators', the user's own, and that of a variable."""
    for folder in (SYSTEM_FOLDER, user_folder("config")):
        if os.path.lexists(folder / name):  # one that cannot be followed is refused, not missed
            yield folder / name
    if named := environment.get(variable):
        yield expanded(Path(named), variable)


def key_lines(text: str) -> Mapping[str, int]:
    """The line of every key of a YAML text, by its dotted name."""
    return dict(_lines(yaml.compose(text, Loader=LOADER)))


def _lines(node: Any, prefix: str = "") -> Iterator[tuple[str, int]]:
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        name = f"{prefix}{key.value}"
        yield name, key.start_mark.line + 1
        yield from _lines(value, f"{name}.")
