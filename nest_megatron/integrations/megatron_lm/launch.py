"""``+nest=auto`` and ``+nest=pinned`` in a job that is about to train: plan, agree, rewrite."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import os
import sys
import threading
import traceback
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from nest_megatron.cluster.discovery import local_gpus
from nest_megatron.config.cluster_detection import (
    JobCluster,
    find_cluster,
    names_cluster,
    processes_per_host,
)
from nest_megatron.config.job import Job
from nest_megatron.config.launch import Mode
from nest_megatron.errors import OK, NestError, RefusedByMegatronError, UserInputError
from nest_megatron.integrations.megatron_lm.agreement import (
    Hosts,
    broadcast,
    propagating_errors,
    require_equal,
)
from nest_megatron.integrations.megatron_lm.groups import (
    check_groups,
    check_permutation,
    ranks_by_host,
)
from nest_megatron.integrations.megatron_lm.launched_job import LaunchedJob
from nest_megatron.integrations.megatron_lm.messages import Decision, from_json, to_json
from nest_megatron.integrations.megatron_lm.namespace import (
    flags_of,
    recorded_version,
    require_planned,
    write,
)
from nest_megatron.integrations.megatron_lm.planning import (
    LaunchPlan,
    carry_out,
    decide,
    read_running_job,
)
from nest_megatron.integrations.megatron_lm.ranks import words_of
from nest_megatron.integrations.megatron_lm.rendezvous import RankContext
from nest_megatron.integrations.megatron_lm.rendezvous_store import RendezvousStore
from nest_megatron.integrations.megatron_lm.same_job import arguments, comparable, versions
from nest_megatron.integrations.plan_output import pinned_by, pinned_file, plan_output, told_where
from nest_megatron.parallel import plan_file
from nest_megatron.parallel.plan import ParallelPlan
from nest_megatron.planner.pins import ActualJob, read_pinned, require_same_job
from nest_megatron.profile.mode import ProfileMode


def run(
    launched: LaunchedJob,
    args: Namespace,
    defaults: Mapping[str, Any],
    validate: Callable[..., Any],
) -> Any:
    """Plan on rank 0, rewrite the arguments on every rank, and let Megatron validate them.

    Returns:
        What Megatron's own ``validate_args`` returns.

    Raises:
        NestError: if no plan can be made or carried out; nothing has touched a GPU then.
    """
    store = _store(launched, args)
    with propagating_errors(store):
        require_equal(store, _command(launched, args, defaults), what="command")
        return _run(launched, args, defaults, validate, store)


def _run(
    launched: LaunchedJob,
    args: Namespace,
    defaults: Mapping[str, Any],
    validate: Callable[..., Any],
    store: RendezvousStore | None,
) -> Any:
    job = _measured(launched, args, defaults, store) if _measures(launched) else None

    def solve(hosts: Hosts) -> str:
        found = find(launched, args, defaults) if job is None else _decided(launched, *job)
        outcome = _with_ranks(launched, found, hosts)
        tell(launched, outcome)
        return to_json(outcome.decision)

    decision = launched.decision = from_json(Decision, broadcast(store, solve))
    if launched.launch.stop_before_training:
        checksum = decision.plan.provenance.checksum
        require_equal(store, {"plan": checksum}, what="plan")  # no rank ends before the others
        sys.exit(OK)
    unplanned = copy.deepcopy(args)
    apply(args, decision)
    result = validated(validate, args, defaults, unplanned)
    require_planned(args, decision.plan)
    require_equal(store, _arguments(launched, args), what="arguments")
    return result


def validated(
    validate: Callable[..., Any], args: Namespace, defaults: Mapping[str, Any], unplanned: Namespace
) -> Any:
    """What Megatron's own ``validate_args`` returns.

    Args:
        unplanned: the arguments before the plan was written into them.

    Raises:
        RefusedByMegatronError: if it refuses them without the plan, too, for the same reason; any
            other error is that of the plan, and comes as Megatron raises it.
    """
    try:
        return validate(args, defaults)
    except Exception as error:
        if isinstance(error, NestError) or not _refuses(validate, unplanned, defaults, error):
            raise
        text = str(error) or traceback.extract_tb(error.__traceback__)[-1].line
        raise RefusedByMegatronError(
            f"Megatron's own validation refuses the arguments: {text} (try without +nest)"
        ) from error


def _refuses(
    validate: Callable[..., Any],
    unplanned: Namespace,
    defaults: Mapping[str, Any],
    error: Exception,
) -> bool:
    """Whether arguments without a plan are refused at the same place in the same words."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            validate(unplanned, defaults)
    except Exception as again:  # noqa: BLE001 - whatever Megatron raises
        return _place_and_words(again) == _place_and_words(error)
    return False


