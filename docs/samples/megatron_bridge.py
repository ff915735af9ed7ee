"""Runs recipes/megatron_bridge/gpt3_175b.py without CUDA, with stand-ins for what imports it."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.nemo import substitutes  # noqa: E402

substitutes.install()
runpy.run_path(str(ROOT / "recipes/megatron_bridge/gpt3_175b.py"), run_name="__main__")
