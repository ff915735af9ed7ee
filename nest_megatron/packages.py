"""Optional packages, and this package's compiled modules: what is there, what to install."""

from __future__ import annotations

import functools
import importlib.util
import logging
import sys
from pathlib import Path
from typing import Any

from nest_megatron.errors import UserInputError

_log = logging.getLogger(__name__)


@functools.cache
def is_built(module: str, otherwise: str) -> bool:
    """Whether a compiled module is there; one warning says what happens ``otherwise``."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        fix = "Reinstall with a C compiler to build it"
        _log.warning("%s is not there (%s): %s. %s.", module, error, otherwise, fix)
        return False
    return True


def is_installed(module: str) -> bool:
    """Whether a module can be found, without loading it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # its parent is missing, or its import is blocked
        return False


def installed_version(package: str) -> str | None:
    """The release of a package that is installed, by its metadata; nothing is loaded."""
    import importlib.metadata

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def require_package(module: str, extra: str, what: str, limit: str, otherwise: str = "") -> None:
    """Refuse what needs an optional package that is not installed.

    Args:
        extra: of this package, which installs it.
        what: what needs it.
        otherwise: what else helps, behind the command that installs the extra.
    """
    if not is_installed(module):
        raise UserInputError(what, None, limit, f"{install_command(extra)}{otherwise}.")


#: The checkout, where the package lies in one.
_ROOT = Path(__file__).resolve().parents[1]


def require_checkout(module: str, what: str) -> None:
    """Refuse what needs a module of ``tools`` or ``benchmarks``, which are not installed.

    Args:
        what: what needs it.

    Raises:
        UserInputError: where the package does not lie in its checkout.
    """
    if not _ROOT.joinpath(*module.split(".")).with_suffix(".py").is_file():
        limit = f"{module} is part of a checkout of nest-megatron, and not of an installation"
        raise UserInputError(what, None, limit, "Run it in a checkout (`pip install -e .`).")


def import_from_checkout(module: str, what: str) -> Any:
    """Import such a module; raises as ``require_checkout``."""
    require_checkout(module, what)
    if str(_ROOT) not in sys.path:
        sys.path.insert(0, str(_ROOT))
    return importlib.import_module(module)


def install_command(extra: str) -> str:
    """The command that installs what an extra of this package needs.

    pip takes the extra from the installed package, which no index needs to have.
    """
    return f"pip install 'nest-megatron[{extra}]'"
