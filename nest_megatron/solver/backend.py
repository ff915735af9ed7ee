"""Which stage solver runs: the compiled kernel, or its Python reference where it is not built."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from enum import Enum

from nest_megatron.cost_model.pipeline import PipelineProblem
from nest_megatron.errors import UserInputError, nearest
from nest_megatron.solver import reference
from nest_megatron.solver.outcome import (
    DEFAULT_NODE_LIMIT,
    NO_THRESHOLD,
    OutOfTime,
    StageSolution,
)
from nest_megatron.solver.problem_checks import check_shape, check_values
from nest_megatron.units import Ticks

ENVIRONMENT_VARIABLE = "NEST_MEGATRON_SOLVER"

Solve = Callable[[PipelineProblem, Ticks, int], StageSolution]

_log = logging.getLogger(__name__)


class Backend(Enum):
    """The stage solvers; they return the same in every field."""

    KERNEL = "kernel"
    REFERENCE = "reference"


def solve(
    problem: PipelineProblem,
    threshold: Ticks = NO_THRESHOLD,
    node_limit: int = DEFAULT_NODE_LIMIT,
    *,
    backend: Backend | None = None,
) -> StageSolution:
    """The first fastest partition that fits and takes less than ``threshold`` ticks.

    Args:
        threshold: an iteration time to beat; the search proves that none does, or finds the best.
        node_limit: partial partitions after which the search gives up with what it has.
        backend: as for ``choose``.

    Raises:
        UserInputError: if the problem is malformed or leaves int64, whatever the backend.
        ImportError: if the kernel is asked for by name and is not built.
    """
    return solver_of(choose(backend))(problem, threshold, node_limit)


def choose(wanted: Backend | None = None) -> Backend:
    """The backend that ``solve`` uses, for a plan's provenance.

    Args:
        wanted: a backend, or ``None`` for what ``NEST_MEGATRON_SOLVER`` names, or else the kernel
            if it is built and the reference, with one warning, if it is not.
    """
    named = os.environ.get(ENVIRONMENT_VARIABLE, "")
    if wanted is not None or named:
        return wanted or _parse(named)
    return _available()


def solver_of(backend: Backend, out_of_time: OutOfTime | None = None) -> Solve:
    """The function behind a backend.

    Args:
        out_of_time: ends each solve once it is true, as a node limit does.
    """
    if backend is Backend.REFERENCE:
        return functools.partial(_solve_reference, out_of_time=out_of_time)
    from nest_megatron.solver import kernel

    return functools.partial(kernel.solve, out_of_time=out_of_time)


def _parse(name: str) -> Backend:
    known = [backend.value for backend in Backend]
    if name not in known:
        raise UserInputError(
            ENVIRONMENT_VARIABLE,
            value=name,
            limit=f"it is unset or one of {', '.join(known)}",
            fix=nearest(name, known),
        )
    return Backend(name)


@functools.cache
def _available() -> Backend:
    try:
        from nest_megatron.solver import kernel  # noqa: F401
    except ImportError as error:
        _log.warning(
            "The compiled stage solver is not available (%s); the Python reference gives the same "
            "answers, some hundred times slower. Reinstall with a C compiler to build it.",
            error,
        )
        return Backend.REFERENCE
    return Backend.KERNEL


def _solve_reference(
    problem: PipelineProblem, threshold: Ticks, node_limit: int, *, out_of_time: OutOfTime | None
) -> StageSolution:
    check_shape(problem, threshold, node_limit)
    check_values(problem)
    return reference.solve(problem, threshold, node_limit, out_of_time=out_of_time)
