"""A solved grid as a plan: its prediction, its runners-up, where it comes from."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from nest_megatron.cluster.records import Cluster
from nest_megatron.cost_model.estimate import estimate
from nest_megatron.cost_model.goodput import goodput
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.peak_limit import out_of_memory
from nest_megatron.cost_model.settings import stored_settings
from nest_megatron.cost_model.site import expected
from nest_megatron.cost_model.uncertainty import Predictive, probability_faster
from nest_megatron.files import now
from nest_megatron.layout.batch_schedule import BatchSchedule, PredictedBatch, TrainChoice
from nest_megatron.layout.dims import RankOrder
from nest_megatron.layout.estimate import (
    Alternative,
    Estimate,
    Placement,
    Price,
    Rates,
    Uncertainty,
    price,
)
from nest_megatron.layout.layout import Layout, PartialLayout
from nest_megatron.layout.plan import ParallelPlan, Provenance, SearchRecord
from nest_megatron.layout.plan_file import digest
from nest_megatron.layout.policy import Policy
from nest_megatron.layout.rank_order import GroupKind, group_level, group_of_rank
from nest_megatron.planner.choice import Candidate
from nest_megatron.planner.request import Request
from nest_megatron.profile.records import ANALYTIC_NAME, Source
from nest_megatron.solver.backend import choose
from nest_megatron.solver.outcome import NO_THRESHOLD
from nest_megatron.solver.ranking import SearchResult, SolvedLayout
from nest_megatron.solver.space import DEFAULT_LIMITS, SearchSpace
from nest_megatron.units import to_seconds
from nest_megatron.version import __version__

#: Certificate of a search that time ended before it had a plan.
ENDED_EARLY = "ended-early"


def assemble(
    request: Request,
    model: CostModel,
    layout: Layout,
    predicted: Estimate,
    record: SearchRecord,
    *,
    batches: tuple[PredictedBatch, ...] = (),
    **others: Any,
) -> ParallelPlan:
    """The plan of a layout for a request.

    Args:
        batches: what is expected at each size of a batch that grows.
        others: further fields of ``ParallelPlan``.
    """
    site, rates = request.site, request.rates
    spec, cluster = model.spec, model.cluster
    known = expected(site, model, layout, predicted.iteration_time_s)
    peak_bytes = predicted.peak_memory_bytes
    without, short = (out_of_memory(model, layout, peak_bytes, each) for each in (None, site))
    memory = None if site is None else site.memory_change(model, layout, without)
    kept, step_s = None, predicted.iteration_time_s
    if request.reliability is not None:
        kept = goodput(request.reliability, step_s, layout.num_gpus)
    found = ParallelPlan(
        model=spec,
        cluster=cluster,
        train=TrainChoice(
            seq_length=spec.seq_length,
            precision=model.settings.precision,
            batch_schedule=request.batch_schedule,
            sequence_lengths=request.sequence_lengths,
        ),
        layout=layout,
        placement=_placement(cluster, layout, has_experts=spec.is_moe),
        predicted=predicted,
        search=record,
        provenance=Provenance(
            nest_megatron_version=__version__,
            created=now(),
            profile=describe_times(model, layout),
            cluster_hash=digest(cluster),
            model_hash=digest(spec),
            settings=stored_settings(model.settings),
            site=None if site is None else site.change(known, memory),
            defaults=request.defaults,
            given=request.given,
        ),
        uncertainty=described(known, short),
        goodput=kept,
        batches=batches,
        **others,
    )
    return found if rates is None else dataclasses.replace(found, price=priced(found, rates))


def described(known: Predictive, out_of_memory: float) -> Uncertainty:
    """A predictive distribution in few numbers, for plan files."""
    low_s, high_s = known.interval(0.9)
    return Uncertainty(
        mean_s=known.expected_s,
        low_s=low_s,
        high_s=high_s,
        percentile_90_s=known.quantile_s(0.9),
        confidence=known.confidence.level,
        kind=known.confidence.kind,
        runs=known.confidence.runs,
        error_percent=known.confidence.error_pct,
        out_of_memory=out_of_memory,
        median_s=None if known.learned is None else known.median_s,
    )


def predicted_batches(
    model: CostModel, layout: Layout, schedule: BatchSchedule | None
) -> Iterator[PredictedBatch]:
    """What is expected of a layout at each size of a batch that grows."""
    for part in () if schedule is None else schedule.parts:
        size, samples = part.global_batch_size, part.samples
        found = estimate(model, dataclasses.replace(layout, global_batch_size=size))
        yield PredictedBatch(
            global_batch_size=size,
            steps=None if samples is None else -(-samples // size),
            iteration_time_s=found.iteration_time_s,
            tokens_per_s_per_gpu=found.tokens_per_s_per_gpu,
            peak_memory_bytes=found.peak_memory_bytes,
        )


def priced(plan: ParallelPlan, rates: Rates) -> Price:
    """What a plan costs."""
    return price(
        rates,
        layout=plan.layout,
        seq_length=plan.train.seq_length,
        step_s=plan.predicted.iteration_time_s,
        kept=1.0 if plan.goodput is None else plan.goodput.share,
        batches=plan.batches,
    )


def describe_times(model: CostModel, grid: PartialLayout) -> str:
    """Where the layer times of a layout come from: a profile, and its blocks by source.

    Example: ``llama3_8b-h200: 3 measured, 1 interpolated``.
    """
    if model.times is None:
        return ANALYTIC_NAME
    sources = Counter(model.sources(grid).values())
    words = (f"{sources[source]} {source}" for source in Source if source in sources)
    return f"{model.times.name}: {', '.join(words)}"


def _placement(cluster: Cluster, grid: PartialLayout, *, has_experts: bool) -> Placement:
    dims, sizes = grid.dims, cluster.group_sizes()
    names = [level.name for level in cluster.levels]
    kinds = {
        "tp": GroupKind.TP,
        "cp": GroupKind.CP,
        "dp": GroupKind.DP_CP,
        "pp": GroupKind.PP,
    }
    if has_experts:
        kinds |= {"ep": GroupKind.EP, "expert_dp": GroupKind.EDP}
    stages = group_of_rank(dims, GroupKind.PP, 0)
    width = dims.tensor_model_parallel_size * dims.context_parallel_size
    if dims.rank_order is RankOrder.TP_CP_EP_DP_PP:
        width *= dims.data_parallel_size
    return Placement(
        stage_ranks=tuple((first, first + width - 1) for first in stages),
        group_levels={name: names[group_level(dims, kind, sizes)] for name, kind in kinds.items()},
    )


def alternative(best: Candidate, other: Candidate) -> Alternative:
    """A runner-up, and how much slower than the plan it is."""
    fastest, iteration = best.solved.iteration, other.solved.iteration
    return Alternative(
        layout=other.solved.layout,
        iteration_time_s=to_seconds(iteration),
        slower_percent=100.0 * (iteration - fastest) / fastest,
        uncertainty=described(other.step, other.out_of_memory),
        peak_memory_bytes=other.peak_memory_bytes,
        chance_slower=probability_faster(best.step, other.step),
    )


def search_record(
    request: Request,
    result: SearchResult,
    seconds: float,
    plan: SolvedLayout | None = None,
    number: int = 0,
) -> SearchRecord:
    """What the search looked at and proved, for the plan file.

    Args:
        plan: the plan that is taken, if there is one.
        number: of the runner-up that the user asks for; 0 for none.
    """
    lower = result.lower_bound
    own = lower if plan is None else plan.iteration
    same = ("candidates", "bounded", "infeasible", "solved", "illegal", "simulations")
    return SearchRecord(
        **{name: getattr(result, name) for name in same},
        certificate=_certificate(result, plan, number),
        gap_percent=100.0 * (own - lower) / max(1, lower),
        stage_nodes=result.nodes,
        seconds=round(seconds, 3),
        backend=choose(request.backend).value,
        space=describe_space(request.space, request.cluster, request.policy),
        not_modelled=request.not_modelled,
    )


def _certificate(result: SearchResult, plan: SolvedLayout | None, number: int) -> str:
    """What was proven, in the words of ``SearchRecord``."""
    if plan is None:
        ended = not result.finished or result.lower_bound < NO_THRESHOLD
        return ENDED_EARLY if ended else "infeasible"
    if not result.optimal:
        return "node-limit" if result.finished else "gap"
    if number:
        return "runner-up"
    return "optimal" if plan.iteration == result.lower_bound else "chosen"


def describe_space(space: SearchSpace, cluster: Cluster, policy: Policy) -> Mapping[str, str]:
    """The declared space in words, for the plan file."""
    words = {name: f"= {value}" for name, value in space.fixed.items()}
    for name in (*DEFAULT_LIMITS, "tensor_model_parallel_size", "expert_tensor_parallel_size"):
        words.setdefault(name, f"<= {space.limit(name, cluster)}")
    for name, value in space.limits.items():
        words.setdefault(name, f"<= {value}")
    for name, value in space.least.items():
        words[name] = ", ".join(filter(None, (f">= {value}", words.get(name))))
    words["zero_stage"] = ", ".join(str(int(zero)) for zero in space.zero_stages)
    words["rank_order"] = ", ".join(order.value for order in space.rank_orders)
    words["recompute"] = "all settings" if space.recompute is None else space.recompute.label()
    if space.partition is not None:
        words["stage_layout"] = "as given"
    elif space.even_stages:
        words["stage_layout"] = "even"
    words["num_gpus"] = "all" if space.use_all_gpus else "any whole nodes"
    if policy:
        words["policy"] = "within " + ", ".join(file.path for file in policy)
    return words


def nothing_searched() -> SearchRecord:
    """The record of a layout that the user chose."""
    return SearchRecord(
        certificate="fixed",
        gap_percent=0.0,
        candidates=1,
        bounded=0,
        infeasible={},
        solved=1,
        illegal={},
        stage_nodes=0,
        simulations=1,
        seconds=0.0,
        backend="none",
        space={},
    )
