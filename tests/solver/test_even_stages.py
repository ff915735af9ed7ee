"""Even stages alone: the best of all cuts that Megatron makes without a layout, and no other."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import pytest

from nest_megatron.cluster.records import Cluster
from nest_megatron.errors import UserInputError
from nest_megatron.layout.stage_layout import StagePartition, uniform_partition
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.planner.layouts import describe_space
from nest_megatron.solver.ranking import SolvedLayout
from nest_megatron.solver.space import SearchSpace
from tests.solver.jobs import search, small_cluster, small_spec

EVEN = SearchSpace(even_stages=True)


def even_cuts(spec: TransformerSpec) -> Iterator[StagePartition]:
    """Every cut that Megatron makes by itself of a model."""
    for pp in (1, 2, 4, 8):
        for virtual in range(1, 7) if pp > 1 else (1,):
            with contextlib.suppress(UserInputError):
                yield uniform_partition(spec, pp, virtual)


def best_of_each(spec: TransformerSpec, cluster: Cluster, batch: int) -> SolvedLayout | None:
    """The best plan where every even cut is given by hand, one after another."""
    found = [
        plan
        for cut in even_cuts(spec)
        if cut.pipeline_model_parallel_size <= cluster.num_gpus
        for plan in search(spec, cluster, batch, SearchSpace(partition=cut)).run().plans[:1]
    ]
    return min(found, key=lambda plan: plan.rank, default=None)


@pytest.mark.parametrize("seed", range(40))
def test_the_best_of_all_even_cuts_is_found(seed: int) -> None:
    rng = random.Random(seed)
    spec, cluster = small_spec(rng), small_cluster(rng)
    result = search(spec, cluster, 8, EVEN).run()
    found = result.plans[0] if result.plans else None
    assert found == best_of_each(spec, cluster, 8)


def test_no_cut_is_uneven() -> None:
    rng = random.Random(3)
    spec = small_spec(rng)
    for plan in search(spec, small_cluster(rng, 10**10).resized(8), 8, EVEN).run().plans:
        dims = plan.layout.dims
        virtual = dims.virtual_pipeline_model_parallel_size
        even = uniform_partition(spec, dims.pipeline_model_parallel_size, virtual)
        assert plan.layout.partition.boundaries == even.boundaries


def test_it_is_said_in_the_plan() -> None:
    assert describe_space(EVEN, small_cluster(random.Random(0)), ())["stage_layout"] == "even"
