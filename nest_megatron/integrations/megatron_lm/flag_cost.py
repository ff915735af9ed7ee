"""What the flags that a user keeps cost, against the same job with each of them free."""

from __future__ import annotations

import dataclasses

from nest_megatron.config.job import FreeParameters
from nest_megatron.errors import NestError
from nest_megatron.integrations.megatron_lm.planning import Searched, running_request
from nest_megatron.parallel.plan import ParallelPlan
from nest_megatron.planner import plan as find_plan
from nest_megatron.units import Seconds

_PIPELINE = "pipeline_model_parallel_size"


def costs(searched: Searched) -> list[tuple[str, Seconds]]:
    """The predicted step with each kept choice freed alone, and at last with all of them."""
    found = []
    for choice in (*searched.kept, "all"):
        names = {choice, "stage_layout"} if choice == _PIPELINE else {choice}
        free = dataclasses.replace(searched.job.free, names=[*searched.job.free.names, *names])
        step = _step(searched, free)
        if step is not None:
            found.append((choice, step))
    return found


def _step(searched: Searched, free: FreeParameters) -> Seconds | None:
    """The predicted step of the fastest plan where other settings may change."""
    request = running_request(dataclasses.replace(searched.job, free=free), searched.place)
    wanted = dataclasses.replace(request, num_alternatives=0, offer=None, num_compared=1)
    found = find_plan(wanted)
    if not isinstance(found, ParallelPlan):
        return None
    step = found.shortest_step_s
    decided = found.search.certificate in ("optimal", "chosen") or step < searched.best_s
    return step if decided else None  # where time ended the search, a slower plan says nothing


def print_costs(searched: Searched) -> None:
    """Print the costs; runs beside the start of training, which it must not disturb."""
    from nest_megatron.integrations.launched import flag_cost_report
    from nest_megatron.report.console import show

    try:
        show(flag_cost_report(searched.best_s, costs(searched)))
    except NestError as error:
        print(f"nest: what the kept flags cost cannot be said: {error}", flush=True)
