"""Waiting for what comes: a machine whose cores others hold for seconds fails no test."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

#: Longest wait for something that comes.
LONG_S = 600.0


def wait_until(is_so: Callable[[], Any]) -> None:
    """Wait for what comes, however busy the machine is.

    Raises:
        AssertionError: if it does not come.
    """
    ended = time.monotonic() + LONG_S
    while not is_so():
        assert time.monotonic() < ended, "it never came"
        time.sleep(0.02)
