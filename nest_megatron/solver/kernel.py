"""The compiled stage solver, with the reference's signature."""

from __future__ import annotations

from nest_megatron.cost_model.pipeline import PipelineProblem
from nest_megatron.errors import UserInputError
from nest_megatron.solver import _stage_dp
from nest_megatron.solver.outcome import (
    DEFAULT_LEARNING,
    DEFAULT_NODE_LIMIT,
    NO_THRESHOLD,
    Learning,
    OutOfTime,
    StageSolution,
    Status,
)
from nest_megatron.solver.problem_checks import MOST, check_shape, check_values
from nest_megatron.units import Ticks

_STATUS = tuple(Status)


def solve(
    problem: PipelineProblem,
    threshold: Ticks = NO_THRESHOLD,
    node_limit: int = DEFAULT_NODE_LIMIT,
    learning: Learning = DEFAULT_LEARNING,
    out_of_time: OutOfTime | None = None,
) -> StageSolution:
    """The first fastest partition that fits and takes less than ``threshold`` ticks.

    Args:
        threshold: an iteration time to beat; the search proves that none does, or finds the best.
            No time beats 0, so 0 or less asks for memory alone: nothing is bounded.
        node_limit: partial partitions after which the search gives up with what it has. 0 asks for
            memory and the lower bound alone: nothing is simulated.
        learning: what the search keeps of what it has seen.
        out_of_time: asked now and then; once true the search gives up with what it has.

    Returns:
        What ``reference.solve`` returns, in every field.

    Raises:
        UserInputError: if the problem is malformed, or too large for int64.
    """
    check_shape(problem, threshold, node_limit)
    try:
        solved = _stage_dp.solve(
            problem.num_stages,
            problem.num_virtual,
            problem.num_microbatches,
            problem.unit_kinds,
            problem.costs,
            problem.num_layers,
            problem.block_num_layers,
            problem.send_forward,
            problem.send_backward,
            problem.overlap_p2p,
            problem.capacity_bytes,
            problem.constant,
            threshold,
            node_limit,
            learning.max_path_bounds,
            learning.nogoods_after,
            learning.max_nogoods,
            learning.max_needs,
            out_of_time,
        )
    except OverflowError:
        solved = None
    if solved is None:
        check_values(problem)
        raise UserInputError(
            "stage problem", value=problem, limit=f"no number above {MOST}", fix="Check its units."
        )
    status, iteration, boundaries, lower_bound, nodes, simulations = solved
    return StageSolution(
        status=_STATUS[status],
        iteration=iteration,
        boundaries=boundaries,
        lower_bound=lower_bound,
        nodes=nodes,
        simulations=simulations,
    )
