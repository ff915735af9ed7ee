"""What a process does at its start when its command line holds ``+nest=...``.

The ``.pth`` file next to the package imports this module in such processes alone, and the runner
(``python -m nest_megatron SCRIPT``) does so itself. It watches for a few modules of Megatron and
calls ``nest_megatron.integrations.megatron_lm.hook`` as they load; until then it imports nothing
and leaves ``sys.argv`` alone, so that a launcher such as ``torchrun`` passes the words on
untouched. Of Hydra, whose applications compose ``+nest`` themselves, it watches the function that
runs a job.

Standard library only. Installing twice is installing once: in a virtual environment Python runs
every ``.pth`` file twice.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

#: The words that ask for a plan; ``boot.pth`` looks for the same.
TOKENS = ("+nest=", "++nest=")

#: Functions of ``HANDLERS`` to call just before a module is loaded ...
BEFORE = {"megatron.training": "before_training"}
#: ... and with the module just after.
AFTER = {
    "megatron.bridge.training.pretrain": "after_bridge_pretrain",
    "megatron.bridge.training.utils.omegaconf_utils": "after_bridge_overrides",
    "megatron.training.arguments": "after_arguments",
    "megatron.training.initialize": "after_initialize",
    "megatron.training.training": "after_training",
    "megatron.core.parallel_state": "after_parallel_state",
    "hydra.core.utils": "after_hydra",
}
HANDLERS = "nest_megatron.integrations.megatron_lm.hook"


class MegatronWatcher:
    """A meta-path finder that finds nothing itself, but hears of every module looked for."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec that the other finders give, with a call of ours around its execution."""
        if name in BEFORE:
            _handler(BEFORE[name])()
        if name not in AFTER:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        finds = [find for each in others if (find := getattr(each, "find_spec", None)) is not None]
        specs = (find(name, path, target) for find in finds)
        spec: ModuleSpec | None = next((found for found in specs if found is not None), None)
        if spec is not None and spec.loader is not None:
            _call_after(spec, _handler(AFTER[name]))
        return spec


def install() -> None:
    """Watch for Megatron, once."""
    if not any(isinstance(finder, MegatronWatcher) for finder in sys.meta_path):
        sys.meta_path.insert(0, MegatronWatcher())


def is_asked_for(argv: Sequence[str]) -> bool:
    """Whether a command line asks for a plan.

    >>> is_asked_for(["pretrain_gpt.py", "--bf16", "+nest=auto"]), is_asked_for(["x.py"])
    (True, False)
    """
    return any(word.startswith(TOKENS) for word in argv)


def _handler(name: str) -> Callable[..., None]:
    handler: Callable[..., None] = getattr(importlib.import_module(HANDLERS), name)
    return handler


def _call_after(spec: ModuleSpec, handler: Callable[..., None]) -> None:
    """Run a handler behind the loader's ``exec_module``."""
    loader = spec.loader
    assert loader is not None
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        handler(module)

    loader.exec_module = exec_module  # type: ignore[method-assign]


if is_asked_for(getattr(sys, "argv", ())):
    install()
