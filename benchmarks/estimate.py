"""What the prediction of a plan takes, by the number of micro batches.

Llama-3.1 405B on 1,024 GPUs in 32 pipeline stages of 4 chunks: with 8,192 micro batches two million
passes. Run from the project's root, on a quiet machine::

    python benchmarks/estimate.py               # the table
    python benchmarks/estimate.py --reference   # and in plain Python, which runs every pass
"""

from __future__ import annotations

import argparse
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from nest_megatron.cost_model.critical_path import summarize_reference  # noqa: E402
from nest_megatron.cost_model.estimate import estimate  # noqa: E402
from nest_megatron.cost_model.model import CostModel  # noqa: E402
from nest_megatron.cost_model.pipeline import evaluate  # noqa: E402
from nest_megatron.cost_model.settings import CostSettings  # noqa: E402
from nest_megatron.cost_model.stage_problems import stage_problem  # noqa: E402
from nest_megatron.layout.dims import ParallelDims  # noqa: E402
from nest_megatron.layout.layout import PartialLayout  # noqa: E402
from nest_megatron.layout.stage_layout import StagePartition  # noqa: E402
from tests import catalogue  # noqa: E402

SIZES = (512, 2048, 8192)
DIMS = ParallelDims(
    tensor_model_parallel_size=4,
    pipeline_model_parallel_size=32,
    virtual_pipeline_model_parallel_size=4,
    context_parallel_size=4,
    data_parallel_size=2,
)


def peak_mb() -> float:
    """Peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def one(num_microbatches: int, *, reference: bool) -> str:
    """One row, to be run in a process of its own so that the peak memory is its own."""
    cluster = catalogue.cluster("h100_spine_leaf", DIMS.world_size)
    model = CostModel(catalogue.model("llama3_1_405b"), cluster, CostSettings())
    grid = PartialLayout(
        dims=DIMS,
        global_batch_size=DIMS.data_parallel_size * num_microbatches,
        micro_batch_size=1,
        sequence_parallel=True,
    )
    stages = DIMS.pipeline_model_parallel_size
    cut = StagePartition(boundaries=tuple(range(129)), pipeline_model_parallel_size=stages)
    problem, before = stage_problem(model, grid), peak_mb()
    wall, cpu = time.perf_counter(), time.process_time()
    if reference:
        iteration = evaluate(problem, cut.boundaries, summarize_reference).iteration / 1e12
    else:
        iteration = estimate(model, grid.with_stages(cut)).iteration_time_s
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    name = "reference" if reference else "estimate"
    return (
        f"{name:10} {num_microbatches:6,} {1e3 * wall:10.1f} {1e3 * cpu:10.1f}"
        f" {peak_mb() - before:10.1f} {peak_mb():8.0f}  {iteration:.6f} s"
    )


def table(*, reference: bool) -> None:
    """All rows."""
    print(f"{platform.machine()}, Python {platform.python_version()}")
    print("           micro b.    wall ms     CPU ms   added MB  peak MB  iteration")
    for plain in (False, True) if reference else (False,):
        for size in SIZES:
            command = [sys.executable, __file__, "--one", str(size)]
            command += ["--reference"] if plain else []
            row = subprocess.check_output(command, text=True)
            print(row.rstrip(), flush=True)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--one", type=int, metavar="MICRO_BATCHES", help="one row, in this process")
    parser.add_argument("--reference", action="store_true", help="the plain form as well")
    options = parser.parse_args()
    if options.one:
        print(one(options.one, reference=options.reference))
    else:
        table(reference=options.reference)


if __name__ == "__main__":
    main()
