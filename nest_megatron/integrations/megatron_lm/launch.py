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
from typing import TYPE_CHECKING, Any

from nest_megatron.cluster.discovery import local_gpus
from nest_megatron.config.cluster_detection import (
    Surroundings,
    names_cluster,
    processes_per_host,
    surroundings,
)
from nest_megatron.config.job import Job
from nest_megatron.config.launch import Mode
from nest_megatron.errors import OK, NestError, RefusedByMegatronError, UserInputError
from nest_megatron.integrations.megatron_lm.agreement import Hosts, broadcast, require_equal
from nest_megatron.integrations.megatron_lm.decision import Decision, read_decision
from nest_megatron.integrations.megatron_lm.groups import (
    check_groups,
    check_permutation,
    ranks_by_host,
)
from nest_megatron.integrations.megatron_lm.namespace import (
    flags_of,
    recorded_version,
    require_planned,
    write,
)
from nest_megatron.integrations.megatron_lm.planning import (
    Outcome,
    carry_out,
    decide,
    read_running_job,
)
from nest_megatron.integrations.megatron_lm.ranks import words_of
from nest_megatron.integrations.megatron_lm.rendezvous import RankContext
from nest_megatron.integrations.megatron_lm.rendezvous_store import RendezvousStore
from nest_megatron.integrations.megatron_lm.same_job import arguments, comparable, versions
from nest_megatron.integrations.plan_output import plan_output
from nest_megatron.parallel import plan_file
from nest_megatron.parallel.plan import ParallelPlan
from nest_megatron.planner.pins import Found, read_pinned, require_same_job
from nest_megatron.profile.mode import ProfileMode

if TYPE_CHECKING:
    from nest_megatron.integrations.megatron_lm.hook import Session


