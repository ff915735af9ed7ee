"""Files appear whole, with the rights of any new file."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from nest_megatron.files import write_text


@pytest.fixture
def umask_027() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


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
