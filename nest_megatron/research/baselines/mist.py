"""Mist: memory in every choice, the network in none.

Source: Zhu et al., "Mist: Efficient Distributed Training of Large Language Models via
Memory-Parallelism Co-Optimization" (EuroSys 2025).

Kept: ZeRO stage, recomputation down to the number of layers, micro batch, degrees of data, tensor
and pipeline parallelism and uneven stages, all searched together under the memory limit. As in the
paper, links are no part of what its search places: it takes place on one flat network with the
bandwidth inside a node, and the plan is then priced on the real one.

Left out: offloading to the host, a ZeRO stage and a recomputation of its own for each stage, which
Megatron does not launch, and ZeRO 2 and 3 with a pipeline, for the same reason. Its hierarchical
mixed-integer program is replaced by our exact search over the same choices, which finds no worse.
Given to it beyond the paper: expert degrees. It has no context parallelism and no virtual stages.
"""

from __future__ import annotations

from nest_megatron.research.baselines.job import BaselineChoice, ComparisonJob, chosen, restricted
from nest_megatron.research.baselines.networks import on_flat_network

_WITHOUT = ("context_parallel_size", "virtual_pipeline_model_parallel_size")


def find(job: ComparisonJob) -> BaselineChoice:
    """The fastest plan on a flat network, priced on the real one."""
    best, candidates = job.search(on_flat_network(job.model), restricted(job, _WITHOUT))
    return chosen(job.priced(best), candidates, "the fastest on a network without levels")
