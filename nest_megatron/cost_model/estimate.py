"""The prediction for one plan, split so that a person can see where time and memory go."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from nest_megatron.cost_model.compute import sixteen_bit
from nest_megatron.cost_model.memory import StaticBytes
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.pipeline import Evaluation, PipelineProblem, chunk_cost, evaluate
from nest_megatron.cost_model.stage_problems import stage_problem
from nest_megatron.cost_model.unit_cost import UnitKind
from nest_megatron.model.graph import OperatorKind
from nest_megatron.model.operators import layer_graph
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import LayerKind, TransformerSpec
from nest_megatron.parallel.grid import Grid
from nest_megatron.parallel.partition import StagePartition
from nest_megatron.units import Bytes, Flops, Seconds, Ticks, to_seconds

#: What an iteration's time goes into; they add up to it. Each second belongs to one operation on
#: some pipeline rank: of the rank that is busy longest while it works and, while it waits, of the
#: rank that the critical path of the schedule lies on then (``_waits``).
TERMS = (
    "compute",
    "recompute",
    "tp_communication",
    "cp_communication",
    "ep_communication",
    "pp_communication",
    "pipeline_bubble",
    "dp_communication",
    "embedding_sync",
    "stragglers",
    "optimizer",
    "host",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEstimate:
    """One pipeline rank.

    Args:
        layers: a short text of what each of its virtual stages holds.
        forward_s, backward_s: all its chunks, one micro batch.
        busy_share: share of the iteration in which it computes or communicates.
        memory: bytes by term, at its peak.
    """

    rank: int
    layers: tuple[str, ...]
    forward_s: Seconds
    backward_s: Seconds
    busy_share: float
    parameters: int
    memory: dict[str, Bytes]

    @property
    def peak_memory_bytes(self) -> Bytes:
        """All terms together."""
        return sum(self.memory.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The prediction for a grid with its stage partition.

    Args:
        terms: seconds by what they go into; they add up to ``iteration_time_s``.
        critical_rank: pipeline rank that is busy longest, whose own time the terms tell.
        fits: whether every rank stays within ``capacity_bytes``.
    """

    iteration_time_s: Seconds
    tokens_per_s_per_gpu: float
    model_tflops_per_gpu: float
    mfu: float
    terms: dict[str, Seconds]
    critical_rank: int
    stages: tuple[StageEstimate, ...]
    capacity_bytes: Bytes
    fits: bool


def model_flops_per_sequence(model: CostModel) -> Flops:
    """Forward and backward operations of one sequence, recomputation not counted.

    GEMMs and the causal half of attention; backward counts twice the forward.
    """
    products = (OperatorKind.GEMM, OperatorKind.GROUPED_GEMM, OperatorKind.ATTENTION)
    return _flops_per_sequence(model.spec, products)


def attention_flops_per_sequence(model: CostModel) -> Flops:
    """The part of ``model_flops_per_sequence`` that is the causal half of attention."""
    return _flops_per_sequence(model.spec, (OperatorKind.ATTENTION,))


def _flops_per_sequence(spec: TransformerSpec, kinds: Collection[OperatorKind]) -> Flops:
    whole = LayerShard()
    by_kind = {
        kind: sum(op.flops for op in layer_graph(spec, kind, whole).operators if op.kind in kinds)
        for kind in set(spec.layer_kinds())
    }
    return 3.0 * sum(by_kind[kind] for kind in spec.layer_kinds())


def estimate(model: CostModel, grid: Grid, partition: StagePartition) -> Estimate:
    """Predict time and memory of a grid with a stage partition."""
    problem = stage_problem(model, grid)
    evaluation = evaluate(problem, partition.boundaries)
    _, kinds = model.unit_kinds(grid)
    iteration = to_seconds(evaluation.iteration)
    gpus = grid.dims.world_size
    tokens = grid.global_batch_size * model.spec.seq_length
    flops = grid.global_batch_size * model_flops_per_sequence(model)
    accelerator = model.cluster.accelerator
    precision = model.settings.precision
    used = precision if accelerator.supports(precision) else sixteen_bit(accelerator)
    achieved = flops / iteration / gpus
    return Estimate(
        iteration_time_s=iteration,
        tokens_per_s_per_gpu=tokens / iteration / gpus,
        model_tflops_per_gpu=achieved / 1e12,
        mfu=achieved / accelerator.peak_flops_per_s[used],
        terms=_terms(model, grid, problem, evaluation, partition, kinds),
        critical_rank=evaluation.critical_rank,
        stages=tuple(
            _stage(model, grid, problem, evaluation, partition, kinds, rank)
            for rank in range(grid.dims.pipeline_model_parallel_size)
        ),
        capacity_bytes=problem.capacity_bytes,
        fits=evaluation.fits,
    )


