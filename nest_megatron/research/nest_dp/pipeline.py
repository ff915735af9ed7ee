"""The best pipeline of one problem: the least bottleneck of every depth, with the slowest sum.

The objective has two maxima, of the stages' times and of their gradient sums. The second is met by
caps that come down: the table is filled without a cap, then with sums below what a better plan can
still have, until none can be better. Nothing is lost: a plan that beats the best so far by a total
of ``limit`` has a bottleneck of at least the last table's, and so a sum below ``limit`` less that.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence
from functools import cache

from nest_megatron.research.nest_dp import reference
from nest_megatron.research.nest_dp.records import UNREACHABLE, FoundPipeline, Problem
from nest_megatron.research.nest_dp.tables import Scratch, Tables, empty_table, tables_of
from nest_megatron.research.nest_dp.trace import pipeline_of
from nest_megatron.units import Ticks

_log = logging.getLogger(__name__)


def best_pipeline(
    problem: Problem,
    limit: Ticks = UNREACHABLE,
    *,
    scratch: Scratch | None = None,
    compiled: bool | None = None,
) -> FoundPipeline | None:
    """The fastest pipeline whose step takes less than ``limit``, if there is one.

    Ties go to fewer stages; ``trace`` says how stages are chosen.

    Args:
        scratch: memory that further problems use again.
        compiled: whether the kernel or the reference fills the tables; they agree bit for bit. The
            kernel where it is built, if not given.
    """
    t, scratch = tables_of(problem), scratch or Scratch()
    least_sync, sync_cap = _least_sync(problem), UNREACHABLE
    found: FoundPipeline | None = None
    while least_sync < sync_cap and least_sync < limit:
        caps = _caps(problem, limit - least_sync)
        table = filled(t, caps, sync_cap, scratch, compiled=compiled)
        depth = _best_depth(problem, t, table)
        if depth is None:
            break
        steps = num_steps(problem, depth)
        one = pipeline_of(problem, t, table, depth, sync_cap, steps)
        least = one.total - one.sync
        if one.total < limit:
            found, limit = one, one.total
        sync_cap = min(sync_cap, limit - least)
    return found


def filled(
    t: Tables,
    caps: Sequence[Ticks],
    sync_cap: Ticks,
    scratch: Scratch,
    *,
    compiled: bool | None = None,
) -> array[int]:
    """The table of states, and what may be behind it.

    Args:
        caps: by number of stages; states count below this only.
        scratch: where the kernel's table lies.
        compiled: as for ``best_pipeline``.
    """
    if has_kernel() if compiled is None else compiled:
        table = scratch.table(t)
        _fill_by_kernel(t, array("q", caps), sync_cap, table)
        return table
    table = empty_table(t)
    reference.fill(t, caps, sync_cap, table)
    return table


@cache
def has_kernel() -> bool:
    """Whether the compiled kernel is there; one warning says so if it is not."""
    try:
        from nest_megatron.research.nest_dp import _recurrence  # noqa: F401
    except ImportError:
        _log.warning("The compiled kernel is not built: the recurrence is far slower.")
        return False
    return True


def num_steps(problem: Problem, depth: int) -> int:
    """How often the slowest stage's time is paid in a step of training."""
    return problem.num_microbatches + depth - 1


def _caps(problem: Problem, left: Ticks) -> list[Ticks]:
    """What a bottleneck must stay below at each depth, so that all its passes take less."""
    depths = range(1, problem.most_stages + 1)
    if left >= UNREACHABLE:
        return [UNREACHABLE] * (problem.most_stages + 1)
    return [0, *(-(-left // num_steps(problem, depth)) for depth in depths)]


def _best_depth(problem: Problem, t: Tables, table: array[int]) -> int | None:
    best, found = UNREACHABLE, None
    for depth in range(problem.least_stages, t.most_stages + 1):
        least = table[t.at(depth, t.num_levels - 1, t.num_downsets - 1, t.num_devices)]
        if least < UNREACHABLE and least * num_steps(problem, depth) < best:
            best, found = least * num_steps(problem, depth), depth
    return found


def _least_sync(problem: Problem) -> Ticks:
    """A sum that no plan stays below: that of the node with the largest, at its best place."""
    places = [times for s in problem.strategies for o in s.options for times in o.times]
    nodes = range(len(problem.downsets.dag.names))
    return max(min(times.sync[node] for times in places) for node in nodes)


def _fill_by_kernel(t: Tables, caps: array[int], sync_cap: int, table: array[int]) -> None:
    from nest_megatron.research.nest_dp import _recurrence

    scratch = array("q", [0]) * (t.num_levels * (t.num_devices + 1) + len(t.options_first))
    _recurrence.fill(
        t.num_downsets,
        t.num_levels,
        t.num_devices,
        t.most_stages,
        t.capacity_bytes,
        t.nested_first,
        t.nested,
        t.ends,
        t.options_first,
        t.option_devices,
        t.reserved,
        t.rows,
        t.times,
        t.least_work,
        t.static,
        t.policies_first,
        t.recomputes,
        t.kept,
        t.peaks,
        t.send,
        t.in_flight,
        caps,
        sync_cap,
        table,
        scratch,
    )
