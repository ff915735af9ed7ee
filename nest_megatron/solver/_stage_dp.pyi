from collections.abc import Callable

from nest_megatron.cost_model.pipeline import PipelineProblem
from nest_megatron.solver.outcome import Learning

def solve(
    problem: PipelineProblem,
    threshold: int,
    node_limit: int,
    learning: Learning,
    out_of_time: Callable[[], bool] | None,
) -> tuple[int, int, int, tuple[int, ...], int, int] | None: ...
