"""Run a command whose writes vanish: a program by itself, which ``run.py`` starts.

``python view.py FOLDER WORD...`` runs the words in namespaces of their own: every file system is
an overlay over itself, whose upper layer is memory, there is no network, and no process outside is
seen. FOLDER alone stays as it is. Where the kernel does not permit that, it writes why to
``FOLDER/open`` and runs the words all the same. Sources: ``unshare(2)``, ``mount_setattr(2)``,
``Documentation/filesystems/overlayfs.rst``.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

#: Processor time and memory of each process, size of a file, processes of the namespace.
LIMITS = {
    resource.RLIMIT_CPU: 20,
    resource.RLIMIT_AS: 512 << 20,
    resource.RLIMIT_FSIZE: 16 << 20,
    resource.RLIMIT_CORE: 0,
}
_MAX_PROCESSES = 512
#: How long processes that the script leaves behind may take to write their words down.
_LEFT_BEHIND_S = 3.0
_UPPER_BYTES = 64 << 20
_MAX_MOUNTS = 2000

_NEWNS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 1 << 17, 1 << 27, 1 << 28, 1 << 29, 1 << 30
_MS_BIND, _MS_REC, _MS_PRIVATE = 1 << 12, 1 << 14, 1 << 18
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 36, 38
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _ATTR_RDONLY = 442, -100, 0x8000, 1
_STORAGE_FREE = ("proc", "sysfs", "devtmpfs", "devpts", "mqueue", "cgroup", "cgroup2")


def main(folder: Path, words: list[str]) -> int:
    """Run the words and return their exit status."""
    _libc("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _libc("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _libc("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    said = folder / "open"
    said.write_text("the view was not finished")
    child = os.fork()
    if child == 0:
        os._exit(_run_closed(folder, said, words))
    try:
        status = _wait_for(child)
        if said.exists():  # nothing was started
            status = _run_bounded(words)
    finally:
        _end_children()
    return status


def _run_closed(folder: Path, said: Path, words: list[str]) -> int:
    """Run the words in a view of their own, or write down why not."""
    _libc("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    try:
        _unshare()
        child = os.fork()
        if child:
            return _wait_for(child)
        _libc("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        _View(folder).enter()
        resource.setrlimit(resource.RLIMIT_NPROC, (_MAX_PROCESSES, _MAX_PROCESSES))
    except (OSError, ValueError) as error:
        said.write_text(str(error), encoding="utf-8")
        return 1
    said.unlink()
    try:
        return _run_bounded(words)
    finally:
        _end_children()


def _unshare() -> None:
    """Leave the namespaces of this machine, by a user's own namespace where that is needed."""
    user, group = os.geteuid(), os.getegid()
    own = _NEWNS | _NEWIPC | _NEWPID | _NEWNET
    if user == 0:
        with suppress(OSError):
            _libc("unshare", own)
            return
    _libc("unshare", own | _NEWUSER)
    proc = Path("/proc/self")
    (proc / "setgroups").write_text("deny")
    (proc / "uid_map").write_text(f"{user} {user} 1")
    (proc / "gid_map").write_text(f"{group} {group} 1")


class _View:
    """A tree in the place of ``/``, which holds what ``/`` holds and keeps nothing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._memory = folder / "view"
        self._root = self._memory / "root"
        self._num_layers = 0

    def enter(self) -> None:
        """Make the tree and go there, into the folder that is the current one."""
        here = Path.cwd()
        _mount(None, Path("/"), None, _MS_REC | _MS_PRIVATE)
        mounts = dict(_mounts())
        self._memory.mkdir(exist_ok=True)
        _mount("none", self._memory, "tmpfs", 0, f"size={_UPPER_BYTES},mode=755")
        self._root.mkdir()
        self._put(Path("/"), mounts)
        _mount(str(self._folder), self._at(self._folder), None, _MS_BIND)
        os.chroot(self._root)
        os.chdir(here)

    def _at(self, path: Path) -> Path:
        return self._root / path.relative_to("/")

    def _put(self, path: Path, mounts: dict[Path, str]) -> None:
        """Put what is at a path there: a copy on write, or where that cannot be, read-only."""
        inner = [each for each in mounts if path in each.parents]
        target = self._at(path)
        kind = mounts.get(path)
        if not inner and kind not in _STORAGE_FREE and self._put_overlay(path, target):
            return
        if not inner or kind in _STORAGE_FREE:
            _mount(str(path), target, None, _MS_BIND | _MS_REC)
            _read_only(target)
            return
        for each in sorted(path.iterdir()):  # no overlay holds a mount that lies beneath it
            at = self._at(each)
            if each.is_symlink():
                at.symlink_to(each.readlink())
            elif each.is_dir():
                at.mkdir(mode=0o755)
                self._put(each, mounts)
            else:
                at.touch()
                _mount(str(each), at, None, _MS_BIND)
                _read_only(at)

    def _put_overlay(self, path: Path, target: Path) -> bool:
        self._num_layers += 1
        if self._num_layers > _MAX_MOUNTS or set(str(path)) & set(",:\\"):
            return False
        layer = self._memory / str(self._num_layers)
        for name in ("upper", "work"):
            (layer / name).mkdir(parents=True)
        with suppress(OSError):
            state = path.stat()
            (layer / "upper").chmod(state.st_mode & 0o7777)
            os.chown(layer / "upper", state.st_uid, state.st_gid)
        data = f"lowerdir={path},upperdir={layer / 'upper'},workdir={layer / 'work'},userxattr"
        try:
            _mount("overlay", target, "overlay", 0, data)
        except OSError:
            return False
        return True


def _mounts() -> list[tuple[Path, str]]:
    """Where something is mounted that this process can see, and of what kind it is."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        fields, _, kind = line.partition(" - ")
        path = Path(fields.split()[4].encode().decode("unicode_escape"))
        with suppress(OSError):
            path.stat()
            found.append((path, kind.split()[0]))
    return found


def _mount(source: str | None, target: Path, kind: str | None, flags: int, data: str = "") -> None:
    texts = [None if each is None else each.encode() for each in (source, str(target), kind)]
    _libc("mount", *texts, ctypes.c_ulong(flags), data.encode() or None)


def _read_only(target: Path) -> None:
    attributes = (ctypes.c_uint64 * 4)(_ATTR_RDONLY)
    _libc(
        "syscall",
        _SYS_MOUNT_SETATTR,
        _AT_FDCWD,
        str(target).encode(),
        _AT_RECURSIVE,
        ctypes.byref(attributes),
        ctypes.c_size_t(ctypes.sizeof(attributes)),
    )


def _libc(name: str, *arguments: object) -> None:
    """Call a function of the C library; ``OSError`` where it fails."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is None:
        raise OSError(f"this system has no {name}")
    if function(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _run_bounded(words: list[str]) -> int:
    """Run the words within bounds; end what they leave behind; their exit status."""
    child = os.fork()
    if child == 0:
        os.setsid()
        for limit, most in LIMITS.items():
            resource.setrlimit(limit, (most, most))
        os.execv(words[0], words)
    status = _wait_for(child)
    until = time.monotonic() + _LEFT_BEHIND_S
    with suppress(ChildProcessError):
        while time.monotonic() < until:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.01)
    return status


def _wait_for(child: int) -> int:
    """The exit status of a child, as shells number it; others that end meanwhile are forgotten."""
    while True:
        pid, state = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(state)
            return code if code >= 0 else 128 - code


def _end_children() -> None:
    """End all processes below this one, also those that come to it when theirs ends."""
    with suppress(OSError):
        while children := Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            for child in children:
                os.kill(int(child), signal.SIGKILL)
            os.wait()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
