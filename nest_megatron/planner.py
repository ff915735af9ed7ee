"""From a request to a plan: price, search, explain. The only module that knows all rooms below."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from nest_megatron import __version__
from nest_megatron.cluster.records import Cluster
from nest_megatron.cost_model.estimate import Estimate, estimate
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.errors import UserInputError
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.parallel.degree_rules import DEGREE_RULES, violations
from nest_megatron.parallel.dims import RankOrder
from nest_megatron.parallel.grid import Grid
from nest_megatron.parallel.layout import layout_string
from nest_megatron.parallel.partition import StagePartition
from nest_megatron.parallel.plan import (
    Alternative,
    ParallelPlan,
    Placement,
    PredictedStage,
    Prediction,
    Provenance,
    SearchRecord,
    TrainChoice,
    parallel_choice,
)
from nest_megatron.parallel.plan_file import digest, sealed
from nest_megatron.parallel.rank_order import GroupKind, group_level, group_of_rank
from nest_megatron.parallel.rules import LaunchRequest
from nest_megatron.solver.backend import Backend, choose, solver_of
from nest_megatron.solver.ranking import SearchResult, SolvedGrid
from nest_megatron.solver.room import Shortage, least_memory
from nest_megatron.solver.search import Search
from nest_megatron.solver.space import DEFAULT_LIMITS, SearchSpace
from nest_megatron.units import Ticks, to_seconds

#: Runners-up that a plan lists.
NUM_ALTERNATIVES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What to plan.

    Args:
        max_seconds: time for the search; when it ends first, the plan says how far from the
            optimum it can be at most.
    """

    spec: TransformerSpec
    cluster: Cluster
    global_batch_size: int
    settings: CostSettings = field(default_factory=CostSettings)
    space: SearchSpace = field(default_factory=SearchSpace)
    max_seconds: float = 60.0
    num_alternatives: int = NUM_ALTERNATIVES
    backend: Backend | None = None

    def __post_init__(self) -> None:
        batch = self.global_batch_size
        if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1:
            raise UserInputError(
                "train.global_batch_size",
                value=batch,
                limit="it must be a whole number of at least 1",
                fix="Give the sequences of one optimizer step.",
            )
        if not self.max_seconds > 0:
            raise UserInputError(
                "search.max_seconds",
                value=self.max_seconds,
                limit="it must be above 0",
                fix="Give the seconds that the search may take.",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class NoPlan:
    """Nothing fits: how far off the nearest plan is, and what would make it fit.

    Args:
        missing_bytes: what the nearest plan lacks on its fullest GPU.
        nearest: that plan's degrees, in words.
        remedies: changes that were tried and make some plan fit.
    """

    shortage: Shortage
    missing_bytes: int
    capacity_bytes: int
    nearest: str
    remedies: tuple[str, ...]
    search: SearchRecord


#: Called with (candidates solved, best time so far in seconds or None, proven bound in seconds).
Progress = Callable[[int, float | None, float], None]


def plan(request: PlanRequest, on_progress: Progress | None = None) -> ParallelPlan | NoPlan:
    """Find the fastest plan that fits.

    Returns:
        The plan with its certificate, or what is missing if nothing fits.

    Raises:
        UserInputError: if no combination of degrees is legal, naming the rules that refuse them.
    """
    model = CostModel(request.spec, request.cluster, request.settings)
    started = time.perf_counter()
    result = _search(request, model, started, on_progress)
    seconds = time.perf_counter() - started
    record = _search_record(request, result, seconds)
    if not result.plans:
        _refuse_if_nothing_is_legal(request, result)
        return _no_plan(request, model, record)
    best, *others = result.plans
    alternatives = tuple(_alternative(request.spec, best, other) for other in others)
    return _assemble(model, request.settings, best, alternatives, record)


def estimate_plan(
    spec: TransformerSpec,
    cluster: Cluster,
    settings: CostSettings,
    grid: Grid,
    partition: StagePartition,
) -> ParallelPlan:
    """A plan for a layout that the user chose, with its prediction; nothing is searched.

    Raises:
        UserInputError: if Megatron would refuse the layout, or it is not of the cluster's size.
    """
    if grid.dims.world_size > cluster.num_gpus:
        raise UserInputError(
            "tp * pp * cp * dp",
            value=grid.dims.world_size,
            limit=f"the cluster has {cluster.num_gpus} GPUs",
            fix="Lower a degree or raise cluster.num_gpus.",
        )
    check_launchable(spec, settings, grid, partition)
    model = CostModel(spec, cluster, settings)
    solved = SolvedGrid(grid=grid, boundaries=partition.boundaries, iteration=0)
    return _assemble(model, settings, solved, (), _nothing_searched())


def check_launchable(
    spec: TransformerSpec, settings: CostSettings, grid: Grid, partition: StagePartition
) -> None:
    """Refuse a layout that breaks one of Megatron's rules on degrees.

    Raises:
        UserInputError: for the first rule broken.
    """
    request = LaunchRequest(
        spec=spec,
        dims=grid.dims,
        micro_batch_size=grid.micro_batch_size,
        global_batch_size=grid.global_batch_size,
        partition=partition,
        recompute=grid.recompute,
        zero=grid.zero,
        precision=settings.precision,
        sequence_parallel=grid.sequence_parallel,
        moe_grouped_gemm=spec.is_moe,
    )
    for _, violation in violations(request, DEGREE_RULES):
        raise UserInputError(
            violation.what, value=violation.value, limit=violation.limit, fix=violation.fix
        )


def _search(
    request: PlanRequest, model: CostModel, started: float, on_progress: Progress | None
) -> SearchResult:
    def report(solved: int, best: Ticks, bound: Ticks) -> None:
        assert on_progress is not None
        on_progress(solved, to_seconds(best), to_seconds(bound))

    search = Search(
        model,
        request.global_batch_size,
        request.space,
        solver_of(choose(request.backend)),
        num_layouts=request.num_alternatives + 1,
        out_of_time=lambda: time.perf_counter() - started > request.max_seconds,
        on_progress=report if on_progress else None,
    )
    return search.run()


def _search_record(request: PlanRequest, result: SearchResult, seconds: float) -> SearchRecord:
    proof = result.certificate
    gap = 0.0
    if result.plans and not proof.optimal:
        best = result.plans[0].iteration
        gap = 100.0 * (best - proof.lower_bound) / max(1, proof.lower_bound)
    return SearchRecord(
        certificate="optimal" if proof.optimal else "gap" if result.plans else "infeasible",
        gap_percent=gap,
        candidates=proof.candidates,
        bounded=proof.bounded,
        infeasible=proof.infeasible,
        solved=proof.solved,
        illegal=proof.illegal,
        stage_nodes=proof.nodes,
        simulations=proof.simulations,
        seconds=round(seconds, 3),
        backend=choose(request.backend).value,
        space=describe_space(request.space, request.cluster),
    )


def describe_space(space: SearchSpace, cluster: Cluster) -> Mapping[str, str]:
    """The declared space in words, for the plan file."""
    words = {name: f"= {value}" for name, value in space.fixed.items()}
    for name in (*DEFAULT_LIMITS, "tensor_model_parallel_size", "expert_tensor_parallel_size"):
        words.setdefault(name, f"<= {space.limit(name, cluster)}")
    for name, value in space.limits.items():
        words.setdefault(name, f"<= {value}")
    words["zero_stage"] = ", ".join(str(int(zero)) for zero in space.zero_stages)
    words["rank_order"] = ", ".join(order.value for order in space.rank_orders)
    words["recompute"] = "all settings" if space.recompute is None else space.recompute.label()
    words["num_gpus"] = "all" if space.use_all_gpus else "any whole nodes"
    return words


def _nothing_searched() -> SearchRecord:
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


def _assemble(
    model: CostModel,
    settings: CostSettings,
    best: SolvedGrid,
    alternatives: tuple[Alternative, ...],
    record: SearchRecord,
) -> ParallelPlan:
    spec, cluster, grid = model.spec, model.cluster, best.grid
    partition = _partition(best)
    predicted = estimate(model, grid, partition)
    plan = ParallelPlan(
        model=spec,
        cluster=cluster,
        train=TrainChoice(
            global_batch_size=grid.global_batch_size,
            micro_batch_size=grid.micro_batch_size,
            seq_length=spec.seq_length,
            precision=settings.precision,
        ),
        parallel=parallel_choice(spec, grid, partition),
        placement=_placement(cluster, grid),
        predicted=_prediction(model, predicted),
        alternatives=alternatives,
        search=record,
        provenance=Provenance(
            nest_megatron_version=__version__,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            profile="analytic",
            cluster_hash=digest(cluster),
            model_hash=digest(spec),
            settings={
                f.name: _plain_setting(getattr(settings, f.name))
                for f in dataclasses.fields(settings)
            },
        ),
    )
    return sealed(plan)


def _plain_setting(value: object) -> float | str:
    return float(value) if isinstance(value, int | float) else str(value)


def _partition(solved: SolvedGrid) -> StagePartition:
    pp = solved.grid.dims.pipeline_model_parallel_size
    return StagePartition(boundaries=solved.boundaries, pipeline_model_parallel_size=pp)


def _placement(cluster: Cluster, grid: Grid) -> Placement:
    dims, sizes = grid.dims, cluster.group_sizes()
    names = [level.name for level in cluster.levels]
    kinds = {
        "tp": GroupKind.TP,
        "cp": GroupKind.CP,
        "ep": GroupKind.EP,
        "dp": GroupKind.DP_CP,
        "expert_dp": GroupKind.EDP,
        "pp": GroupKind.PP,
    }
    stages = group_of_rank(dims, GroupKind.PP, 0)
    width = dims.tensor_model_parallel_size * dims.context_parallel_size
    if dims.rank_order is RankOrder.TP_CP_EP_DP_PP:
        width *= dims.data_parallel_size
    return Placement(
        rank_order=dims.rank_order,
        use_tp_pp_dp_mapping=dims.rank_order is RankOrder.TP_CP_EP_PP_DP,
        num_gpus=dims.world_size,
        gpus_per_node=cluster.gpus_per_node,
        stage_ranks=tuple((first, first + width - 1) for first in stages),
        group_levels={name: names[group_level(dims, kind, sizes)] for name, kind in kinds.items()},
    )


def _prediction(model: CostModel, predicted: Estimate) -> Prediction:
    peaks = [stage.peak_memory_bytes for stage in predicted.stages]
    fullest = peaks.index(max(peaks))
    spare = predicted.capacity_bytes - peaks[fullest]
    largest = max(predicted.terms, key=lambda name: predicted.terms[name])
    share = 100 * predicted.terms[largest] / predicted.iteration_time_s
    binding = (
        f"memory: pipeline rank {fullest} has {spare / 2**30:.1f} GiB to spare"
        if 0 <= spare < 0.1 * predicted.capacity_bytes
        else f"memory: pipeline rank {fullest} lacks {-spare / 2**30:.1f} GiB"
        if spare < 0
        else f"{largest}: {share:.0f} % of the iteration"
    )
    return Prediction(
        iteration_time_s=predicted.iteration_time_s,
        tokens_per_s_per_gpu=predicted.tokens_per_s_per_gpu,
        model_tflops_per_gpu=predicted.model_tflops_per_gpu,
        mfu=predicted.mfu,
        terms=predicted.terms,
        critical_rank=predicted.critical_rank,
        peak_memory_bytes=max(peaks),
        capacity_bytes=predicted.capacity_bytes,
        fits=predicted.fits,
        binding_constraint=binding,
        stages=tuple(
            PredictedStage(
                layers=stage.layers,
                forward_s=stage.forward_s,
                backward_s=stage.backward_s,
                busy_share=stage.busy_share,
                parameters=stage.parameters,
                memory_bytes=stage.memory,
            )
            for stage in predicted.stages
        ),
    )


def _alternative(spec: TransformerSpec, best: SolvedGrid, other: SolvedGrid) -> Alternative:
    grid, dims = other.grid, other.grid.dims
    virtual = dims.virtual_pipeline_model_parallel_size
    pipelined = dims.pipeline_model_parallel_size > 1
    return Alternative(
        num_gpus=dims.world_size,
        tensor_model_parallel_size=dims.tensor_model_parallel_size,
        pipeline_model_parallel_size=dims.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        context_parallel_size=dims.context_parallel_size,
        data_parallel_size=dims.data_parallel_size,
        expert_model_parallel_size=dims.expert_model_parallel_size,
        expert_tensor_parallel_size=dims.expert_tensor_parallel_size,
        micro_batch_size=grid.micro_batch_size,
        zero_stage=int(grid.zero),
        recompute=grid.recompute.label(),
        rank_order=dims.rank_order,
        pipeline_model_parallel_layout=(
            layout_string(spec, _partition(other)) if pipelined else None
        ),
        iteration_time_s=to_seconds(other.iteration),
        slower_percent=100.0 * (other.iteration - best.iteration) / best.iteration,
    )


def _refuse_if_nothing_is_legal(request: PlanRequest, result: SearchResult) -> None:
    if result.certificate.candidates:
        return
    rules = "; ".join(sorted(result.certificate.illegal)) or (
        "the batch divides over no data-parallel size and micro batch"
    )
    raise UserInputError(
        "the job",
        value=f"{request.cluster.num_gpus} GPUs, global batch {request.global_batch_size}, "
        + ", ".join(f"{k}={v}" for k, v in request.space.fixed.items()),
        limit=f"no combination of degrees is legal for {request.spec.name} ({rules})",
        fix="Free a degree, or use a batch and a number of GPUs with more common divisors.",
    )


def _no_plan(request: PlanRequest, model: CostModel, record: SearchRecord) -> NoPlan:
    """Explain an infeasible job: the nearest plan, and which larger clusters would take it."""
    shortage = least_memory(_new_search(request, model))
    assert shortage is not None, "a legal space has a plan that needs least memory"
    missing = shortage.needed_bytes - model.capacity_bytes
    return NoPlan(
        shortage=shortage,
        missing_bytes=missing,
        capacity_bytes=model.capacity_bytes,
        nearest=describe_grid(shortage.grid),
        remedies=tuple(_remedies(request, missing)),
        search=record,
    )


def _remedies(request: PlanRequest, missing: int) -> list[str]:
    """Single changes after which something fits, each tried."""
    found = []
    total, batch = request.cluster.num_gpus, request.global_batch_size
    for factor in (2, 4, 8, 16, 32, 64):
        cluster = request.cluster.resized(total * factor)
        if _fits(dataclasses.replace(request, cluster=cluster)):
            found.append(f"cluster.num_gpus={total * factor}")
            break
    if request.space.fixed or request.space.limits or request.space.recompute:
        free = dataclasses.replace(
            request, space=SearchSpace(use_all_gpus=request.space.use_all_gpus)
        )
        if _fits(free):
            given = [*request.space.fixed, *(f"max_{name}" for name in request.space.limits)]
            given += ["recompute_granularity"] if request.space.recompute else []
            found.append(f"leave free what is fixed ({', '.join(given)})")
    accelerator = request.cluster.accelerator
    more = -(-(missing + accelerator.memory_bytes) // 2**30)
    found.append(f"GPUs with at least {more} GiB of memory, for a global batch of {batch}")
    return found


def _fits(request: PlanRequest) -> bool:
    model = CostModel(request.spec, request.cluster, request.settings)
    return bool(_new_search(request, model, first_fit=True).run().plans)


def _new_search(request: PlanRequest, model: CostModel, *, first_fit: bool = False) -> Search:
    return Search(
        model,
        request.global_batch_size,
        request.space,
        solver_of(choose(request.backend)),
        first_fit=first_fit,
    )


def describe_grid(grid: Grid) -> str:
    """A grid's degrees in one line."""
    dims = grid.dims
    words = [
        f"TP {dims.tensor_model_parallel_size}",
        f"PP {dims.pipeline_model_parallel_size}",
        f"CP {dims.context_parallel_size}",
        f"DP {dims.data_parallel_size}",
    ]
    if dims.expert_ranks > 1:
        words.append(f"EP {dims.expert_model_parallel_size}")
        words.append(f"ETP {dims.expert_tensor_parallel_size}")
    words += [f"micro batch {grid.micro_batch_size}", f"ZeRO-{int(grid.zero)}"]
    return ", ".join([*words, f"recompute {grid.recompute.label()}"])
