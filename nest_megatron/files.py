"""Files written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from nest_megatron.errors import UserInputError


def write_text(path: Path, text: str) -> None:
    """Write a text file in one step: readers see the old file or the new one.

    Raises:
        UserInputError: if the folder is missing or cannot be written to.
    """
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file in one step, as ``write_text`` does.

    Raises:
        UserInputError: if the folder is missing or cannot be written to.
    """
    path = path.expanduser()
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
    folder = path.expanduser().parent
    if not folder.is_dir():
        raise UserInputError(
            what, value=str(path), limit=f"there is no folder {folder}", fix=f"mkdir -p {folder}"
        )


def read_text(path: Path, what: str) -> str:
    """The text of a file.

    Raises:
        UserInputError: if it is missing or unreadable.
    """
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserInputError(
            what, value=str(path), limit=f"it cannot be read: {reason}", fix="Check the path."
        ) from error


def _new_file(path: Path) -> tuple[int, str]:
    """A file of a name that nobody uses, beside ``path``, with the rights of any new file.

    ``tempfile`` makes private files, and what the umask is can be asked only by setting it, which
    other threads would see.
    """
    while True:
        name = str(path.parent / f".{path.name}.{secrets.token_hex(4)}.tmp")
        with contextlib.suppress(FileExistsError):
            return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), name
