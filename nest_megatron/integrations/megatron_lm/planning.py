"""A job as a planning request; of a running one, its plan as a decision for all ranks."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nest_megatron.cluster.records import Cluster
from nest_megatron.config.cluster_detection import JobCluster
from nest_megatron.config.compose import Settings
from nest_megatron.config.job import FreeParameters, Job, ReadCommand, installed_packages
from nest_megatron.config.request import request_for
from nest_megatron.cost_model.target_defaults import newer_release_notes
from nest_megatron.integrations.megatron_lm import checkpoint, namespace
from nest_megatron.integrations.megatron_lm.attach import with_command
from nest_megatron.integrations.megatron_lm.present_layout import on_device, with_present_layout
from nest_megatron.integrations.megatron_lm.read import (
    job_of,
    refuse_unplannable,
    require_optimizer,
)
from nest_megatron.integrations.megatron_lm.search_space import (
    fixed_choices,
    freed_flags,
    job_space,
    kept_flags,
)
from nest_megatron.layout.diff import Change
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.rulebook.facts import known_release
from nest_megatron.planner import Request
from nest_megatron.planner import plan as find_plan
from nest_megatron.profile.installed import installed_versions
from nest_megatron.report.failure import require_plan
from nest_megatron.units import Seconds


def job_request(
    job: Job,
    cluster: Cluster,
    composed: Settings,
    *,
    prefix: str = "",
    versions: Mapping[str, str] | None = None,
) -> Request:
    """What to plan for a job, wherever it was read from.

    Args:
        prefix: what stands before the names of settings where the user types them.
        versions: of the running job; ``None`` on a laptop, where none are known.

    Raises:
        UserInputError: for a setting that cannot be kept.
    """
    job = on_device(job, cluster)
    space, offer = job_space(job, composed)
    request = request_for(
        *(job, cluster, composed, space),
        offer=offer,
        freed=freed_flags(job.free),
        prefix=prefix,
        versions=versions,
    )
    return with_present_layout(request, job, composed)


#: Runners-up that a launch ranks, unless it is told how many; all that wait for it count seconds.
_RUNNERS_UP = 3
_PIPELINE = "pipeline_model_parallel_size"


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """What was searched, to ask again with more of it free; ``best_s`` is the best plan's step."""

    job: Job
    place: JobCluster
    request: Request
    best_s: Seconds

    @property
    def kept(self) -> tuple[str, ...]:
        """The choices of the user that the plan holds fixed, as ``LAYOUT`` names them."""
        return fixed_choices(self.job)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A plan in the form that a rank carries out: from rank 0 to all.

    Args:
        values: of Megatron's arguments, by destination.
        ranks: new global rank of each launched rank; ``None`` leaves them.
    """

    plan: ParallelPlan
    values: Mapping[str, Any]
    ranks: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """A decision with what a user is told of it; a pinned plan was not ``searched``."""

    decision: Decision
    changes: tuple[Change, ...]
    notes: tuple[str, ...]
    searched: Searched | None = None


def read_running_job(
    args: Namespace,
    defaults: Mapping[str, Any],
    command_line: tuple[str, Sequence[str]],
    release: str,
) -> Job:
    """The job of the process that this runs in.

    Args:
        args: Megatron's arguments before its validation.
        command_line: the script and its arguments, our own words apart.
        release: of the installed megatron-core.

    Raises:
        UserInputError: for a release that is older than those that are known, and for a job that
            cannot be planned.
    """
    script, argv = command_line
    version = known_release(release)
    command = namespace.command_of(args, argv, script, version, defaults)
    # a checkpoint's arguments are merged in by now, so the model's shape is known
    values = {**command.values, "use_checkpoint_args": False}
    refuse_unplannable(values, script)  # before its tokenizer is built, which may take long
    require_optimizer(values, version)
    values["padded_vocab_size"] = namespace.padded_vocab_size(args, defaults)
    job = job_of(command, values)
    newer = newer_release_notes(f"megatron_lm_{release}")
    return dataclasses.replace(job, notes=(*job.notes, *newer))


def decide(
    job: Job,
    place: JobCluster,
    *,
    free: Sequence[str] = (),
    alternative: int = 0,
    made_by: str = "+nest=auto",
) -> LaunchPlan:
    """Plan a running job.

    Args:
        free: the user's flags that may change.
        alternative: the runner-up to take; 0 is the best plan.
        made_by: the words that asked for it, which the plan keeps.

    Raises:
        NothingFitsError: if no plan fits in memory.
        SearchEndedError: if time ended the search before it had a plan.
        UserInputError: if nothing legal is left, or the checkpoint cannot take the plan.
    """
    command = job.command
    assert command is not None
    values, version = command.values, command.version
    saved = checkpoint.read_checkpoint(values)
    saves = {} if saved is None else checkpoint.required(saved, values, version)
    job = dataclasses.replace(
        job,
        free=FreeParameters(names=tuple(free), option="nest.free"),
        required={**saves, **job.required},
        packages=installed_packages(),
    )
    request = running_request(job, place)
    found = plan_to_launch(request, place.settings, alternative)
    if saved is not None:
        checkpoint.check_loadable(saved, found.arguments, values, version)
    searched = Searched(
        job=job, place=place, request=request, best_s=found.predicted.iteration_time_s
    )
    kept = kept_flags(job, request, place.settings)
    outcome = carry_out(found, command, request.notes, made_by=made_by, kept=kept)
    return dataclasses.replace(outcome, searched=searched)


def plan_to_launch(request: Request, composed: Settings, choose: int = 0) -> ParallelPlan:
    """The plan of a job that waits for it, with few runners-up unless their number is given.

    Raises:
        NothingFitsError, SearchEndedError: as of ``decide``.
    """
    if "search.num_alternatives" not in composed.given:
        request = dataclasses.replace(request, num_alternatives=max(_RUNNERS_UP, choose))
    return require_plan(find_plan(request, choose=choose), request.notes)


def running_request(job: Job, place: JobCluster) -> Request:
    """What to search for a running job."""
    cluster, notes = place.cluster, (*job.notes, *place.notes)
    job = dataclasses.replace(job, notes=notes, num_gpus=cluster.num_gpus)
    installed = installed_versions()
    return job_request(job, cluster, place.settings, prefix="nest.", versions=installed)


def carry_out(
    plan: ParallelPlan,
    command: ReadCommand,
    notes: tuple[str, ...],
    *,
    made_by: str | None = None,
    kept: Collection[str] = (),
) -> LaunchPlan:
    """A plan as what every rank sets in Megatron's arguments, which Megatron must not refuse."""
    plan, rewrite = with_command(plan, command, made_by=made_by, kept=kept, notes=notes)
    ranks = plan.placement.rank_permutation
    decision = Decision(plan=plan, values=rewrite.values, ranks=ranks)
    return LaunchPlan(decision=decision, changes=rewrite.changes, notes=notes)


def costs(searched: Searched) -> list[tuple[str, Seconds]]:
    """The predicted step with each of the user's choices freed alone, at last with all of them."""
    found = []
    for choice in (*searched.kept, "all"):
        names = {choice, "stage_layout"} if choice == _PIPELINE else {choice}
        free = dataclasses.replace(searched.job.free, names=(*searched.job.free.names, *names))
        request = running_request(dataclasses.replace(searched.job, free=free), searched.place)
        wanted = dataclasses.replace(request, num_alternatives=0, offer=None, remedies=False)
        plan = find_plan(wanted)
        if not isinstance(plan, ParallelPlan):
            continue
        step = plan.predicted.iteration_time_s
        # where time ended the search, a slower plan says nothing
        if plan.search.certificate in ("optimal", "chosen") or step < searched.best_s:
            found.append((choice, step))
    return found
