"""What to install where an optional package is missing."""

from __future__ import annotations

import importlib.metadata
import shlex

_NAME = "nest-megatron"


def install_command(extra: str) -> str:
    """The command that installs what an extra of this package needs.

    The packages themselves are named: where this package was installed from a checkout, no index
    has it, and ``pip install 'nest-megatron[extra]'`` fails.
    """
    try:
        lines = importlib.metadata.requires(_NAME) or ()
    except importlib.metadata.PackageNotFoundError:  # run from the source tree
        lines = ()
    pairs = [line.partition(";")[::2] for line in lines]
    wanted = [name.strip() for name, marker in pairs if f'"{extra}"' in marker.replace("'", '"')]
    if not wanted:
        return f"pip install '.[{extra}]' in a checkout of {_NAME}"
    return f"pip install {shlex.join(wanted)}"
