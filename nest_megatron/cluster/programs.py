"""Programs that know the machines: started without a shell, for a limited time."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Sequence

from nest_megatron.errors import UserInputError
from nest_megatron.units import Seconds

#: Longest that one program may take: a fabric of thousands of ports is asked in seconds.
TIMEOUT_S = 60.0
#: How long a killed program may take to end; one that waits for a broken device never does.
_END_S = 2.0


def output_of(words: Sequence[str], *, timeout_s: Seconds = TIMEOUT_S) -> str:
    """What a program prints.

    Raises:
        UserInputError: if it is not there, ends with an error, or takes too long.
    """
    try:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
        )
    except OSError as error:
        raise _failed(words, f"it cannot be started: {error.strerror}") from error
    try:
        printed, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise _failed(words, f"it has not ended after {timeout_s:g} s") from error
    finally:
        if process.poll() is None:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
    if process.returncode:
        told = (errors.strip() or printed.strip()).splitlines()
        last = f": {told[-1].strip()}" if told else ""
        raise _failed(words, f"it ended with code {process.returncode}{last}")
    return printed


def _failed(words: Sequence[str], limit: str) -> UserInputError:
    fix = "Run it by hand, or give its saved output with --read FILE."
    return UserInputError(words[0], " ".join(words), limit, fix)