def run(
    session: Session,
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
    store = _store(session, args)
    if store is None:
        return _run(session, args, defaults, validate, None)
    with store.propagating_errors():
        require_equal(store, _command(session, args, defaults), what="command")
        return _run(session, args, defaults, validate, store)


def _run(
    session: Session,
    args: Namespace,
    defaults: Mapping[str, Any],
    validate: Callable[..., Any],
    store: RendezvousStore | None,
) -> Any:
    job = _measured(session, args, defaults, store) if _measures(session) else None

    def solve(hosts: Hosts) -> str:
        found = find(session, args, defaults) if job is None else _decided(session, *job)
        outcome = _with_ranks(session, found, hosts)
        tell(session, outcome)
        return outcome.decision.to_text()

    text = solve(lambda: ["localhost"]) if store is None else broadcast(store, solve)
    decision = session.decision = read_decision(text)
    if session.launch.stop_before_training:
        if store is not None:
            checksum = decision.plan.provenance.checksum
            require_equal(store, {"plan": checksum}, what="plan")  # no rank ends before the others
        sys.exit(OK)
    unplanned = copy.deepcopy(args)
    apply(args, decision)
    result = validated(validate, args, defaults, unplanned)
    require_planned(args, decision.plan)
    if store is not None:
        require_equal(store, _arguments(session, args), what="arguments")
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


def _command(session: Session, args: Namespace, defaults: Mapping[str, Any]) -> dict[str, str]:
    """What this rank was started with."""
    return {
        **versions(),
        **words_of(session.words),
        "defaults of the script": comparable(defaults),
        **_arguments(session, args),
    }


def _arguments(session: Session, args: Namespace) -> dict[str, str]:
    from megatron.core import __version__ as release

    flags = flags_of(recorded_version(release))
    return arguments(args, flags, session.launch.may_differ)


def _store(session: Session, args: Namespace) -> RendezvousStore | None:
    """Where the ranks meet; ``None`` for a process that has no others."""
    if args.world_size == 1 or args.fake_process_group:
        return None
    timeout_s = 60.0 * (args.distributed_timeout_minutes or 10)
    return session.rendezvous.join(args.rank, args.world_size, session.words, timeout_s)


def find(session: Session, args: Namespace, defaults: Mapping[str, Any]) -> Outcome:
    """A plan for the job of this process: searched, or pinned.

    Raises:
        NestError: if there is none.
    """
    asked_file(session)
    job = _read(session, args, defaults)
    if session.words.mode is Mode.PINNED:
        return _pinned(session, job, args.world_size)
    return _decided(session, job, _place(session, args))


def _read(session: Session, args: Namespace, defaults: Mapping[str, Any]) -> Job:
    from megatron.core import __version__ as release

    command_line = (session.script, session.argv)
    return read_running_job(args, defaults, command_line, recorded_version(release))


def _place(session: Session, args: Namespace) -> Surroundings:
    dry_run = session.launch.dry_run
    return surroundings(session.words.job, args.world_size, os.environ, dry_run=dry_run)


def _decided(session: Session, job: Job, place: Surroundings) -> Outcome:
    launch = session.launch
    return decide(job, place, free=launch.free, alternative=launch.alternative)


def _measures(session: Session) -> bool:
    """Whether layers are to be measured first; said in the command itself, so all ranks know."""
    said = [s.value for s in session.words.job if s.key == "profile.mode" and s.value is not None]
    asked = said[-1:] == [ProfileMode.MEASURE.value]
    return asked and session.words.mode is Mode.AUTO and not session.launch.dry_run


def _measured(
    session: Session, args: Namespace, defaults: Mapping[str, Any], store: RendezvousStore | None
) -> tuple[Job, Surroundings] | None:
    """The job and where it runs, with layer times measured just now, on rank 0; all take part."""
    from nest_megatron.integrations.megatron_lm.measure import measure_job, planned_with

    read: list[tuple[Job, Surroundings]] = []

    def job() -> tuple[Job, Surroundings]:
        asked_file(session)
        read.append((_read(session, args, defaults), _place(session, args)))
        return read[0]

    measured = measure_job(job, store=store, defaults=defaults, free=session.launch.free)
    if not read:
        return None
    ((found, place),) = read
    return found, planned_with(place, measured)


def _pinned(session: Session, job: Job, world_size: int) -> Outcome:
    if session.launch.plan is None:
        raise UserInputError(
            "nest.plan",
            value=None,
            limit="+nest=pinned launches a reviewed plan",
            fix="Name it: nest.plan=FILE (`nest-megatron pin` makes one).",
        )
    pinned = read_pinned(Path(session.launch.plan).expanduser())
    dry_run = session.launch.dry_run
    named = names_cluster(session.words.job)
    if named:
        place = surroundings(session.words.job, world_size, os.environ, dry_run=dry_run)
        world_size = place.cluster.num_gpus
    elif dry_run and "WORLD_SIZE" not in os.environ:
        world_size = pinned.plan.placement.num_gpus
    assert job.command is not None
    found = Found(
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
    who = f"Pinned {pinned.pin.created} by {pinned.pin.by}."
    return carry_out(_with_rows_of(job, pinned.plan), job.command, (who,))


def _with_rows_of(job: Job, plan: ParallelPlan) -> ParallelPlan:
    """The plan with the embedding's rows that the job has by itself, where they can be split."""
    rows = job.spec.vocab_size
    if not job.spec.vocab_is_padded or rows % plan.parallel.tensor_model_parallel_size:
        return plan
    model = dataclasses.replace(plan.model, vocab_size=rows, vocab_is_padded=True)
    return dataclasses.replace(plan, model=model)


def _with_ranks(session: Session, outcome: Outcome, hosts: Hosts) -> Outcome:
    """The outcome with the ranks that processes take: as told, or each host's together."""
    ranks = outcome.decision.ranks
    asked = session.launch.ranks
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


def tell(session: Session, outcome: Outcome) -> None:
    """Say on rank 0 what will run and why, and keep the full plan in a file."""
    from nest_megatron.integrations.launched import launched_report
    from nest_megatron.integrations.megatron_lm.flag_cost import print_costs
    from nest_megatron.report.console import say, show

    show(launched_report(outcome.decision.plan, outcome.changes, outcome.notes))
    say(keep(session, outcome.decision.plan))
    if outcome.searched is not None and outcome.searched.kept:
        threading.Thread(target=print_costs, args=(outcome.searched,), daemon=True).start()


def asked_file(session: Session) -> Path | None:
    """The file that the user wants the plan in, checked."""
    given = [setting.value for setting in session.words.job if setting.key == "out"]
    return plan_output(given[-1] if given else None, [session.launch.plan])


def keep(session: Session, plan: ParallelPlan) -> str:
    """Write the plan file; a cache that cannot be written is no reason to stop.

    Returns:
        Where it is, in a sentence.
    """
    from platformdirs import user_cache_path

    asked = path = asked_file(session)
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
    return f"nest: the full plan is in {path} (`nest-megatron explain` shows it)"


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
