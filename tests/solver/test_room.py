"""What fits is told by memory alone, as looking at everything tells it, and with little work."""

from __future__ import annotations

import dataclasses
import random

import pytest

from nest_megatron.cluster.records import Precision
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.peak_limit import PeakLimit
from nest_megatron.cost_model.pipeline import PipelineProblem, evaluate
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.cost_model.stage_problems import stage_problem
from nest_megatron.cost_model.traits import ExecutionTraits
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.recompute import Recompute, RecomputeGranularity, RecomputeMethod
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.model.execution import Execution, GraphImpl
from nest_megatron.planner import NoPlan, Request, plan, shortage
from nest_megatron.solver.grids import GridSpace
from nest_megatron.solver.memory_shortage import Shortage, fits, least_memory
from nest_megatron.solver.outcome import NO_THRESHOLD, StageSolution
from nest_megatron.solver.search import Search
from nest_megatron.solver.space import SearchSpace
from tests import catalogue
from tests.solver.brute_force import partitions
from tests.solver.jobs import KERNEL, families, search, small_cluster, small_settings, small_spec

SMALL = SearchSpace(limits={"micro_batch_size": 2, "virtual_pipeline_model_parallel_size": 2})
UNIFORM = Recompute(
    granularity=RecomputeGranularity.FULL, method=RecomputeMethod.UNIFORM, num_layers=2
)
SPACES = (SMALL, dataclasses.replace(SMALL, recompute=UNIFORM))


def least_of_everything(asked: Search) -> int:
    """The least peak of any partition of any candidate."""
    return min(
        max(rank.total for rank in evaluate(problem, cut).memory)
        for shard in asked.grids.shards()
        for grid in asked.grids.grids(shard)
        for family in asked.grids.families(grid)
        for recompute in asked.grids.recompute_settings(family)
        for problem in [
            stage_problem(asked.model, dataclasses.replace(family, recompute=recompute))
        ]
        for cut in partitions(problem)
    )


@pytest.mark.parametrize("space", SPACES, ids=["free", "uniform"])
@pytest.mark.parametrize("seed", range(12))
def test_least_memory_is_that_of_looking_at_everything(seed: int, space: SearchSpace) -> None:
    rng = random.Random(seed)
    spec, cluster = small_spec(rng), small_cluster(rng).resized(rng.choice([1, 2, 4]))
    asked = search(spec, cluster, 8, space)
    found = least_memory(asked)
    assert found is not None
    assert found.needed_bytes == least_of_everything(asked)
    for memory, enough in ((found.needed_bytes - 1, False), (found.needed_bytes, True)):
        asked.model.capacity_bytes = memory
        asked.__post_init__(None, NO_THRESHOLD, None)
        assert fits(asked) == enough


class LessBesideTensorRanks(PeakLimit):
    """The whole device without tensor parallelism, and less of it with more tensor ranks."""

    def of(self, grid: PartialLayout) -> int:
        return self.at_most(grid.zero) // grid.dims.tensor_model_parallel_size

    def at_most(self, zero: ZeroStage) -> int:
        return self._model.capacity_bytes


@pytest.mark.parametrize("seed", range(12))
def test_the_nearest_plan_lacks_least(seed: int) -> None:
    """Not always the one that needs least: limits depend on the layout."""
    rng = random.Random(seed)
    model = CostModel(small_spec(rng), small_cluster(rng, 10**8).resized(2), small_settings())
    limit = LessBesideTensorRanks(model)
    asked = Search(model, 8, SMALL, KERNEL, limit=limit)
    found = least_memory(asked)
    assert found is not None
    assert found.limit_bytes == limit.of(found.grid)
    assert found.missing_bytes == min(
        max(rank.total for rank in evaluate(problem, cut).memory) - limit.of(family)
        for family in families(asked.grids)
        for recompute in asked.grids.recompute_settings(family)
        for problem in [stage_problem(model, dataclasses.replace(family, recompute=recompute))]
        for cut in partitions(problem)
    )


@pytest.mark.parametrize(("margin", "helps"), [(0.04, False), (0.3, True)])
def test_a_smaller_margin_is_told_where_it_is_what_limits(margin: float, helps: bool) -> None:
    """What a job takes beside its tensors leaves less than a small margin does."""
    rng = random.Random(0)
    request = Request(
        spec=small_spec(rng),
        cluster=small_cluster(rng, 10**10).resized(8),
        global_batch_size=8,
        settings=CostSettings(memory_reserve_bytes=0, memory_margin=margin),
        max_oom_chance=0.5,
    )
    model = request.cost_model()
    grid = next(GridSpace(model, 8, SMALL).shards())
    limit = PeakLimit(model, 0.5).of(grid)
    lacking = Shortage(grid=grid, needed_bytes=limit + 10**7, limit_bytes=limit)
    changes = [remedy.change for remedy in shortage._of_capacity(request, lacking)]
    assert any(change.startswith("memory.margin") for change in changes) == helps