def _place_and_words(error: Exception) -> tuple[object, ...]:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return type(error), str(error), last.filename, last.lineno


def _command(launched: LaunchedJob, args: Namespace, defaults: Mapping[str, Any]) -> dict[str, str]:
    """What this rank was started with."""
    return {
        **versions(),
        **words_of(launched.words),
        "defaults of the script": comparable(defaults),
        **_arguments(launched, args),
    }


def _arguments(launched: LaunchedJob, args: Namespace) -> dict[str, str]:
    from megatron.core import __version__ as release

    flags = flags_of(recorded_version(release))
    return arguments(args, flags, launched.launch.may_differ)


def _store(launched: LaunchedJob, args: Namespace) -> RendezvousStore | None:
    """Where the ranks meet; ``None`` for a process that has no others."""
    if args.world_size == 1 or args.fake_process_group:
        return None
    timeout_s = 60.0 * (args.distributed_timeout_minutes or 10)
    return launched.rendezvous.join(args.rank, args.world_size, launched.words, timeout_s)


def find(launched: LaunchedJob, args: Namespace, defaults: Mapping[str, Any]) -> LaunchPlan:
    """A plan for the job of this process: searched, or pinned.

    Raises:
        NestError: if there is none.
    """
    asked_file(launched)
    job = _read(launched, args, defaults)
    if launched.words.mode is Mode.PINNED:
        return _pinned(launched, job, args.world_size)
    return _decided(launched, job, _place(launched, args))


def _read(launched: LaunchedJob, args: Namespace, defaults: Mapping[str, Any]) -> Job:
    from megatron.core import __version__ as release

    command_line = (launched.script, launched.argv)
    return read_running_job(args, defaults, command_line, recorded_version(release))


def _place(launched: LaunchedJob, args: Namespace) -> JobCluster:
    dry_run = launched.launch.dry_run
    return find_cluster(launched.words.job, args.world_size, os.environ, dry_run=dry_run)


def _decided(launched: LaunchedJob, job: Job, place: JobCluster) -> LaunchPlan:
    launch = launched.launch
    return decide(job, place, free=launch.free, alternative=launch.alternative)


def _measures(launched: LaunchedJob) -> bool:
    """Whether layers are to be measured first; said in the command itself, so all ranks know."""
    said = [s.value for s in launched.words.job if s.key == "profile.mode" and s.value is not None]
    asked = said[-1:] == [ProfileMode.MEASURE.value]
    return asked and launched.words.mode is Mode.AUTO and not launched.launch.dry_run


def _measured(
    launched: LaunchedJob,
    args: Namespace,
    defaults: Mapping[str, Any],
    store: RendezvousStore | None,
) -> tuple[Job, JobCluster] | None:
    """The job and where it runs, with layer times measured just now, on rank 0; all take part."""
    from nest_megatron.integrations.megatron_lm.measure import measure_job, planned_with

    read: list[tuple[Job, JobCluster]] = []

    def job() -> tuple[Job, JobCluster]:
        asked_file(launched)
        read.append((_read(launched, args, defaults), _place(launched, args)))
        return read[0]

    measured = measure_job(job, store=store, defaults=defaults, free=launched.launch.free)
    if not read:
        return None
    ((found, place),) = read
    return found, planned_with(place, measured)


def _pinned(launched: LaunchedJob, job: Job, world_size: int) -> LaunchPlan:
    pinned = read_pinned(pinned_file(launched.launch.plan))
    dry_run = launched.launch.dry_run
    named = names_cluster(launched.words.job)
    if named:
        place = find_cluster(launched.words.job, world_size, os.environ, dry_run=dry_run)
        world_size = place.cluster.num_gpus
    elif dry_run and "WORLD_SIZE" not in os.environ:
        world_size = pinned.plan.placement.num_gpus
    assert job.command is not None
    found = ActualJob(
        spec=job.spec,
        num_gpus=world_size,
        cluster=place.cluster if named else None,
        gpus=None if named or dry_run else local_gpus(),
        gpus_per_host=None if dry_run else processes_per_host(os.environ),
        global_batch_size=job.global_batch_size,
        precision=job.precision,
        tensor_model_parallel_size=job.command.values["tensor_model_parallel_size"],
        megatron_lm=job.version,
        memory_flags=job.memory_flags,
    )
    require_same_job(pinned, found)
    plan = _with_rows_of(job, pinned.plan)
    return carry_out(plan, job.command, (pinned_by(pinned.pin),))


