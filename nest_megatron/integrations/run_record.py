"""The record of a run that begins: which plan runs where, and what is predicted of it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

from nest_megatron.cluster.discovery import local_gpus
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.peak_limit import allocatable
from nest_megatron.cost_model.settings import restored_settings
from nest_megatron.cost_model.uncertainty import predictive
from nest_megatron.files import now
from nest_megatron.history.records import (
    Launch,
    Outcome,
    Predicted,
    RunRecord,
    cluster_key,
    job_key,
)
from nest_megatron.integrations.plan_output import user_name
from nest_megatron.layout import plan_file
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.profile.choose import times_of
from nest_megatron.profile.installed import installed_versions, nccl_version
from nest_megatron.profile.records import ANALYTIC_NAME
from nest_megatron.version import __version__

#: Variables in which schedulers tell a job its number: Slurm, Flux and LSF, PBS.
_BATCH_JOB = ("SLURM_JOB_ID", "FLUX_JOB_ID", "LSB_JOBID", "PBS_JOBID")


def new_run(
    plan: ParallelPlan,
    hosts: Sequence[str],
    environment: Mapping[str, str],
    launch: Launch | None = None,
) -> RunRecord:
    """The record of a run that begins.

    Args:
        hosts: of each global rank.
        environment: of the process, for the scheduler's number of the job.
        launch: how it was launched.
    """
    gpus = local_gpus()
    return RunRecord(
        id=secrets.token_hex(4),
        outcome=Outcome.STARTED,
        start=now(),
        user=user_name(),
        batch_job=batch_job(environment),
        hosts=tuple(hosts),
        device=None if gpus is None else gpus.device_name,
        plan=plan_file.checksum(plan),
        job=job_key(plan),
        cluster=cluster_key(plan),
        versions={**installed_versions(), **nccl_version(), "nest_megatron": __version__},
        grid=plan.layout.without_stages(),
        pipeline_model_parallel_layout=plan.arguments["pipeline_model_parallel_layout"],
        predicted=predicted(plan),
        launch=launch,
    )


def batch_job(environment: Mapping[str, str]) -> str | None:
    """The scheduler's number of the job, where there is one."""
    return next((environment[name] for name in _BATCH_JOB if environment.get(name)), None)


def predicted(plan: ParallelPlan) -> Predicted:
    """What a plan predicts.

    Shares of the step are computed again, since plan files do not hold them: with the layer times
    that the plan was made with, or not at all.
    """
    times = times_of(plan.provenance.profile, plan.model)
    settings = restored_settings(plan.provenance.settings)
    model = CostModel(plan.model, plan.cluster, settings, times)
    layout, step_s = plan.layout, plan.predicted.iteration_time_s
    known = predictive(model, layout, step_s)
    is_whole = times is not None or plan.provenance.profile == ANALYTIC_NAME
    stages = plan.predicted.stages
    highest = max(stages, key=lambda stage: stage.peak_memory_bytes)
    return Predicted(
        step_s=step_s,
        low_s=plan.uncertainty.low_s,
        high_s=plan.uncertainty.high_s,
        shares={name.value: share for name, share in known.shares.items()} if is_whole else {},
        features=tuple(sorted(feature.value for feature in known.features)),
        busy_s=tuple(layout.num_microbatches * (s.forward_s + s.backward_s) for s in stages),
        peak_memory_bytes=tuple(stage.peak_memory_bytes for stage in stages),
        peak_terms=highest.memory_bytes,
        allocatable_bytes=allocatable(model, layout),
        expert_imbalance=settings.expert_imbalance if plan.model.is_moe else None,
        own_runs=plan.provenance.own_runs,
    )