@pytest.mark.parametrize("seed", range(20))
def test_what_fits_is_what_a_search_finds(seed: int) -> None:
    rng = random.Random(seed)
    spec, cluster = small_spec(rng), small_cluster(rng)
    found = search(spec, cluster, 8, SMALL).run()
    assert fits(search(spec, cluster, 8, SMALL)) == bool(found.plans)


#: Graphs of the job's own that it may go without.
GRAPHS = dataclasses.replace(
    SMALL,
    full_recompute=False,
    execution=Execution(cuda_graph_impl=GraphImpl.TRANSFORMER_ENGINE, cuda_graph_scope=("attn",)),
    executions={"cuda_graph_impl": (GraphImpl.NONE,), "cuda_graph_scope": ((),)},
)
SCORES = CostSettings(memory_reserve_bytes=0, traits=ExecutionTraits(flash_attention=False))


@pytest.mark.parametrize(
    ("seed", "space", "settings"),
    [(seed, SMALL, SCORES) for seed in (11, 21, 32)]
    + [(seed, GRAPHS, small_settings()) for seed in (4, 8, 11)],
)
def test_what_would_help_is_looked_for_where_least_memory_is_needed(
    seed: int, space: SearchSpace, settings: CostSettings
) -> None:
    """Two sequences a micro batch take less where one's scores are not fused."""
    rng = random.Random(seed)
    model = CostModel(small_spec(rng), small_cluster(rng), settings)
    whole = least_memory(Search(model, 8, space, KERNEL))
    lean = least_memory(Search(model, 8, shortage._least_memory(space, model), KERNEL))
    assert whole is not None
    assert lean is not None
    assert lean.needed_bytes == whole.needed_bytes


@pytest.mark.parametrize(
    ("model", "cluster", "num_gpus", "precision"),
    [
        ("kimi_k2", "dgx_h100", 96, Precision.BF16),
        ("deepseek_v3", "dgx_h100", 64, Precision.BF16),
        ("deepseek_v3", "gb200_nvl72", 36, Precision.FP8),
    ],
)
def test_proof_that_nothing_fits_takes_little_work(
    model: str, cluster: str, num_gpus: int, precision: Precision
) -> None:
    asked = 0

    def counted(problem: PipelineProblem, threshold: int, node_limit: int) -> StageSolution:
        nonlocal asked
        asked += 1
        return KERNEL(problem, threshold, node_limit)

    cost_model = CostModel(
        catalogue.model(model),
        catalogue.cluster(cluster, num_gpus),
        CostSettings(precision=precision),
    )
    found = Search(cost_model, 4608, SearchSpace(), counted).run()
    assert found.finished
    assert sum(found.infeasible.values()) == found.candidates > 100_000
    assert least_memory(Search(cost_model, 4608, SearchSpace(), counted)) is not None
    assert asked < 12_000


@pytest.mark.parametrize("num_gpus", [36, 96])
def test_enough_gpus_are_looked_for_in_whole_hosts(
    num_gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From half a node on as well, to which no number of whole nodes can be halved back."""
    model, name = ("deepseek_v3", "gb200_nvl72") if num_gpus == 36 else ("kimi_k2", "dgx_h100")
    cluster, sizes = catalogue.cluster(name, num_gpus), []
    enough = 7 * max(cluster.gpus_per_node, num_gpus)

    def tried(request: Request, *_: object) -> bool:
        sizes.append(request.cluster.num_gpus)
        assert len(sizes) < 50, "does not end"
        return request.cluster.num_gpus >= enough

    monkeypatch.setattr(shortage, "_fits", tried)
    settings = CostSettings(precision=Precision.FP8)
    spec = catalogue.model(model)
    found = plan(
        Request(
            spec=spec,
            cluster=cluster,
            global_batch_size=4608,
            settings=settings,
            max_seconds=3600.0,  # however busy the machine
            max_oom_chance=0.5,
        )
    )
    assert isinstance(found, NoPlan)
    assert found.complete
    assert found.remedies[0].change == f"cluster.num_gpus={enough}"
    assert all(map(cluster.part_of_nodes, sizes))
    assert len({*sizes}) == len(sizes)
