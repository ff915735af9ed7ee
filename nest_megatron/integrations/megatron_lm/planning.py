"""A job as a planning request; a running one from Megatron's Namespace, its plan written back."""

from __future__ import annotations

import contextlib
import io
from argparse import Namespace
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nest_megatron.cluster.records import Cluster
from nest_megatron.config.cluster_detection import JobCluster
from nest_megatron.config.compose import Settings
from nest_megatron.config.job import Job, ReadCommand, installed_packages
from nest_megatron.config.request import request_for
from nest_megatron.config.space import require_all_gpus
from nest_megatron.cost_model.target_defaults import newer_release_notes
from nest_megatron.errors import NestError, settings_typed_as
from nest_megatron.integrations.megatron_lm import checkpoint
from nest_megatron.integrations.megatron_lm.attach import with_command
from nest_megatron.integrations.megatron_lm.changed_command import with_degrees_as_flags
from nest_megatron.integrations.megatron_lm.layout_arguments import (
    PARALLEL_ARGUMENTS,
    Values,
    flag_error,
    naming_fields,
)
from nest_megatron.integrations.megatron_lm.parser import defaults_of, read_argv
from nest_megatron.integrations.megatron_lm.present_layout import (
    with_device_settings,
    with_present_layout,
)
from nest_megatron.integrations.megatron_lm.read import job_of, refuse_unplannable, require_options
from nest_megatron.integrations.megatron_lm.search_space import (
    fixed_choices,
    freed_flags,
    job_space,
    kept_flags,
)
from nest_megatron.layout.diff import Change
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.rulebook.devices import ELEMENTWISE_OPTIMIZERS
from nest_megatron.layout.rulebook.facts import known_release
from nest_megatron.plain import frozen
from nest_megatron.planner import Request
from nest_megatron.planner import plan as find_plan
from nest_megatron.profile.installed import installed_versions
from nest_megatron.report.failure import require_plan
from nest_megatron.solver.space import SearchSpace
from nest_megatron.units import Seconds


def job_request(
    job: Job,
    cluster: Cluster,
    composed: Settings,
    *,
    versions: Mapping[str, str] | None = None,
    narrow: Callable[[SearchSpace], SearchSpace] = lambda space: space,
) -> Request:
    """What to plan for a job, wherever it was read from.

    Args:
        narrow: leaves of the space what the job can be told.
        versions: of the running job; ``None`` on a laptop, where none are known.

    Raises:
        UserInputError: for a setting that cannot be kept.
    """
    job = with_device_settings(job, cluster)
    with naming_fields(job.fields):
        space, offer = job_space(job, composed)
        request = request_for(
            job,
            cluster,
            composed,
            narrow(space),
            offer=offer,
            freed=freed_flags(job),
            versions=versions,
        )
    return with_present_layout(request, job, composed)


_NUMBERS_OF_STAGES = ("pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size")


@frozen
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


@frozen
class Decision:
    """A plan in the form that every rank applies: from rank 0 to all.

    Args:
        values: of Megatron's arguments, by destination.
        ranks: new global rank of each launched rank; ``None`` leaves them.
    """

    plan: ParallelPlan
    values: Values
    ranks: tuple[int, ...] | None = None


@frozen
class LaunchPlan:
    """A decision with what is printed of it; a pinned plan was not ``searched``."""

    decision: Decision
    changes: tuple[Change, ...]
    notes: tuple[str, ...]
    searched: Searched | None = None


