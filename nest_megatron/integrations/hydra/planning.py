"""A plan for an application: searched, or pinned and compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from nest_megatron.cluster.discovery import local_gpus
from nest_megatron.config.cluster_detection import JobCluster, find_cluster, processes_per_host
from nest_megatron.config.compose import compose
from nest_megatron.config.job import FreeParameters, Job
from nest_megatron.config.launch import Mode
from nest_megatron.config.request import request_for
from nest_megatron.integrations.execution_fields import execution_items
from nest_megatron.integrations.field_mapping import planned_items
from nest_megatron.integrations.hydra.expressible_space import (
    planned_execution,
    require_expressible,
    space_of,
)
from nest_megatron.integrations.hydra.ranks import require_decided
from nest_megatron.integrations.hydra.read import read_app
from nest_megatron.integrations.hydra.size import is_launched, num_gpus
from nest_megatron.integrations.hydra.view import AppView
from nest_megatron.integrations.megatron_lm.search_space import job_space
from nest_megatron.integrations.megatron_lm.typed import freed_flags
from nest_megatron.integrations.plan_output import pinned_by, pinned_file
from nest_megatron.parallel import plan_file
from nest_megatron.parallel.plan import ParallelPlan
from nest_megatron.planner import plan as find_plan
from nest_megatron.planner.pins import Found, PinnedPlan, read_pinned, require_same_job
from nest_megatron.report.failure import require_plan

#: Runners-up that are ranked unless ``search.num_alternatives`` says otherwise.
_RUNNERS_UP = 3
#: The application's own fields say which ZeRO stages it has (``zero_stages``).
_FREE = FreeParameters(names=("use_megatron_fsdp",))


@dataclass(frozen=True, slots=True, kw_only=True)
class AppPlan:
    """An application's plan.

    Args:
        values: what ``${nest:NAME}`` is.
        notes: what was assumed, one sentence each.
    """

    plan: ParallelPlan
    values: Mapping[str, Any]
    notes: tuple[str, ...]


def plan_app(view: AppView, environment: Mapping[str, str]) -> AppPlan:
    """Find the plan of an application, in a process with these variables.

    Raises:
        NestError: if there is none that the application can carry out.
    """
    view.require_places()
    size = num_gpus(view, environment)
    if view.settings.mode is Mode.PINNED:
        plan, job, notes = _pinned(view, size, environment)
    else:
        plan, job, notes = _searched(view, size, environment)
    require_expressible(plan, view, job)
    values = {
        **planned_items(plan),
        **execution_items(plan),
        "data_parallel_size": plan.parallel.data_parallel_size,
        "num_gpus": plan.placement.num_gpus,
    }
    return AppPlan(plan=plan, values=MappingProxyType(values), notes=notes)


def _searched(
    view: AppView, size: int, environment: Mapping[str, str]
) -> tuple[ParallelPlan, Job, tuple[str, ...]]:
    place = _place(view, size, environment)
    composed = place.composed
    job = dataclasses.replace(
        read_app(view, composed), free=_FREE, can_state=planned_execution(view)
    )
    job = dataclasses.replace(job, notes=(*job.notes, *place.notes))
    own, offer = job_space(job, composed.config)
    space = space_of(own, view, job)
    freed = freed_flags(job.free)
    wanted = request_for(job, place.cluster, composed, space, offer=offer, freed=freed)
    if "search.num_alternatives" not in composed.given:
        wanted = dataclasses.replace(wanted, num_alternatives=_RUNNERS_UP)
    found = require_plan(find_plan(wanted), wanted.notes)
    require_decided(found, wanted.max_seconds)
    found = plan_file.made_for(found, "a Hydra application", None, "+nest=auto")
    return found, job, wanted.notes


def _place(view: AppView, size: int, environment: Mapping[str, str]) -> JobCluster:
    settings = view.settings.settings(size)
    return find_cluster(settings, size, environment, dry_run=not is_launched(environment))


def _pinned(
    view: AppView, size: int, environment: Mapping[str, str]
) -> tuple[ParallelPlan, Job, tuple[str, ...]]:
    pinned = read_pinned(pinned_file(view.settings.plan))
    job = read_app(view, compose(view.settings.settings(None)))
    require_same_job(pinned, _found(view, pinned, job, size, environment))
    return pinned.plan, job, (pinned_by(pinned.pin),)


def _found(
    view: AppView, pinned: PinnedPlan, job: Job, size: int, environment: Mapping[str, str]
) -> Found:
    """What is known of the job that is about to run."""
    named = view.settings.cluster is not None
    here = is_launched(environment)
    return Found(
        spec=job.spec,
        num_gpus=size,
        cluster=_place(view, size, environment).cluster if named else None,
        gpus=local_gpus() if here and not named else None,
        gpus_per_host=processes_per_host(environment) if here else None,
        global_batch_size=job.global_batch_size,
        precision=job.precision,
        tensor_model_parallel_size=pinned.plan.parallel.tensor_model_parallel_size,
        megatron_lm=pinned.pin.megatron_lm,  # an application has a Megatron of its own
        memory_flags=job.memory_flags,
    )
