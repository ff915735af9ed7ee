"""Optional packages, and this package's own compiled modules: what is there, what to install."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import logging
import shlex

_NAME = "nest-megatron"
_log = logging.getLogger(__name__)


@functools.cache
def is_built(module: str, otherwise: str) -> bool:
    """Whether a compiled module is there; one warning says what happens ``otherwise``."""
    try:
        importlib.import_module(module)
    except ImportError:
        _log.warning("The compiled %s is not built: %s.", module, otherwise)
        return False
    return True


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