def read_running_job(
    args: Namespace,
    defaults: Values,
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
    command = command_of(args, argv, script, version, defaults)
    # a checkpoint's arguments are merged in by now, so the model's shape is known
    values = {**command.values, "use_checkpoint_args": False}
    refuse_unplannable(values, script)  # before its tokenizer is built, which may take long
    require_options(values, version)
    values["padded_vocab_size"] = padded_vocab_size(args, defaults)
    job = job_of(command, values)
    return replace(job, notes=(*job.notes, *newer_release_notes(f"megatron_lm_{release}")))


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
    assert command
    values, version = command.values, command.version
    saved = checkpoint.read_checkpoint(values)
    saves = {} if saved is None else checkpoint.requirements(saved, values)
    job = replace(
        job,
        free=tuple(free),
        free_option="nest.free",
        required={**saves, **job.required},
        packages=installed_packages(),
    )
    request = running_request(job, place)
    found = plan_to_launch(request, alternative)
    if saved is not None:
        checkpoint.check_loadable(saved, found.arguments, values, version)
    step = found.predicted.iteration_time_s
    kept = kept_flags(job, request, place.settings)
    outcome = launch_plan(found, command, request.notes, made_by=made_by, kept=kept)
    return replace(outcome, searched=Searched(job=job, place=place, request=request, best_s=step))


def plan_to_launch(request: Request, choose: int = 0) -> ParallelPlan:
    """The plan of a job that waits for it.

    Raises:
        NothingFitsError, SearchEndedError: as of ``decide``.
    """
    request = replace(request, num_alternatives=max(request.num_alternatives, choose))
    return require_plan(find_plan(request, choose=choose), request.notes)


def running_request(job: Job, place: JobCluster) -> Request:
    """What to search for a running job."""
    cluster = place.cluster
    notes = (*job.notes, *place.notes)
    job = replace(job, notes=notes, num_gpus=cluster.num_gpus)
    with settings_typed_as("nest.{}".format):
        require_all_gpus(place.settings, "a job that has started")
        return job_request(job, cluster, place.settings, versions=installed_versions())


def launch_plan(
    plan: ParallelPlan,
    command: ReadCommand,
    notes: tuple[str, ...],
    *,
    made_by: str | None = None,
    kept: Collection[str] = (),
) -> LaunchPlan:
    """A plan as what every rank sets in Megatron's arguments, which Megatron must not refuse."""
    plan, rewrite = with_command(plan, command, made_by=made_by, kept=kept)
    decision = Decision(plan=plan, values=rewrite.values, ranks=plan.placement.rank_permutation)
    return LaunchPlan(decision=decision, changes=rewrite.changes, notes=notes)


def costs(searched: Searched) -> list[tuple[str, Seconds]]:
    """The predicted step with each of the user's choices freed alone, at last with all of them."""
    found = []
    for choice in (*searched.kept, "all"):
        # the user's stages divide the model for these numbers
        names = {choice, "stage_layout"} if choice in _NUMBERS_OF_STAGES else {choice}
        job = replace(searched.job, free=(*searched.job.free, *names))
        request = running_request(job, searched.place)
        plan = find_plan(replace(request, num_alternatives=0, offer=None, remedies=False))
        if not isinstance(plan, ParallelPlan):
            continue
        step = plan.predicted.iteration_time_s
        # where time ended the search, a slower plan says nothing
        if plan.search.certificate in ("optimal", "chosen") or step < searched.best_s:
            found.append((choice, step))
    return found


#: Choices of a plan that Megatron's validation derives or checks.
_DERIVED = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "data_parallel_size",
    "expert_model_parallel_size",
    "sequence_parallel",
    "use_megatron_fsdp",
)


def command_of(
    args: Namespace, argv: Sequence[str], script: str, version: str, defaults: Values
) -> ReadCommand:
    """The job as Megatron has parsed it, with the words that the user typed.

    A value that differs from Megatron's default without being typed counts as the user's own: it
    comes from a checkpoint's arguments.

    Args:
        args: Megatron's Namespace before validation.
        argv: the script's arguments, without this package's own words.
    """
    typed = read_argv(script, argv, version, world_size=args.world_size)
    values = with_defaults({**typed.values, **vars(args)}, defaults)
    of_megatron = defaults_of(version)
    untyped = {
        name
        for name in of_megatron.keys() & PARALLEL_ARGUMENTS
        if values.get(name) != of_megatron[name]
    }
    return with_degrees_as_flags(replace(typed, values=values, explicit=typed.explicit | untyped))


def with_defaults(values: Values, defaults: Values) -> dict[str, Any]:
    """Megatron's arguments with what the script sets where the user says nothing."""
    given = {name: value for name, value in values.items() if value is not None}
    return {**values, **defaults, **given}


def require_planned(args: Namespace, plan: ParallelPlan) -> None:
    """Raise if Megatron derived something else than the plan has, naming it."""
    arguments = plan.arguments
    train = plan.train
    wanted = {name: arguments[name] for name in _DERIVED} | {
        "micro_batch_size": plan.layout.micro_batch_size,
        "seq_length": train.seq_length,
        "num_layers": plan.model.num_layers,
    }
    if train.batch_schedule is None or train.batch_schedule.rampup_batch_size:
        wanted["global_batch_size"] = plan.final_batch_size  # else one micro batch on each replica
    if (getattr(args, "optimizer", None) or "adam") in ELEMENTWISE_OPTIMIZERS:
        # 0.20 divides an emerging optimizer's state by layers instead, and clears the flag
        wanted["use_distributed_optimizer"] = arguments["use_distributed_optimizer"]
    if plan.model.vision is not None:  # pretrain_vlm.py makes the language model's of others
        del wanted["seq_length"], wanted["num_layers"]
    for name, value in wanted.items():
        found = getattr(args, name)
        if found != value:
            raise NestError(
                f"after Megatron's own validation {name} is {found!r}, the plan has {value!r}; "
                "launch without nest and report it."
            )


def padded_vocab_size(args: Namespace, defaults: Values) -> int | None:
    """Rows of the embedding under the user's own tensor-parallel size; ``None`` without padding.

    Megatron's own tokenizer says it, on a copy of the arguments, because for most tokenizers the
    number is in their files alone.

    Raises:
        UserInputError: if the tokenizer cannot be built.
    """
    if args.padded_vocab_size is not None:
        return int(args.padded_vocab_size)
    if getattr(args, "pad_vocab_size", True) is False:
        return None
    copied = Namespace(**with_defaults(vars(args), defaults))
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # Megatron says it all again when it starts
            _build_tokenizer()(copied)
    except Exception as error:
        raise flag_error(
            "tokenizer_type",
            copied.tokenizer_type,
            f"Megatron cannot build it: {error}",
            "Correct the tokenizer's flags, or give --padded-vocab-size.",
        ) from error
    return int(copied.padded_vocab_size)


def _build_tokenizer() -> Any:
    try:
        from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    except ImportError:  # 0.16
        from megatron.training.tokenizer import build_tokenizer
    return build_tokenizer
