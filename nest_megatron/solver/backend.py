"""Which stage solver runs: the compiled kernel, or its Python reference where it is not built."""

from __future__ import annotations

import functools
import logging
import os
from enum import Enum

from nest_megatron.cost_model.pipeline import PipelineProblem
from nest_megatron.errors import UserInputError, nearest
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
from nest_megatron.solver.problem_checks import MOST, check_shape, check_values
from nest_megatron.units import Ticks

ENVIRONMENT_VARIABLE = "NEST_MEGATRON_SOLVER"

_STATUS = tuple(Status)
_log = logging.getLogger(__name__)


class Backend(Enum):
    """The stage solvers; they return the same in every field."""

    KERNEL = "kernel"
    REFERENCE = "reference"


def choose(wanted: Backend | None = None) -> Backend:
    """The backend that runs, for a plan's provenance.

    Args:
        wanted: a backend, or ``None`` for what ``NEST_MEGATRON_SOLVER`` names, or else the kernel
            if it is built and the reference, with one warning, if it is not.
    """
    named = os.environ.get(ENVIRONMENT_VARIABLE, "")
    if wanted is not None or not named:
        return wanted or _available()
    known = [backend.value for backend in Backend]
    if named not in known:
        raise UserInputError(
            ENVIRONMENT_VARIABLE,
            named,
            f"it is unset or one of {', '.join(known)}",
            nearest(named, known),
        )
    return Backend(named)


@functools.cache
def _available() -> Backend:
    try:
        from nest_megatron.solver import _stage_dp  # noqa: F401
    except ImportError as error:
        _log.warning(
            "The compiled stage solver is not available (%s); the Python reference gives the same "
            "answers, some hundred times slower. Reinstall with a C compiler to build it.",
            error,
        )
        return Backend.REFERENCE
    return Backend.KERNEL


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
    """
    from nest_megatron.solver import _stage_dp

    try:
        solved = _stage_dp.solve(problem, threshold, node_limit, learning, out_of_time)
    except OverflowError:  # no int64
        solved = None
    if solved is None:
        check_shape(problem, threshold, node_limit)
        check_values(problem)
        raise UserInputError(
            "stage problem", problem, f"no number above {MOST}", "Check its units."
        )
    return StageSolution(_STATUS[solved[0]], *solved[1:])


def _solve_reference(
    problem: PipelineProblem, threshold: Ticks, node_limit: int, *, out_of_time: OutOfTime | None
) -> StageSolution:
    from nest_megatron.solver import reference

    check_shape(problem, threshold, node_limit)
    check_values(problem)
    return reference.solve(problem, threshold, node_limit, out_of_time=out_of_time)
