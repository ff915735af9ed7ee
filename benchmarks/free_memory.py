"""What the plans of 50 usual jobs leave free of a device's memory, and what more would cost.

Run from the project's root::

    python benchmarks/free_memory.py

Each job is planned as `nest-megatron plan` plans it, and nominally (``search.objective=nominal``),
which fills memory up to the limit of the device.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from nest_megatron.config.compose import compose  # noqa: E402
from nest_megatron.config.overrides import parse  # noqa: E402
from nest_megatron.config.request import request_of  # noqa: E402
from nest_megatron.parallel.plan import ParallelPlan  # noqa: E402
from nest_megatron.planner import plan  # noqa: E402

#: Models with the GPUs that they are planned for.
MODELS = {
    "llama3_8b": (8, 64, 256),
    "llama2_13b": (16, 64),
    "qwen3_32b": (64, 256),
    "llama3_70b": (64, 256, 1024),
    "gpt3_175b": (256, 1024),
    "llama3_1_405b": (512, 1024),
    "mixtral_8x7b": (64, 256),
    "qwen3_30b_a3b": (16, 128),
    "qwen3_235b_a22b": (256, 512),
    "deepseek_v3": (512, 1024),
}
CLUSTERS = ("dgx_h100", "b200", "dgx_a100")
NUM_JOBS = 50
#: Sequences of a step for each GPU.
BATCH = 4
#: A plan with less free than this fills its memory.
FULL = 0.05


def jobs() -> Iterator[tuple[str, str, int]]:
    """Model, cluster and GPUs; small clusters first, so that the 50 hold every model."""
    for cluster in CLUSTERS:
        for model, sizes in MODELS.items():
            for num_gpus in sizes:
                yield model, cluster, num_gpus


def planned(model: str, cluster: str, num_gpus: int, objective: str) -> ParallelPlan | None:
    """The plan of a job, if one fits."""
    words = [
        f"model={model}",
        f"cluster={cluster}",
        f"cluster.num_gpus={num_gpus}",
        f"train.global_batch_size={BATCH * num_gpus}",
        f"search.objective={objective}",
    ]
    found = plan(request_of(compose(parse(words))))
    return found if isinstance(found, ParallelPlan) else None


def left(found: ParallelPlan) -> float:
    """Share of the fullest GPU beside peak and reserve."""
    reserve = float(found.provenance.settings["memory_reserve_bytes"])
    device = found.cluster.accelerator.memory_bytes
    return 1.0 - (found.predicted.peak_memory_bytes + reserve) / device


def main() -> int:
    """Print a row for each job, and how many fill their memory."""
    head = f"{'model':17} {'cluster':9} {'GPUs':>5}  {'left %':>7} {'nominal %':>9} {'slower %':>8}"
    print(f"{head}  chance to run out %")
    full = {"nominal": 0, "expected": 0}
    count = 0
    for model, cluster, num_gpus in jobs():
        if count == NUM_JOBS:
            break
        nominal = planned(model, cluster, num_gpus, "nominal")
        usual = planned(model, cluster, num_gpus, "expected")
        if nominal is None or usual is None:
            continue
        count += 1
        full["nominal"] += left(nominal) < FULL
        full["expected"] += left(usual) < FULL
        steps = [found.predicted.iteration_time_s for found in (nominal, usual)]
        slower = 100 * (steps[1] / steps[0] - 1)
        chance = usual.uncertainty.out_of_memory if usual.uncertainty else 0.0
        print(
            f"{model:17} {cluster:9} {num_gpus:>5}  {100 * left(usual):7.1f} "
            f"{100 * left(nominal):9.1f} {slower:8.1f}  {100 * chance:.1f}",
            flush=True,
        )
    for objective, number in full.items():
        print(f"{objective}: {number} of {count} plans fill more than {100 * (1 - FULL):g} %")
    return 0


if __name__ == "__main__":
    sys.exit(main())
