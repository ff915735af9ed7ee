"""Planning on a laptop loads no framework."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

HEAVY = ("torch", "megatron", "nemo", "numpy", "hydra", "omegaconf", "fiddle")
LOADED = "import sys, {module}; print(*[name for name in {heavy} if name in sys.modules])"


MODULES = (
    "nest_megatron",
    "nest_megatron.planner",
    "nest_megatron.integrations.nemo",
    "nest_megatron.integrations.megatron_bridge",
)


@pytest.mark.parametrize("module", MODULES)
def test_import_loads_no_framework(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not written yet")
    code = LOADED.format(module=module, heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == []


def test_a_plan_starts_without_the_modules_of_tests_and_servers() -> None:
    code = LOADED.format(module="nest_megatron.cli.planning", heavy=("unittest", "asyncio", "ssl"))
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == []
