"""The recorder as a callback of Lightning: in recipes of NeMo, and in applications of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

try:
    from lightning.pytorch.callbacks import Callback
except ImportError:  # releases that are older
    from pytorch_lightning.callbacks import Callback

from nest_megatron.integrations.watching import STEPS, WatchedLoop, loop_of_hydra
from nest_megatron.layout import plan_file


class WatchCallback(Callback):
    """Keep what the first steps take in the history, next to what a plan predicts of them.

    A step is one of the optimizer, also where Lightning accumulates gradients over batches.

    Args:
        plan: a plan file, or its text; the plan of the Hydra application if not given.
        steps: how many to watch.
    """

    def __init__(self, plan: str | None = None, steps: int = STEPS) -> None:
        self._plan = plan
        self._steps = steps
        self._loop: WatchedLoop | None = None
        self._step: Any = None
        self._at: int | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Begin the record; the trainer has its ranks by now, and no model."""
        if stage == "fit":
            if self._plan is None:
                self._loop = loop_of_hydra(self._steps)
            else:
                is_text = "\n" in self._plan
                plan = plan_file.load(self._plan) if is_text else plan_file.read(Path(self._plan))
                self._loop = WatchedLoop(plan, steps=self._steps)
            self._loop.begin(trainer.global_rank, trainer.world_size)

    def on_train_batch_start(self, trainer: Any, *_: Any, **__: Any) -> None:
        """A step begins with the first batch after the optimizer's last."""
        if self._loop is not None and trainer.global_step != self._at:
            self._at = trainer.global_step
            self._step = self._loop.step()
            self._step.__enter__()

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        """What comes between two batches belongs to no pass."""
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Training is over."""
        if self._loop is not None:
            self._loop.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """An error ends it."""
        if self._loop is not None:
            self._loop.end(exception)
