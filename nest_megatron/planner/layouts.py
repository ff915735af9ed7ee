"""Layouts as plans: each with its prediction, its runners-up, and where it comes from."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from statistics import NormalDist
from typing import Any, NamedTuple

from nest_megatron.cluster.records import Cluster
from nest_megatron.cost_model.estimate import estimate
from nest_megatron.cost_model.features import confidence, kind_words, runs_like
from nest_megatron.cost_model.goodput import goodput
from nest_megatron.cost_model.memory_flags import may_change_model
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.peak_limit import out_of_memory
from nest_megatron.cost_model.settings import CostSettings, stored_settings
from nest_megatron.cost_model.site import expected
from nest_megatron.cost_model.uncertainty import (
    Predictive,
    difference_deviation,
    measured_runs,
    probability_faster,
)
from nest_megatron.errors import UserInputError
from nest_megatron.files import now
from nest_megatron.layout.batch_schedule import BatchSchedule, PredictedBatch, TrainChoice
from nest_megatron.layout.dims import SHORT_DEGREES, RankOrder
from nest_megatron.layout.estimate import (
    Alternative,
    Difference,
    Estimate,
    Placement,
    Price,
    Rates,
    Uncertainty,
    price,
)
from nest_megatron.layout.execution_rules import EXECUTION_FIELDS
from nest_megatron.layout.layout import Layout, PartialLayout
from nest_megatron.layout.plan import ParallelPlan, Provenance, SearchRecord
from nest_megatron.layout.plan_file import digest
from nest_megatron.layout.policy import Policy
from nest_megatron.layout.rank_order import GroupKind, group_level, group_of_rank
from nest_megatron.layout.rulebook import require_legal
from nest_megatron.layout.rulebook.facts import DEFAULT_VERSION, LaunchRequest
from nest_megatron.layout.stage_layout import spread_partition
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.plain import frozen
from nest_megatron.planner.choice import Candidate
from nest_megatron.planner.request import Request
from nest_megatron.profile.records import ANALYTIC_NAME, Source
from nest_megatron.solver.backend import backend_to_run
from nest_megatron.solver.one_partition import check_partition
from nest_megatron.solver.outcome import NO_THRESHOLD
from nest_megatron.solver.ranking import SearchResult, SolvedLayout
from nest_megatron.solver.space import DEFAULT_LIMITS, SearchSpace
from nest_megatron.units import to_seconds
from nest_megatron.version import __version__

#: Certificate of a search that time ended before it had a plan.
ENDED_EARLY = "ended-early"


class PredictedLayout(NamedTuple):
    """A layout of a job with its prediction, and how far that can be off."""

    layout: Layout
    predicted: Estimate
    known: Predictive


def predict(request: Request, model: CostModel, layout: Layout) -> PredictedLayout:
    """What is expected of a layout of a request's job."""
    found = estimate(model, layout)
    known = expected(request.site, model, layout, found.iteration_time_s)
    return PredictedLayout(layout, found, known)


def assemble(
    request: Request,
    model: CostModel,
    found: PredictedLayout,
    record: SearchRecord,
    *,
    alternatives: tuple[Alternative, ...] = (),
    **others: Any,
) -> ParallelPlan:
    """The plan of a layout for a request; ``others`` are further fields of ``ParallelPlan``."""
    site, rates = request.site, request.rates
    spec, cluster = model.spec, model.cluster
    layout, predicted, known = found
    if not model.settings.traits.overlap_param_gather:
        layout = replace(layout, overlap_param_gather=False)
    peak_bytes = predicted.peak_memory_bytes
    without, short = (out_of_memory(model, layout, peak_bytes, each) for each in (None, site))
    memory = None if site is None else site.memory_change(model, layout, without)
    kept, step_s = None, predicted.iteration_time_s
    if request.reliability is not None:
        kept = goodput(request.reliability, step_s, layout.num_gpus)
    plan = ParallelPlan(
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
        uncertainty=uncertainty_of(model, known, short, request.not_modelled),
        goodput=kept,
        alternatives=alternatives,
        batches=predicted_batches(model, layout, request.batch_schedule),
        notes=request.notes,
        **others,
    )
    return plan if rates is None else replace(plan, price=price_of_plan(plan, rates))


