"""Plans of an application: searched, or pinned and compared, and each found once in a process.

Every rank composes and plans for itself. The search is deterministic, so equal configurations give
equal plans, but for two things that a host may have of its own: the time that ended a search, and
what lies on its disks and in its sockets. The first is refused. For the second, ranks under
``torchrun`` compare their configuration and their plan with those of the rank that came first
(``_compare_ranks``).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import weakref
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from nest_megatron.cluster.discovery import local_gpus
from nest_megatron.config.cluster_detection import (
    JobCluster,
    find_cluster,
    number_said,
    processes_per_host,
)
from nest_megatron.config.compose import compose
from nest_megatron.config.launch import OF_OTHER_MODES, Mode
from nest_megatron.config.overrides import value_text
from nest_megatron.errors import OneRankError, UserInputError, settings_typed_as
from nest_megatron.history.records import Launch, RunRecord
from nest_megatron.integrations import recorder
from nest_megatron.integrations.hydra.read import (
    planned_execution,
    read_app,
    require_expressible,
    space_of,
)
from nest_megatron.integrations.hydra.view import AppView, view_of
from nest_megatron.integrations.megatron_lm.attach import launch_request
from nest_megatron.integrations.megatron_lm.planning import job_request, plan_to_launch
from nest_megatron.integrations.megatron_lm.rendezvous import (
    NoAgreementError,
    RankContext,
    TimedStore,
    comparable_fields,
    differences,
    versions,
)
from nest_megatron.integrations.megatron_lm.write import planned_values
from nest_megatron.integrations.plan_output import (
    actual_job,
    pin_note,
    pinned_file,
    plan_file_note,
    plan_output,
    read_launched,
    require_launch,
    values_report,
)
from nest_megatron.integrations.process_variables import Environment, with_rank_variables
from nest_megatron.integrations.recipe_plan import planned_items
from nest_megatron.integrations.run_record import auditing_refusals, changed_flags
from nest_megatron.layout import plan_file
from nest_megatron.layout.diff import Change, plan_values, reason
from nest_megatron.layout.knobs import KNOBS
from nest_megatron.layout.layout import LAYOUT_ARGUMENTS
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.plain import frozen
from nest_megatron.planner.pinned_job import require_same_job
from nest_megatron.report.console import say, show

#: Longest wait for the agent's store.
_TIMEOUT_S = 60.0


def is_launched(environment: Environment) -> bool:
    """Whether a launcher started this process for training; otherwise somebody is looking."""
    return "WORLD_SIZE" in environment or "LOCAL_RANK" in environment


def is_first(environment: Environment) -> bool:
    """Whether this is the process that speaks for all."""
    rank = environment.get("RANK", environment.get("LOCAL_RANK", "0"))
    return rank == environment.get("NODE_RANK", "0") == "0"


def num_gpus(view: AppView, environment: Environment) -> int:
    """Ranks of the job, as the user, the trainer and the launcher agree; one must say it."""
    # Lightning's words; ``-1`` and ``auto`` leave the number to the host
    devices, nodes = view.at("trainer.devices"), view.at("trainer.num_nodes")
    count = len(devices) if isinstance(devices, list) else devices
    of_trainer = None
    if isinstance(count, int) and count >= 1:
        of_trainer = count * (nodes if isinstance(nodes, int) else 1)
    said = {
        "nest.num_gpus": view.settings.num_gpus,
        "trainer.devices * trainer.num_nodes": of_trainer,
        "WORLD_SIZE": number_said(environment, "WORLD_SIZE"),
    }
    found = {where: count for where, count in said.items() if count is not None}
    if not found:
        raise UserInputError(
            "nest.num_gpus",
            None,
            "neither the application nor a launcher says how many GPUs there are",
            "Give nest.num_gpus=64.",
        )
    if len(set(found.values())) > 1:
        raise UserInputError(
            " / ".join(found),
            list(found.values()),
            "they are the same number of ranks",
            "Correct the one that is wrong; nest.num_gpus is not needed.",
        )
    return next(iter(found.values()))


def require_decided(plan: ParallelPlan, max_seconds: float) -> None:
    """Refuse a plan that depends on how fast its rank searched, since each searches by itself."""
    if plan.search.certificate == "gap":
        raise UserInputError(
            "search.max_seconds",
            max_seconds,
            "it ended the search, and every rank searches for itself: they could arrive at "
            "different plans",
            "Raise it with +nest.overrides.search.max_seconds=600, or plan once with "
            "`nest-megatron plan`, pin the plan and launch with +nest=pinned.",
        )


class DifferentRankError(NoAgreementError, OneRankError):
    """This rank differs from the first, and the others have not been told."""


def require_same_plan(plan: ParallelPlan, job: str, environment: Environment) -> bool:
    """Compare this rank's plan with the others', where ``torchrun`` has a store, and say if so.

    Args:
        job: a digest of the configuration, so that each of several jobs is compared with itself.

    Raises:
        NoAgreementError: if another rank has arrived at another plan, with what differs.
    """
    items = {"num_gpus": plan.layout.num_gpus, **planned_items(plan)}
    return _compare_ranks(
        environment,
        f"plan of {job}",
        {name: repr(value) for name, value in items.items()},
        head="the ranks have found different plans",
        advice="The hosts differ in GPUs, profiles or versions. Plan once with `nest-megatron "
        "plan`, pin the plan and launch with +nest=pinned",
    )


def _compare_ranks(
    environment: Environment, name: str, mine: Mapping[str, str], **words: str
) -> bool:
    """Compare values with the rank's that came first, where ``torchrun`` has a store; say if so.

    No rank waits for another, since an application may read its configuration on some ranks only.
    Digests are compared, and values are there before their digest, so that they can be named.

    Args:
        words: of ``differences``.

    Raises:
        DifferentRankError: on a rank that differs, with both values of each name.
    """
    context = RankContext(
        rank=number_said(environment, "RANK") or 0,
        world_size=number_said(environment, "WORLD_SIZE") or 1,
        environment=environment,
        rendezvous_timeout_s=_TIMEOUT_S,
    )
    if not context.agent_hosts_store:
        return False
    store = TimedStore(context)
    own = plan_file.digest(dict(mine))
    host = socket.gethostname()
    if not store.call("check", [f"{name}/{own}"]):
        note = {"rank": context.rank, "host": host, "values": dict(mine)}
        store.call("compare_set", f"{name}/{own}", "", json.dumps(note))
    first = store.call("compare_set", name, "", own)
    if first != own:
        other = json.loads(store.call("get", f"{name}/{first}"))
        of_ranks = {other["rank"]: other["values"], context.rank: mine}
        hosts = {other["rank"]: other["host"], context.rank: host}
        raise DifferentRankError(differences(of_ranks, hosts, **words))
    return True


#: The application's own fields say which ZeRO stages it has (``zero_stages``).
_FREE = ("use_megatron_fsdp",)


@frozen
class AppPlan:
    """An application's plan, the values of its ``${nest:NAME}``, and what was assumed.

    Args:
        signer: id of the trusted key that signed the plan.
    """

    plan: ParallelPlan
    values: Mapping[str, Any]
    notes: tuple[str, ...]
    signer: str | None = None


def plan_app(view: AppView, environment: Environment) -> AppPlan:
    """Find the plan of an application, in a process with these variables; ``NestError`` if none."""
    view.require_places()
    settings = view.settings
    size = num_gpus(view, environment)
    here = is_launched(environment)
    writes = here and is_first(environment)  # once for all ranks, which plan each for itself
    refusals = auditing_refusals(settings.mode.value, settings.plan, size)

    def place() -> JobCluster:
        return find_cluster(settings.settings(size), size, environment, dry_run=not here)

    signer = None
    with refusals if writes else contextlib.nullcontext():
        if here:
            require_launch(settings.mode)
        if settings.mode is Mode.AUTO:
            if settings.plan is not None:
                raise UserInputError("nest.plan", settings.plan, *OF_OTHER_MODES["plan"][1:])
            found = place()
            job = read_app(view, found.settings)
            job = replace(
                job, free=_FREE, can_state=planned_execution(view), notes=(*job.notes, *found.notes)
            )
            request = job_request(
                job, found.cluster, found.settings, narrow=partial(space_of, view, job)
            )
            plan = plan_to_launch(request)
            notes = request.notes
            require_decided(plan, request.max_seconds)
            plan = replace(
                plan, provenance=plan.provenance.made_for("a Hydra application", None, "+nest=auto")
            )
        else:
            with settings_typed_as("nest.{}".format):
                pinned = read_launched(pinned_file(settings.plan), size)
                plan, notes, signer = pinned.plan, (pin_note(pinned.pin),), pinned.signer
                job = read_app(view, compose(settings.settings(None)))
                named = settings.cluster is not None
                actual = actual_job(
                    pinned,
                    job,
                    num_gpus=size,
                    cluster=place().cluster if named else None,
                    gpus=local_gpus() if here and not named else None,
                    gpus_per_host=processes_per_host(environment) if here else None,
                )
                require_same_job(pinned, actual)
    require_expressible(plan, view, job)
    planned = planned_values(launch_request(plan))
    values = {
        **planned_items(plan),
        **{knob.name: planned[knob.name] for knob in KNOBS},
        "data_parallel_size": plan.layout.dims.data_parallel_size,
        "num_gpus": plan.layout.num_gpus,
    }
    return AppPlan(plan=plan, values=values, notes=notes, signer=signer)


def plan_job(config: Any, task: Any = None) -> None:
    """Plan a job as it starts: its first rank says what the plan is, and writes it.

    Both configurations hold its values then, and can be resolved where nobody plans.

    Args:
        config: with Hydra's own part.
        task: what the application gets of it.
    """
    view = view_of(config)
    environment = with_rank_variables(os.environ)
    number = OmegaConf.select(config, "hydra.job.num", default=0)  # unset without -m
    own = comparable_fields(view.raw, (*view.settings.may_differ, "nest.out"))
    _compare_ranks(environment, f"configuration of job {number}", {**versions(), **own})
    if is_first(environment):
        _plan_first(config, view, environment, number)
    found = PLANS.of(config)
    for each in (config,) if task is None else (config, task):
        PLANS.write(each, found)


def _plan_first(config: Any, view: AppView, environment: Environment, number: int) -> None:
    out = view.settings.out
    if out is not None and out != "-" and number:  # each further job of a sweep has its own
        out = str(Path(out).with_stem(f"{Path(out).stem}_{number}"))
    path = plan_output(out, [view.settings.plan])
    path = path or Path(config.hydra.runtime.output_dir, "nest_plan.yaml")
    found = PLANS.of(config)
    reasons = {item: reason(found.plan, item) for item in plan_values(found.plan)}
    reasons |= {knob.name: knob.reason for knob in KNOBS}
    changes = [
        Change(field=str(view.place(item)), before=None, after=found.values[item], reason=why)
        for item, why in reasons.items()
        if view.is_planned(item)
    ]
    rows = [(each.field, value_text(each.after), each.reason) for each in changes]
    show(*values_report(found.plan, rows, found.notes))
    plan_file.write(found.plan, path)
    say(plan_file_note(path))
    if is_launched(environment):
        PLANS.launch = Launch(
            mode=view.settings.mode.value,
            signer=found.signer,
            changes=changed_flags(changes),
        )
        PLANS.run = recorder.begin_record(
            found.plan, [socket.gethostname()], PLANS.launch, is_watched=False
        )


#: Choices that an application may have a field for.
_ITEMS = (
    "micro_batch_size",
    "use_tp_pp_dp_mapping",
    *LAYOUT_ARGUMENTS,
    *(knob.name for knob in KNOBS),
)


class Plans:
    """Plans by configuration: an application reads one value after another, and means one plan.

    Attributes:
        latest: the plan of the job that runs now.
        launch: how it was launched, on its first rank.
        run: its record, where an audit has it.
    """

    def __init__(self) -> None:
        self.latest: AppPlan | None = None
        self.launch: Launch | None = None
        self.run: RunRecord | None = None
        self._known: dict[str, AppPlan] = {}
        self._of_root: dict[int, tuple[weakref.ref[Any], str, AppPlan]] = {}
        self._planning = threading.local()

    def of(self, root: Any) -> AppPlan:
        """The plan of a composed configuration; ``NestError`` if there is none.

        An application may change its configuration later; as long as the job is the same, so is
        the plan, whatever became of the planned fields.
        """
        view = view_of(root)
        job = self._job(view)
        known = self._of_root.get(id(root))
        if known is not None and known[0]() is root and known[1] == job:
            return known[2]
        whole = _digest(view.raw)
        if whole not in self._known:
            if getattr(self._planning, "on", False):
                raise UserInputError(
                    "${nest:...}",
                    None,
                    "the model or the batch is computed from a value of the plan, which is "
                    "made for that model and batch",
                    "State num_layers, global_batch_size and the like without the plan.",
                )
            self._planning.on = True
            try:
                environment = with_rank_variables(os.environ)
                found = plan_app(view, environment)
                require_same_plan(found.plan, job, environment)
                self._known[whole] = found
            finally:
                self._planning.on = False
        found = self._known[whole]
        view.write(found.values, is_read=True)
        self._keep(root, job, found)
        self.latest = found
        return found

    def write(self, root: Any, found: AppPlan) -> None:
        """Write the values of a plan into a configuration that it is the plan of."""
        view_of(root).write(found.values)
        self._keep(root, self._job(view_of(root)), found)

    def _keep(self, root: Any, job: str, found: AppPlan) -> None:
        key = id(root)
        reference = weakref.ref(root, lambda _: self._of_root.pop(key, None))
        self._of_root[key] = (reference, job, found)

    def _job(self, view: AppView) -> str:
        """A digest of all that a plan is made for."""
        places = {view.place(item) for item in (*_ITEMS, *(item for _, item in view.uses()))}
        return _digest(_without_places(view.raw, "", places))


#: Of this process.
PLANS = Plans()


def _without_places(node: Any, path: str, places: set[str | None]) -> Any:
    if not isinstance(node, Mapping):
        return node
    inside = {name: f"{path}.{name}" if path else str(name) for name in node}
    return {
        name: _without_places(node[name], where, places)
        for name, where in inside.items()
        if where not in places
    }


def _digest(plain: Any) -> str:
    return plan_file.digest(json.dumps(plain, default=str, sort_keys=True))
