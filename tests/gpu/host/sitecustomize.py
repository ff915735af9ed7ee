"""Gives a process as many GPUs that stand in as ``NEST_TEST_GPUS`` says, for the process's life.

Python imports this by its name from ``PYTHONPATH`` at every start, so that the command that is
tested is the one that a user types. A process that is shown some GPUs has those alone.
"""

from __future__ import annotations

import atexit
import os
import sys

_COUNT = int(os.environ.get("NEST_TEST_GPUS", "0"))
_ARGV = getattr(sys, "orig_argv", [])

if _COUNT and "torch.distributed.run" not in _ARGV:
    from tests.gpu.stand_in import stand_in_gpu

    _SHOWN = os.environ.get("CUDA_VISIBLE_DEVICES")
    _DEVICE = stand_in_gpu(devices=len(_SHOWN.split(",")) if _SHOWN else _COUNT)
    _DEVICE.__enter__()
    atexit.register(_DEVICE.__exit__, None, None, None)
    if "nest_megatron.integrations.megatron_lm.measure_child" in _ARGV:
        # the layers that a script builds need its Megatron-LM: here those of the model's shape
        from nest_megatron.integrations.megatron_lm import own_layers

        own_layers.JobLayers = lambda *_: None  # type: ignore[assignment,misc]