def _terms(
    model: CostModel,
    grid: Grid,
    problem: PipelineProblem,
    evaluation: Evaluation,
    partition: StagePartition,
    kinds: Sequence[UnitKind],
) -> dict[str, Seconds]:
    """Where the time goes: what the critical rank does, and what it waits for."""
    rank = evaluation.critical_rank
    terms = _rank_terms(problem, evaluation, partition, kinds, rank)
    for name, waited in _waits(evaluation, rank).items():
        terms[name] += to_seconds(waited)
    return terms | _after_schedule(model, grid, problem, evaluation)


def critical_terms(
    model: CostModel, grid: Grid, partition: StagePartition
) -> tuple[int, dict[str, Seconds]]:
    """The pipeline rank that is busy longest, and the terms of an ``Estimate``."""
    problem, (_, kinds) = stage_problem(model, grid), model.unit_kinds(grid)
    evaluation = evaluate(problem, partition.boundaries)
    terms = _terms(model, grid, problem, evaluation, partition, kinds)
    return evaluation.critical_rank, terms


def _waits(evaluation: Evaluation, rank: int) -> dict[str, Ticks]:
    """What a rank waits for in a step, by the critical path; together all that it waits.

    Before its first pass the rank waits for the weights that the path's first rank gathers, after
    its reduction for the gradients that the path's last rank reduces. Of the rest, transfers on
    the path that run beside the work of their senders are pipeline communication. What is left are
    passes of other ranks, mostly before the rank's first and after its last: the pipeline bubble.
    """
    path, gathers, reductions = evaluation.path, evaluation.gathers, evaluation.reductions
    own = gathers[rank] + evaluation.busy[rank] + reductions[rank]
    waited = evaluation.finish - own
    gathered = max(0, min(gathers[path.first_rank], evaluation.first_start(rank)) - gathers[rank])
    reduced = min(
        reductions[path.last_rank], evaluation.finish - evaluation.ends[rank] - reductions[rank]
    )
    sent = min(path.sent(evaluation.chunks), waited - gathered - reduced)
    return {
        "dp_communication": gathered + reduced,
        "pp_communication": sent,
        "pipeline_bubble": waited - gathered - reduced - sent,
    }


def mean_terms(model: CostModel, grid: Grid, partition: StagePartition) -> dict[str, Seconds]:
    """Where the time of all GPUs goes: the terms of every pipeline rank, averaged.

    The terms of an ``Estimate`` are about the rank that is busy longest; here the bubble is what
    the ranks wait on average, for whatever reason.
    """
    problem, (_, kinds) = stage_problem(model, grid), model.unit_kinds(grid)
    evaluation = evaluate(problem, partition.boundaries)
    mean = dict.fromkeys(TERMS, 0.0)
    for rank in range(problem.num_stages):
        terms = _rank_terms(problem, evaluation, partition, kinds, rank)
        for name, spent in terms.items():
            mean[name] += spent / problem.num_stages
    own = map(sum, zip(evaluation.gathers, evaluation.busy, evaluation.reductions, strict=True))
    waited = evaluation.finish * problem.num_stages - sum(own)
    mean["pipeline_bubble"] = to_seconds(waited) / problem.num_stages
    return mean | _after_schedule(model, grid, problem, evaluation)


