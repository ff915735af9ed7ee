"""The stage solver that runs, the compiled kernel or its Python reference, and what both refuse."""

from __future__ import annotations

import functools
import os
from enum import Enum

from nest_megatron.cost_model.pipeline import PipelineProblem, UnitCost
from nest_megatron.errors import UserInputError, require_known
from nest_megatron.packages import is_built
from nest_megatron.solver.outcome import (
    DEFAULT_LEARNING,
    DEFAULT_NODE_LIMIT,
    NO_THRESHOLD,
    Learning,
    OutOfTime,
    StageSolution,
    StageSolver,
    Status,
)
from nest_megatron.units import Ticks, to_seconds

ENVIRONMENT_VARIABLE = "NEST_MEGATRON_SOLVER"

_STATUS = tuple(Status)
#: No sum over a schedule may exceed this, so that int64 carries every intermediate result.
LARGEST_SUM = 1 << 59
#: Units that one problem may have: solvers keep their numbers in int32.
_MOST_UNITS = (1 << 31) - 2
#: The two fields that may be negative: overlap beyond what there was to hide.
_SIGNED = frozenset({"gather_hideable", "reduce_hideable"})


class Backend(Enum):
    """The stage solvers; they return the same in every field."""

    KERNEL = "kernel"
    REFERENCE = "reference"


def backend_to_run(requested: Backend | None = None) -> Backend:
    """The backend that runs, for a plan's provenance.

    Args:
        requested: a backend, or ``None`` for what ``NEST_MEGATRON_SOLVER`` names, or else the
            kernel if it is built and the reference, with one warning, if it is not.

    Raises:
        UserInputError: if the variable names no backend.
    """
    if requested is not None:
        return requested
    if named := os.environ.get(ENVIRONMENT_VARIABLE):
        known = [backend.value for backend in Backend]
        limit = f"it is unset or one of {', '.join(known)}"
        require_known(ENVIRONMENT_VARIABLE, named, known, limit)
        return Backend(named)
    slower = "the Python reference gives the same answers, some hundred times slower"
    is_there = is_built("nest_megatron.solver._stage_dp", slower)
    return Backend.KERNEL if is_there else Backend.REFERENCE


def solver_of(backend: Backend, out_of_time: OutOfTime | None = None) -> StageSolver:
    """The function behind a backend, as ``reference.solve`` with problems checked.

    Args:
        out_of_time: ends each solve once it is true, as a node limit does.

    Raises:
        UserInputError: (the function) if a problem is malformed or leaves int64.
        ImportError: (the function) if the kernel is not built.
    """
    solve = solve_compiled if backend is Backend.KERNEL else _solve_reference
    return functools.partial(solve, out_of_time=out_of_time)


def solve_compiled(
    problem: PipelineProblem,
    threshold: Ticks = NO_THRESHOLD,
    node_limit: int = DEFAULT_NODE_LIMIT,
    learning: Learning = DEFAULT_LEARNING,
    out_of_time: OutOfTime | None = None,
) -> StageSolution:
    """What ``reference.solve`` returns, in every field, from the kernel.

    Raises:
        UserInputError: if the problem is malformed, or too large for int64.
        ImportError: if the kernel is not built.
    """
    from nest_megatron.solver import _stage_dp

    try:
        solved = _stage_dp.solve(problem, threshold, node_limit, learning, out_of_time)
    except OverflowError:  # no int64
        solved = None
    if solved is None:
        _check_shape(problem, threshold, node_limit)
        _check_values(problem)
        raise UserInputError(
            "stage problem", problem, f"no number above {LARGEST_SUM}", "Check its units."
        )
    return StageSolution(_STATUS[solved[0]], *solved[1:])


def _solve_reference(
    problem: PipelineProblem, threshold: Ticks, node_limit: int, *, out_of_time: OutOfTime | None
) -> StageSolution:
    from nest_megatron.solver import reference

    _check_shape(problem, threshold, node_limit)
    _check_values(problem)
    return reference.solve(problem, threshold, node_limit, out_of_time=out_of_time)


