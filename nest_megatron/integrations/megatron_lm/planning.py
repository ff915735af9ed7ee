"""A running training job as a planning request, and its plan as a decision for all ranks."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nest_megatron.config.cluster_detection import JobCluster
from nest_megatron.config.job import FreeParameters, Job, ReadCommand
from nest_megatron.config.target import installed_packages
from nest_megatron.integrations.megatron_lm.attach import LAUNCHER, rewritten, with_launch
from nest_megatron.integrations.megatron_lm.checkpoint import (
    check_loadable,
    read_checkpoint,
    required,
)
from nest_megatron.integrations.megatron_lm.command_request import job_request
from nest_megatron.integrations.megatron_lm.messages import Decision
from nest_megatron.integrations.megatron_lm.namespace import command_of, written_values
from nest_megatron.integrations.megatron_lm.optimizer_rules import require_optimizer
from nest_megatron.integrations.megatron_lm.read import job_of, refuse_unplannable
from nest_megatron.integrations.megatron_lm.search_space import fixed_choices
from nest_megatron.integrations.megatron_lm.typed import kept_flags
from nest_megatron.integrations.megatron_lm.vocabulary import padded_vocab_size
from nest_megatron.parallel import plan_file
from nest_megatron.parallel.diff import Change
from nest_megatron.parallel.plan import MEGATRON_LM, ParallelPlan
from nest_megatron.planner import PlanRequest
from nest_megatron.planner import plan as find_plan
from nest_megatron.profile.installed import installed_versions
from nest_megatron.report.failure import require_plan
from nest_megatron.units import Seconds

#: Runners-up that a launch ranks, unless it is told how many; all that wait for it count seconds.
_RUNNERS_UP = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """What was searched, to ask again with more of it free.

    Args:
        best_s: the predicted step of the best plan found, whichever runner-up was taken.
    """

    job: Job
    place: JobCluster
    request: PlanRequest
    best_s: Seconds

    @property
    def kept(self) -> tuple[str, ...]:
        """The user's choices that the plan holds fixed, by their names in ``typed.LAYOUT``."""
        return fixed_choices(self.job)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """A decision with what a user is told of it.

    Args:
        searched: ``None`` for a pinned plan.
    """

    decision: Decision
    changes: tuple[Change, ...]
    notes: tuple[str, ...]
    searched: Searched | None = None


def read_running_job(
    args: Namespace,
    defaults: Mapping[str, Any],
    command_line: tuple[str, Sequence[str]],
    version: str,
) -> Job:
    """The job of the process that this runs in.

    Args:
        args: Megatron's arguments before its validation.
        defaults: what the script sets where the user says nothing.
        command_line: the script and its arguments, our own words apart.
        version: the recorded release that stands for the installed one.

    Raises:
        UserInputError: for a job that cannot be planned.
    """
    script, argv = command_line
    command = command_of(args, argv, script, version, defaults)
    # a checkpoint's arguments are merged in by now, so the model's shape is known
    values = {**command.values, "use_checkpoint_args": False}
    refuse_unplannable(values, script)  # before its tokenizer is built, which may take long
    require_optimizer(values, version)
    values["padded_vocab_size"] = padded_vocab_size(args, defaults)
    return job_of(command, values)


def decide(job: Job, place: JobCluster, *, free: Sequence[str], alternative: int) -> LaunchPlan:
    """Plan a running job.

    Args:
        free: the user's flags that may change.
        alternative: the runner-up to take; 0 is the best plan.

    Raises:
        NothingFitsError: if no plan fits in memory.
        SearchEndedError: if time ended the search before it had a plan.
        UserInputError: if what is kept has no legal layout, or the checkpoint cannot take the plan.
    """
    command = job.command
    assert command is not None
    saved = read_checkpoint(command.values)
    job = dataclasses.replace(
        job,
        free=FreeParameters(names=tuple(free), option="nest.free"),
        required={} if saved is None else required(saved, command.values, command.version),
        packages=installed_packages(),
    )
    request = running_request(job, place)
    asked = request
    if "search.num_alternatives" not in place.composed.given:
        asked = dataclasses.replace(request, num_alternatives=max(_RUNNERS_UP, alternative))
    found = require_plan(find_plan(asked, choose=alternative), request.notes)
    if saved is not None:
        check_loadable(saved, found.parallel, command.values, command.version)
    searched = Searched(job=job, place=place, request=request, best_s=found.shortest_step_s)
    found = plan_file.made_for(found, MEGATRON_LM, command.version, "+nest=auto")
    kept = kept_flags(job, request, place.composed.config)
    outcome = carry_out(found, command, request.notes, kept=kept)
    return dataclasses.replace(outcome, searched=searched)


def running_request(job: Job, place: JobCluster) -> PlanRequest:
    """What to search for a running job."""
    job = dataclasses.replace(
        job, notes=(*job.notes, *place.notes), num_gpus=place.cluster.num_gpus
    )
    return job_request(
        job, place.cluster, place.composed, prefix="nest.", versions=installed_versions()
    )


def carry_out(
    plan: ParallelPlan,
    command: ReadCommand,
    notes: tuple[str, ...],
    *,
    kept: Collection[str] = (),
) -> LaunchPlan:
    """A plan as what every rank sets in Megatron's arguments.

    Args:
        kept: destinations that the user set and did not free.

    Raises:
        UserInputError: if Megatron would refuse it for this job.
    """
    plan = with_launch(plan, command, kept=kept, notes=notes)
    rewrite = rewritten(plan, command, kept)
    decision = Decision(
        plan=plan,
        values=written_values(rewrite, command),
        environment=plan.launch[LAUNCHER].environment,
        ranks=plan.placement.rank_permutation,
    )
    return LaunchPlan(decision=decision, changes=rewrite.changes, notes=notes)
