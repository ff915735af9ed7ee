"""The bounds that spare a search its work never exceed what the stage solver finds."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest

from nest_megatron.cluster.records import Precision
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.schedule import peak_live_chunks
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.cost_model.stage_problems import StageProblems, stage_problem
from nest_megatron.layout.recompute import (
    Recompute,
    RecomputeGranularity,
    RecomputeMethod,
    RecomputeModule,
    selective_recompute,
)
from nest_megatron.model.encoder import Adapters
from nest_megatron.model.layer_pattern import LayerKind
from nest_megatron.solver import backend
from nest_megatron.solver.bounds import Bounds, MemoryBounds, least_live
from nest_megatron.solver.grids import GridSpace
from nest_megatron.solver.outcome import NO_THRESHOLD, Status
from nest_megatron.solver.recompute_bounds import (
    Layer,
    Ranks,
    RecomputeBounds,
    without_needless,
)
from nest_megatron.solver.search import UNLIMITED
from nest_megatron.solver.space import SearchSpace
from tests import catalogue

SOLVE = backend.solver_of(backend.backend_to_run())
#: As a job may have it: it saves less than each layer by itself, and needs more at work.
GROUPS_OF_LAYERS = Recompute(
    granularity=RecomputeGranularity.FULL, method=RecomputeMethod.UNIFORM, num_layers=4
)
WITHIN_ONE_ANOTHER = (
    RecomputeModule.MOE,
    RecomputeModule.MOE_ACT,
    RecomputeModule.SHARED_EXPERTS,
)


@pytest.mark.parametrize(
    ("name", "adapters"),
    [
        ("llama3_8b", None),
        ("mixtral_8x7b", None),
        ("deepseek_v3", None),
        ("bert_large", None),
        ("llama3_8b", Adapters()),
        ("mixtral_8x7b", Adapters()),
    ],
)
def test_bounds_are_below_every_candidate(name: str, adapters: Adapters | None) -> None:
    spec = dataclasses.replace(catalogue.model(name), adapters=adapters)
    model = CostModel(spec, catalogue.cluster("dgx_h100", 64), CostSettings())
    limits = {
        "micro_batch_size": 2,
        "context_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
    }
    space = SearchSpace(limits=limits)
    grids = GridSpace(model, 128, space)
    bounds = Bounds(model, 128, grids.micro_batches)
    memory = MemoryBounds(model, grids)
    checked = 0
    for number, shard in enumerate(grids.shards()):
        for grid in grids.grids(shard) if number % 7 == 0 else ():
            for family in grids.families(grid):
                settings = grids.recompute_settings(family)
                for recompute in settings[:: 1 + len(settings) // 3]:
                    candidate = dataclasses.replace(family, recompute=recompute)
                    problem = stage_problem(model, candidate)
                    roomy = problem._replace(capacity_bytes=UNLIMITED)
                    found = SOLVE(roomy, NO_THRESHOLD, 20_000)
                    assert bounds.in_any_micro_batch(shard) <= bounds.even(shard) <= found.iteration
                    assert bounds.even(candidate) <= found.iteration
                    assert bounds.pipeline(candidate) <= found.iteration
                    least = max(
                        memory.of_states(candidate.dims, candidate.zero),
                        memory.of_shard_states(shard),
                        memory.of_family(candidate),
                    )
                    tight = problem._replace(capacity_bytes=int(least) - 1)
                    assert SOLVE(tight, 0, 20_000).status is Status.INFEASIBLE
                    checked += 1
    assert checked > 100


@pytest.mark.parametrize("seed", range(24))
def test_no_sequence_takes_longer_in_a_larger_micro_batch(seed: int) -> None:
    """Whatever the model, its format, the cluster and the batch."""
    rng = random.Random(seed)
    names = ["gpt3_175b", "mixtral_8x7b", "deepseek_v3", "gpt_oss_20b", "nemotron3_super", "t5_11b"]
    cluster = catalogue.cluster(rng.choice(["dgx_h100", "gb200_nvl72"]), rng.choice([8, 512]))
    spec = dataclasses.replace(
        catalogue.model(rng.choice(names)), seq_length=rng.choice([512, 777, 4096, 4_194_304])
    )
    precision = rng.choice([Precision.BF16, Precision.FP8])
    model = CostModel(spec, cluster, CostSettings(precision=precision))
    batch = 8 * cluster.num_gpus * rng.choice([4, 6, 7, 630])
    grids = GridSpace(model, batch, SearchSpace())
    bounds = Bounds(model, batch, grids.micro_batches)
    shards = [*grids.shards()]
    for shard in rng.sample(shards, min(200, len(shards))):
        assert bounds.in_any_micro_batch(shard) <= bounds.even(shard)
    assert len(shards) >= 10


@pytest.mark.parametrize(
    "name",
    ["llama3_8b", "mixtral_8x7b", "deepseek_v3", "bert_large", "llama31_nemotron_ultra_253b"],
)
def test_what_has_to_be_recomputed_takes_no_longer_than_any_plan_that_fits(name: str) -> None:
    model = CostModel(catalogue.model(name), catalogue.cluster("dgx_h100", 64), CostSettings())
    fixed = {"context_parallel_size": 1, "expert_tensor_parallel_size": 1}
    limits = {"micro_batch_size": 4, "virtual_pipeline_model_parallel_size": 3}
    space = SearchSpace(fixed=fixed, limits=limits, present_recompute=GROUPS_OF_LAYERS)
    grids = GridSpace(model, 128, space)
    bounds = Bounds(model, 128, grids.micro_batches)
    memory = MemoryBounds(model, grids)
    recomputing = RecomputeBounds(bounds, memory)
    fits, raised = Counter[bool](), 0
    for grid in [grid for shard in grids.shards() for grid in grids.grids(shard)][::5]:
        for family in [*grids.families(grid)][::4]:
            needed, free = memory.of_family(family), bounds.waiting(grid)
            for capacity in (int(needed * times) for times in (0.9, 1.1, 1.5, 3)):
                least = max(
                    recomputing.of_family(family, capacity),
                    recomputing.of_grid(grid, [family.zero], capacity, free),
                )
                raised += least > bounds.pipeline(family)
                stages = StageProblems(model, family, capacity)
                settings = grids.recompute_settings(family)
                if name == "deepseek_v3":  # as a job may have it
                    settings = (*settings, selective_recompute(WITHIN_ONE_ANOTHER))
                others = tuple(s for s in settings if s.method is not RecomputeMethod.BLOCK)
                each = recomputing.of_settings(family, capacity, others)
                by_setting = dict(zip(others, each, strict=True))
                for recompute in settings:
                    threshold = max(least, by_setting.get(recompute, 0))
                    found = SOLVE(stages.problem(recompute), threshold, 20_000)
                    assert not found.boundaries
                    fits[found.status is not Status.INFEASIBLE] += 1
    assert min(fits.values()) > 20
    assert raised > 20 or model.num_units[LayerKind.NO_OP]


def test_a_needless_setting_lets_no_rank_hold_more_layers() -> None:
    rng, dropped = random.Random(1), 0
    for _ in range(300):
        layers = [Layer(*(rng.randint(1, 20) for _ in range(3))) for _ in range(6)]
        kept = without_needless(layers)
        for _ in range(20):
            ranks = Ranks(rng.randint(1, 9), rng.randint(1, 90), (rng.randint(2, 9), 1))
            least = [min(ranks.fullest(each, 4) for each in some) for some in (layers, kept)]
            assert least[0] == least[1]
        dropped += len(layers) - len(kept)
    assert dropped > 300


def test_equal_models_of_heterogeneous_layers_have_equal_bounds() -> None:
    """Their kinds of layers are equal, and not the same objects."""
    spec, needed = catalogue.model("llama33_nemotron_super_49b"), []
    layers = tuple(LayerKind(str(kind)) for kind in spec.heterogeneous_layers)
    for each in (spec, dataclasses.replace(spec, heterogeneous_layers=layers)):
        model = CostModel(each, catalogue.cluster("dgx_h100", 64), CostSettings())
        grids = GridSpace(model, 128, SearchSpace())
        grid = next(grid for shard in grids.shards() for grid in grids.grids(shard))
        needed.append(MemoryBounds(model, grids).of_family(grid))
    assert needed[0] == needed[1] > 0


@pytest.mark.parametrize("p", [2, 3, 5, 8])
def test_micro_batches_alive_in_every_chunk_are_those_of_the_schedule(p: int) -> None:
    for v, m in [(1, 1), (1, 3), (1, 4 * p), (2, p), (3, 2 * p), (4, 5 * p)]:
        each = Counter(max(map(min, peak_live_chunks(p, v, m, rank))) for rank in range(p))
        assert least_live(p, m if v == 1 else p, is_plain=v == 1) == each
