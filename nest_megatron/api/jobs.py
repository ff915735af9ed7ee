"""A job of settings, planned or priced: what the calls of the API and the command line share."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

from nest_megatron.api.results import Plan
from nest_megatron.config.compose import Settings
from nest_megatron.config.layout import estimate_layout
from nest_megatron.config.request import request_of
from nest_megatron.integrations.megatron_lm.attach import with_launch
from nest_megatron.planner import Progress
from nest_megatron.planner import plan as find_plan
from nest_megatron.report.failure import require_plan
from nest_megatron.units import Seconds

if TYPE_CHECKING:
    from nest_megatron.integrations.plan_job import RecipeJob


def plan_job(
    settings: Settings,
    *,
    begun_s: Seconds | None = None,
    shortlist: bool = False,
    stated: RecipeJob | None = None,
    on_progress: Progress | None = None,
) -> Plan:
    """Plan a job of settings: what ``plan`` does, here and on the command line.

    Args:
        stated: what the recipe of a plan file whose job it is says; ``None`` for no plan file.
        begun_s: when its ``search.max_seconds`` began (``time.monotonic``); ``None`` is now.
        on_progress: called while the search runs.
    """
    begun_s = time.monotonic() if begun_s is None else begun_s
    if stated is None:
        request = request_of(settings, choose_execution=True, begun_s=begun_s, shortlist=shortlist)
    else:
        request = stated.request(settings)
        request = dataclasses.replace(request, begun_s=begun_s, shortlist=shortlist)
    found = require_plan(find_plan(request, on_progress), request.notes)
    return Plan(record=with_launch(found, notes=request.notes), notes=request.notes)


def estimate_job(settings: Settings) -> Plan:
    """Price a layout of settings: what ``estimate`` does, here and on the command line."""
    found, notes = estimate_layout(settings)
    return Plan(record=with_launch(found, notes=notes), notes=notes)