def _check_shape(problem: PipelineProblem, threshold: Ticks, node_limit: int) -> None:
    """Refuse a problem whose numbers do not belong together.

    Raises:
        UserInputError: naming the field, its value, the rule and the fix.
    """
    p, v, m = problem.num_stages, problem.num_virtual, problem.num_microbatches
    n = problem.num_units
    if min(p, v, m) < 1:
        _refuse("num_stages, num_virtual, num_microbatches", (p, v, m), "each is at least 1")
    if n > _MOST_UNITS:
        _refuse("unit_kinds", n, f"at most {_MOST_UNITS} units", fix="Plan a smaller model.")
    if m > LARGEST_SUM // n:
        _refuse("num_microbatches", m, f"at most {LARGEST_SUM // n} with {n} units")
    if p * v > n:
        _refuse(
            "num_stages * num_virtual",
            p * v,
            f"each chunk needs one of the {n} units (layers, embedding, head)",
            fix="Use fewer pipeline stages or fewer virtual stages.",
        )
    if v == 1 and problem.overlap_p2p:
        _refuse("overlap_p2p", True, "Megatron overlaps transfers only with virtual stages")
    if v > 1 and (p == 1 or m % p):
        _refuse(
            "num_microbatches",
            m,
            f"virtual stages need at least 2 pipeline stages and a multiple of their number ({p})",
            fix="Change the global batch, the micro batch or the number of stages.",
        )
    layers, block, sends = problem.num_layers, problem.block_num_layers, problem.send_forward
    if not 0 <= layers < n or block < 0:
        limit = f"layers are the units 1 .. num_layers of {n}, and counts are not negative"
        _refuse("num_layers, block_num_layers", (layers, block), limit)
    if not len(sends) == len(problem.send_backward) == p * v:
        _refuse("send_forward, send_backward", len(sends), f"one for each of {p * v}")
    if max(problem.unit_kinds) >= len(problem.costs) or len(problem.costs) > 256:
        _refuse("unit_kinds", max(problem.unit_kinds), f"an index into {len(problem.costs)} costs")
    if not -NO_THRESHOLD <= threshold <= NO_THRESHOLD:
        _refuse("threshold", threshold, f"at most NO_THRESHOLD = {NO_THRESHOLD} ticks")
    if not 0 <= node_limit <= NO_THRESHOLD:
        _refuse("node_limit", node_limit, f"a count, at most {NO_THRESHOLD}")


def _check_values(problem: PipelineProblem) -> None:
    """Refuse negative times and bytes, and sums that could leave int64.

    Raises:
        UserInputError: naming the field, its value, the rule and the fix.
    """
    for index, cost in enumerate(problem.costs):
        for name, value in zip(UnitCost._fields, cost, strict=True):
            if value < 0 and name not in _SIGNED:
                _refuse(f"costs[{index}].{name}", value, "times and bytes are not negative")
    for name in ("send_forward", "send_backward"):
        if min(getattr(problem, name)) < 0:
            _refuse(name, min(getattr(problem, name)), "times are not negative")
    if problem.constant < 0:
        _refuse("constant", problem.constant, "times are not negative")
    if abs(problem.capacity_bytes) > LARGEST_SUM:
        _refuse("capacity_bytes", problem.capacity_bytes, f"at most {LARGEST_SUM}")
    ticks, num_bytes = _largest_sums(problem)
    if ticks > LARGEST_SUM:
        _refuse(
            "all work of one step",
            f"{to_seconds(ticks) / 86_400:.1f} days on one GPU after another",
            f"the solver's clock carries {to_seconds(LARGEST_SUM) / 86_400:.1f} days",
            fix="Use a smaller global batch, or more GPUs.",
        )
    if num_bytes > LARGEST_SUM:
        _refuse(
            "largest memory in bytes", num_bytes, f"all that a step saves, at most {LARGEST_SUM}"
        )


def _largest_sums(problem: PipelineProblem) -> tuple[Ticks, int]:
    """Above every time and every memory that a backend adds up."""
    units = [problem.costs[kind] for kind in problem.unit_kinds]
    m = problem.num_microbatches
    work = sum(u.forward + u.backward + u.block_backward for u in units)
    work += sum(problem.send_forward) + sum(problem.send_backward)
    edges = sum(u.gather_unhidden + u.reduce_unhidden + u.optimizer for u in units)
    edges += sum(abs(u.gather_hideable) + abs(u.reduce_hideable) for u in units)
    saved = sum(u.saved_bytes + u.block_saved_bytes for u in units)
    static = sum(u.static_bytes for u in units)
    working = sum(c.working_bytes + c.block_working_bytes for c in problem.costs)
    return (m + 4) * work + edges + problem.constant, static + m * saved + working


def _refuse(what: str, value: object, limit: str, *, fix: str = "Correct the problem.") -> None:
    raise UserInputError(what, value, limit, fix)
