"""``+nest=auto`` and ``+nest=pinned`` in a job that is about to train: plan, agree, rewrite.

``nest.dry_run=true`` does everything that a launch would do, as far as the first GPU.
"""

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
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from nest_megatron.cluster.discovery import is_same_device, known_gpus
from nest_megatron.config.cluster_detection import JobCluster
from nest_megatron.config.job import Job
from nest_megatron.config.launch import Mode
from nest_megatron.errors import OK, NestError, RefusedByMegatronError, UserInputError
from nest_megatron.files import user_folder
from nest_megatron.integrations import audit
from nest_megatron.integrations.launched import flag_cost_report, launched_report
from nest_megatron.integrations.megatron_lm import agreement, attach, groups, planning, watch
from nest_megatron.integrations.megatron_lm.measure import measure_job
from nest_megatron.integrations.megatron_lm.namespace import (
    flags_of,
    require_planned,
    write,
)
from nest_megatron.integrations.megatron_lm.own_layers import stand_in_device
from nest_megatron.integrations.megatron_lm.pinned import pinned_plan
from nest_megatron.integrations.megatron_lm.planning import Decision
from nest_megatron.integrations.megatron_lm.ranks import (
    LaunchedJob,
    job_hosts,
    last_value,
    words_of,
)
from nest_megatron.integrations.megatron_lm.rendezvous import RankContext
from nest_megatron.integrations.megatron_lm.same_job import arguments, comparable, versions
from nest_megatron.integrations.plan_output import plan_output, told_where
from nest_megatron.integrations.process_variables import set_variables
from nest_megatron.integrations.site_policy import require_launch
from nest_megatron.layout import plan_file
from nest_megatron.layout.plan import ParallelPlan, launch_words
from nest_megatron.layout.rulebook.facts import known_release
from nest_megatron.plain import from_plain
from nest_megatron.printing import print_cleaned
from nest_megatron.profile.mode import ProfileMode
from nest_megatron.report.console import command_lines, say, show


def run(launched: LaunchedJob) -> Any:
    """Plan on rank 0, rewrite the arguments on every rank, and let Megatron validate them.

    Raises:
        NestError: if no plan can be made or carried out; nothing has touched a GPU then.
    """
    args, launch, words = launched.args, launched.launch, launched.words
    if args.world_size > 1 and not getattr(args, "fake_process_group", False):  # none in 0.15
        launched.join(60.0 * (args.distributed_timeout_minutes or 10))
    store = launched.store
    measured = None

    def solve(hosts: agreement.Hosts) -> Decision:
        with contextlib.ExitStack() as audited:
            if not launch.stop_before_training:  # what is not to train is no launch
                audited.enter_context(
                    audit.refusals(words.mode.value, launch.plan, args.world_size)
                )
            require_launch(words.mode, launch.free, _release())
            found = _find(launched, measured)
        outcome = _with_ranks(launched, found, hosts)
        launched.changes = tuple(outcome.changes)
        show(launched_report(outcome.decision.plan, outcome.changes, outcome.notes))
        say(_write_plan(launched, outcome.decision.plan))
        if outcome.searched is not None and outcome.searched.kept:
            threading.Thread(target=_print_costs, args=(outcome.searched,), daemon=True).start()
        return outcome.decision

    with agreement.propagating_errors(store):
        command = {
            **versions(),
            **words_of(words),
            "defaults of the script": comparable(launched.defaults),
            **_arguments(launched),
        }
        agreement.require_equal(store, command, what="command")
        launched.hosts = job_hosts(store)
        measures = last_value(words, "profile.mode") == ProfileMode.MEASURE.value
        if measures and words.mode is Mode.AUTO:
            measured = measure_job(
                lambda: _job_and_place(launched),
                store=store,
                defaults=launched.defaults,
                free=launch.free,
            )
        decision = launched.decision = from_plain(Decision, agreement.broadcast(store, solve))
        if launch.stop_before_training:
            checksum = {"plan": plan_file.checksum(decision.plan)}
            agreement.require_equal(store, checksum, what="plan")  # no rank ends before the others
            sys.exit(OK)
        result = _carried_out(launched, decision)
        agreement.require_equal(store, _arguments(launched), what="arguments")
        watch.begin(launched)
        return result


def dry_run(launched: LaunchedJob) -> None:
    """Print the plan, the changes and the command on rank 0; have Megatron validate them."""
    if os.environ.get("RANK", "0") != "0":
        return
    outcome = _find(launched)
    plan = outcome.decision.plan
    show(launched_report(plan, outcome.changes, outcome.notes))
    launched.args.world_size = plan.layout.num_gpus
    with _device_of(plan), contextlib.redirect_stdout(io.StringIO()):  # it prints every argument
        _carried_out(launched, outcome.decision)
    say("nest: Megatron's own validation accepts this.\n")
    _show_command(launched, plan)
    if _asked_file(launched) is not None:
        say(_write_plan(launched, plan))
    if outcome.searched is not None and outcome.searched.kept:
        _print_costs(outcome.searched)
    say("nest: dry run; nothing was started.")


