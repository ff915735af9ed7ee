"""Each test is a job of its own; the long suite of faults runs where it is asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.launch.stores import HERE, STORES

MARK = "reliability"


@pytest.fixture(autouse=True)
def another_job(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test meets the store of another or of another checkout."""
    HERE["SLURM_JOB_ID"] = f"{request.node.name} of {os.getpid()}"
    yield
    for store in STORES:
        store.stop_heartbeat()


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--write-docs``: write what was seen into docs/reliability.md."""
    parser.addoption("--write-docs", action="store_true", help="write docs/reliability.md")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip the suite unless it is named."""
    if MARK in config.getoption("-m") or config.getoption("--write-docs", default=False):
        return
    reason = f"takes minutes: pytest -m {MARK} tests/launch"
    for item in items:
        if item.get_closest_marker(MARK):
            item.add_marker(pytest.mark.skip(reason=reason))
