"""``+nest=auto`` and ``+nest=pinned`` in a job that is about to train: plan, agree, rewrite.

``nest.dry_run=true`` does everything that a launch would do, as far as the first GPU. A plan is
pinned for a job, for machines and for software. Another job is refused. Where the machines or the
software are not the plan's, ``nest.on_mismatch`` says what happens: ``nearest`` holds the search to
the plan's degrees and stages, ``replan`` to what the command itself states.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import threading
import traceback
from argparse import Namespace
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from nest_megatron.cluster.discovery import is_same_device, known_gpus, local_gpus, with_hosts_of
from nest_megatron.cluster.records import Cluster
from nest_megatron.config.cluster_detection import (
    JobCluster,
    find_cluster,
    like_gpus,
    names_cluster,
    processes_per_host,
)
from nest_megatron.config.compose import compose
from nest_megatron.config.job import Job, Requirement
from nest_megatron.config.launch import MixedGpus, Mode
from nest_megatron.errors import NestError, RefusedByMegatronError, UserInputError
from nest_megatron.files import user_folder
from nest_megatron.integrations.megatron_lm import attach, planning
from nest_megatron.integrations.megatron_lm.agreement import Hosts
from nest_megatron.integrations.megatron_lm.measure import measure_job
from nest_megatron.integrations.megatron_lm.own_layers import stand_in_device
from nest_megatron.integrations.megatron_lm.parser import load_arguments
from nest_megatron.integrations.megatron_lm.planning import (
    Decision,
    LaunchPlan,
    Searched,
    require_planned,
)
from nest_megatron.integrations.megatron_lm.ranks import (
    LaunchedJob,
    check_permutation,
    ranks_by_host,
)
from nest_megatron.integrations.megatron_lm.rendezvous import MAY_DIFFER, comparable_text
from nest_megatron.integrations.plan_output import (
    actual_job,
    allowed_on_mismatch,
    flag_cost_report,
    launched_report,
    pin_note,
    pinned_file,
    plan_file_note,
    plan_output,
    read_launched,
    require_launch,
)
from nest_megatron.integrations.process_variables import set_variables
from nest_megatron.integrations.restore import restored_by_command
from nest_megatron.layout import plan_file
from nest_megatron.layout.dims import ParallelDims
from nest_megatron.layout.plan import ParallelPlan, launch_words
from nest_megatron.layout.policy import OnMismatch
from nest_megatron.layout.rulebook.facts import known_release
from nest_megatron.planner import plan as find_plan
from nest_megatron.planner.pinned_job import ActualJob, Difference, differences, refusal
from nest_megatron.planner.pins import PinnedPlan
from nest_megatron.printing import print_cleaned
from nest_megatron.profile.records import ProfileMode
from nest_megatron.report.console import command_lines, say, show


def run(launched: LaunchedJob) -> Any:
    """Plan the job, and let Megatron validate the arguments; errors as of ``LaunchedJob.run``."""
    launch = launched.launch
    version = known_release(_installed())
    measured: tuple[Job, JobCluster] | None = None

    def comparable() -> dict[str, str]:
        defaults = {"defaults of the script": comparable_text(launched.defaults)}
        return defaults | comparable_arguments(launched.args, version, launch.may_differ)

    def measure() -> None:
        nonlocal measured
        measures = launched.last_value("profile.mode") == ProfileMode.MEASURE.value
        if measures and launched.words.mode is Mode.AUTO:
            measured = measure_job(
                lambda: _job_and_place(launched),
                store=launched.store,
                defaults=launched.defaults,
                free=launch.free,
            )

    def decide(hosts: Hosts) -> Decision:
        require_launch(launched.words.mode, launch.free, version)
        outcome = _with_ranks(launched, _find_plan(launched, measured), hosts)
        launched.changes = tuple(outcome.changes)
        plan = outcome.decision.plan
        show(launched_report(plan, outcome.changes, outcome.notes))
        say(_write_plan(launched, plan))
        threading.Thread(target=_print_costs, args=(outcome.searched,), daemon=True).start()
        return outcome.decision

    def write(decision: Decision) -> Any:
        return _apply_and_validate(launched, decision)

    return launched.run(
        comparable, decide, write, launched.begin_record, what="arguments", measure=measure
    )


def dry_run(launched: LaunchedJob) -> None:
    """Print the plan, the changes and the command on rank 0; have Megatron validate them."""
    if os.environ.get("RANK", "0") != "0":
        return
    outcome = _find_plan(launched)
    plan = outcome.decision.plan
    show(launched_report(plan, outcome.changes, outcome.notes))
    launched.args.world_size = plan.layout.num_gpus
    with _device_of(plan), contextlib.redirect_stdout(io.StringIO()):  # it prints every argument
        _apply_and_validate(launched, outcome.decision)
    say("nest: Megatron's own validation accepts this.\n")
    launch = plan.launch[attach.LAUNCHER]
    say("nest: the same without nest\n")
    say(command_lines(launch_words(plan, launch, launched.script), launch.environment.items()))
    for name, text in launch.environment.items():
        if text is None:
            say(f"  with {name} unset")
    say()
    if _output_file(launched) is not None:
        say(_write_plan(launched, plan))
    _print_costs(outcome.searched)
    say("nest: dry run; nothing was started.")


def _device_of(plan: ParallelPlan) -> AbstractContextManager[None]:
    """Stand in for the planned device unless it is here: Megatron asks for its generation."""
    device = plan.cluster.accelerator
    here = known_gpus()
    if here is not None and is_same_device(device, here):
        return contextlib.nullcontext()
    return stand_in_device(device.name, attach.device_architecture(plan), device.memory_bytes)


def _apply_and_validate(launched: LaunchedJob, decision: Decision) -> Any:
    args = launched.args
    validate = launched.validate
    assert validate is not None
    unplanned = copy.deepcopy(args)
    apply(args, decision)
    result = validate_arguments(validate, args, launched.defaults, unplanned)
    require_planned(args, decision.plan)
    return result


def validate_arguments(
    validate: Callable[..., Any], args: Namespace, defaults: Mapping[str, Any], unplanned: Namespace
) -> Any:
    """What ``validate_args`` of Megatron returns; ``unplanned``: the arguments without a plan.

    Raises:
        RefusedByMegatronError: if it refuses them without the plan, too, for the same reason; any
            other error is that of the plan, and comes as Megatron raises it.
    """
    try:
        return validate(args, defaults)
    except NestError:
        raise
    except Exception as error:
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                validate(unplanned, defaults)
        except Exception as other:  # noqa: BLE001 - whatever Megatron raises
            if _error_identity(other) == _error_identity(error):
                text = str(error) or traceback.extract_tb(error.__traceback__)[-1].line
                raise RefusedByMegatronError(
                    f"Megatron's own validation refuses the arguments: {text} (try without +nest)"
                ) from error
        raise


def _error_identity(error: Exception) -> tuple[object, ...]:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return type(error), str(error), last.filename, last.lineno


def comparable_arguments(
    args: Namespace, version: str, may_differ: Collection[str] = ()
) -> dict[str, str]:
    """Everything of Megatron's arguments that must be the same on all ranks, by its flag.

    An argument that a flag switches off has both names.
    """
    flags: dict[str, str] = {}
    for argument in load_arguments(version):
        flag = argument.flags[0]
        off = argument.action == "store_false"
        flags.setdefault(argument.dest, f"{argument.dest} ({flag} makes it False)" if off else flag)
    return {
        flags.get(name, f"args.{name}"): comparable_text(value)
        for name, value in sorted(vars(args).items())
        if name not in MAY_DIFFER and name not in may_differ
    }


def _installed() -> str:
    from megatron.core import __version__ as release

    return str(release)


def _find_plan(launched: LaunchedJob, measured: tuple[Job, JobCluster] | None = None) -> LaunchPlan:
    """The plan; one that is searched, with the layer times that were measured for it, if any."""
    launch = launched.launch
    if launched.words.mode is Mode.PINNED:
        return pinned_plan(launched, _read(launched))
    job, place = measured or _job_and_place(launched)
    return planning.decide(job, place, free=launch.free, alternative=launch.alternative)


def _job_and_place(launched: LaunchedJob) -> tuple[Job, JobCluster]:
    return _read(launched), _find_place(launched, launched.args.world_size)


def _find_place(launched: LaunchedJob, num_ranks: int) -> JobCluster:
    """Where a job runs: as ``nest.cluster`` names it, or as it is found."""
    return find_cluster(
        launched.words.job,
        num_ranks,
        os.environ,
        dry_run=launched.launch.dry_run,
        hosts=launched.hosts if launched.launch.ranks == "by_host" else launched.unordered_hosts,
        mixed=MixedGpus(launched.launch.mixed_gpus),
    )


def _read(launched: LaunchedJob) -> Job:
    _output_file(launched)
    return planning.read_running_job(
        launched.args, launched.defaults, (launched.script, launched.argv), _installed()
    )


def _with_ranks(launched: LaunchedJob, outcome: LaunchPlan, hosts: Hosts) -> LaunchPlan:
    """The outcome with the ranks that processes take: those of ``nest.ranks``, or by host."""
    ranks = outcome.decision.ranks
    asked = launched.launch.ranks
    if isinstance(asked, list):
        ranks = tuple(asked)
    elif ranks is None and asked == "by_host":
        ranks = ranks_by_host(hosts(), {host.name: host.groups for host in launched.hosts})
    if ranks is None:
        return outcome
    may_move = launched.store is not None and launched.store.context.agent_hosts_store
    check_permutation(ranks, len(hosts()), zero_may_move=may_move)
    plan = outcome.decision.plan
    note = "Ranks are numbered anew so that each host's are together, and hosts of one switch."
    if isinstance(asked, list) or outcome.decision.ranks is not None:
        note = "Ranks are numbered anew, as asked for."
        plan = replace(plan, placement=replace(plan.placement, rank_permutation=ranks))
    decision = replace(outcome.decision, plan=plan, ranks=ranks)
    return replace(outcome, decision=decision, notes=(*outcome.notes, note))


def apply(args: Namespace, decision: Decision) -> None:
    """Carry a decision out in this process: arguments, variables, this process's rank."""
    assert decision.values.keys() <= attach.WRITABLE
    for dest, value in decision.values.items():
        if hasattr(args, dest):
            setattr(args, dest, value)
    set_variables(decision.plan.launch[attach.LAUNCHER].environment)
    if decision.ranks is not None:
        args.rank = decision.ranks[args.rank]
        set_variables({"RANK": str(args.rank)})


