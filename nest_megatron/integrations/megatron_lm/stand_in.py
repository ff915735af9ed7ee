"""A device that is not there, as far as Megatron's validation of arguments asks for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

from nest_megatron.units import Bytes


@contextlib.contextmanager
def stand_in_device(name: str, major: int, memory_bytes: Bytes) -> Iterator[None]:
    """Have torch describe a device.

    Args:
        major: of its compute capability.
    """
    import torch

    device = SimpleNamespace(name=name, major=major, minor=0, total_memory=memory_bytes)
    with (
        mock.patch.object(torch.cuda, "get_device_properties", return_value=device),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(major, 0)),
    ):
        yield
