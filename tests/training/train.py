"""One rank of a real training run, laid out exactly as a plan says, and what it did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from nest_megatron.layout.plan import ParallelPlan
from tests.training.job import (
    Job,
    config_of,
    initialize_model_parallel,
    job_of,
    models_of,
    step,
)
from tests.training.layouts import STEPS
from tests.training.observe import Forwards, built, num_moments
from tests.training.weights import fill, global_parameters, largest_stray

#: Small, so that several buckets a rank are reduced while others are still computed.
BUCKET_SIZE = 10_000


def train(plan: ParallelPlan, reference: Path, *, is_reference: bool) -> dict[str, Any]:
    """Train a few steps on this rank and tell what happened.

    Args:
        plan: the layout; the process group of its size exists already.
        reference: file with the whole weights after the one-rank run, which that run writes.
    """
    spec = plan.model
    initialize_model_parallel(plan)
    config = config_of(plan)
    models = models_of(plan, config)
    begun = fill(spec, models)
    report = built(spec, models)
    forwards = Forwards(models)
    job = job_of(plan, config, models, bucket_size=BUCKET_SIZE)
    steps = [step(job, number) for number in range(STEPS)]
    _gather_parameters(job)
    if is_reference:
        torch.save({name: p.detach() for name, p in global_parameters(spec, models)}, reference)
    stray, distance = largest_stray(spec, models, begun, torch.load(reference))
    return {
        **report,
        **forwards.report(),
        "losses": [loss for loss, _ in steps if loss is not None],
        "grad_norms": [norm for _, norm in steps],
        "optimizer_moments": num_moments(job.optimizer),
        "stray": stray,
        "stray_distance": distance,
    }


def _gather_parameters(job: Job) -> None:
    """Bring the last step's parameters to every replica, which the next forward pass would do."""
    if job.plan.arguments["overlap_param_gather"]:
        for chunk in job.chunks:
            chunk.disable_forward_pre_hook(param_sync=True)
