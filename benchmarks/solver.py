"""How long a plan takes: four models at five cluster sizes, and the kernel against its reference.

Run from the project's root, on a quiet machine::

    python benchmarks/solver.py               # the table
    python benchmarks/solver.py --reference   # and the compiled kernel against pure Python
    python benchmarks/solver.py --misfits     # jobs that fit nowhere
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from nest_megatron.config.compose import compose  # noqa: E402
from nest_megatron.config.overrides import parse  # noqa: E402
from nest_megatron.config.request import request_of  # noqa: E402
from nest_megatron.layout.plan import ParallelPlan  # noqa: E402
from nest_megatron.planner import Request, plan  # noqa: E402
from nest_megatron.solver.backend import Backend  # noqa: E402
from nest_megatron.solver.space import SearchSpace  # noqa: E402

MODELS = ("llama3_70b", "gpt3_175b", "mixtral_8x7b", "deepseek_v3")
SIZES = (64, 256, 1024, 4096, 16384)
CLUSTER = "dgx_h100"


def job(model: str, num_gpus: int, **changes: object) -> Request:
    """The request that is timed, as the command makes it: four sequences a GPU, everything free."""
    words = [f"model={model}", f"cluster={CLUSTER}", f"cluster.num_gpus={num_gpus}"]
    composed = compose(parse([*words, f"train.global_batch_size={max(512, 4 * num_gpus)}"]))
    found = request_of(composed, choose_execution=True)
    return dataclasses.replace(found, **changes)  # type: ignore[arg-type]


def one(model: str, num_gpus: int) -> str:
    """One row, to be run in a process of its own so that the peak memory is its own."""
    request = job(model, num_gpus)
    wall, cpu = time.perf_counter(), time.process_time()
    found = plan(request)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    record = found.search
    best = f"{found.predicted.iteration_time_s:.3f} s" if isinstance(found, ParallelPlan) else "-"
    return (
        f"{model:13} {num_gpus:6} {wall:8.2f} {cpu:8.2f} {peak:8.0f} {record.candidates:10,}"
        f" {record.solved:7,} {record.simulations:12,}  {record.certificate:10} {best}"
    )


#: Jobs that fit nowhere: overrides of ``nest-megatron plan``.
MISFITS = (
    "model=deepseek_v3 cluster=gb200_nvl72 cluster.num_gpus=36 train.global_batch_size=4608 "
    "train.precision=fp8",
    "model=kimi_k2 cluster=dgx_h100 cluster.num_gpus=96",
    "model=deepseek_v3 cluster=dgx_h100 cluster.num_gpus=64",
    "model=llama3_1_405b cluster=dgx_h100 cluster.num_gpus=24",
)


def misfits() -> None:
    """The whole command on each job, in a process of its own: CPU time and what it says."""
    for job_words in MISFITS:
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        command = [sys.executable, "-m", "nest_megatron", "plan", *job_words.split(), "--json"]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        cpu = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
        told = json.loads(found.stdout)["no_plan"]
        says = "complete" if told["complete"] else "incomplete"
        print(
            f"{cpu:6.2f} s CPU  {says}  {told['remedies'][0]['change']:24} {job_words}", flush=True
        )


def table() -> None:
    """All rows."""
    print(f"{platform.machine()}, {cpu_name()}, Python {platform.python_version()}, one core")
    print(
        "model           GPUs   wall s    CPU s  peak MB candidates  solved  simulations"
        "  certificate iteration"
    )
    for model in MODELS:
        for num_gpus in SIZES:
            command = [sys.executable, __file__, "--one", model, str(num_gpus)]
            print(subprocess.check_output(command, text=True).rstrip(), flush=True)


def against_reference() -> None:
    """The llama3_70b search with the compiled kernel and with pure Python, the same to the bit."""
    space = SearchSpace(
        fixed={"tensor_model_parallel_size": 8, "context_parallel_size": 1, "micro_batch_size": 1},
        limits={"virtual_pipeline_model_parallel_size": 2},
    )
    times, plans = {}, {}
    for backend in (Backend.KERNEL, Backend.REFERENCE):
        request = job("llama3_70b", 1024, space=space, backend=backend, max_seconds=3600.0)
        started = time.process_time()
        found = plan(request)
        times[backend] = time.process_time() - started
        assert isinstance(found, ParallelPlan)
        plans[backend] = (found.layout, found.predicted, found.alternatives)
        print(f"{backend.value:10} {times[backend]:9.3f} s CPU", flush=True)
    ratio = times[Backend.REFERENCE] / times[Backend.KERNEL]
    print(f"kernel {ratio:.0f} times faster; same plan: {len(set(map(repr, plans.values()))) == 1}")


def cpu_name() -> str:
    """The processor's name, where the system tells it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "GPUS"))
    parser.add_argument("--reference", action="store_true")
    parser.add_argument("--misfits", action="store_true")
    arguments = parser.parse_args()
    if arguments.one:
        print(one(arguments.one[0], int(arguments.one[1])))
        return
    if arguments.misfits:
        misfits()
        return
    table()
    if arguments.reference:
        against_reference()


if __name__ == "__main__":
    main()
