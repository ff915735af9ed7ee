"""Plan a job that a framework's adapter has read, on a cluster named as on the command line."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from nest_megatron.cluster.discovery import LocalGpus, known_gpus, local_gpus
from nest_megatron.cluster.hosts import Host
from nest_megatron.cluster.records import Cluster
from nest_megatron.config.cluster_detection import (
    JobCluster,
    find_cluster,
    like_gpus,
    names_cluster,
)
from nest_megatron.config.compose import compose
from nest_megatron.config.defaults import with_defaults
from nest_megatron.config.job import Job
from nest_megatron.config.launch import MixedGpus
from nest_megatron.config.overrides import Setting
from nest_megatron.config.train import LENGTH_SETTINGS
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.megatron_lm.planning import job_request, plan_to_launch
from nest_megatron.integrations.site_policy import read_launched
from nest_megatron.integrations.stated_job import made_for
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.planner.pinned_job import ActualJob, require_same_job
from nest_megatron.planner.pins import PinnedPlan


def fields_assumed_harmless(settings: Sequence[Setting]) -> tuple[str, ...]:
    """The fields of ``assume_harmless`` among settings, which are needed as a recipe is read."""
    named = [setting for setting in settings if setting.key == "assume_harmless"]
    return compose(named).assume_harmless if named else ()


def pinned_recipe(
    job: Job, path: Path, *, hosts: Sequence[Host] = (), mixed: MixedGpus = MixedGpus.REFUSE
) -> PinnedPlan:
    """A pinned file, for the job that it was made for and no other.

    What is not known where it is launched from (a login node has no GPUs) is not compared.

    Args:
        hosts, mixed: as for ``plan_recipe``.
    """
    pinned = read_launched(path, job.num_gpus)
    num_gpus = job.num_gpus or pinned.plan.layout.num_gpus
    gpus, _ = like_gpus(hosts, known_gpus(), mixed)
    require_pinned_for(pinned, job, num_gpus=num_gpus, gpus=gpus, gpus_per_host=job.gpus_per_node)
    return pinned


def require_pinned_for(
    pinned: PinnedPlan,
    job: Job,
    *,
    num_gpus: int,
    gpus: LocalGpus | None,
    gpus_per_host: int | None,
    cluster: Cluster | None = None,
) -> None:
    """Refuse a pinned plan for another job, where a framework has a megatron-core of its own."""
    found = ActualJob(
        spec=job.spec,
        num_gpus=num_gpus,
        cluster=cluster,
        gpus=gpus,
        gpus_per_host=gpus_per_host,
        global_batch_size=job.final_batch_size,
        batch_schedule=job.batch_schedule,
        precision=job.precision,
        tensor_model_parallel_size=pinned.plan.layout.dims.tensor_model_parallel_size,
        megatron_lm=pinned.pin.megatron_lm,
        memory_flags=job.memory_flags,
    )
    require_same_job(pinned, found)


def plan_recipe(
    job: Job,
    *,
    cluster: str | Cluster | None,
    overrides: Sequence[Setting],
    choose: int = 0,
    hosts: Sequence[Host] = (),
    mixed: MixedGpus = MixedGpus.REFUSE,
) -> tuple[ParallelPlan, tuple[str, ...]]:
    """Find the fastest plan for a job that was read, and what was assumed for it.

    Raises as ``nemo.auto_recipe`` does.

    Args:
        cluster: a name of the catalogue or a file, taken with the job's number of GPUs; a record;
            or ``None`` for the GPUs of this host.
        overrides: settings as ``nest-megatron plan`` takes them, the model and the batch apart.
        choose: take this runner-up instead of the best (0).
        hosts: of a job whose ranks have started and told what they have.
        mixed: what to do where their GPUs are unlike.
    """
    settings = tuple(overrides)
    for setting in settings:
        section, _, key = setting.key.partition(".")
        if section in ("model", "train") and key not in LENGTH_SETTINGS:
            raise UserInputError(
                setting.key,
                setting.value,
                "the model and the batch are the recipe's own",
                "Change the job.",
            )
    if isinstance(cluster, str):
        settings = (Setting(key="cluster", value=cluster), *settings)
    settings = with_defaults(settings, names_cluster=isinstance(cluster, Cluster))
    size = "cluster.num_gpus"
    if isinstance(cluster, Cluster):
        sized = cluster.resized(job.num_gpus or cluster.num_gpus)
        place = JobCluster(cluster=sized, settings=compose(settings), notes=())
    else:
        if not any(setting.key == size for setting in settings):
            if job.num_gpus is None:
                raise UserInputError(
                    size,
                    None,
                    "the number of ranks is the launcher's, and this process has none",
                    "Give overrides=['cluster.num_gpus=64'].",
                )
            settings = (*settings, Setting(key=size, value=str(job.num_gpus)))
        if not names_cluster(settings) and local_gpus() is None:
            raise UserInputError(
                "cluster",
                None,
                "none is given, and this host shows no NVIDIA GPU",
                "Give for example cluster='dgx_h100' (`nest-megatron clusters` lists them).",
            )
        place = find_cluster(
            settings,
            job.num_gpus or 0,
            os.environ if hosts else {},
            dry_run=not hosts,
            hosts=hosts,
            mixed=mixed,
        )
    job = dataclasses.replace(job, notes=(*job.notes, *place.notes))
    request = job_request(job, place.cluster, place.settings)
    found = plan_to_launch(request, place.settings, choose)
    if job.restored is not None:
        job.restored.check(found, job.version)
    by_words = job.free.option == "nest.free"  # only Megatron-Bridge's scripts take them
    return made_for(found, job, "+nest=auto" if by_words else "auto_recipe"), request.notes
