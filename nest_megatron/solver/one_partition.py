"""The stage problem where one partition alone is allowed, left to the stage solver all the same.

Time and memory ask of a chunk only the sums over its units and the largest working memory. Joining
the units of each chunk to one unit therefore leaves a problem with as many units as chunks, whose
only partition costs what the original one costs, to the tick and the byte. The stage solver,
whichever backend, judges that problem with all that it promises: bounds, thresholds, limits and
refusals.
"""

from __future__ import annotations

from nest_megatron.cost_model.pipeline import PipelineProblem, chunk_cost, chunks_of
from nest_megatron.errors import UserInputError
from nest_megatron.layout.rulebook.schedule import lets_nemo_build_mtp, misplaced_mtp_chunk
from nest_megatron.layout.stage_layout import StagePartition, layout_string, uniform_partition
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.solver.outcome import NO_THRESHOLD, StageSolution, StageSolver, Status
from nest_megatron.units import Ticks

#: Different chunks that a stage problem can name.
_MOST_KINDS = 256


def check_partition(
    spec: TransformerSpec, partition: StagePartition, *, mtp_beside_layer: bool = False
) -> None:
    """Refuse a partition that is not one of this model.

    Args:
        mtp_beside_layer: as of ``SearchSpace``.

    Raises:
        UserInputError: if it cuts another number of units, or puts MTP layers where Megatron, or
            the job's framework, does not build them.
    """
    units = spec.num_units
    if partition.boundaries[-1] != units:
        raise UserInputError(
            "stage partition",
            partition.boundaries[-1],
            f"model {spec.name} has {units} units (layers, embedding, MTP, head)",
            "Cut the units of this very model.",
        )
    pp, chunk = partition.pipeline_model_parallel_size, misplaced_mtp_chunk(spec, partition)
    if chunk is not None:
        raise UserInputError(
            "stage partition",
            f"MTP layers in virtual stage {chunk // pp} of pipeline rank {chunk % pp}",
            "Megatron keeps them in the last virtual stage of a rank other than the first",
            "Move them to the last stage.",
        )
    if mtp_beside_layer and not lets_nemo_build_mtp(spec, partition):
        raise UserInputError(
            "pipeline_model_parallel_layout",
            layout_string(spec, partition),
            "NeMo builds MTP layers in the last virtual stage, of a layer there",
            "Move the last layer and them to the head.",
        )


def solver_of_partition(solve: StageSolver, partition: StagePartition) -> StageSolver:
    """A stage solver that knows one partition alone.

    Args:
        solve: the stage solver that judges it.
        partition: one of the model whose problems it solves, with their ``p`` and ``v``.
    """

    def solve_one(problem: PipelineProblem, threshold: Ticks, node_limit: int) -> StageSolution:
        found = solve(join_chunks(problem, partition.boundaries), threshold, node_limit)
        return found._replace(boundaries=partition.boundaries) if found.boundaries else found

    return solve_one


def solver_of_even_stages(solve: StageSolver, spec: TransformerSpec) -> StageSolver:
    """The same of the partition that Megatron makes of each problem's sizes by itself."""

    def solve_even(problem: PipelineProblem, threshold: Ticks, node_limit: int) -> StageSolution:
        even = uniform_partition(spec, problem.num_stages, problem.num_virtual)
        return solver_of_partition(solve, even)(problem, threshold, node_limit)

    return solve_even


def solver_with_mtp_at_head(
    solve: StageSolver,
    spec: TransformerSpec,
    *,
    mtp_beside_layer: bool = False,
    mtp_beside_head: bool = False,
) -> StageSolver:
    """A stage solver that keeps MTP layers with the head, where the model is built so.

    Those of a hybrid model are (0.20 ``HybridModel``), NeMo's with the last layer as well; the
    layouts of other models may part them.

    Args:
        mtp_beside_layer: as of ``SearchSpace``.
        mtp_beside_head: no layout of the release parts them.
    """
    beside_head = bool(spec.hybrid_layer_pattern) or (mtp_beside_head and not mtp_beside_layer)
    if not spec.num_mtp_layers or not (beside_head or mtp_beside_layer):
        return solve

    def solve_whole(problem: PipelineProblem, threshold: Ticks, node_limit: int) -> StageSolution:
        units = problem.num_units
        if units != problem.num_layers + 3 or problem.num_chunks == 1:  # no MTP, or joined already
            return solve(problem, threshold, node_limit)
        first = units - (2 if beside_head else 3)
        if first + 1 < problem.num_chunks:
            return StageSolution(Status.INFEASIBLE, NO_THRESHOLD)
        found = solve(_join_end(problem, first), threshold, node_limit)
        boundaries = (*found.boundaries[:-1], units) if found.boundaries else ()
        return found._replace(boundaries=boundaries)

    return solve_whole


def _join_end(problem: PipelineProblem, first: int) -> PipelineProblem:
    """The units from ``first`` on as one, whose layer no block of recomputation covers."""
    end = chunk_cost(problem._replace(block_num_layers=0), first, problem.num_units)
    costs = (*problem.costs, end)
    return problem._replace(
        unit_kinds=bytes((*problem.unit_kinds[:first], len(costs) - 1)),
        costs=costs,
        num_layers=first - 1,
    )


def join_chunks(problem: PipelineProblem, boundaries: tuple[int, ...]) -> PipelineProblem:
    """The problem with one unit for each chunk of a partition.

    Every unit but the first and the last counts as a layer, so that the family of
    ``chunk_space.py`` too has one member: a layer for each chunk between the ends.

    Raises:
        UserInputError: if there are more different chunks than a problem can name.
    """
    chunks = chunks_of(problem, boundaries)
    kinds = {cost: number for number, cost in enumerate(dict.fromkeys(chunks))}
    if len(kinds) > _MOST_KINDS:
        raise UserInputError(
            "stage partition",
            len(kinds),
            f"it may have {_MOST_KINDS} virtual stages of different cost",
            "Give more virtual stages the same layers.",
        )
    return problem._replace(
        unit_kinds=bytes(kinds[cost] for cost in chunks),
        costs=tuple(kinds),
        num_layers=max(0, len(chunks) - 2),
        block_num_layers=0,
    )
