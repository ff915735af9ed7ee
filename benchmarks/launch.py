"""What ``+nest=auto`` adds to the start of a job.

Run from the project's root, on a quiet machine::

    python benchmarks/launch.py                        # the boot line alone
    MEGATRON_LM_HOME=... python benchmarks/launch.py   # and the start of a job of 1,024 ranks

The second compares the time from the start of the process to validated arguments, with and without
``+nest=auto``, on rank 0 of a world of 1,024; nothing is built or trained.
"""

from __future__ import annotations

import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path

from nest_megatron.integrations.megatron_lm.write import model_argv

ROOT = Path(__file__).resolve().parents[1]
RUNS = 5
LINE = (ROOT / "nest_megatron" / "boot.pth").read_text(encoding="utf-8")

#: Megatron's own way from its import to validated arguments.
START = """
import typing, typing_extensions
if not hasattr(typing, "override"):
    typing.override = typing_extensions.override
import types, torch
device = types.SimpleNamespace(major=9, minor=0, name="stub", total_memory=80 << 30)
torch.cuda.get_device_properties = lambda *_, **__: device
torch.cuda.get_device_capability = lambda *_, **__: (9, 0)
import megatron.training
from megatron.training import arguments
args = arguments.parse_args()
arguments.validate_args(args, {})
"""
JOB = shlex.split(
    "--micro-batch-size 1 --global-batch-size 4096 --train-iters 10 --lr 1e-4 --bf16 --mock-data "
    "--fake-process-group --no-rope-fusion --no-gradient-accumulation-fusion"
)
NEST = ["+nest=auto", "nest.cluster=h100_spine_leaf", "nest.free=all"]


def boot_seconds() -> float:
    """What the line costs in a process that does not use it."""
    code = f"import time; t = time.perf_counter(); exec({LINE!r}); print(time.perf_counter() - t)"
    done = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
        for _ in range(RUNS)
    ]
    return statistics.median(done)


def start_seconds(home: str, words: list[str]) -> float:
    """From the start of the process to validated arguments."""
    code = f"import nest_megatron.boot\n{START}" if words else START
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([home, str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "PYTHONWARNINGS": "ignore",
        "WORLD_SIZE": "1024",
        "RANK": "0",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    times = []
    for _ in range(RUNS):
        started = time.perf_counter()
        subprocess.run(
            [sys.executable, "-c", code, *job(), *words],
            env=environment,
            check=True,
            capture_output=True,
        )
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def job() -> list[str]:
    """Llama-3 70B in Megatron's flags."""
    from nest_megatron.config.catalogue import read_spec
    from nest_megatron.config.compose import compose
    from nest_megatron.config.overrides import Setting

    spec = read_spec(compose([Setting(key="model", value="llama3_70b")]))
    return [*model_argv(spec), "--tokenizer-type", "NullTokenizer", *JOB]


def main() -> None:
    """Print the figures."""
    print(f"{platform.machine()}, Python {platform.python_version()}, median of {RUNS}")
    print(f"boot line without +nest     {1e6 * boot_seconds():8.1f} us")
    home = os.environ.get("MEGATRON_LM_HOME")
    if not home:
        print("set MEGATRON_LM_HOME for the rest")
        return
    plain, planned = start_seconds(home, []), start_seconds(home, NEST)
    print(f"start to arguments, plain   {plain:8.2f} s")
    print(f"the same with +nest=auto    {planned:8.2f} s   (+{planned - plain:.2f} s)")


if __name__ == "__main__":
    main()
