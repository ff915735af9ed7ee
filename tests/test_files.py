"""Files appear whole, with the rights of any new file."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from nest_megatron import files
from nest_megatron.errors import UserInputError
from nest_megatron.files import check_output, expanded, user_folder, write_text

#: Writes a file, and is killed when all of it is on the disk but not yet under its name.
KILLED = """
import os, sys
from pathlib import Path
from nest_megatron import files
if sys.argv[3] == "named":
    files._unnamed_file = lambda *_: os.open("/nonexistent/x", 0)
os.fsync = lambda _: os.kill(os.getpid(), int(sys.argv[2]))
files.write_text(Path(sys.argv[1]), "tp: 4")
"""


@pytest.fixture
def umask_027() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


@pytest.fixture(params=["unnamed", "named"])
def _while_written(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether files have names while they are written, as where a file system needs that."""
    if request.param == "named":
        monkeypatch.setattr(files, "_unnamed_file", lambda *_: os.open("/nonexistent/x", 0))


@pytest.mark.usefixtures("umask_027")
def test_a_file_gets_the_rights_of_any_new_file(tmp_path: Path) -> None:
    write_text(tmp_path / "plan.yaml", "tp: 2\n")
    assert stat.S_IMODE((tmp_path / "plan.yaml").stat().st_mode) == 0o640
    assert [path.name for path in tmp_path.iterdir()] == ["plan.yaml"]


def test_the_umask_is_not_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(mask: int) -> int:
        raise AssertionError(f"umask {mask} for every thread")

    monkeypatch.setattr(os, "umask", refuse)
    write_text(tmp_path / "plan.yaml", "tp: 2\n")


@pytest.mark.parametrize("kind", ["unnamed", "named"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("before", [None, "tp: 2"])
def test_a_killed_writer_leaves_nothing(
    before: str | None, number: signal.Signals, kind: str, tmp_path: Path
) -> None:
    path = tmp_path / "plan.yaml"
    if before is not None:
        path.write_text(before)
    words = [sys.executable, "-c", KILLED, str(path), str(int(number)), kind]
    done = subprocess.run(words, check=False, timeout=300)
    assert done.returncode == -number
    assert (path.read_text() if path.exists() else None) == before
    try:
        os.close(files._unnamed_file(tmp_path, 0o600))
        has_unnamed = True
    except OSError:
        has_unnamed = False
    if kind == "unnamed" and has_unnamed:
        assert [each.name for each in tmp_path.iterdir()] == ["plan.yaml"] * (before is not None)
    write_text(path, "tp: 8")
    if kind == "named":  # what is left there goes where files have names while they are written
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(files, "_unnamed_file", lambda *_: os.open("/nonexistent/x", 0))
            write_text(path, "tp: 8")
    assert (path.read_text(), [each.name for each in tmp_path.iterdir()]) == ("tp: 8", [path.name])


@pytest.mark.usefixtures("_while_written")
def test_many_write_one_file_at_once(tmp_path: Path) -> None:
    path, failed = tmp_path / "plan.yaml", []

    def write(number: int) -> None:
        try:
            for _ in range(20):
                write_text(path, f"{number}" * 1000)
        except UserInputError as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert [each.name for each in tmp_path.iterdir()] == ["plan.yaml"]
    assert len(set(path.read_text())) == 1


@pytest.mark.usefixtures("homeless")
@pytest.mark.parametrize("kind", ["cache", "config", "data", "log"])
def test_a_user_without_a_home_has_a_folder_that_is_not_there(kind: str) -> None:
    assert not user_folder(kind).exists()
    assert user_folder(kind).is_absolute()


@pytest.mark.usefixtures("homeless")
@pytest.mark.parametrize(("name", "words"), [("~/x", "HOME is not set"), ("~nosuch/x", "nosuch")])
def test_a_home_that_is_not_there_is_named(name: str, words: str) -> None:
    with pytest.raises(UserInputError, match=words):
        expanded(Path(name), "nest.out")


@pytest.mark.usefixtures("_while_written")
def test_a_file_that_appears_after_the_check_is_kept(tmp_path: Path) -> None:
    """Of two programs with one output the later does not replace what the earlier has written."""
    path = tmp_path / "plan.yaml"
    check_output("out", path, force=False)
    path.write_text("theirs")
    with pytest.raises(UserInputError, match=r"File exists\. .* no other program writes"):
        write_text(path, "ours")
    assert path.read_text() == "theirs"
    assert [*tmp_path.iterdir()] == [path]
    check_output("out", path, force=True)
    write_text(path, "ours")
    assert path.read_text() == "ours"


def test_what_was_not_there_is_written_any_number_of_times(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    for force in (False, True):
        check_output("out", path, force=force)
        for text in ("first", "second"):
            write_text(path, text)
        assert path.read_text() == "second"
        path.unlink()
    check_output("out", path, force=True)
    path.write_text("theirs")
    write_text(path, "ours")
    assert path.read_text() == "ours"