def _print_costs(searched: Searched | None) -> None:
    """Print what the user's flags cost while training starts, which it must not disturb."""
    if searched is None or not searched.kept:
        return
    try:
        show(flag_cost_report(searched.best_s, planning.costs(searched)))
    except NestError as error:
        print_cleaned(f"nest: what the kept flags cost cannot be said: {error}")


def _output_file(launched: LaunchedJob) -> Path | None:
    return plan_output(launched.last_value("out"), [launched.launch.plan])


def _write_plan(launched: LaunchedJob, plan: ParallelPlan) -> str:
    """Write the plan file and say where; a cache that cannot be written is no reason to stop."""
    asked = path = _output_file(launched)
    try:
        if path is None:
            name = f"{plan.model.name}-{plan_file.checksum(plan)}.yaml"
            path = user_folder("cache") / "plans" / name
            path.parent.mkdir(parents=True, exist_ok=True)
        plan_file.write(plan, path)
    except (OSError, UserInputError) as error:
        if asked is not None:
            raise
        return f"nest: the full plan could not be kept ({error}); nest.out=FILE names a place."
    return plan_file_note(path)


_VIRTUAL = "virtual_pipeline_model_parallel_size"
#: What a plan keeps under ``nearest``, by the names of ``layout_arguments``: which rank holds which
#: part of the model, and how its states are divided. Replicas take the ranks that are there.
_KEPT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    _VIRTUAL,
    "pipeline_model_parallel_layout",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "use_distributed_optimizer",
    "use_megatron_fsdp",
)
#: Flags of the job that the search may change, where the plan and not the command says what stays.
_ALL = ("all",)


