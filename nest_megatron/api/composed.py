"""A composed job, planned or priced: what the calls of the API and the command line share."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping

from nest_megatron.api.results import Plan
from nest_megatron.config.buildable import buildable_space, require_buildable
from nest_megatron.config.compose import Composed
from nest_megatron.config.layout import estimate_layout
from nest_megatron.config.plan_settings import with_traits
from nest_megatron.config.request import request_of
from nest_megatron.config.target import read_target
from nest_megatron.integrations.megatron_lm.attach import with_launch
from nest_megatron.planner import Progress
from nest_megatron.planner import plan as find_plan
from nest_megatron.report.failure import require_plan
from nest_megatron.units import Seconds


def plan_composed(
    composed: Composed,
    *,
    begun_s: Seconds | None = None,
    shortlist: bool = False,
    traits: Mapping[str, float | str] | None = None,
    on_progress: Progress | None = None,
) -> Plan:
    """Plan a composed job: what ``plan`` does, here and on the command line.

    Args:
        traits: of a plan file whose job it is, where settings do not say them (``own_traits``).
        begun_s: when its ``search.max_seconds`` began (``time.monotonic``); ``None`` is now.
        on_progress: called while the search runs.
    """
    begun_s = time.monotonic() if begun_s is None else begun_s
    request = with_traits(request_of(composed, choose_execution=True), traits)
    target = read_target(composed.config)
    require_buildable(request.spec, target)
    space = buildable_space(request.spec, target, request.space)
    request = dataclasses.replace(request, space=space, begun_s=begun_s, shortlist=shortlist)
    found = require_plan(find_plan(request, on_progress), request.notes)
    return Plan(record=with_launch(found, notes=request.notes), notes=request.notes)


def estimate_composed(composed: Composed) -> Plan:
    """Price a composed layout: what ``estimate`` does, here and on the command line."""
    found, notes = estimate_layout(composed)
    return Plan(record=with_launch(found, notes=notes), notes=notes)
