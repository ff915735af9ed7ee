"""Plans of an application: searched, or pinned and compared, and each found once in a process."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from nest_megatron.cluster.discovery import local_gpus
from nest_megatron.config.cluster_detection import JobCluster, find_cluster, processes_per_host
from nest_megatron.config.compose import compose
from nest_megatron.config.job import FreeParameters, Job
from nest_megatron.config.launch import Mode
from nest_megatron.config.overrides import choice, value_text
from nest_megatron.config.request import request_for
from nest_megatron.cost_model.execution_flags import execution_of
from nest_megatron.cost_model.target_defaults import OF_THE_JOB
from nest_megatron.errors import UserInputError
from nest_megatron.history.records import Launch, RunRecord
from nest_megatron.integrations import recorder
from nest_megatron.integrations.execution_fields import execution_items
from nest_megatron.integrations.hydra.ranks import (
    is_first,
    is_launched,
    num_gpus,
    require_decided,
    require_same_job,
    require_same_plan,
)
from nest_megatron.integrations.hydra.read import read_app
from nest_megatron.integrations.hydra.view import AppView, view_of
from nest_megatron.integrations.launched import values_report
from nest_megatron.integrations.megatron_lm.planning import plan_to_launch
from nest_megatron.integrations.megatron_lm.read import read_recompute
from nest_megatron.integrations.megatron_lm.search_space import freed_flags, job_space
from nest_megatron.integrations.plan_output import (
    pinned_by,
    pinned_file,
    plan_output,
    read_launched,
    require_launch,
    told_where,
)
from nest_megatron.integrations.process_variables import launched
from nest_megatron.integrations.recipe import RECOMPUTE
from nest_megatron.integrations.recipe_plan import planned_items, require_pinned_for
from nest_megatron.integrations.run_record import auditing_refusals, changed_flags
from nest_megatron.layout import plan_file
from nest_megatron.layout.diff import Change, plan_values, reason
from nest_megatron.layout.dims import RankOrder
from nest_megatron.layout.execution_rules import allowed_execution
from nest_megatron.layout.knobs import KNOBS
from nest_megatron.layout.layout import LAYOUT_ARGUMENTS
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.recompute import (
    NO_RECOMPUTE,
    RecomputeGranularity,
    RecomputeMethod,
    RecomputeModule,
)
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.report.console import say, show
from nest_megatron.solver.space import DEGREES, SearchSpace

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
    settings, size, here = view.settings, num_gpus(view, environment), is_launched(environment)
    writes = here and is_first(environment)  # once for all ranks, which plan each for itself
    refusals = auditing_refusals(settings.mode.value, settings.plan, size)

    def place() -> JobCluster:
        return find_cluster(settings.settings(size), size, environment, dry_run=not here)

    signer = None
    with refusals if writes else contextlib.nullcontext():
        if here:
            require_launch(settings.mode)
        if settings.mode is Mode.AUTO:
            found = place()
            job = read_app(view, found.settings)
            job = dataclasses.replace(
                job, free=_FREE, can_state=planned_execution(view), notes=(*job.notes, *found.notes)
            )
            own, offer = job_space(job, found.settings)
            request = request_for(
                *(job, found.cluster, found.settings, space_of(own, view, job)),
                offer=offer,
                freed=freed_flags(job.free),
            )
            plan, notes = plan_to_launch(request, found.settings), request.notes
            require_decided(plan, request.max_seconds)
            origin = plan.provenance.made_for("a Hydra application", None, "+nest=auto")
            plan = dataclasses.replace(plan, provenance=origin)
        else:
            pinned = read_launched(pinned_file(settings.plan), size)
            plan, notes, signer = pinned.plan, (pinned_by(pinned.pin),), pinned.signer
            job = read_app(view, compose(settings.settings(None)))
            named = settings.cluster is not None
            require_pinned_for(
                pinned,
                job,
                num_gpus=size,
                cluster=place().cluster if named else None,
                gpus=local_gpus() if here and not named else None,
                gpus_per_host=processes_per_host(environment) if here else None,
            )
    require_expressible(plan, view, job)
    values = {
        **planned_items(plan),
        **execution_items(plan),
        "data_parallel_size": plan.layout.dims.data_parallel_size,
        "num_gpus": plan.layout.num_gpus,
    }
    return AppPlan(plan=plan, values=values, notes=notes, signer=signer)


#: Choices that need no field: they follow from others, or only save time where they are set.
_NEED_NO_FIELD = (
    "global_batch_size",
    "data_parallel_size",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "use_distributed_optimizer",
    "expert_tensor_parallel_size",
)
#: Degrees that are not 1 where the application has no field for them: what is wrong, and the fix.
_UNKNOWN = {
    "micro_batch_size": (
        "the application has no such field, so its micro batch is not known",
        "Name it with nest.fields.micro_batch_size, or fix it with "
        "+nest.overrides.train.micro_batch_size=1.",
    ),
    "expert_tensor_parallel_size": (
        "the application has no field for it, so it is the tensor-parallel size, which is free",
        "Give {tensor}, or name the place with nest.fields.expert_tensor_parallel_size.",
    ),
}
#: What an application does that has no such field.
_DEFAULTS: tuple[object, ...] = (None, False, 1, "no_shard", "", [])


def space_of(own: SearchSpace, view: AppView, job: Job) -> SearchSpace:
    """The part of the user's search space that an application's fields can state.

    A choice without a field is fixed at what Megatron does by itself; one that is given by hand is
    fixed at that; ``UserInputError`` for one that can be neither.
    """
    layout, mapping = "pipeline_model_parallel_layout", "use_tp_pp_dp_mapping"
    if not view.is_planned(layout) and (given := view.given(layout)):
        raise UserInputError(
            str(view.place(layout)),
            given,
            "a layout given by hand leaves nothing to search for in a Hydra application",
            "Leave it out, or launch without nest.",
        )
    order = RankOrder.TP_CP_EP_PP_DP if view.given(mapping) else RankOrder.TP_CP_EP_DP_PP
    orders = tuple(RankOrder) if view.is_planned(mapping) else (order,)
    # sequence parallelism comes with tensor parallelism, as every plan wants it
    divides_sequences = view.is_planned("sequence_parallel") or view.given("sequence_parallel")
    recompute = own.recompute
    if not view.is_planned("recompute_granularity"):
        said = {name: view.given(name) for name in RECOMPUTE}
        if said["recompute_granularity"] == RecomputeGranularity.FULL:
            choice("recompute_method", str(said["recompute_method"]), RecomputeMethod)
            said["recompute_num_layers"] = int(said["recompute_num_layers"] or 1)
        recompute = read_recompute(said) or NO_RECOMPUTE
    with_modules = view.is_planned("recompute_modules")
    return dataclasses.replace(
        own,
        fixed={**_degrees(own, view, job.spec), **own.fixed},
        limits=own.limits if divides_sequences else {"tensor_model_parallel_size": 1, **own.limits},
        rank_orders=_common("rank_order", own.rank_orders, orders),
        zero_stages=_common("zero_stage", own.zero_stages, zero_stages(view, job)),
        recompute=recompute,
        without_modules=own.without_modules if with_modules else frozenset(RecomputeModule),
        even_stages=not view.is_planned(layout),
    )


def require_expressible(plan: ParallelPlan, view: AppView, job: Job) -> None:
    """Refuse a plan that needs a field which the application lacks, or has another value in."""
    for item, value in planned_items(plan).items():
        if item in _NEED_NO_FIELD or view.is_planned(item):
            continue
        given = view.given(item)
        if given == value or (given in _DEFAULTS and value in _DEFAULTS):
            continue
        limit, fix = f"the plan needs {value}", "Leave it to the plan, or plan again with it fixed."
        if (place := view.place(item)) is None:
            limit = f"{limit}, and the application has no field for it"
            fix = f"Name its place in nest.fields.{item}, or fix it with nest.overrides."
        raise UserInputError(place or item, given, limit, fix)
    # what the application does not ask for is carried out as its own fields say
    stated = allowed_execution(execution_of(job.memory_flags), plan.layout)
    wanted = allowed_execution(plan.layout.execution, plan.layout)
    for knob in KNOBS:
        own, needed = getattr(stated, knob.name), getattr(wanted, knob.name)
        applies = plan.model.is_moe or not knob.of_experts
        if own != needed and applies and knob.name not in planned_execution(view):
            raise UserInputError(
                view.place(knob.name) or knob.name,
                own,
                f"the plan was priced with {needed}",
                f"Give a field ${{nest:{knob.name}}}, or plan again with "
                f"+nest.overrides.search.keep=[{knob.choice}].",
            )
    allowed = zero_stages(view, job)
    if plan.layout.zero not in allowed and plan.layout.dims.data_parallel_size > 1:
        raise UserInputError(
            "use_distributed_optimizer",
            plan.layout.shards_optimizer,
            "the plan says so, and the application's optimizer is another",
            "Change the application's optimizer, or plan again.",
        )


def planned_execution(view: AppView) -> frozenset[str]:
    """Fields of ``Execution`` that an application asks the plan for."""
    names = (knob.name for knob in KNOBS if knob.name not in OF_THE_JOB)
    return frozenset(name for name in names if view.is_planned(name))


def zero_stages(view: AppView, job: Job) -> tuple[ZeroStage, ...]:
    """The ways to share states among replicas that an application can be told, or has."""
    if view.is_planned("use_megatron_fsdp") and view.is_planned("data_parallel_sharding_strategy"):
        return tuple(ZeroStage)
    if view.is_planned("use_distributed_optimizer"):
        return (ZeroStage.NONE, ZeroStage.OPTIMIZER)
    return (ZeroStage.OPTIMIZER if job.use_distributed_optimizer else ZeroStage.NONE,)


def _common(name: str, wanted: tuple[Any, ...], possible: tuple[Any, ...]) -> tuple[Any, ...]:
    found = tuple(each for each in wanted if each in possible)
    if not found:
        raise UserInputError(
            f"parallel.{name}",
            str(wanted[0]),
            f"the application's fields can only say {', '.join(map(str, possible))}",
            "Leave it out of nest.overrides, or give the application a field for it.",
        )
    return found


def _degrees(own: SearchSpace, view: AppView, spec: TransformerSpec) -> dict[str, int]:
    """Degrees that are given by hand, or that the application cannot be told."""
    fixed: dict[str, int] = {}
    for name in DEGREES:
        free = name == "data_parallel_size" or view.is_planned(name) or name in own.fixed
        if free or (name.startswith("expert_") and not spec.is_moe):
            continue
        given = view.given(name)
        if name == "expert_tensor_parallel_size":  # Megatron divides an expert like a layer
            given = given or fixed.get(
                "tensor_model_parallel_size", own.fixed.get("tensor_model_parallel_size")
            )
        if given is None and name in _UNKNOWN:
            limit, fix = _UNKNOWN[name]
            fix = fix.format(tensor=view.place("tensor_model_parallel_size"))
            raise UserInputError(name, None, limit, fix)
        fixed[name] = 1 if given is None else int(given)
    return fixed


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
    say(told_where(path))
    if is_launched(environment):
        PLANS.launch = Launch(
            mode=view.settings.mode.value,
            signer=found.signer,
            changes=changed_flags(changes),
        )
        hosts = [socket.gethostname()]
        PLANS.run = recorder.begin_record(found.plan, hosts, PLANS.launch, is_watched=False)


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
                environment = launched(os.environ)
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
        return _digest(_without(view.raw, "", places))


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
    return plan_file.digest(json.dumps(plain, default=str, sort_keys=True))
