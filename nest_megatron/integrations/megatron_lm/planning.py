"""A running training job as a planning request, and its plan as a decision for all ranks."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nest_megatron.config.choices import installed_packages
from nest_megatron.config.cluster_detection import Surroundings
from nest_megatron.config.request import plan_request, with_times
from nest_megatron.integrations.megatron_lm.attach import LAUNCHER, rewritten, with_launch
from nest_megatron.integrations.megatron_lm.checkpoint import (
    check_loadable,
    read_checkpoint,
    required,
)
from nest_megatron.integrations.megatron_lm.command_request import (
    CommandRequest,
    Wishes,
    request_for,
)
from nest_megatron.integrations.megatron_lm.decision import Decision
from nest_megatron.integrations.megatron_lm.job import MegatronJob
from nest_megatron.integrations.megatron_lm.namespace import command_of, written_values
from nest_megatron.integrations.megatron_lm.optimizer_rules import require_optimizer
from nest_megatron.integrations.megatron_lm.parser import ReadCommand
from nest_megatron.integrations.megatron_lm.read import job_from_values, refuse_unplannable
from nest_megatron.integrations.megatron_lm.rewrite import Change
from nest_megatron.integrations.megatron_lm.vocabulary import padded_vocab_size
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.parallel import plan_file
from nest_megatron.parallel.plan import MEGATRON_LM, ParallelPlan
from nest_megatron.planner import plan as find_plan
from nest_megatron.profile.installed import installed_versions
from nest_megatron.report.failure import require_plan
from nest_megatron.units import Seconds

#: Runners-up that a launch ranks, unless it is told how many; all that wait for it count seconds.
_RUNNERS_UP = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningJob:
    """A job as Megatron has parsed it."""

    command: ReadCommand
    spec: TransformerSpec
    job: MegatronJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """What was searched, to ask again with less kept.

    Args:
        best_s: the predicted step of the best plan found, whichever runner-up was taken.
    """

    running: RunningJob
    place: Surroundings
    wishes: Wishes
    request: CommandRequest
    best_s: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
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
) -> RunningJob:
    """Model and job of the process that this runs in.

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
    spec, job = job_from_values(
        values,
        explicit=command.explicit,
        script=script,
        version=version,
        world_size=args.world_size,
        passthrough=command.unknown,
        notes=command.notes,
    )
    return RunningJob(command=command, spec=spec, job=job)


def decide(
    running: RunningJob, place: Surroundings, *, free: Sequence[str], alternative: int
) -> Outcome:
    """Plan a running job.

    Args:
        free: the user's flags that may change.
        alternative: the runner-up to take; 0 is the best plan.

    Raises:
        NothingFitsError: if no plan fits in memory.
        SearchEndedError: if time ended the search before it had a plan.
        UserInputError: if what is kept has no legal layout, or the checkpoint cannot take the plan.
    """
    command = running.command
    saved = read_checkpoint(command.values)
    needed = {} if saved is None else required(saved, command.values, command.version)
    wishes = Wishes(
        free=tuple(free),
        required=needed,
        option="nest.free",
        packages=installed_packages(),
    )
    request = ask(running, place, wishes)
    inputs = request.inputs
    wanted = plan_request(place.composed.config, inputs, request.space)
    if "search.num_alternatives" not in place.composed.given:
        wanted = dataclasses.replace(wanted, num_alternatives=max(_RUNNERS_UP, alternative))
    found = require_plan(find_plan(wanted, choose=alternative), inputs.notes)
    if saved is not None:
        check_loadable(saved, found.parallel, command.values, command.version)
    searched = Searched(
        running=running,
        place=place,
        wishes=wishes,
        request=request,
        best_s=found.shortest_step_s,
    )
    found = plan_file.made_for(found, MEGATRON_LM, command.version, "+nest=auto")
    outcome = carry_out(found, command, inputs.notes, kept=request.kept_flags)
    return dataclasses.replace(outcome, searched=searched)


def ask(running: RunningJob, place: Surroundings, wishes: Wishes) -> CommandRequest:
    """What to search for a running job."""
    job = dataclasses.replace(
        running.job, notes=(*running.job.notes, *place.notes), world_size=place.cluster.num_gpus
    )
    model_and_job = (running.spec, job)
    request = request_for(running.command, model_and_job, place.cluster, place.composed, wishes)
    inputs = with_times(
        request.inputs, place.composed, prefix="nest.", versions=installed_versions()
    )
    return dataclasses.replace(request, inputs=inputs)


def carry_out(
    plan: ParallelPlan,
    command: ReadCommand,
    notes: tuple[str, ...],
    *,
    kept: Collection[str] = (),
) -> Outcome:
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
    return Outcome(decision=decision, changes=rewrite.changes, notes=notes)
