"""Phaze: an exact dynamic program that does not know the network.

Source: Wang et al., "Integrated Hardware Architecture and Device Placement Search" (ICML 2024),
whose placement solver NEST's paper compares itself with.

Kept: tensor, data and pipeline parallelism, uneven contiguous stages, 1F1B, recomputation of all
layers or of none, memory inside the search, and an optimum. Its own search takes place on one flat
network with the bandwidth inside a node; the plan is then priced on the real one.

Left out: the search for the accelerator's architecture, and per-layer tensor degrees, which
Megatron does not launch. Given to it beyond the paper: the micro batch, and expert degrees, are
searched where its runs take them as inputs. It has no ZeRO, no context parallelism and no virtual
stages.
"""

from __future__ import annotations

from nest_megatron.parallel.recompute import FULL_RECOMPUTE, NO_RECOMPUTE
from nest_megatron.parallel.zero import ZeroStage
from nest_megatron.research.baselines.job import (
    BaselineChoice,
    ComparisonJob,
    chosen,
    fastest,
    restricted,
)
from nest_megatron.research.baselines.networks import on_flat_network

_WITHOUT = ("context_parallel_size", "virtual_pipeline_model_parallel_size")


def find(job: ComparisonJob) -> BaselineChoice:
    """The fastest plan on a flat network, priced on the real one."""
    flat, zeros = on_flat_network(job.model), (ZeroStage.NONE,)
    settings = (NO_RECOMPUTE, FULL_RECOMPUTE) if job.space.recompute is None else (None,)
    results = [
        job.search(flat, restricted(job, _WITHOUT, zero_stages=zeros, recompute=recompute))
        for recompute in settings
    ]
    best = fastest(plan for plan, _ in results)
    candidates = sum(count for _, count in results)
    return chosen(job.priced(best), candidates, "the fastest on a network without levels")