def pinned_plan(launched: LaunchedJob, job: Job) -> LaunchPlan:
    """The plan of ``nest.plan`` for a running job, or the one that takes its place.

    Raises:
        UserInputError: for another job, for other machines or software where the user lets nothing
            take the plan's place, and where nothing legal can.
        NothingFitsError: if what could take its place does not fit in memory.
    """
    path = pinned_file(launched.launch.plan)
    dry_run = launched.launch.dry_run
    allowed = allowed_on_mismatch(launched.launch.on_mismatch)
    _refuse_search(launched, allowed)
    cluster = None
    world_size = launched.args.world_size
    if names_cluster(launched.words.job):
        cluster = _find_place(launched, world_size).cluster
        world_size = cluster.num_gpus
    unsized = cluster is None and dry_run and "WORLD_SIZE" not in os.environ
    pinned = read_launched(path, None if unsized else world_size)
    if unsized:
        world_size = pinned.plan.layout.num_gpus
    gpus = None
    if cluster is None and not dry_run:
        gpus, _ = like_gpus(launched.hosts, local_gpus(), MixedGpus(launched.launch.mixed_gpus))
    actual = actual_job(
        pinned,
        job,
        num_gpus=world_size,
        cluster=cluster,
        gpus=gpus,
        gpus_per_host=None if dry_run else processes_per_host(os.environ),
    )
    found = differences(pinned, actual)
    if not found:
        launched.signer = pinned.signer
        return _pinned_launch(job, pinned)
    if not all(each.is_of_moment for each in found):
        raise refusal(found)
    if allowed[0] is OnMismatch.REFUSE:
        fix = "Launch the pinned job, or plan and pin this one"
        others = " or ".join(allowed[1:])
        if others:
            fix += f"; nest.on_mismatch={others} has another plan take its place"
        raise refusal(found, f"{fix}.")
    return _replacement(launched, job, pinned, actual, found, allowed)


