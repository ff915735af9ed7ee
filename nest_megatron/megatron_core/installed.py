"""Whether megatron-core is installed."""

from __future__ import annotations

import importlib.util

from nest_megatron.errors import UserInputError
from nest_megatron.packages import install_command


def require_megatron(command: str = "extract") -> None:
    """Refuse to go on without megatron-core.

    Raises:
        UserInputError: naming what to install, and what works without.
    """
    for name, package in (("torch", "torch"), ("megatron.core", "megatron-core")):
        if not _is_installed(name):
            raise UserInputError(
                command,
                value=None,
                limit=f"layers are built by megatron-core, and {package} is not installed",
                fix=install_command("megatron")
                + (
                    ", or add --closed-form to see the formulas that the planner uses."
                    if command == "extract"
                    else "."
                ),
            )


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # its parent is missing, or its import is blocked
        return False
