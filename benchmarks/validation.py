"""How long the public measurements take to predict.

Run with the folder that holds the tables::

    python benchmarks/validation.py FOLDER

Every CSV file in it that ``nest-megatron validate`` reads is predicted in one cold process, three
times; the median is printed.
"""

from __future__ import annotations

import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

from nest_megatron.errors import UserInputError
from nest_megatron.validation.rows import read_rows

RUNS = 3


def tables(folder: Path) -> list[Path]:
    """Files of a known kind."""
    found = []
    for path in sorted(folder.glob("*.csv")):
        try:
            read_rows(path)
        except UserInputError:
            continue
        found.append(path)
    return found


def main() -> None:
    """Time the command and print one line."""
    paths = tables(Path(sys.argv[1]))
    rows = sum(len(read_rows(path).rows) for path in paths)
    command = [sys.executable, "-m", "nest_megatron", "validate", *map(str, paths)]
    seconds = []
    for _ in range(RUNS):
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds.append(time.perf_counter() - start)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}")
    print(
        f"{rows:,} rows of {len(paths)} files: {statistics.median(seconds):.1f} s, "
        f"{(used.ru_utime + used.ru_stime) / RUNS:.1f} s CPU, {used.ru_maxrss / 1024:.0f} MiB"
    )


if __name__ == "__main__":
    main()