def _rank_terms(
    problem: PipelineProblem,
    evaluation: Evaluation,
    partition: StagePartition,
    kinds: Sequence[UnitKind],
    rank: int,
) -> dict[str, Seconds]:
    """What one rank does in a step: its gather, its passes and its reduction."""
    m = problem.num_microbatches
    terms = dict.fromkeys(TERMS, 0.0)
    units = 0
    for index in range(rank, problem.num_chunks, problem.num_stages):
        chunk = partition.chunk(index)
        covered = [u for u in chunk if 1 <= u <= problem.num_layers][: problem.block_num_layers]
        for unit in chunk:
            kind = kinds[problem.unit_kinds[unit]]
            run = kind.block_run if unit in covered else kind.run
            terms["recompute"] += m * run.recompute.total
            for name in ("tp", "cp", "ep"):
                spent = getattr(run.forward, name) + getattr(run.backward, name)
                terms[f"{name}_communication"] += m * spent
            terms["compute"] += m * (run.forward.compute + run.backward.compute)
        units += len(chunk)
        if not problem.overlap_p2p:
            sent = problem.send_forward[index] + problem.send_backward[index]
            terms["pp_communication"] += m * to_seconds(sent)
    # A unit's ticks hold its own work and, under ZeRO-2 and 3, the traffic it could not hide; less
    # than two ticks of each are rounding.
    unhidden = to_seconds(evaluation.busy[rank]) - sum(terms.values())
    rounded = abs(unhidden) < 2 * m * to_seconds(units)
    terms["compute" if rounded else "dp_communication"] += unhidden
    terms["dp_communication"] += to_seconds(evaluation.gathers[rank] + evaluation.reductions[rank])
    return terms


def _after_schedule(
    model: CostModel, grid: Grid, problem: PipelineProblem, evaluation: Evaluation
) -> dict[str, Seconds]:
    """What follows the schedule: all ranks take as long as the slowest."""
    constant = to_seconds(problem.constant)
    host = min(model.settings.iteration_floor_s, constant)
    waited = min(model.straggler_time(grid), constant - host)
    return {
        "embedding_sync": constant - host - waited,
        "stragglers": waited,
        "optimizer": to_seconds(max(evaluation.optimizers)),
        "host": host,
    }


def _stage(
    model: CostModel,
    grid: Grid,
    problem: PipelineProblem,
    evaluation: Evaluation,
    partition: StagePartition,
    kinds: Sequence[UnitKind],
    rank: int,
) -> StageEstimate:
    chunks = partition.chunks_of_rank(rank)
    costs = [chunk_cost(problem, chunk.start, chunk.stop) for chunk in chunks]
    units = [kinds[problem.unit_kinds[u]] for chunk in chunks for u in chunk]
    peak = evaluation.memory[rank]
    memory = _static_split(model, grid, [problem.unit_kinds[u] for chunk in chunks for u in chunk])
    memory |= {"activations": peak.activation, "working": peak.working}
    return StageEstimate(
        rank=rank,
        layers=tuple(_describe([kinds[problem.unit_kinds[u]].kind for u in c]) for c in chunks),
        forward_s=to_seconds(sum(c.forward for c in costs)),
        backward_s=to_seconds(sum(c.backward for c in costs)),
        busy_share=evaluation.busy[rank] / evaluation.iteration,
        parameters=sum(unit.parameters.total for unit in units),
        memory=memory,
    )


def _static_split(model: CostModel, grid: Grid, units: Sequence[int]) -> dict[str, Bytes]:
    """Weights, gradients and optimizer states of a rank, as its partition was judged by.

    Args:
        units: which of the distinct units each one of the rank is.
    """
    held = model.replica_costs(grid.dims, grid.zero)
    total = StaticBytes(0, 0, 0)
    for unit in units:
        total = total.plus(held[unit].static)
    return {name: int(num) for name, num in total._asdict().items()}


def _describe(kinds: Sequence[LayerKind]) -> str:
    """What a chunk holds, in the letters of Megatron's layout.

    >>> _describe([LayerKind.EMBEDDING, LayerKind.DENSE, LayerKind.DENSE])
    'Et*2'
    """
    letters = {LayerKind.EMBEDDING: "E", LayerKind.MTP: "m", LayerKind.HEAD: "L"}
    text = "".join(letters.get(kind, "t") for kind in kinds)
    layers = text.count("t")
    return text.replace("t" * layers, f"t*{layers}") if layers > 1 else text
