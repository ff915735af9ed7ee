"""What the plans of 50 usual jobs leave free of memory, and what their less usual choices gain.

Run from the project's root::

    python benchmarks/free_memory.py

Each job is planned as `nest-megatron plan` plans it, and nominally (``search.objective=nominal``),
which fills memory up to the limit of the device. Where the plan needs stages that Megatron does not
cut by itself, or more than five virtual stages, the job is planned without as well: the gain is by
how much the mean step, with the price of running out of memory, is longer then.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from nest_megatron.catalogue_files import default_setting  # noqa: E402
from nest_megatron.config.compose import compose  # noqa: E402
from nest_megatron.config.overrides import parse  # noqa: E402
from nest_megatron.config.request import request_of  # noqa: E402
from nest_megatron.layout.objective import Objective  # noqa: E402
from nest_megatron.layout.plan import ParallelPlan  # noqa: E402
from nest_megatron.layout.stage_layout import is_uniform  # noqa: E402
from nest_megatron.planner import Request, plan  # noqa: E402

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
#: More virtual stages than these are unusual.
MOST_VIRTUAL = 5


def jobs() -> Iterator[tuple[str, str, int]]:
    """Model, cluster and GPUs; small clusters first, so that the 50 hold every model."""
    for cluster in CLUSTERS:
        for model, sizes in MODELS.items():
            for num_gpus in sizes:
                yield model, cluster, num_gpus


def request(model: str, cluster: str, num_gpus: int, **changes: object) -> Request:
    """The request for a job."""
    words = [
        f"model={model}",
        f"cluster={cluster}",
        f"cluster.num_gpus={num_gpus}",
        f"train.global_batch_size={BATCH * num_gpus}",
    ]
    return dataclasses.replace(request_of(compose(parse(words))), **changes)  # type: ignore[arg-type]


def planned(asked: Request) -> ParallelPlan | None:
    """The plan of a request, if one fits."""
    found = plan(asked)
    return found if isinstance(found, ParallelPlan) else None


def least_s(asked: Request, **space: object) -> float:
    """The least that a plan of a space is worth, ties aside; infinite if there is none."""
    smaller = dataclasses.replace(asked.space, **space)  # type: ignore[arg-type]
    found = planned(dataclasses.replace(asked, space=smaller, tie_percent=0.0, shortlist=False))
    return math.inf if found is None or found.choice is None else found.choice.value_s


def gains(asked: Request, found: ParallelPlan) -> tuple[float | None, float | None]:
    """What layouts that a plan needs gain, and more than ``MOST_VIRTUAL`` stages, in per cent."""
    is_even, layout, virtual = is_uniform(asked.spec, found.layout.partition), None, None
    limits = {**asked.space.limits, "virtual_pipeline_model_parallel_size": MOST_VIRTUAL}
    if not is_even:
        layout = 100 * (least_s(asked, even_stages=True) / least_s(asked) - 1)
    if found.layout.dims.virtual_pipeline_model_parallel_size > MOST_VIRTUAL:
        # Fewer stages that need a layout are no simpler than more that need none.
        fewer_s = least_s(asked, limits=limits, even_stages=is_even)
        virtual = 100 * (fewer_s / least_s(asked, even_stages=is_even) - 1)
    return layout, virtual


def left(found: ParallelPlan) -> float:
    """Share of the fullest GPU beside peak and reserve."""
    reserve = float(found.provenance.settings["memory_reserve_bytes"])
    device = found.cluster.accelerator.memory_bytes
    return 1.0 - (found.predicted.peak_memory_bytes + reserve) / device


def main() -> int:
    """Print a row for each job, and what they come to."""
    names = f"{'left %':>7} {'nominal %':>9} {'slower %':>8} {'runs out %':>10} {'listed':>6}"
    print(f"{'model':17} {'cluster':9} {'GPUs':>5}  {names} {'layout +%':>9} {'virtual +%':>10}")
    full = {"nominal": 0, "expected": 0}
    needed: dict[str, list[float]] = {
        "a layout": [],
        f"more than {MOST_VIRTUAL} virtual stages": [],
    }
    listed = []
    for model, cluster, num_gpus in jobs():
        if len(listed) == NUM_JOBS:
            break
        asked = request(model, cluster, num_gpus, shortlist=True)
        nominal = planned(dataclasses.replace(asked, objective=Objective.NOMINAL, shortlist=False))
        usual = planned(asked)
        if nominal is None or usual is None:
            continue
        assert usual.shortlist is not None
        assert usual.uncertainty is not None
        listed.append(len(usual.shortlist.numbers))
        full["nominal"] += left(nominal) < FULL
        full["expected"] += left(usual) < FULL
        steps = [found.predicted.iteration_time_s for found in (nominal, usual)]
        gained = gains(asked, usual)
        for what, value in zip(needed, gained, strict=True):
            needed[what] += [] if value is None else [value]
        layout, virtual = ("" if each is None else f"{each:.2f}" for each in gained)
        print(
            f"{model:17} {cluster:9} {num_gpus:>5}  {100 * left(usual):7.1f} "
            f"{100 * left(nominal):9.1f} {100 * (steps[1] / steps[0] - 1):8.1f} "
            f"{100 * usual.uncertainty.out_of_memory:10.1f} {listed[-1]:>6} "
            f"{layout:>9} {virtual:>10}",
            flush=True,
        )
    for objective, number in full.items():
        print(f"{objective}: {number} of {len(listed)} plans fill more than {100 * (1 - FULL):g} %")
    tie = default_setting("search.tie_percent")
    for what, values in needed.items():
        little = sum(value <= tie for value in values)
        print(f"{len(values)} need {what}; {little} of them for no more than {tie:g} %")
    print(f"shortlists: {statistics.fmean(listed):.1f} plans in the mean, at most {max(listed)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
