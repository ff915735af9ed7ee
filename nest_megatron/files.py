"""Files: read within limits, written whole or not at all."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import stat
import sys
from pathlib import Path

from nest_megatron.errors import UserInputError

#: Largest file that is read: a hundred times the largest plan, profile or table in use.
MAX_BYTES = 32 * 2**20

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


def write_text(path: Path, text: str) -> None:
    """Write a text file in one step: readers see the old file or the new one.

    Raises:
        UserInputError: if the folder is missing or cannot be written to.
    """
    write_bytes(path, text.encode("utf-8", errors="backslashreplace"))


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file in one step, as ``write_text`` does.

    Raises:
        UserInputError: if the folder is missing or cannot be written to.
    """
    path = expanded(path, "out")
    require_folder(path)
    temporary: str | None = None
    try:
        descriptor, temporary = _new_file(path)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        Path(temporary).replace(path)
        temporary = None
    except OSError as error:
        raise UserInputError(
            "out",
            value=str(path),
            limit=f"it cannot be written: {error.strerror or error}",
            fix="Name a file in a folder that you may write to.",
        ) from error
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()


def require_folder(path: Path, what: str = "out") -> None:
    """Refuse a file in a folder that is not there: before the work whose result it is to hold.

    Raises:
        UserInputError: naming the folder.
    """
    folder = expanded(path, what).parent
    if not folder.is_dir():
        raise UserInputError(
            what, value=str(path), limit=f"there is no folder {folder}", fix=f"mkdir -p {folder}"
        )


def read_text(path: Path, what: str, *, most: int = MAX_BYTES) -> str:
    """The text of a regular file, without the byte-order mark that some editors write.

    Args:
        what: names the file in errors.
        most: largest size, in bytes.

    Raises:
        UserInputError: if it is missing, unreadable, too large, no regular file or no UTF-8 text.
    """
    try:
        return read_bytes(path, what, most=most).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _unreadable(path, what, f"it is not UTF-8 text: {error}") from error


def read_bytes(path: Path, what: str, *, most: int = MAX_BYTES) -> bytes:
    """The bytes of a regular file; see ``read_text``."""
    try:
        # a pipe without a writer would block for ever
        descriptor = os.open(expanded(path, what), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as stream:
            kind = kind_of(os.fstat(descriptor).st_mode)
            if kind is not None:
                raise _unreadable(path, what, f"it is {kind}, not a regular file")
            content = stream.read(most + 1)
    except (OSError, ValueError) as error:  # a null character in a name is a ValueError
        if isinstance(error, UserInputError):
            raise
        raise _unreadable(path, what, getattr(error, "strerror", None) or str(error)) from error
    if len(content) > most:
        raise _unreadable(path, what, f"it is larger than {most / 2**20:g} MiB")
    return content


@functools.cache
def warn_once(text: str) -> None:
    """Say on standard error, once a process, what is gone without."""
    print(f"warning: {text}", file=sys.stderr)


def kind_of(mode: int) -> str | None:
    """What a file is that is no regular one, in words."""
    return next((name for is_kind, name in _KINDS if is_kind(mode)), None)


def expanded(path: Path, what: str) -> Path:
    """The path with ``~`` resolved.

    Raises:
        UserInputError: if there is no such user.
    """
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise _unreadable(path, what, str(error)) from error


def _unreadable(path: Path, what: str, reason: str) -> UserInputError:
    return UserInputError(
        what, value=str(path), limit=f"it cannot be read: {reason}", fix="Check the path."
    )


def _new_file(path: Path) -> tuple[int, str]:
    """A file of a name that nobody uses, beside ``path``, with the rights of any new file.

    ``tempfile`` makes private files, and what the umask is can be asked only by setting it, which
    other threads would see.
    """
    while True:
        name = str(path.parent / f".{path.name}.{secrets.token_hex(4)}.tmp")
        with contextlib.suppress(FileExistsError):
            return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), name
