"""The oracle of the stage problem: look at every partition. Exponential; for tests."""

from __future__ import annotations

from collections.abc import Iterator

from nest_megatron.cost_model.critical_path import Summarize, summarize
from nest_megatron.cost_model.pipeline import PipelineProblem, evaluate
from nest_megatron.solver.chunk_space import Boundaries, interleaved_partitions
from nest_megatron.solver.outcome import NO_THRESHOLD, StageSolution, Status


def partitions(problem: PipelineProblem) -> Iterator[Boundaries]:
    """Every partition of the declared space, in tie order."""
    if problem.num_virtual == 1:
        for boundaries in _compositions(problem.num_units, problem.num_stages):
            if problem.num_stages == 1 or boundaries[1] <= problem.num_layers + 1:
                yield boundaries
    else:
        yield from interleaved_partitions(problem)


def _compositions(num_units: int, num_stages: int, first: int = 0) -> Iterator[Boundaries]:
    if num_stages == 1:
        if num_units > first:
            yield (first, num_units)
        return
    for end in range(num_units - num_stages + 1, first, -1):
        for rest in _compositions(num_units, num_stages - 1, end):
            yield (first, *rest)


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
