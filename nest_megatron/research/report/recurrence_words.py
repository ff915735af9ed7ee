"""A plan of the recurrence in a line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from nest_megatron.research.nest_artifact.search import NoSolution
from nest_megatron.research.nest_dp.plan import ResearchPlan


def research_words(found: ResearchPlan | NoSolution) -> str:
    """Devices, stages, replicas and ZeRO, or why there is no plan."""
    if isinstance(found, NoSolution):
        return f"no plan: {found.reason}"
    degrees = f"{found.pipeline_model_parallel_size}, {found.data_parallel_size}"
    settings = ((stage.zero_stage, stage.zero_degree) for stage in found.stages)
    return f"{found.num_devices} devices, {{{degrees}, 1}}; {zero_stages(settings)}"


def zero_stages(settings: Iterable[tuple[int, int]]) -> str:
    """How many stages divide what over how many devices, the most frequent first.

    Args:
        settings: ZeRO stage and degree of each stage.

    >>> zero_stages([(3, 8), (0, 1), (3, 8)])
    '2 ZeRO-3 over 8, 1 without'
    """
    return ", ".join(
        f"{count} {f'ZeRO-{zero} over {degree}' if degree > 1 else 'without'}"
        for (zero, degree), count in Counter(settings).most_common()
    )