def _with_rows_of(job: Job, plan: ParallelPlan) -> ParallelPlan:
    """The plan with the embedding's rows that the job has by itself, where they can be split."""
    rows = job.spec.vocab_size
    if not job.spec.vocab_is_padded or rows % plan.parallel.tensor_model_parallel_size:
        return plan
    model = dataclasses.replace(plan.model, vocab_size=rows, vocab_is_padded=True)
    return dataclasses.replace(plan, model=model)


def _with_ranks(launched: LaunchedJob, outcome: LaunchPlan, hosts: Hosts) -> LaunchPlan:
    """The outcome with the ranks that processes take: as told, or each host's together."""
    ranks = outcome.decision.ranks
    asked = launched.launch.ranks
    if isinstance(asked, list):
        ranks = tuple(asked)
    elif ranks is None and asked == "by_host":
        ranks = ranks_by_host(hosts())
    if ranks is None:
        return outcome
    context = RankContext(rank=0, world_size=len(hosts()), environment=dict(os.environ))
    check_permutation(ranks, context.world_size, zero_may_move=context.agent_hosts_store)
    plan = outcome.decision.plan
    note = "Ranks are numbered anew so that each host's are together."
    if isinstance(asked, list) or outcome.decision.ranks is not None:
        note = "Ranks are numbered anew, as asked for."
        placement = dataclasses.replace(plan.placement, rank_permutation=ranks)
        plan = plan_file.sealed(dataclasses.replace(plan, placement=placement))
    return dataclasses.replace(
        outcome,
        decision=dataclasses.replace(outcome.decision, plan=plan, ranks=ranks),
        notes=(*outcome.notes, note),
    )


def apply(args: Namespace, decision: Decision) -> None:
    """Carry a decision out in this process: arguments, variables, this process's rank."""
    write(args, decision.values, decision.environment)
    if decision.ranks is not None:
        args.rank = decision.ranks[args.rank]
        os.environ["RANK"] = str(args.rank)


def tell(launched: LaunchedJob, outcome: LaunchPlan) -> None:
    """Say on rank 0 what will run and why, and keep the full plan in a file."""
    from nest_megatron.integrations.launched import launched_report
    from nest_megatron.integrations.megatron_lm.flag_cost import print_costs
    from nest_megatron.report.console import say, show

    show(launched_report(outcome.decision.plan, outcome.changes, outcome.notes))
    say(keep(launched, outcome.decision.plan))
    if outcome.searched is not None and outcome.searched.kept:
        threading.Thread(target=print_costs, args=(outcome.searched,), daemon=True).start()


def asked_file(launched: LaunchedJob) -> Path | None:
    """The file that the user wants the plan in, checked."""
    given = [setting.value for setting in launched.words.job if setting.key == "out"]
    return plan_output(given[-1] if given else None, [launched.launch.plan])


def keep(launched: LaunchedJob, plan: ParallelPlan) -> str:
    """Write the plan file; a cache that cannot be written is no reason to stop.

    Returns:
        Where it is, in a sentence.
    """
    from platformdirs import user_cache_path

    asked = path = asked_file(launched)
    try:
        if path is None:
            name = f"{plan.model.name}-{plan.provenance.checksum}.yaml"
            path = user_cache_path("nest-megatron") / "plans" / name
            path.parent.mkdir(parents=True, exist_ok=True)
        plan_file.write(plan, path)
    except (OSError, UserInputError) as error:
        if asked is not None:
            raise
        return f"nest: the full plan could not be kept ({error}); nest.out=FILE names a place."
    return told_where(path)


def compare_groups(plan: ParallelPlan, parallel_state: ModuleType) -> None:
    """Compare Megatron's process groups with the plan's.

    Raises:
        NestError: if one differs.
    """
    import torch

    rank = torch.distributed.get_rank()
    # megatron-core before 0.10, which NeMo 1 runs on, makes the experts' groups in another way
    has_experts = plan.model.is_moe and hasattr(parallel_state, "get_expert_data_parallel_group")
    check_groups(parallel_state, plan.grid().dims, rank, has_experts=has_experts)
