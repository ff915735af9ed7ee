"""The oracle of the stage problem: look at every partition. Exponential; for tests."""

from __future__ import annotations

from nest_megatron.cost_model.critical_path import Summarize, summarize
from nest_megatron.cost_model.pipeline import PipelineProblem, evaluate
from nest_megatron.solver.chunk_space import Boundaries, partitions
from nest_megatron.solver.outcome import NO_THRESHOLD, StageSolution, Status


def solve(
    problem: PipelineProblem, threshold: int = NO_THRESHOLD, run: Summarize = summarize
) -> StageSolution:
    """The first fastest partition that fits in memory and beats the threshold.

    Args:
        run: what simulates: plain Python where compiled code is judged, else the same compiled.
    """
    best, simulations, any_fits = threshold, 0, False
    boundaries: Boundaries = ()
    for partition in partitions(problem):
        evaluation = evaluate(problem, partition, run)
        simulations += 1
        any_fits |= evaluation.fits
        if evaluation.fits and evaluation.iteration < best:
            best, boundaries = evaluation.iteration, partition
    nothing = Status.BOUNDED if any_fits else Status.INFEASIBLE
    status = Status.OPTIMAL if boundaries else nothing
    iteration = best if boundaries else NO_THRESHOLD
    return StageSolution(status, best, iteration, boundaries, simulations, simulations)
