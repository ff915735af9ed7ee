"""How long a plan takes: four models at five cluster sizes, and the kernel against its reference.

Run from the project's root, on a quiet machine::

    python benchmarks/solver.py               # the table
    python benchmarks/solver.py --reference   # and the compiled kernel against pure Python
    python benchmarks/solver.py --misfits     # jobs that fit nowhere
    python benchmarks/solver.py --commands    # whole commands on one core
    python benchmarks/solver.py --neighbours  # partitions outside the searched family
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from nest_megatron.config.compose import compose  # noqa: E402
from nest_megatron.config.overrides import parse  # noqa: E402
from nest_megatron.config.request import request_of  # noqa: E402
from nest_megatron.cost_model.pipeline import PipelineProblem  # noqa: E402
from nest_megatron.cost_model.stage_problems import stage_problem  # noqa: E402
from nest_megatron.layout.plan import ParallelPlan  # noqa: E402
from nest_megatron.layout.stage_layout import layout_string  # noqa: E402
from nest_megatron.planner import Request, plan  # noqa: E402
from nest_megatron.solver.backend import Backend, solve_compiled  # noqa: E402
from nest_megatron.solver.one_partition import join_chunks  # noqa: E402
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


#: Whole commands, as a user types them.
COMMANDS = (
    *(
        f"model={model} cluster.num_gpus=1024 train.global_batch_size=4096"
        for model in ("llama3_70b", "gpt3_175b", "mixtral_8x7b", "deepseek_v3")
    ),
    "model=deepseek_v3 cluster.num_gpus=64",
    *(
        f"model={model} cluster.num_gpus=131072 train.global_batch_size=131072"
        for model in ("llama3_70b", "deepseek_v3")
    ),
)


def commands() -> None:
    """CPU time of each command on one core, the least of three, and of its search."""
    os.sched_setaffinity(0, {0})
    for words in COMMANDS:
        command = [sys.executable, "-m", "nest_megatron", "plan", *words.split(), "--json"]
        times = []
        for _ in range(3):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            found = subprocess.run(
                [*command, f"cluster={CLUSTER}"], capture_output=True, text=True, check=False
            )
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        told = json.loads(found.stdout)
        record = told.get("search") or told["no_plan"]["search"]
        print(f"{min(times):6.2f} s ({record['seconds']:.2f})  {words}", flush=True)


#: Plans of virtual stages whose partitions are left: overrides of ``nest-megatron plan``.
INTERLEAVED = (
    "model=deepseek_v3 cluster.num_gpus=1024 train.global_batch_size=4096",
    "model=deepseek_v3 cluster.num_gpus=2048 train.global_batch_size=8192 "
    "parallel.pipeline_model_parallel_size=16",
    "model=llama3_1_405b cluster.num_gpus=1024 train.global_batch_size=1024",
    "model=gpt3_175b cluster.num_gpus=1024 train.global_batch_size=1024",
)


def neighbours() -> None:
    """What is gained by moving layers of a plan from chunk to chunk for as long as that helps."""
    for words in INTERLEAVED:
        composed = compose(parse([*words.split(), f"cluster={CLUSTER}"]))
        request = request_of(composed, choose_execution=True)
        layout = plan(request).layout  # type: ignore[union-attr]
        problem = stage_problem(request.cost_model(), layout)
        found, tried = layout.partition.boundaries, 0
        first = best = iteration(problem, found)
        moved = True
        while moved:
            moved = False
            for other in list(neighbours_of(found)):
                tried += 1
                if (time_of_other := iteration(problem, other)) < best:
                    found, best, moved = other, time_of_other, True
        stages = layout_string(request.spec, layout.partition)
        gain = 100 * (first / best - 1)
        print(f"{gain:5.2f} % by {tried:,} moves of {stages}  {words}", flush=True)


def iteration(problem: PipelineProblem, boundaries: tuple[int, ...]) -> int:
    """The step with one partition, in ticks; far too long where it does not fit."""
    found = solve_compiled(join_chunks(problem, boundaries))
    return found.iteration


def neighbours_of(boundaries: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Partitions in which one unit goes from one chunk to another."""
    chunks = len(boundaries) - 1
    for first, last in itertools.combinations(range(1, chunks + 1), 2):
        for step in (-1, 1):
            inner = [each + step for each in boundaries[first:last]]
            moved = (*boundaries[:first], *inner, *boundaries[last:])
            if all(a < b for a, b in itertools.pairwise(moved)):
                yield moved


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
    parser.add_argument("--commands", action="store_true")
    parser.add_argument("--neighbours", action="store_true")
    arguments = parser.parse_args()
    if arguments.one:
        print(one(arguments.one[0], int(arguments.one[1])))
        return
    for name, run in (("misfits", misfits), ("commands", commands), ("neighbours", neighbours)):
        if getattr(arguments, name):
            run()
            return
    table()
    if arguments.reference:
        against_reference()


if __name__ == "__main__":
    main()
