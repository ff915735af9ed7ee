"""A checkout that cannot be imported here is a reason to skip, with the packages that it lacks."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

#: What importing a Megatron-LM checkout takes (``.ci/megatron-lm-requirements.txt``).
PACKAGES = ("einops", "pybind11", "pydantic", "regex", "six", "torch", "tqdm", "triton", "yaml")


def missing() -> list[str]:
    """Packages of a checkout that are not installed."""
    return [name for name in PACKAGES if find_spec(name) is None]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a checkout where a package of the checkout is missing."""
    absent = missing() if os.environ.get("MEGATRON_LM_HOME") else []
    if not absent:
        return
    reason = f"a Megatron-LM checkout needs {', '.join(absent)}: bash .ci/megatron_lm installs it"
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))
