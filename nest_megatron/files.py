"""Files: read within limits, written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import re
import shlex
import stat
import sys
from collections.abc import Collection, Iterable, Iterator
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from nest_megatron.errors import PROGRAM, UserInputError
from nest_megatron.printing import print_to_stderr

#: Largest file that is read: a hundred times the largest plan, profile or table in use.
MAX_BYTES = 32 * 2**20

#: In the place of an unknown home, where nobody can make a folder.
_NO_HOME = Path(os.devnull) / PROGRAM
#: Links to the open files of this process, on Linux.
_OPEN_FILES = "/proc/self/fd"
#: Links that Linux follows in one path.
_MAX_LINKS = 40
_KINDS = {
    stat.S_ISDIR: "a folder",
    stat.S_ISFIFO: "a pipe",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
    stat.S_ISSOCK: "a socket",
}


def write_text(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Write a text file as ``write_bytes`` does."""
    write_bytes(path, text.encode("utf-8", errors="backslashreplace"), mode=mode)


def write_bytes(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Write a file in one step: readers see the old file or the new one.

    A link is followed: the file that it names is written again, the link stays. ``-`` is standard
    output.

    Args:
        mode: rights of a new file, less those that the umask takes; an old one keeps its own as
            far as these go.

    Raises:
        UserInputError: if the folder is missing or cannot be written to, a device or a pipe is
            named, or a file is there that ``check_output`` has not seen.
    """
    if is_standard_output(path):
        _print(content)
        return
    path = regular_target(path)
    require_folder(path)
    absent = _absent.get()
    _absent.set(absent - {path})
    try:
        with _new_file(path, mode) as (descriptor, name):
            if path.exists():
                os.fchmod(descriptor, stat.S_IMODE(path.stat().st_mode) & ~(0o666 ^ mode))
            with os.fdopen(os.dup(descriptor), "wb") as stream:
                stream.write(content)
            os.fsync(descriptor)
            if name is None:
                _link(descriptor, path, replaces=path not in absent)
            elif path in absent and path.exists():
                raise FileExistsError(os.strerror(errno.EEXIST))
            else:
                name.replace(path)
    except OSError as error:
        raise _refused(
            "file",
            path,
            f"it cannot be written: {error.strerror or error}",
            "Name a place where there is space, you may write, and no other program writes.",
        ) from error


def now() -> str:
    """This moment as files have it: ISO 8601 in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def append_line(path: Path, line: bytes, *, mode: int | None = None) -> None:
    """Append a line in one write, behind whole lines: a writer before may have been killed.

    The file is opened by its name each time, so that it may be moved away at any moment.

    Args:
        line: with its end.
        mode: rights of a new file, whatever the umask; by default those of any new file.

    Raises:
        OSError: if the line is not there as a whole.
    """
    flags = os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags | os.O_RDWR | os.O_CREAT, 0o666)
    except PermissionError:  # of a file to write to and not to read, or that another user made
        descriptor = os.open(path, flags | os.O_WRONLY)
    try:
        state = os.fstat(descriptor)
        if kind := _kind_of(state.st_mode):
            raise OSError(errno.EINVAL, f"it is {kind}, not a regular file")
        if mode is not None and not state.st_size and state.st_uid == os.geteuid():
            os.fchmod(descriptor, mode)
        is_whole = not state.st_size
        with contextlib.suppress(OSError):  # of a file to write to and not to read
            is_whole = is_whole or os.pread(descriptor, 1, state.st_size - 1) == b"\n"
        if not is_whole:
            line = b"\n" + line
        if os.write(descriptor, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(descriptor)


#: Says in a file that this program has written it, where a format has a place to say so.
MARK = "written by nest-megatron"
#: How files of ours begin that hold no mark: pinned plans, clusters, tables of ``validate``, plans
#: in the form of NEST's artifact, and the page of ``validate --docs``.
_BEGINNINGS = (
    b"# nest-megatron pinned plan",
    b"# Written by nest-megatron ",
    b"file,row_id,source,model,",
    b'{\n "dataParallelDegree": ',
    b"# Accuracy\n",
)
#: Plans and profiles: the schema first, and further down a short hash of ours.
_SCHEMA = re.compile(rb"schema: \d+\n")
_HASH = re.compile(rb"^ *(checksum|fingerprint): '?[0-9a-f]{16}'?$", re.MULTILINE)


#: Files that were not there when they were checked, and that nothing was written to since.
_absent = ContextVar[frozenset[Path]]("absent", default=frozenset())


def check_output(
    what: str, path: Path, *, inputs: Iterable[Path] = (), force: bool | None = None
) -> None:
    """Refuse, before any work, a file that a command must not write.

    Args:
        what: the option that names it.
        inputs: files that the command reads.
        force: replace a file although this program has not written it; ``None`` where the user
            has no option for that.

    Raises:
        UserInputError: for a folder, a device or a pipe, a missing folder, a file that the command
            reads, or one of somebody else's.
    """
    if is_standard_output(path):
        return
    target = regular_target(path, what)
    require_folder(target, what)
    absent = _absent.get() - {target}
    _absent.set(absent if force or target.exists() else absent | {target})
    if not target.exists():
        return
    if any(_is_same(target, each) for each in inputs):
        raise _refused(what, path, "the command reads this file", "Name another file.")
    if not force and not _is_ours(read_bytes(target, what, whole=False)):
        limit = "this file exists, and nothing in it says that nest-megatron has written it"
        or_force = "Name another file, or add --force (in Python force=True) to replace it."
        raise _refused(what, path, limit, "Name another file." if force is None else or_force)


def _is_same(target: Path, other: Path) -> bool:
    """Whether two names are one file; ``other`` may be any text that a user typed."""
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        return target.samefile(other.expanduser())
    return False


def is_standard_output(path: Path) -> bool:
    """Whether an output is named ``-``."""
    return str(path) == "-"


def regular_target(path: Path, what: str = "file") -> Path:
    """The regular file, there or not, that a path names, links followed."""
    target = expanded(path, what)
    for _ in range(_MAX_LINKS):
        where = target.absolute()
        if where.is_relative_to("/proc") or where.parent == Path("/dev"):
            limit = "it is a device or an open file, which a file must not take the place of"
            raise _refused(what, path, limit, "Name a regular file, or - for standard output.")
        if not target.is_symlink():
            break
        target = target.parent / target.readlink()
    else:
        raise _refused(what, path, "it is a link in a circle", "Name a regular file.")
    kind = _kind_of(target.stat().st_mode) if target.exists() else None
    if kind:
        fix = "Name a file inside it." if kind == "a folder" else "Name a file."
        raise _refused(what, path, f"it is {kind}, not a regular file", fix)
    return target


def _is_ours(content: bytes) -> bool:
    """Whether a file is empty or was written by this program."""
    head = content[:4096]
    if _SCHEMA.match(head):
        return _HASH.search(content) is not None
    marked = head[:1] in (b"<", b"{", b"\x89") and MARK.encode() in head
    return not head or head.startswith(_BEGINNINGS) or marked


_standard_output: ContextVar[TextIO | None] = ContextVar("standard_output", default=None)


@contextlib.contextmanager
def reserved_standard_output() -> Iterator[None]:
    """Keep standard output for the file named ``-``; other output goes to standard error."""
    token = _standard_output.set(sys.stdout)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _standard_output.reset(token)


def _print(content: bytes) -> None:
    stream = _standard_output.get() or sys.stdout
    binary = getattr(stream, "buffer", None)
    if binary is None:
        stream.write(content.decode("utf-8"))
    else:
        stream.flush()
        binary.write(content)
    stream.flush()


def require_folder(path: Path, what: str = "file") -> None:
    """Refuse a file in a folder that is not there or is read-only, before the work for it."""
    folder = expanded(path, what).parent
    limit, fix = f"you may not write to {folder.absolute()}", "Name another folder."
    if not folder.is_dir():
        limit, fix = f"there is no folder {folder}", f"mkdir -p {shlex.quote(str(folder))}"
    elif os.access(folder, os.W_OK):
        return
    if file := next(filter(Path.is_file, (folder, *folder.parents)), None):
        limit, fix = f"{file} is a file, not a folder", "Name another folder."
    raise _refused(what, path, limit, fix)


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


def read_bytes(path: Path, what: str, *, most: int = MAX_BYTES, whole: bool = True) -> bytes:
    """The bytes of a regular file; see ``read_text``.

    Args:
        whole: refuse a file of more than ``most`` bytes, of which the first are returned otherwise.
    """
    return read_opened(path, what, most=most, whole=whole)[0]


def read_opened(
    path: Path, what: str, *, most: int = MAX_BYTES, whole: bool = True
) -> tuple[bytes, Path]:
    """The bytes of a regular file as ``read_bytes``, and where the file lies that was opened.

    Links are followed once: whatever the path names by now, the place is that of these bytes. Where
    the system does not say it (``/proc``), it is the path's, links followed.
    """
    try:
        # a pipe without a writer would block for ever
        descriptor = os.open(expanded(path, what), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as stream:
            kind = _kind_of(os.fstat(descriptor).st_mode)
            if kind:
                raise _unreadable(path, what, f"it is {kind}, not a regular file")
            content = stream.read(most + 1)
            opened = _place_of(descriptor, path)
    except UserInputError:
        raise
    except (OSError, ValueError) as error:  # a null character in a name is a ValueError
        raise _unreadable(path, what, getattr(error, "strerror", None) or str(error)) from error
    if whole and len(content) > most:
        raise _unreadable(path, what, f"it is larger than {most / 2**20:g} MiB")
    return content, opened


def _place_of(descriptor: int, path: Path) -> Path:
    link = Path(f"{_OPEN_FILES}/{descriptor}")
    if not link.is_symlink():
        return path.resolve()
    if not os.fstat(descriptor).st_nlink:
        raise OSError(errno.ENOENT, "it was removed while it was read")
    return link.readlink()


def require_unwritable(path: Path, what: str, owners: Collection[int]) -> None:
    """Refuse a file that others than its owners may change, as sshd does (``StrictModes``).

    The file and every folder above it belong to an owner, and neither a group nor others may write
    to them; of a folder with the sticky bit they may, for they can replace nothing there.

    Args:
        what: names the file in errors.
        owners: user ids; root is one.

    Raises:
        UserInputError: naming the first file or folder that is otherwise, or is not there.
    """
    real = Path(os.path.realpath(path))
    trusted = {0, *owners, *_unmapped_users()}
    for each in dict.fromkeys((real, *real.parents, *path.absolute().parents)):
        try:
            state = each.stat()
        except OSError as error:
            raise _unreadable(path, what, error.strerror or str(error)) from error
        if state.st_uid not in trusted:
            limit, fix = f"{each} belongs to user {state.st_uid}", f"chown root {each}"
        elif state.st_mode & 0o022 and not (each.is_dir() and state.st_mode & stat.S_ISVTX):
            limit, fix = f"a group or others may write to {each}", f"chmod go-w {each}"
        else:
            continue
        raise _refused(what, path, f"{limit}, who could change what it says", fix)


@functools.cache
def _unmapped_users() -> frozenset[int]:
    """The id that files of unknown users have in a container, root's of the host among them."""
    try:
        unknown = int(Path("/proc/sys/kernel/overflowuid").read_text(encoding="ascii"))
        lines = Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return frozenset()
    known = (tuple(map(int, line.split())) for line in lines)
    is_known = any(first <= unknown < first + count for first, _, count in known)
    return frozenset() if is_known else frozenset({unknown})


@functools.cache
def warn_once(text: str) -> None:
    """Say on standard error, once a process, what is gone without."""
    print_to_stderr(f"warning: {text}")


def _kind_of(mode: int) -> str | None:
    return next((_KINDS[is_kind] for is_kind in _KINDS if is_kind(mode)), None)


def expanded(path: Path, what: str) -> Path:
    """The path with ``~`` resolved.

    Args:
        what: names the path in errors.

    Raises:
        UserInputError: for the home of a user that does not exist, or of one without a home.
    """
    try:
        return path.expanduser()
    except RuntimeError as error:
        user = path.parts[0]
        limit = f"there is no user {user[1:]}"
        if user == "~":
            limit = "this user has no home folder: HOME is not set, and no account names one"
        raise _refused(what, path, limit, "Write the whole path, from / on.") from error


def user_folder(kind: str) -> Path:
    """Our folder for the ``cache``, ``config``, ``data`` or ``log`` of this user.

    It need not exist. For a user without a home it cannot: there is nothing to read, and who
    writes is told so.
    """
    import platformdirs

    try:
        folder = getattr(platformdirs, f"user_{kind}_path")(PROGRAM, appauthor=False)
    except RuntimeError:
        return _NO_HOME
    return folder if folder.is_absolute() else _NO_HOME  # before 4.11, "~" may be left in it


def _unreadable(path: Path, what: str, reason: str) -> UserInputError:
    return _refused(what, path, f"it cannot be read: {reason}", "Check the path.")


def _refused(what: str, path: Path, limit: str, fix: str) -> UserInputError:
    return UserInputError(what, str(path), limit, fix)


@contextlib.contextmanager
def _new_file(path: Path, mode: int) -> Iterator[tuple[int, Path | None]]:
    """A file beside ``path``, with rights as of any new file, and its name if it has one.

    One without a name is gone with its process, however that ends. Not all file systems have them.
    """
    name = None
    try:
        descriptor = _unnamed_file(path.parent, mode)
    except (OSError, AttributeError):  # or a system has none
        descriptor, name = _named_file(path, mode)
    try:
        yield descriptor, name
    finally:
        if name is not None:
            with contextlib.suppress(OSError):
                _unlink(name, descriptor)
        os.close(descriptor)


def _unnamed_file(folder: Path, mode: int) -> int:
    if not os.path.exists(_OPEN_FILES):  # noqa: PTH110 - its links alone give it a name
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
    return os.open(folder, os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC, mode)


def _link(descriptor: int, path: Path, *, replaces: bool) -> None:
    """Give a file without a name that of ``path``, in the place of a file that may have it."""
    source = f"{_OPEN_FILES}/{descriptor}"
    try:  # with src_dir_fd, which an absolute path leaves without meaning, the link is followed
        os.link(source, path, src_dir_fd=descriptor)
    except FileExistsError:
        if not replaces:
            raise
        name = path.parent / f".{path.name}.{os.urandom(4).hex()}.tmp"
        os.link(source, name, src_dir_fd=descriptor)
        name.replace(path)


def _named_file(path: Path, mode: int) -> tuple[int, Path]:
    """A new file of the one name that is removed where its writer was killed, or else of any.

    A writer that lives holds a lock. ``tempfile`` makes private files, and what the umask is can be
    asked only by setting it, which other threads would see.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    name = path.parent / f".{path.name}.tmp"
    with contextlib.suppress(OSError):  # remove what a writer that was killed has left
        left = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(left, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _unlink(name, left)
        finally:
            os.close(left)
    with contextlib.suppress(OSError):
        descriptor = os.open(name, flags, mode)
        if _is_locked(descriptor) and os.fstat(descriptor).st_nlink:
            return descriptor, name
        os.close(descriptor)  # another writer took it for one that was left
    while True:
        name = path.parent / f".{path.name}.{os.urandom(4).hex()}.tmp"
        with contextlib.suppress(FileExistsError):
            return os.open(name, flags, mode), name


def _is_locked(descriptor: int) -> bool:
    """Lock a file, unless another has; where files cannot be locked nobody does."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _unlink(name: Path, descriptor: int) -> None:
    """Remove an open file by its name, unless another has that by now."""
    if os.path.samestat(os.fstat(descriptor), name.lstat()):
        name.unlink()
