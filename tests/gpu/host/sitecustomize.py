"""Gives each rank that torchrun starts a GPU that stands in; it stays for the process's life.

Python imports this by its name from ``PYTHONPATH`` at every start, so that the command that is
tested is the one that a user types.
"""

from __future__ import annotations

import os

if "LOCAL_RANK" in os.environ:
    from tests.gpu.stand_in import stand_in_gpu

    _DEVICE = stand_in_gpu(devices=int(os.environ["LOCAL_WORLD_SIZE"]))
    _DEVICE.__enter__()
