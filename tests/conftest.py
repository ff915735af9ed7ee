"""No test sees the profiles that the user of this machine has measured."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from nest_megatron.profile.store import FOLDER_VARIABLE


@pytest.fixture(scope="session", autouse=True)
def empty_profile_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty store for this process and those it starts; a test that fills one names its own."""
    before = os.environ.get(FOLDER_VARIABLE)
    folder = tmp_path_factory.mktemp("profiles")
    os.environ[FOLDER_VARIABLE] = str(folder)
    yield folder
    if before is None:
        del os.environ[FOLDER_VARIABLE]
    else:
        os.environ[FOLDER_VARIABLE] = before
