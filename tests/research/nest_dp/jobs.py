"""Jobs of the catalogue for the recurrence, small enough for the reference."""

from __future__ import annotations

import dataclasses
from typing import Any

from nest_megatron.cluster.records import Cluster
from nest_megatron.config.compose import compose
from nest_megatron.config.overrides import parse
from nest_megatron.config.request import request_of
from nest_megatron.research.nest_dp.job import ResearchChoices, ResearchJob

TINY = ("model=llama3_8b", "model.num_layers=4", "train.global_batch_size=16")


def research_job(*overrides: str, **choices: Any) -> ResearchJob:
    """A job of the catalogue."""
    inputs = request_of(compose(parse(overrides)))
    return ResearchJob(
        spec=inputs.spec,
        cluster=inputs.cluster,
        settings=inputs.settings,
        global_batch_size=inputs.global_batch_size,
        choices=ResearchChoices(**choices),
    )


def tiny_job(num_gpus: int = 4, cluster: str = "h100_spine_leaf", **choices: Any) -> ResearchJob:
    """Four layers on a few devices, one strategy unless said otherwise."""
    choices.setdefault("fixed", {"tensor_model_parallel_size": 1, "context_parallel_size": 1})
    choices.setdefault("limits", {"micro_batch_size": 1})
    return research_job(*TINY, f"cluster={cluster}", f"cluster.num_gpus={num_gpus}", **choices)


def with_memory(job: ResearchJob, memory_bytes: int) -> ResearchJob:
    """The job on devices of another size."""
    cluster: Cluster = job.cluster
    accelerator = dataclasses.replace(cluster.accelerator, memory_bytes=memory_bytes)
    smaller = dataclasses.replace(cluster, accelerator=accelerator)
    return dataclasses.replace(job, cluster=smaller)