def _show_command(launched: LaunchedJob, plan: ParallelPlan) -> None:
    launch = plan.launch[attach.LAUNCHER]
    wanted = [(name, text) for name, text in launch.environment.items() if text is not None]
    say("nest: the same without nest\n")
    say(command_lines(launch_words(plan, launched.script, launch.argv), wanted))
    for name, text in launch.environment.items():
        if text is None:
            say(f"  with {name} unset")
    say()


def _device_of(plan: ParallelPlan) -> AbstractContextManager[None]:
    """Stand in for the planned device unless it is here: Megatron asks for its generation."""
    device, here = plan.cluster.accelerator, known_gpus()
    if here is not None and is_same_device(device, here):
        return contextlib.nullcontext()
    return stand_in_device(device.name, attach.device_architecture(plan), device.memory_bytes)


def _carried_out(launched: LaunchedJob, decision: Decision) -> Any:
    args, validate = launched.args, launched.validate
    assert validate is not None
    unplanned = copy.deepcopy(args)
    apply(args, decision)
    result = validated(validate, args, launched.defaults, unplanned)
    require_planned(args, decision.plan)
    return result


def validated(
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
            if _place_and_words(other) == _place_and_words(error):
                text = str(error) or traceback.extract_tb(error.__traceback__)[-1].line
                raise RefusedByMegatronError(
                    f"Megatron's own validation refuses the arguments: {text} (try without +nest)"
                ) from error
        raise


def _place_and_words(error: Exception) -> tuple[object, ...]:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return type(error), str(error), last.filename, last.lineno


def _arguments(launched: LaunchedJob) -> dict[str, str]:
    return arguments(launched.args, flags_of(_release()), launched.launch.may_differ)


def _release() -> str:
    """The release whose options and rules stand for the installed one."""
    return known_release(_installed())


def _installed() -> str:
    from megatron.core import __version__ as release

    return str(release)


def _find(
    launched: LaunchedJob, measured: tuple[Job, JobCluster] | None = None
) -> planning.LaunchPlan:
    """The plan; one that is searched, with the layer times that were measured for it, if any."""
    launch = launched.launch
    if launched.words.mode is Mode.PINNED:
        return pinned_plan(launched, _read(launched))
    job, place = measured or _job_and_place(launched)
    return planning.decide(job, place, free=launch.free, alternative=launch.alternative)


def _job_and_place(launched: LaunchedJob) -> tuple[Job, JobCluster]:
    return _read(launched), launched.find_place(launched.args.world_size)


def _read(launched: LaunchedJob) -> Job:
    _asked_file(launched)
    command_line = (launched.script, launched.argv)
    return planning.read_running_job(launched.args, launched.defaults, command_line, _installed())


def _with_ranks(
    launched: LaunchedJob, outcome: planning.LaunchPlan, hosts: agreement.Hosts
) -> planning.LaunchPlan:
    """The outcome with the ranks that processes take: as told, or each host's together."""
    ranks, asked = outcome.decision.ranks, launched.launch.ranks
    if isinstance(asked, list):
        ranks = tuple(asked)
    elif ranks is None and asked == "by_host":
        ranks = groups.ranks_by_host(hosts(), {host.name: host.groups for host in launched.hosts})
    if ranks is None:
        return outcome
    context = RankContext(rank=0, world_size=len(hosts()), environment=dict(os.environ))
    groups.check_permutation(ranks, context.world_size, zero_may_move=context.agent_hosts_store)
    plan = outcome.decision.plan
    note = "Ranks are numbered anew so that each host's are together, and hosts of one switch."
    if isinstance(asked, list) or outcome.decision.ranks is not None:
        note = "Ranks are numbered anew, as asked for."
        placement = dataclasses.replace(plan.placement, rank_permutation=ranks)
        plan = dataclasses.replace(plan, placement=placement)
    decision = dataclasses.replace(outcome.decision, plan=plan, ranks=ranks)
    return dataclasses.replace(outcome, decision=decision, notes=(*outcome.notes, note))


def apply(args: Namespace, decision: Decision) -> None:
    """Carry a decision out in this process: arguments, variables, this process's rank."""
    write(args, decision.values, decision.plan.launch[attach.LAUNCHER].environment)
    if decision.ranks is not None:
        args.rank = decision.ranks[args.rank]
        set_variables({"RANK": str(args.rank)})


def _print_costs(searched: planning.Searched) -> None:
    """Print what the user's flags cost, beside the start of training, which it must not disturb."""
    try:
        show(flag_cost_report(searched.best_s, planning.costs(searched)))
    except NestError as error:
        print_cleaned(f"nest: what the kept flags cost cannot be said: {error}")


def _asked_file(launched: LaunchedJob) -> Path | None:
    return plan_output(last_value(launched.words, "out"), [launched.launch.plan])


def _write_plan(launched: LaunchedJob, plan: ParallelPlan) -> str:
    """Write the plan file and say where; a cache that cannot be written is no reason to stop."""
    asked = path = _asked_file(launched)
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
    return told_where(path)
