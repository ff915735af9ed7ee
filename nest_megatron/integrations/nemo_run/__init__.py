"""NeMo-Run: a plugin that plans each task of an experiment, and factories for its command line.

``NestPlugin`` subclasses a class of NeMo-Run, so it is made when it is first used; importing
this package loads nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nest_megatron.packages import install_command

if TYPE_CHECKING:
    from nest_megatron.integrations.nemo_run.plugin import NestPlugin

__all__ = ["NestPlugin"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from nest_megatron.integrations.nemo_run.plugin import NestPlugin
    except ImportError as error:
        raise ImportError(
            f"NeMo-Run cannot be imported ({error}); {install_command('run')}"
        ) from error
    return NestPlugin