#: Sections of settings that say what is searched, and how.
_OF_SEARCH = ("parallel", "search", "memory", "cost", "profile", "reliability")


def _refuse_search(launched: LaunchedJob, allowed: Sequence[OnMismatch]) -> None:
    """Refuse what a plan that is launched as it was pinned does not follow."""
    searches: dict[str, object] = {
        f"nest.{each.key}": each.value
        for each in launched.words.job
        if each.origin is None and each.key.partition(".")[0] in _OF_SEARCH
        if allowed[0] is OnMismatch.REFUSE
    }
    if launched.launch.free and allowed[0] is not OnMismatch.REPLAN:
        searches["nest.free"] = launched.launch.free
    for name, value in searches.items():
        more = ", or let it hold where the machines are others: nest.on_mismatch=replan"
        raise UserInputError(
            name,
            value,
            "+nest=pinned launches the plan as it was reviewed, and searches nothing",
            f"Leave it out{more if OnMismatch.REPLAN in allowed else ''}.",
        )


def _pinned_launch(job: Job, pinned: PinnedPlan) -> LaunchPlan:
    assert job.command
    if restored := restored_by_command(job.command.values):
        restored.check(pinned.plan, job.version)
    plan = pinned.plan
    rows = job.spec.vocab_size
    if job.spec.vocab_is_padded and rows % plan.layout.dims.tensor_model_parallel_size == 0:
        # the embedding has the rows that the job gives it by itself
        plan = replace(plan, model=replace(plan.model, vocab_size=rows, vocab_is_padded=True))
    return planning.launch_plan(
        plan, job.command, (pin_note(pinned.pin), *filter(None, [pinned.told]))
    )


def _replacement(
    launched: LaunchedJob,
    job: Job,
    pinned: PinnedPlan,
    actual: ActualJob,
    found: Sequence[Difference],
    allowed: Sequence[OnMismatch],
) -> LaunchPlan:
    """The plan that the machines of the moment get, with the reason in its notes."""
    policy = allowed[0]
    note = (
        f"{pin_note(pinned.pin)} Another plan takes its place (nest.on_mismatch={policy}): "
        f"{'; '.join(map(str, found))}."
    )
    place = _place(launched, pinned.plan.cluster, actual)
    job = replace(job, notes=(*job.notes, note))
    made_by = f"+nest=pinned nest.on_mismatch={policy}"
    if policy is OnMismatch.REPLAN:
        return planning.decide(job, place, free=launched.launch.free, made_by=made_by)
    way_out = (
        "search anew with nest.on_mismatch=replan"
        if OnMismatch.REPLAN in allowed
        else "pin a plan for these machines"
    )
    arguments = pinned.plan.arguments
    values = {**arguments, _VIRTUAL: arguments[_VIRTUAL] or 1}
    kept = {
        name: Requirement(
            value=values[name],
            reason="nest.on_mismatch=nearest keeps its degrees and stages",
            fix=way_out,
            who="the pinned plan",
        )
        for name in _KEPT
        if values[name] is not None and (job.spec.is_moe or not name.startswith("expert"))
    }
    job = replace(job, required={**job.required, **kept})
    try:
        return planning.decide(job, place, free=_ALL, made_by=made_by)
    except UserInputError as error:
        if (smaller := _largest_below(job, place, pinned.plan.layout.dims)) is None:
            raise
        fix = (
            f"Start {smaller} ranks, the most below {actual.num_gpus} that the pinned plan's "
            f"degrees and stages can be used on, or {way_out}."
        )
        raise UserInputError(error.what, error.value, error.limit, fix) from error


def _largest_below(job: Job, place: JobCluster, dims: ParallelDims) -> int | None:
    """The most ranks below those that are there for which a plan keeps what ``job`` requires."""
    job = replace(job, free=_ALL)
    for number in range(place.cluster.num_gpus - 1, 0, -1):
        replicas, rest = divmod(number, dims.world_size // dims.data_parallel_size)
        if rest or (job.final_batch_size or 0) % replicas:
            continue
        with contextlib.suppress(UserInputError):
            smaller = replace(place, cluster=place.cluster.resized(number))
            asked = replace(planning.running_request(job, smaller), remedies=False)
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
        return _find_place(launched, actual.num_gpus)
    cluster = planned.resized(actual.num_gpus)
    per_host = actual.gpus_per_host
    if per_host not in (None, cluster.launch_gpus_per_host) and cluster.gpus_per_host is None:
        cluster = with_hosts_of(cluster, per_host)
    note = f"The network is taken to be that of the pinned plan ({planned.name})."
    return JobCluster(cluster=cluster, settings=compose(words), notes=(note,))
