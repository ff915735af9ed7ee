"""Plans of an application: searched, or pinned and compared, and each found once in a process."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import socket
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from omegaconf import OmegaConf
from rich.console import RenderableType

from nest_megatron.cluster.discovery import local_gpus
from nest_megatron.config.cluster_detection import JobCluster, find_cluster, processes_per_host
from nest_megatron.config.compose import compose
from nest_megatron.config.job import FreeParameters, Job
from nest_megatron.config.launch import Mode
from nest_megatron.config.overrides import value_text
from nest_megatron.config.request import request_for
from nest_megatron.errors import UserInputError
from nest_megatron.history.records import Launch, RunRecord
from nest_megatron.integrations import audit, recorder
from nest_megatron.integrations.execution_fields import execution_items
from nest_megatron.integrations.field_mapping import planned_items
from nest_megatron.integrations.hydra.expressible_space import (
    planned_execution,
    require_expressible,
    space_of,
)
from nest_megatron.integrations.hydra.planned_fields import write_moved, write_values
from nest_megatron.integrations.hydra.ranks import (
    is_first,
    is_launched,
    launched,
    num_gpus,
    require_decided,
    require_same_job,
    require_same_plan,
)
from nest_megatron.integrations.hydra.read import read_app
from nest_megatron.integrations.hydra.view import AppView, view_of
from nest_megatron.integrations.launched import values_report
from nest_megatron.integrations.megatron_lm.planning import plan_to_launch
from nest_megatron.integrations.megatron_lm.search_space import freed_flags, job_space
from nest_megatron.integrations.plan_output import pinned_by, pinned_file, plan_output, told_where
from nest_megatron.integrations.plan_recipe import require_pinned_for
from nest_megatron.integrations.site_policy import read_launched, require_launch
from nest_megatron.layout import plan_file
from nest_megatron.layout.diff import Change, plan_values, reason
from nest_megatron.layout.knobs import KNOBS
from nest_megatron.layout.layout import LAYOUT_ARGUMENTS
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.model.execution import Execution
from nest_megatron.report.console import say, show

#: The application's own fields say which ZeRO stages it has (``zero_stages``).
_FREE = FreeParameters(names=("use_megatron_fsdp",))


@dataclass(frozen=True, slots=True, kw_only=True)
class AppPlan:
    """An application's plan, the values of its ``${nest:NAME}``, and what was assumed.

    Args:
        signer: id of the trusted key that signed the plan.
    """

    plan: ParallelPlan
    values: Mapping[str, Any]
    notes: tuple[str, ...]
    signer: str | None = None


def plan_app(view: AppView, environment: Mapping[str, str]) -> AppPlan:
    """Find the plan of an application, in a process with these variables; ``NestError`` if none."""
    view.require_places()
    size = num_gpus(view, environment)
    with _writing_refusals(view, size, environment):
        if is_launched(environment):
            require_launch(view.settings.mode)
        if view.settings.mode is Mode.PINNED:
            plan, job, notes, signer = _pinned(view, size, environment)
        else:
            plan, job, notes = _searched(view, size, environment)
            signer = None
    require_expressible(plan, view, job)
    values = {
        **planned_items(plan),
        **execution_items(plan),
        "data_parallel_size": plan.layout.dims.data_parallel_size,
        "num_gpus": plan.layout.num_gpus,
    }
    return AppPlan(plan=plan, values=MappingProxyType(values), notes=notes, signer=signer)


def _writing_refusals(
    view: AppView, size: int, environment: Mapping[str, str]
) -> AbstractContextManager[None]:
    """What no rule allows is in the audit, once for all ranks, which plan each for itself."""
    if not is_launched(environment) or not is_first(environment):
        return contextlib.nullcontext()
    return audit.refusals(view.settings.mode.value, view.settings.plan, size)


def _searched(
    view: AppView, size: int, environment: Mapping[str, str]
) -> tuple[ParallelPlan, Job, tuple[str, ...]]:
    place = _place(view, size, environment)
    composed, job = place.settings, read_app(view, place.settings)
    job = dataclasses.replace(
        job, free=_FREE, can_state=planned_execution(view), notes=(*job.notes, *place.notes)
    )
    own, offer = job_space(job, composed)
    space, freed = space_of(own, view, job), freed_flags(job.free)
    wanted = request_for(job, place.cluster, composed, space, offer=offer, freed=freed)
    found = plan_to_launch(wanted, composed)
    require_decided(found, wanted.max_seconds)
    origin = found.provenance.made_for("a Hydra application", None, "+nest=auto")
    return dataclasses.replace(found, provenance=origin), job, wanted.notes


def _place(view: AppView, size: int, environment: Mapping[str, str]) -> JobCluster:
    settings = view.settings.settings(size)
    return find_cluster(settings, size, environment, dry_run=not is_launched(environment))


def _pinned(
    view: AppView, size: int, environment: Mapping[str, str]
) -> tuple[ParallelPlan, Job, tuple[str, ...], str | None]:
    pinned = read_launched(pinned_file(view.settings.plan), size)
    job = read_app(view, compose(view.settings.settings(None)))
    named, here = view.settings.cluster is not None, is_launched(environment)
    require_pinned_for(
        pinned,
        job,
        num_gpus=size,
        cluster=_place(view, size, environment).cluster if named else None,
        gpus=local_gpus() if here and not named else None,
        gpus_per_host=processes_per_host(environment) if here else None,
    )
    return pinned.plan, job, (pinned_by(pinned.pin),), pinned.signer


def plan_job(config: Any, task: Any = None) -> None:
    """Plan a job as it starts: its first rank says what the plan is, and writes it.

    Both configurations hold its values then, and can be resolved where nobody plans.

    Args:
        config: with Hydra's own part.
        task: what the application gets of it.
    """
    view, environment = view_of(config), launched(os.environ)
    number = OmegaConf.select(config, "hydra.job.num", default=0)  # unset without -m
    require_same_job(view, number, environment)
    if is_first(environment):
        _plan_first(config, view, environment)
    found = PLANS.of(config)
    for each in (config,) if task is None else (config, task):
        PLANS.write(each, found)


def _plan_first(config: Any, view: AppView, environment: Mapping[str, str]) -> None:
    path = plan_output(view.settings.out, [view.settings.plan])
    path = path or Path(config.hydra.runtime.output_dir, "nest_plan.yaml")
    found = PLANS.of(config)
    show(*_report(found, view))
    plan_file.write(found.plan, path)
    say(told_where(path))
    if is_launched(environment):
        changes = [
            Change(field=p, before=None, after=v, reason=w) for p, v, w in _rows(found, view)
        ]
        PLANS.launch = Launch(
            mode=view.settings.mode.value,
            signer=found.signer,
            changes=audit.changed_flags(changes),
        )
        hosts = [socket.gethostname()]
        PLANS.run = recorder.begin(found.plan, hosts, PLANS.launch, is_watched=False)


def _report(found: AppPlan, view: AppView) -> Iterator[RenderableType]:
    rows = [(path, value_text(value), why) for path, value, why in _rows(found, view)]
    return values_report(found.plan, rows, found.notes)


def _rows(found: AppPlan, view: AppView) -> Iterator[tuple[str, object, str]]:
    """Path, value and reason of each field that asks for the plan."""
    plan = found.plan
    reasons = {item: reason(plan, item) for item in plan_values(plan)}
    reasons |= {knob.name: knob.reason for knob in KNOBS}
    for item, why in reasons.items():
        if view.is_planned(item) and (path := view.place(item)) is not None:
            yield path, found.values[item], why


#: Choices that an application may have a field for.
_ITEMS = (
    "micro_batch_size",
    "use_tp_pp_dp_mapping",
    *LAYOUT_ARGUMENTS,
    *(field.name for field in dataclasses.fields(Execution) if field.init),
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
        found = self._found(view, _digest(view.raw), job)
        if view.moved:
            write_moved(root, view.raw, found.values, view.moved)
        self._keep(root, job, found)
        self.latest = found
        return found

    def write(self, root: Any, found: AppPlan) -> None:
        """Write the values of a plan into a configuration that it is the plan of."""
        view = view_of(root)
        write_values(root, view.raw, found.values, view.moved)
        self._keep(root, self._job(view_of(root)), found)

    def _keep(self, root: Any, job: str, found: AppPlan) -> None:
        key = id(root)
        reference = weakref.ref(root, lambda _: self._of_root.pop(key, None))
        self._of_root[key] = (reference, job, found)

    def _job(self, view: AppView) -> str:
        """A digest of all that a plan is made for."""
        places = {view.place(item) for item in (*_ITEMS, *(item for _, item in view.uses()))}
        return _digest(_without(view.raw, "", places))

    def _found(self, view: AppView, whole: str, job: str) -> AppPlan:
        if whole not in self._known:
            if getattr(self._planning, "on", False):
                raise UserInputError(
                    "${nest:...}",
                    None,
                    limit="the model or the batch is computed from a value of the plan, which is "
                    "made for that model and batch",
                    fix="State num_layers, global_batch_size and the like without the plan.",
                )
            self._planning.on = True
            try:
                environment = launched(os.environ)
                found = plan_app(view, environment)
                require_same_plan(found.plan, job, environment)
                self._known[whole] = found
            finally:
                self._planning.on = False
        return self._known[whole]


#: Of this process.
PLANS = Plans()


def _without(node: Any, path: str, places: set[str | None]) -> Any:
    if not isinstance(node, Mapping):
        return node
    inside = {name: f"{path}.{name}" if path else str(name) for name in node}
    return {
        name: _without(node[name], where, places)
        for name, where in inside.items()
        if where not in places
    }


def _digest(plain: Any) -> str:
    return hashlib.sha256(json.dumps(plain, default=str, sort_keys=True).encode()).hexdigest()[:16]
