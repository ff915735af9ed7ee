"""The best pipeline of one problem: the least bottleneck of every depth, with the slowest sum.

The objective has two maxima, of the stages' times and of their gradient sums. The second is met by
caps that come down: the table is filled without a cap, then with sums below what a better plan can
still have, until none can be better. Nothing is lost: a plan that beats the best so far by a total
of ``limit`` has a bottleneck of at least the last table's, and so a sum below ``limit`` less that.
"""

from __future__ import annotations

import dataclasses
import logging
from array import array
from collections.abc import Sequence
from functools import cache
from typing import Any

from nest_megatron.research.nest_dp import reference
from nest_megatron.research.nest_dp.records import UNREACHABLE, FoundPipeline, Problem
from nest_megatron.research.nest_dp.tables import Tables, tables_of
from nest_megatron.units import Ticks

_log = logging.getLogger(__name__)


def best_pipeline(
    problem: Problem, limit: Ticks = UNREACHABLE, *, compiled: bool | None = None
) -> FoundPipeline | None:
    """The fastest pipeline whose step takes less than ``limit``, if there is one.

    Ties go to fewer stages; ``reference.pipeline_of`` says how stages are chosen.

    Args:
        compiled: whether the kernel or the reference fills the tables; they agree bit for bit. The
            kernel where it is built, if not given.
    """
    t = tables_of(problem)
    least_sync, sync_cap = _least_sync(problem), UNREACHABLE
    found: FoundPipeline | None = None
    while least_sync < sync_cap and least_sync < limit:
        table = filled(t, _caps(problem, limit - least_sync), sync_cap, compiled=compiled)
        depth = _best_depth(problem, t, table)
        if depth is None:
            break
        steps = _num_steps(problem, depth)
        one = reference.pipeline_of(problem, t, table, depth, sync_cap, steps)
        if one.total < limit:
            found, limit = one, one.total
        sync_cap = min(sync_cap, limit - (one.total - one.sync))
    return found


def filled(
    t: Tables, caps: Sequence[Ticks], sync_cap: Ticks, *, compiled: bool | None = None
) -> Sequence[int]:
    """The table of states.

    Args:
        caps: by number of stages; states count below this only.
        compiled: as for ``best_pipeline``.
    """
    if not (has_kernel() if compiled is None else compiled):
        return reference.filled(t, caps, sync_cap)
    import numpy as np

    from nest_megatron.research.nest_dp import _recurrence

    table = np.empty(t.table_size, np.int64)
    scratch = array("q", [0]) * (t.num_levels * (t.num_devices + 1) + len(t.options_first))
    question: list[Any] = [getattr(t, field.name) for field in dataclasses.fields(t)]
    question += [array("q", caps), sync_cap, table.data, scratch]
    _recurrence.fill(*question)
    return table.data  # whose items are Python's integers


@cache
def has_kernel() -> bool:
    """Whether the compiled kernel is there; one warning says so if it is not."""
    try:
        from nest_megatron.research.nest_dp import _recurrence  # noqa: F401
    except ImportError:
        _log.warning("The compiled kernel is not built: the recurrence is far slower.")
        return False
    return True


def _num_steps(problem: Problem, depth: int) -> int:
    """How often the slowest stage's time is paid in a step of training."""
    return problem.num_microbatches + depth - 1


def _caps(problem: Problem, left: Ticks) -> list[Ticks]:
    """What a bottleneck must stay below at each depth, so that all its passes take less."""
    depths = range(1, problem.most_stages + 1)
    if left >= UNREACHABLE:
        return [UNREACHABLE] * (problem.most_stages + 1)
    return [0, *(-(-left // _num_steps(problem, depth)) for depth in depths)]


def _best_depth(problem: Problem, t: Tables, table: Sequence[int]) -> int | None:
    best, found = UNREACHABLE, None
    for depth in range(problem.least_stages, t.most_stages + 1):
        least = table[t.at(depth, t.num_levels - 1, t.num_downsets - 1, t.num_devices)]
        if least < UNREACHABLE and least * _num_steps(problem, depth) < best:
            best, found = least * _num_steps(problem, depth), depth
    return found


def _least_sync(problem: Problem) -> Ticks:
    """A sum that no plan stays below: that of the node with the largest, at its best place."""
    places = (times.sync for s in problem.strategies for o in s.options for times in o.times)
    least: Ticks = max(min(sums) for sums in zip(*places, strict=True))
    return least
