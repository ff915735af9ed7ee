"""What the plugin costs a Hydra application that asks for no plan.

usage: python benchmarks/hydra_plugin.py
"""

from __future__ import annotations

import statistics
import subprocess
import sys

RUNS = 5
#: Milliseconds of Hydra's scan of our plugin, and of the plugin's own work.
CHILD = """
import time
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

plugins = Plugins.instance()
scan = plugins.get_stats().modules_import_time["hydra_plugins.nest_megatron"]
(ours,) = [p for p in plugins.discover(SearchPathPlugin) if p.__name__ == "NestSearchPath"]
started = time.perf_counter()
ours().manipulate_search_path(ConfigSearchPathImpl())
print(1e3 * scan, 1e3 * (time.perf_counter() - started))
"""


def main() -> None:
    """Measure in fresh processes."""
    rows = []
    for _ in range(RUNS):
        done = subprocess.run(
            [sys.executable, "-c", CHILD], capture_output=True, text=True, check=True
        )
        rows.append([float(word) for word in done.stdout.split()])
    for name, values in zip(
        ("scan", "search path and resolver"), zip(*rows, strict=True), strict=True
    ):
        print(f"{name}: {statistics.median(values):.2f} ms (worst {max(values):.2f})")


if __name__ == "__main__":
    main()
