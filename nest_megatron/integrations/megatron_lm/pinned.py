"""``+nest=pinned``: the pinned plan, or what takes its place on other machines than its own.

A plan is pinned for a job, for machines and for software. Another job is refused. Where the
machines or the software are not the plan's, ``nest.on_mismatch`` says what happens: ``nearest``
holds the search to the plan's degrees and stages, ``replan`` to what the command itself states.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from nest_megatron.cluster.discovery import is_same_device, local_gpus, with_hosts_of
from nest_megatron.cluster.records import Cluster
from nest_megatron.config.cluster_detection import (
    JobCluster,
    like_gpus,
    names_cluster,
    processes_per_host,
)
from nest_megatron.config.compose import compose
from nest_megatron.config.job import FreeParameters, Job, Requirement
from nest_megatron.config.launch import MixedGpus
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.megatron_lm import planning
from nest_megatron.integrations.megatron_lm.ranks import LaunchedJob
from nest_megatron.integrations.plan_output import pinned_by, pinned_file
from nest_megatron.integrations.restore import restored_by_command
from nest_megatron.integrations.site_policy import allowed_on_mismatch, read_launched
from nest_megatron.layout.dims import ParallelDims
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.policy import OnMismatch
from nest_megatron.planner import plan as find_plan
from nest_megatron.planner.pinned_job import ActualJob, Difference, differences, refusal
from nest_megatron.planner.pins import PinnedPlan

#: What a plan keeps under ``nearest``, by the names of ``layout_arguments``: which rank holds which
#: part of the model, and how its states are divided. Replicas take the ranks that are there.
_KEPT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "pipeline_model_parallel_layout",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "use_distributed_optimizer",
    "use_megatron_fsdp",
)
#: Flags of the job that the search may change, where the plan and not the command says what stays.
_ALL = ("all",)


def pinned_plan(launched: LaunchedJob, job: Job) -> planning.LaunchPlan:
    """The plan of ``nest.plan`` for a running job, or the one that takes its place.

    Raises:
        UserInputError: for another job, for other machines or software where the user lets nothing
            take the plan's place, and where nothing legal can.
        NothingFitsError: if what could take its place does not fit in memory.
    """
    path, dry_run = pinned_file(launched.launch.plan), launched.launch.dry_run
    allowed = allowed_on_mismatch(launched.launch.on_mismatch)
    cluster, world_size = None, launched.args.world_size
    if names_cluster(launched.words.job):
        cluster = launched.find_place(world_size).cluster
        world_size = cluster.num_gpus
    unsized = cluster is None and dry_run and "WORLD_SIZE" not in os.environ
    pinned = read_launched(path, None if unsized else world_size)
    if unsized:
        world_size = pinned.plan.layout.num_gpus
    actual = _actual(launched, job, cluster, world_size)
    found = differences(pinned, actual)
    if not found:
        launched.signer = pinned.signer
        return _as_pinned(job, pinned)
    if not all(each.is_of_moment for each in found):
        raise refusal(found)
    if allowed[0] is OnMismatch.REFUSE:
        fix, others = "Launch the pinned job, or plan and pin this one", " or ".join(allowed[1:])
        if others:
            fix += f"; nest.on_mismatch={others} has another plan take its place"
        raise refusal(found, f"{fix}.")
    return _in_its_place(launched, job, pinned, actual, found, allowed)


def _actual(launched: LaunchedJob, job: Job, cluster: Cluster | None, world_size: int) -> ActualJob:
    assert job.command is not None
    dry_run, gpus = launched.launch.dry_run, None
    if cluster is None and not dry_run:
        gpus, _ = like_gpus(launched.hosts, local_gpus(), MixedGpus(launched.launch.mixed_gpus))
    return ActualJob(
        spec=job.spec,
        num_gpus=world_size,
        cluster=cluster,
        gpus=gpus,
        gpus_per_host=None if dry_run else processes_per_host(os.environ),
        global_batch_size=job.final_batch_size,
        batch_schedule=job.batch_schedule,
        precision=job.precision,
        tensor_model_parallel_size=job.command.values["tensor_model_parallel_size"],
        megatron_lm=job.version,
        memory_flags=job.memory_flags,
    )


def _as_pinned(job: Job, pinned: PinnedPlan) -> planning.LaunchPlan:
    assert job.command is not None
    if (restored := restored_by_command(job.command.values)) is not None:
        restored.check(pinned.plan, job.version)
    plan, rows = pinned.plan, job.spec.vocab_size
    if job.spec.vocab_is_padded and rows % plan.layout.dims.tensor_model_parallel_size == 0:
        # the embedding has the rows that the job gives it by itself
        model = dataclasses.replace(plan.model, vocab_size=rows, vocab_is_padded=True)
        plan = dataclasses.replace(plan, model=model)
    notes = [pinned_by(pinned.pin), *filter(None, [pinned.told])]
    return planning.carry_out(plan, job.command, tuple(notes))


def _in_its_place(
    launched: LaunchedJob,
    job: Job,
    pinned: PinnedPlan,
    actual: ActualJob,
    found: Sequence[Difference],
    allowed: Sequence[OnMismatch],
) -> planning.LaunchPlan:
    """The plan that the machines of the moment get, with the reason in its notes."""
    policy, free = allowed[0], launched.launch.free
    note = (
        f"{pinned_by(pinned.pin)} Another plan takes its place (nest.on_mismatch={policy}): "
        f"{'; '.join(map(str, found))}."
    )
    place = _place(launched, pinned.plan.cluster, actual)
    job = dataclasses.replace(job, notes=(*job.notes, note))
    made_by = f"+nest=pinned nest.on_mismatch={policy}"
    if policy is OnMismatch.REPLAN:
        return planning.decide(job, place, free=free, made_by=made_by)
    way_out = (
        "search anew with nest.on_mismatch=replan"
        if OnMismatch.REPLAN in allowed
        else "pin a plan for these machines"
    )
    kept = _kept(pinned.plan.arguments, way_out, has_experts=job.spec.is_moe)
    job = dataclasses.replace(job, required={**job.required, **kept})
    try:
        return planning.decide(job, place, free=_ALL, made_by=made_by)
    except UserInputError as error:
        if (smaller := _largest_below(job, place, pinned.plan.layout.dims)) is None:
            raise
        fix = f"Start {smaller} ranks, the most below {actual.num_gpus} that the pinned plan's "
        fix += f"degrees and stages can be used on, or {way_out}."
        raise UserInputError(error.what, error.value, limit=error.limit, fix=fix) from error


def _largest_below(job: Job, place: JobCluster, dims: ParallelDims) -> int | None:
    """The most ranks below those that are there for which a plan keeps what ``job`` requires."""
    job = dataclasses.replace(job, free=FreeParameters(names=_ALL))
    for number in range(place.cluster.num_gpus - 1, 0, -1):
        replicas, rest = divmod(number, dims.world_size // dims.data_parallel_size)
        if rest or (job.final_batch_size or 0) % replicas:
            continue
        with contextlib.suppress(UserInputError):
            smaller = dataclasses.replace(place, cluster=place.cluster.resized(number))
            asked = dataclasses.replace(planning.running_request(job, smaller), remedies=False)
            if isinstance(find_plan(asked), ParallelPlan):
                return number
    return None


def _place(launched: LaunchedJob, planned: Cluster, actual: ActualJob) -> JobCluster:
    """The machines of the moment: as named, else the plan's own at the size of the job.

    Where this host has other GPUs than the plan's, they are found as ``+nest=auto`` finds them.
    """
    words = launched.words.job
    other = actual.gpus is not None and not is_same_device(planned.accelerator, actual.gpus)
    if names_cluster(words) or other:
        return launched.find_place(actual.num_gpus)
    cluster, per_host = planned.resized(actual.num_gpus), actual.gpus_per_host
    if per_host not in (None, cluster.launch_gpus_per_host) and cluster.gpus_per_host is None:
        cluster = with_hosts_of(cluster, per_host)
    note = f"The network is taken to be that of the pinned plan ({planned.name})."
    return JobCluster(cluster=cluster, settings=compose(words), notes=(note,))


def _kept(
    arguments: Mapping[str, Any], way_out: str, *, has_experts: bool
) -> Mapping[str, Requirement]:
    """What ``nearest`` keeps of a plan; a virtual size of 1 stands for none."""
    names = [name for name in _KEPT if has_experts or not name.startswith("expert")]
    return {
        name: Requirement(
            value=1 if value is None and name.startswith("virtual") else value,
            reason="nest.on_mismatch=nearest keeps its degrees and stages",
            fix=way_out,
            who="the pinned plan",
        )
        for name in names
        if (value := arguments[name]) is not None or name.startswith("virtual")
    }
