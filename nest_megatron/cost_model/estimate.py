"""The prediction for one plan, split so that a person can see where time and memory go."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from nest_megatron.cost_model.compute import sixteen_bit_format
from nest_megatron.cost_model.layer_cost import PassTime
from nest_megatron.cost_model.memory import StaticBytes
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.pipeline import Evaluation, PipelineProblem, chunk_cost, evaluate
from nest_megatron.cost_model.stage_problems import stage_problem
from nest_megatron.cost_model.unit_cost import UnitKind
from nest_megatron.cost_model.unit_run import UnitRun
from nest_megatron.layout.estimate import Estimate, StageEstimate
from nest_megatron.layout.layout import Layout
from nest_megatron.layout.stage_layout import StagePartition
from nest_megatron.model.graph import OperatorKind
from nest_megatron.model.layer_pattern import LayerKind
from nest_megatron.model.operators import layer_graph
from nest_megatron.model.shard import LayerShard
from nest_megatron.units import Bytes, Flops, Seconds, Ticks, format_gib, to_seconds

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


def model_flops_per_sequence(model: CostModel) -> Flops:
    """Forward and backward operations of one sequence, recomputation not counted.

    GEMMs, scans and the causal half of attention; backward counts twice the forward, and once
    for frozen weights.
    """
    return _flops_per_sequence(model, set(OperatorKind) - {OperatorKind.MEMORY_BOUND})


def attention_flops_per_sequence(model: CostModel) -> Flops:
    """The part of ``model_flops_per_sequence`` that is the causal half of attention."""
    return _flops_per_sequence(model, (OperatorKind.ATTENTION,))


def _flops_per_sequence(model: CostModel, kinds: Collection[OperatorKind]) -> Flops:
    spec, whole = model.spec, LayerShard(attended_tokens=model.settings.traits.attended_tokens)
    by_kind = {
        kind: sum(
            (2.0 if op.frozen else 3.0) * op.flops
            for op in layer_graph(spec, kind, whole).operators
            if op.kind in kinds
        )
        for kind in set(spec.layer_kinds())
    }
    return sum(by_kind[kind] for kind in spec.layer_kinds())


class _Evaluated(NamedTuple):
    """A layout, priced and simulated."""

    model: CostModel
    layout: Layout
    problem: PipelineProblem
    evaluation: Evaluation
    kinds: Sequence[UnitKind]


def _evaluated(model: CostModel, layout: Layout) -> _Evaluated:
    problem = stage_problem(model, layout)
    evaluation = evaluate(problem, layout.partition.boundaries)
    return _Evaluated(model, layout, problem, evaluation, model.unit_kinds(layout)[1])


def estimate(model: CostModel, layout: Layout) -> Estimate:
    """Predict time and memory of a layout."""
    found = _evaluated(model, layout)
    iteration = to_seconds(found.evaluation.iteration)
    gpus = layout.dims.world_size
    tokens = layout.global_batch_size * model.spec.seq_length
    flops = layout.global_batch_size * model_flops_per_sequence(model)
    accelerator = model.cluster.accelerator
    precision = model.settings.precision
    used = precision if accelerator.supports(precision) else sixteen_bit_format(accelerator)
    achieved = flops / iteration / gpus
    stages = tuple(_stage(found, r) for r in range(layout.dims.pipeline_model_parallel_size))
    peaks, terms = [stage.peak_memory_bytes for stage in stages], _terms(found)
    return Estimate(
        iteration_time_s=iteration,
        tokens_per_s_per_gpu=tokens / iteration / gpus,
        model_tflops_per_gpu=achieved / 1e12,
        mfu=achieved / accelerator.peak_flops_per_s[used],
        terms=terms,
        critical_rank=found.evaluation.critical_rank,
        peak_memory_bytes=max(peaks),
        capacity_bytes=found.problem.capacity_bytes,
        fits=found.evaluation.fits,
        binding_constraint=_binding_constraint(
            peaks, found.problem.capacity_bytes, terms, iteration
        ),
        stages=stages,
    )


def _binding_constraint(
    peaks: Sequence[Bytes], capacity: Bytes, terms: Mapping[str, Seconds], iteration_s: Seconds
) -> str:
    """What a faster layout would have to change: memory where it is short, or the largest term."""
    rank = peaks.index(max(peaks))
    spare = capacity - peaks[rank]
    if spare < 0:
        return f"memory: pipeline rank {rank} lacks {format_gib(-spare)}"
    if spare < 0.1 * capacity:
        return f"memory: pipeline rank {rank} has {format_gib(spare)} to spare"
    largest = max(terms, key=lambda name: terms[name])
    return f"{largest}: {100 * terms[largest] / iteration_s:.0f} % of the iteration"


def critical_terms(model: CostModel, layout: Layout) -> tuple[int, dict[str, Seconds]]:
    """The pipeline rank that is busy longest, and the terms of an ``Estimate``."""
    found = _evaluated(model, layout)
    return found.evaluation.critical_rank, _terms(found)


def mean_terms(model: CostModel, layout: Layout) -> dict[str, Seconds]:
    """Where the time of all GPUs goes: the terms of every pipeline rank, averaged.

    The terms of an ``Estimate`` are about the rank that is busy longest; here the bubble is what
    the ranks wait on average, for whatever reason.
    """
    found = _evaluated(model, layout)
    evaluation, num_stages = found.evaluation, found.problem.num_stages
    mean = dict.fromkeys(TERMS, 0.0)
    for rank in range(num_stages):
        for name, spent in _rank_terms(found, rank).items():
            mean[name] += spent / num_stages
    own = sum(evaluation.gathers) + sum(evaluation.busy) + sum(evaluation.reductions)
    mean["pipeline_bubble"] = to_seconds(evaluation.finish * num_stages - own) / num_stages
    return mean | _after_schedule(found)


def _terms(found: _Evaluated) -> dict[str, Seconds]:
    """Where the time goes: what the critical rank does, and what it waits for."""
    rank = found.evaluation.critical_rank
    terms = _rank_terms(found, rank)
    for name, waited in _waits(found.evaluation, rank).items():
        terms[name] += to_seconds(waited)
    return terms | _after_schedule(found)


def _waits(evaluation: Evaluation, rank: int) -> dict[str, Ticks]:
    """What a rank waits for in a step, by the critical path; together all that it waits.

    Before its first pass the rank waits for the weights that the path's first rank gathers, after
    its reduction for the gradients that the path's last rank reduces. Of the rest, transfers on
    the path that overlap the work of their senders are pipeline communication. What is left are
    passes of other ranks, mostly before the rank's first and after its last: the pipeline bubble.
    """
    path, gathers, reductions = evaluation.path, evaluation.gathers, evaluation.reductions
    own = gathers[rank] + evaluation.busy[rank] + reductions[rank]
    waited = evaluation.finish - own
    gathered = max(0, min(gathers[path.first_rank], evaluation.first_start(rank)) - gathers[rank])
    reduced = min(
        reductions[path.last_rank], evaluation.finish - path.ends[rank] - reductions[rank]
    )
    sent = min(path.sent(evaluation.chunks), waited - gathered - reduced)
    return {
        "dp_communication": gathered + reduced,
        "pp_communication": sent,
        "pipeline_bubble": waited - gathered - reduced - sent,
    }


def _rank_terms(found: _Evaluated, rank: int) -> dict[str, Seconds]:
    problem, evaluation = found.problem, found.evaluation
    m = found.layout.num_microbatches
    terms = dict.fromkeys(TERMS, 0.0)
    units = 0
    for index in range(rank, problem.num_chunks, problem.num_stages):
        runs = _runs(problem, found.layout.partition, found.kinds, index)
        for run in runs:
            terms["recompute"] += m * run.recompute.total
            for name in ("tp", "cp", "ep"):
                spent = getattr(run.forward, name) + getattr(run.backward, name)
                terms[f"{name}_communication"] += m * spent
            terms["compute"] += m * (run.forward.compute + run.backward.compute)
        units += len(runs)
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


def _runs(
    problem: PipelineProblem, partition: StagePartition, kinds: Sequence[UnitKind], index: int
) -> list[UnitRun]:
    """The units of a chunk as they run."""
    chunk = partition.chunk(index)
    covered = [u for u in chunk if 1 <= u <= problem.num_layers][: problem.block_num_layers]
    found = ((kinds[problem.unit_kinds[unit]], unit in covered) for unit in chunk)
    return [(kind.block if is_covered else kind.own).run for kind, is_covered in found]


def exposed_communication(
    model: CostModel, layout: Layout, problem: PipelineProblem
) -> tuple[tuple[dict[str, Seconds], dict[str, Seconds]], ...]:
    """What one pass forward and one backward of each chunk spend on communication, by term.

    Only what nothing hides. What recomputation repeats of it counts as recomputation.
    """
    kinds, found = model.unit_kinds(layout)[1], []
    for index in range(problem.num_chunks):
        chunk = layout.partition.chunk(index)
        cost = chunk_cost(problem, chunk.start, chunk.stop)
        runs = _runs(problem, layout.partition, kinds, index)
        again = sum(run.recompute.total for run in runs)
        forward = _exposed([run.forward for run in runs], to_seconds(cost.forward))
        backward = _exposed([run.backward for run in runs], to_seconds(cost.backward) - again)
        if not problem.overlap_p2p:
            forward["pp_communication"] = to_seconds(problem.send_forward[index])
            backward["pp_communication"] = to_seconds(problem.send_backward[index])
        found.append((forward, backward))
    return tuple(found)


def _exposed(passes: Sequence[PassTime], spent: Seconds) -> dict[str, Seconds]:
    """Communication of a chunk's passes, of which the sharding of replicas is what else was spent.

    Less than two ticks a unit are rounding, as in ``_rank_terms``.
    """
    shards = spent - sum(each.total for each in passes)
    return {
        "tp_communication": sum(each.tp for each in passes),
        "cp_communication": sum(each.cp for each in passes),
        "ep_communication": sum(each.ep for each in passes),
        "dp_communication": 0.0 if abs(shards) < to_seconds(2 * len(passes)) else shards,
    }


def _after_schedule(found: _Evaluated) -> dict[str, Seconds]:
    """What follows the schedule: all ranks take as long as the slowest."""
    constant = to_seconds(found.problem.constant)
    host = min(found.model.settings.iteration_floor_s, constant)
    waited = min(found.model.straggler_time(found.layout), constant - host)
    return {
        "embedding_sync": constant - host - waited,
        "stragglers": waited,
        "optimizer": to_seconds(max(found.evaluation.optimizers)),
        "host": host,
    }


def _stage(found: _Evaluated, rank: int) -> StageEstimate:
    problem, evaluation = found.problem, found.evaluation
    chunks = found.layout.partition.chunks_of_rank(rank)
    costs = [chunk_cost(problem, chunk.start, chunk.stop) for chunk in chunks]
    places = [problem.unit_kinds[u] for chunk in chunks for u in chunk]
    replicas = found.model.replica_costs(found.layout.dims, found.layout.zero)
    static = functools.reduce(StaticBytes.plus, (replicas[place].static for place in places))
    peak = evaluation.memory[rank]
    return StageEstimate(
        layers=tuple(
            _describe([found.kinds[problem.unit_kinds[u]].kind for u in c]) for c in chunks
        ),
        forward_s=to_seconds(sum(c.forward for c in costs)),
        backward_s=to_seconds(sum(c.backward for c in costs)),
        busy_share=evaluation.busy[rank] / evaluation.iteration,
        parameters=sum(found.kinds[place].parameters.total for place in places),
        memory_bytes={name: int(num) for name, num in static._asdict().items()}
        | {"activations": peak.activation, "working": peak.working},
    )


def _describe(kinds: Sequence[LayerKind]) -> str:
    """What a chunk holds, in the letters of Megatron's layout.

    >>> _describe([LayerKind.EMBEDDING, LayerKind.DENSE, LayerKind.DENSE])
    'Et*2'
    """
    text = "".join(kind.letter for kind in kinds)
    layers = text.count("t")
    return text.replace("t" * layers, f"t*{layers}") if layers > 1 else text
