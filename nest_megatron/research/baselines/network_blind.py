"""Phaze and Mist: exact searches on one flat network, whose plan is priced on the real one.

Phaze: Wang et al., "Integrated Hardware Architecture and Device Placement Search" (ICML 2024),
whose placement solver NEST's paper compares itself with. Kept: tensor, data and pipeline
parallelism, uneven contiguous stages, 1F1B, recomputation of all layers or of none, memory inside
the search, and an optimum. Left out: the search for the accelerator's architecture, and per-layer
tensor degrees, which Megatron does not launch. Given to it beyond the paper: the micro batch, and
expert degrees, are searched where its runs take them as inputs. It has no ZeRO.

Mist: Zhu et al., "Mist: Efficient Distributed Training of Large Language Models via
Memory-Parallelism Co-Optimization" (EuroSys 2025). Kept: ZeRO stage, recomputation down to the
number of layers, micro batch, degrees of data, tensor and pipeline parallelism and uneven stages,
all searched together under the memory limit. As in the paper, links are no part of what its search
places. Left out: offloading to the host, a ZeRO stage and a recomputation for each
stage, which Megatron does not launch, and ZeRO 2 and 3 with a pipeline, for the same reason. Its
hierarchical mixed-integer program is replaced by our exact search over the same choices, which
finds no worse. Given to it beyond the paper: expert degrees.

Both search with the bandwidth inside a node, and have no context parallelism and no virtual stages.
"""

from __future__ import annotations

from collections.abc import Iterable

from nest_megatron.layout.zero import ZeroStage
from nest_megatron.research.baselines.job import (
    PLAIN,
    BaselineChoice,
    ComparisonJob,
    chosen,
    restricted,
    with_network_levels,
)
from nest_megatron.solver.ranking import SolvedLayout, fastest
from nest_megatron.solver.search import Search
from nest_megatron.solver.space import SearchSpace


def find_phaze(job: ComparisonJob) -> BaselineChoice:
    """The fastest plan without ZeRO, all layers recomputed or none."""
    settings, zeros = job.all_or_no_recompute(), (ZeroStage.NONE,)
    return _fastest_on_flat_network(
        job, (restricted(job, PLAIN, zero_stages=zeros, recompute=each) for each in settings)
    )


def find_mist(job: ComparisonJob) -> BaselineChoice:
    """The fastest plan of the memory-aware space."""
    return _fastest_on_flat_network(job, [restricted(job, PLAIN)])


def _fastest_on_flat_network(job: ComparisonJob, spaces: Iterable[SearchSpace]) -> BaselineChoice:
    flat, plans, candidates = with_network_levels(job.model, 1), list[SolvedLayout](), 0
    for space in spaces:
        found = Search(
            flat,
            job.global_batch_size,
            space,
            job.solve_stages,
            limit=job.peaks,
            num_layouts=1,
            out_of_time=job.out_of_time,
        ).run()
        plans += found.plans
        candidates += found.candidates
    best = job.priced(fastest(plans))
    return chosen(best, candidates, "the fastest on a network without levels")
