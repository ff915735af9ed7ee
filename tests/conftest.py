"""No test sees what the user of this machine has measured, extracted or run, nor how busy it is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from nest_megatron.cost_model import site_file
from nest_megatron.history import store as history_store
from nest_megatron.megatron_core import layers
from nest_megatron.profile import store

# Others may hold the cores for seconds: no example has a deadline, and drawing it may take long.
hypothesis.settings.register_profile(
    "busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("busy")


@pytest.fixture(scope="session", autouse=True)
def empty_stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Empty stores for this process and those it starts; a test that fills one names its own.

    Layers are extracted once for all tests, those of other processes of the same run included.
    """
    before = dict(os.environ)
    folder = tmp_path_factory.mktemp("stores")
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    os.environ[store.FOLDER_VARIABLE] = str(folder / "profiles")
    os.environ[layers.CACHE_VARIABLE] = str(shared / "extract")
    os.environ[history_store.VARIABLE] = str(folder / "runs.jsonl")
    os.environ[site_file.VARIABLE] = str(folder / "sites")
    yield folder
    for name in (
        store.FOLDER_VARIABLE,
        layers.CACHE_VARIABLE,
        history_store.VARIABLE,
        site_file.VARIABLE,
    ):
        os.environ.pop(name)
        if name in before:
            os.environ[name] = before[name]


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user of a container: no HOME, and no entry in the database of users."""

    def unknown(uid: object) -> None:
        raise KeyError(uid)

    for name in [name for name in os.environ if name == "HOME" or name.startswith("XDG_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr("pwd.getpwuid", unknown)