def uncertainty_of(
    model: CostModel, known: Predictive, out_of_memory: float, not_modelled: Iterable[str] = ()
) -> Uncertainty:
    """A predictive distribution in few numbers, for plan files.

    Args:
        not_modelled: flags of the job; no run is like one whose model they may change.
    """
    low_s, high_s = known.interval(0.9)
    place = model.settings.precision, model.cluster.accelerator.name
    tested = () if any(map(may_change_model, not_modelled)) else measured_runs()
    like = runs_like(tested, known.features, *place)
    return Uncertainty(
        mean_s=known.expected_s,
        low_s=low_s,
        high_s=high_s,
        percentile_90_s=known.quantile_s(0.9),
        confidence=confidence(like),
        kind=kind_words(known.features, *place),
        runs=like.runs,
        error_percent=like.error_pct,
        out_of_memory=out_of_memory,
        median_s=None if known.learned is None else known.median_s,
    )


def predicted_batches(
    model: CostModel, layout: Layout, schedule: BatchSchedule | None
) -> tuple[PredictedBatch, ...]:
    """What is expected of a layout at each size of a batch that grows."""
    if schedule is None:
        return ()
    batches = []
    for part in schedule.parts:
        size, samples = part.global_batch_size, part.samples
        found = estimate(model, replace(layout, global_batch_size=size))
        batch = PredictedBatch(
            global_batch_size=size,
            steps=None if samples is None else -(-samples // size),
            iteration_time_s=found.iteration_time_s,
            tokens_per_s_per_gpu=found.tokens_per_s_per_gpu,
            peak_memory_bytes=found.peak_memory_bytes,
        )
        batches.append(batch)
    return tuple(batches)


def price_of_plan(plan: ParallelPlan, rates: Rates) -> Price:
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


def alternative(model: CostModel, best: Candidate, other: Candidate) -> Alternative:
    """A runner-up, and how much slower than the plan it is."""
    fastest, iteration = best.solved.iteration, other.solved.iteration
    return Alternative(
        layout=other.solved.layout,
        iteration_time_s=to_seconds(iteration),
        slower_percent=100.0 * (iteration - fastest) / fastest,
        uncertainty=uncertainty_of(model, other.step, other.out_of_memory),
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
    found = lower if plan is None else plan.iteration
    same = ("candidates", "bounded", "infeasible", "solved", "illegal", "simulations")
    return SearchRecord(
        **{name: getattr(result, name) for name in same},
        certificate=_certificate(result, plan, number),
        gap_percent=100.0 * (found - lower) / max(1, lower),
        stage_nodes=result.nodes,
        seconds=round(seconds, 3),
        backend=backend_to_run(request.backend).value,
        space=describe_space(request.space, request.cluster, request.policy),
        not_modelled=_not_modelled(request, plan),
    )


def _not_modelled(request: Request, plan: SolvedLayout | None) -> tuple[str, ...]:
    """Those of the planned job, which may leave out the offloading of today's."""
    if plan is None:
        return request.not_modelled
    of_job, chosen = request.space.execution, plan.layout.execution
    left_out = {
        spelling
        for argument, name in EXECUTION_FIELDS.items()
        if getattr(of_job, name) and not getattr(chosen, name)
        for spelling in (argument, f"--{argument.replace('_', '-')}")
    }
    return tuple(flag for flag in request.not_modelled if flag not in left_out)


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
        most = max(space.limit(name, cluster), space.present.get(name, 1))
        words.setdefault(name, f"<= {most}")
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


def record_without_search() -> SearchRecord:
    """The record of a layout that the user chose."""
    return SearchRecord(
        certificate="fixed",
        gap_percent=0.0,
        candidates=1,
        bounded=0,
        infeasible={},
        solved=1,
        illegal=(),
        stage_nodes=0,
        simulations=1,
        seconds=0.0,
        backend="none",
        space={},
    )


#: Share of outcomes that the interval of a difference holds, as that of a step.
_LEVEL = 0.9


@frozen
class Variant:
    """What runs: a layout, and the cost model's assumptions as its job's flags make them."""

    settings: CostSettings
    layout: Layout


#: Predicts a variant, whether Megatron launches it or not.
Pricing = Callable[[Variant], PredictedLayout]


def pricing(request: Request) -> Pricing:
    """Predicts variants of a job; those of the same settings share a cost model."""
    model = cache(request.cost_model)

    def price(variant: Variant) -> PredictedLayout:
        return predict(request, model(variant.settings), variant.layout)

    return price


def difference(other: PredictedLayout, found: PredictedLayout) -> Difference:
    """How a layout differs from another one of the same job."""
    ratio = found.known.median_s / other.known.median_s
    spread = NormalDist().inv_cdf((1.0 + _LEVEL) / 2.0) * difference_deviation(
        found.known, other.known
    )
    return Difference(
        seconds=found.predicted.iteration_time_s - other.predicted.iteration_time_s,
        percent=100.0 * (ratio - 1.0),
        low_percent=100.0 * (ratio * math.exp(-spread) - 1.0),
        high_percent=100.0 * (ratio * math.exp(spread) - 1.0),
        chance_faster=probability_faster(found.known, other.known),
    )


def estimate_for(
    request: Request, layout: Layout, *, settings: CostSettings | None = None
) -> ParallelPlan:
    """A plan for a layout that the user chose, with its prediction; nothing is searched.

    Args:
        settings: in the place of the request's.

    Raises:
        UserInputError: if Megatron would refuse the layout, or it is not of the cluster's size.
    """
    if layout.num_gpus > request.cluster.num_gpus:
        raise UserInputError(
            "tp * pp * cp * dp",
            layout.num_gpus,
            f"the cluster has {request.cluster.num_gpus} GPUs",
            "Lower a degree or raise cluster.num_gpus.",
        )
    model, schedule = request.cost_model(settings), request.batch_schedule
    if request.space.mtp_beside_layer:
        check_partition(request.spec, layout.partition, mtp_beside_layer=True)
    version = request.space.version
    check_launchable(request.spec, model.settings, layout, schedule, version=version)
    return assemble(
        replace(request, defaults=(), given=()),  # which are of a search
        model,
        predict(request, model, layout),
        replace(record_without_search(), not_modelled=request.not_modelled),
    )


def keep_layout(plan: ParallelPlan, request: Request) -> ParallelPlan:
    """Price a plan's layout for another request: all degrees stay, but that of data parallelism.

    With another number of GPUs as many replicas train as they hold; a model with another number of
    layers is spread over the stages again.

    Raises:
        UserInputError: if the GPUs or the batch do not divide, or Megatron refuses the layout.
    """
    layout, num_gpus = plan.layout, request.cluster.num_gpus
    dims, resized = layout.dims, num_gpus != plan.cluster.num_gpus
    one_replica = dims.world_size // dims.data_parallel_size
    if resized and num_gpus % one_replica:
        raise UserInputError(
            "cluster.num_gpus",
            num_gpus,
            f"a replica of the layout takes {one_replica}",
            "Use a multiple of it.",
        )
    replicas = num_gpus // one_replica if resized else dims.data_parallel_size
    dims = replace(dims, data_parallel_size=replicas)
    is_same = layout.partition.boundaries[-1] == request.spec.num_units
    stages = layout.partition if is_same else spread_partition(request.spec, dims)
    batch = request.global_batch_size
    kept = replace(layout, dims=dims, global_batch_size=batch, partition=stages)
    return estimate_for(request, kept)


def check_launchable(
    spec: TransformerSpec,
    settings: CostSettings,
    layout: Layout,
    schedule: BatchSchedule | None = None,
    *,
    version: str = DEFAULT_VERSION,
) -> None:
    """Refuse a layout that breaks one of Megatron's rules on degrees.

    Raises:
        UserInputError: for the first rule broken.
    """
    launched = LaunchRequest.of(
        spec,
        layout,
        partition=layout.partition,
        sharding=layout.sharding,
        batch_schedule=schedule,
        version=version,
        **settings.of_launch(),
    )
    require_legal(launched)


def describe_grid(grid: PartialLayout) -> str:
    """A grid's degrees in one line."""
    degrees = {short: getattr(grid.dims, name) for name, short in SHORT_DEGREES.items()}
    left_out = ("VPP",) if grid.dims.expert_ranks > 1 else ("VPP", "EP", "ETP")
    words = [f"{short} {size}" for short, size in degrees.items() if short not in left_out]
    words.append(f"micro batch {grid.micro_batch_size}")
    return ", ".join([*words, f"ZeRO-{int(grid.zero)}", f"recompute {grid.recompute.label()}"])
