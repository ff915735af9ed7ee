"""Values that are kept by keys: where two calls have one key, they have one value.

Each field of a layout is changed in turn, and two degrees at once so that their product stays.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import itertools
import pkgutil
import random
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import pytest

import nest_megatron
from nest_megatron.caching import Caching, Key
from nest_megatron.cost_model.keys import SHARD, split_block
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.peak_limit import PeakLimit
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.cost_model.stage_problems import StageProblems, stage_problem
from nest_megatron.errors import UserInputError
from nest_megatron.layout.dims import DEGREES, ParallelDims
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.recompute import (
    FULL_RECOMPUTE,
    NO_RECOMPUTE,
    Recompute,
    RecomputeGranularity,
    RecomputeMethod,
    selective_recompute,
)
from nest_megatron.model.execution import (
    PLAIN,
    ContextTraffic,
    Execution,
    FlexBackend,
    GraphImpl,
    TokenDispatcher,
)
from nest_megatron.profile.lookup import LayerTimes
from nest_megatron.solver.search import Search
from nest_megatron.solver.space import SearchSpace
from tests.profile.profiles import profile, random_timings
from tests.solver.jobs import KERNEL, families, small_cluster, small_spec

#: Modules whose classes keep values.
PACKAGES = ("cost_model", "solver", "planner", "validation")
BLOCK = Recompute(granularity=RecomputeGranularity.FULL, method=RecomputeMethod.BLOCK, num_layers=2)
#: Values of fields that are neither a switch, a name nor a degree.
VALUES: dict[str, tuple[Any, ...]] = {
    "hierarchical_context_parallel_sizes": ((), (2, 2)),
    "cuda_graph_scope": ((), ("attn",), ("attn", "moe_router"), ("moe_router", "moe_preprocess")),
    "cpu_offloading_num_layers": (0, 1),
    "offload_modules": ((), ("core_attn",)),
    "moe_flex_dispatcher_backend": (None, *FlexBackend),
    "recompute": (NO_RECOMPUTE, FULL_RECOMPUTE, BLOCK, selective_recompute(["mlp", "moe_act"])),
}
RICH = Execution(
    moe_token_dispatcher_type=TokenDispatcher.FLEX,
    moe_flex_dispatcher_backend=FlexBackend.HYBRIDEP,
    overlap_moe_expert_parallel_comm=True,
    cp_comm_type=ContextTraffic.A2A_P2P,
    hierarchical_context_parallel_sizes=(2, 2),
    cuda_graph_impl=GraphImpl.TRANSFORMER_ENGINE,
    cuda_graph_scope=("attn", "moe_router"),
    offload_modules=("core_attn",),
)
DIMS = ParallelDims(
    tensor_model_parallel_size=2,
    pipeline_model_parallel_size=2,
    context_parallel_size=2,
    data_parallel_size=4,
    expert_model_parallel_size=2,
    expert_tensor_parallel_size=2,
)
SPACE = SearchSpace(
    limits={"micro_batch_size": 2, "virtual_pipeline_model_parallel_size": 2},
    executions={
        "moe_token_dispatcher_type": (TokenDispatcher.FLEX,),
        "moe_flex_dispatcher_backend": (FlexBackend.HYBRIDEP,),
        "overlap_moe_expert_parallel_comm": (True,),
        "delay_wgrad_compute": (True,),
        "cp_comm_type": (ContextTraffic.A2A,),
        "cuda_graph_impl": (GraphImpl.TRANSFORMER_ENGINE,),
    },
)
SETTINGS = CostSettings(
    memory_reserve_bytes=0,
    tp_overlap=0.6,
    ep_overlap=0.5,
    alltoall_slowdown=1.4,
    host_kernel_s=1e-4,
)


def cached_methods() -> dict[str, tuple[type, Callable[..., Any]]]:
    found = {}
    for package in PACKAGES:
        path = f"{nest_megatron.__name__}.{package}"
        for module in pkgutil.iter_modules(importlib.import_module(path).__path__, f"{path}."):
            for owner in vars(importlib.import_module(module.name)).values():
                if inspect.isclass(owner) and issubclass(owner, Caching):
                    for name, method in vars(owner).items():
                        if hasattr(method, "key"):
                            found[f"{owner.__name__}.{name}"] = (owner, method)
    return found


METHODS = cached_methods()


def key_of(method: Callable[..., Any], owner: object, arguments: tuple[Any, ...]) -> Any:
    key = method.key  # type: ignore[attr-defined]
    return key.of(*arguments) if isinstance(key, Key) else key(owner, *arguments)


def is_whole(method: Callable[..., Any]) -> bool:
    """Whether the key is all of the arguments, so that nothing can be left out."""
    number = len(inspect.signature(method).parameters) - 1
    arguments = tuple(object() for _ in range(number))
    try:
        return key_of(method, None, arguments) == (arguments if number > 1 else arguments[0])
    except AttributeError:
        return False


def changes_of(record: Any) -> Iterator[tuple[str, Any]]:
    """A record with one field changed, wherever that makes one."""
    for field in (each for each in dataclasses.fields(record) if each.init):
        now = getattr(record, field.name)
        values: tuple[Any, ...] = VALUES.get(field.name, ())
        if dataclasses.is_dataclass(now) and not values:
            for name, changed in changes_of(now):
                yield from _made(record, name, {field.name: changed})
            continue
        if not values:
            is_number = isinstance(now, int) and not isinstance(now, (bool, Enum))
            values = (2 * now, now // 2) if is_number else ()
            values = values or ((True, False) if isinstance(now, bool) else tuple(type(now)))
        for value in values:
            if value != now:
                yield from _made(record, field.name, {field.name: value})


def _made(record: Any, name: str, values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    try:
        yield name, dataclasses.replace(record, **values)
    except UserInputError:
        return


def layouts(execution: Execution) -> list[tuple[str, PartialLayout]]:
    """A layout, and others that differ in one field, or in two degrees."""
    base = PartialLayout(
        dims=DIMS,
        global_batch_size=64,
        micro_batch_size=2,
        sequence_parallel=True,
        execution=execution,
    )
    found = [("", base), *changes_of(base)]
    for one, other in itertools.permutations(DEGREES, 2):
        values = {one: 2 * getattr(DIMS, one), other: getattr(DIMS, other) // 2}
        for name, dims in _made(DIMS, f"{one} {other}", values):
            found += _made(base, name, {"dims": dims})
    return found


def test_every_field_of_a_layout_is_changed() -> None:
    changed = {name for execution in (PLAIN, RICH) for name, _ in layouts(execution)}
    fields = {
        each.name for record in (PartialLayout, ParallelDims, Execution) for each in _fields(record)
    }
    assert fields - {"dims", "execution"} <= changed
    assert "delay_wgrad_compute" in changed


def _fields(record: Any) -> Iterator[Any]:
    return (each for each in dataclasses.fields(record) if each.init)


def job(seed: int, *, is_measured: bool = False) -> Search:
    rng = random.Random(seed)
    spec, cluster = small_spec(rng), small_cluster(rng).resized(8)
    device = dataclasses.replace(cluster.accelerator, host_bandwidth_bytes_per_s=1e10)
    cluster, times = dataclasses.replace(cluster, accelerator=device), None
    if is_measured:
        profiles = (profile(random_timings(rng, spec), spec=spec),)
        times = LayerTimes(spec=spec, profiles=profiles)
    model = CostModel(spec, cluster, SETTINGS, times)
    return Search(model, 16, SPACE, KERNEL, num_layouts=4)


#: A dense model, and one of experts, by formulas and by measured times.
JOBS = {"dense": job(1), "experts": job(5), "measured": job(5, is_measured=True)}


def owners(search: Search, base: PartialLayout) -> dict[str, Any]:
    model = search.model
    found = (model, model._blocks, search.grids, search.grids.executions, search.bounds)
    found = (*found, search.memory, search.recomputing, search)
    found = (*found, StageProblems(model, base), PeakLimit(model, 0.05))
    return {type(each).__name__: each for each in found}


def arguments_of(
    method: Callable[..., Any], search: Search, shard: PartialLayout, grid: PartialLayout
) -> Iterator[tuple[Any, ...]]:
    """The arguments that a method gets for a layout."""
    model, grids = search.model, search.grids
    covered, elsewhere = split_block(grid.recompute)
    profiles = () if model.times is None else model.times.profiles
    timings = [timing for profile in profiles for timing in profile.timings]
    by_name: dict[str, list[Any]] = {
        "shard: PartialLayout": [shard],
        "grid: PartialLayout": [grid],
        "shard: LayerShard": [model.shard(grid)],
        "dims: ParallelDims": [grid.dims],
        "zero: ZeroStage": [grid.zero],
        "places: GroupPlaces": [model.places(grid.dims)],
        "kind: LayerKind": list(dict.fromkeys(model.spec.layer_kinds())),
        "block: LayerBlock": list(model.spec.blocks),
        "before: LayerBlock | None": [None, *model.spec.blocks],
        "recompute: Recompute": [grid.recompute],
        "covered: Recompute": [covered],
        "elsewhere: Recompute": [elsewhere],
        "settings: tuple[Recompute, ...]": [(NO_RECOMPUTE, FULL_RECOMPUTE)],
        "timing: Timing": timings,
        "hidden_reduce: bool": [False, True],
        "zeros: Sequence[ZeroStage]": [grids.zero_stages(grid.dims)],
        "stages: StageProblems": [StageProblems(model, grid)],
        "ranks: Ranks": [search.recomputing._ranks_of(grid, n) for n in (1 << 24, 1 << 30)],
        "kinds: RecomputeKinds": [grids.settings_key(grid)[1]],
    }
    parameters = list(inspect.signature(method).parameters.values())[1:]
    yield from itertools.product(*(by_name[f"{p.name}: {p.annotation}"] for p in parameters))


ON_LAYOUTS = sorted(
    name
    for name, (owner, method) in METHODS.items()
    if not is_whole(method) and owner.__module__.split(".")[1] in ("cost_model", "solver")
)


def test_every_method_is_tested() -> None:
    """Here, or in tests/validation/test_pipeline_runs.py; or its key is all of its arguments."""
    whole = {name for name, (_, method) in METHODS.items() if is_whole(method)}
    elsewhere = {"Assessor._candidate", "Predictor.model", "Predictor.predict"}
    assert METHODS.keys() == {*ON_LAYOUTS} | whole | elsewhere


@pytest.mark.parametrize("which", JOBS)
@pytest.mark.parametrize("name", ON_LAYOUTS)
def test_calls_of_one_key_have_one_value(name: str, which: str) -> None:
    search, (owner, method) = JOBS[which], METHODS[name]
    if owner.__module__.startswith("nest_megatron.cost_model"):
        pools = [[(each, each) for _, each in layouts(way)] for way in (PLAIN, RICH)]
    else:
        shards = list(search.grids.shards())
        rng = random.Random(1)
        found = list(families(search.grids))
        sample = rng.sample(found, min(len(found), 600))
        pools = [[(rng.choice(shards), grid) for grid in sample]]
    compared = 0
    for pool in pools:
        values: dict[Any, Any] = {}
        instance = owners(search, pool[0][1])[owner.__name__]
        compute = inspect.unwrap(method)
        for shard, grid in pool:
            for arguments in arguments_of(method, search, shard, grid):
                key = key_of(method, instance, arguments)
                if key not in values:
                    values[key] = compute(instance, *arguments)
                    continue
                compared += 1
                assert compute(instance, *arguments) == values[key], (name, arguments)
    assert compared or (name == "BlockTimes._ratio" and which != "measured")


def test_a_key_that_leaves_out_what_matters_is_noticed() -> None:
    """As the test above would, were the size of the micro batch no part of the key."""
    model, (_, base) = JOBS["dense"].model, layouts(PLAIN)[0]
    other = dataclasses.replace(base, micro_batch_size=1)
    assert SHARD.of(base) != SHARD.of(other)
    assert inspect.unwrap(CostModel._work)(model, base) != inspect.unwrap(CostModel._work)(
        model, other
    )


@pytest.mark.parametrize("name", [each.name for each in dataclasses.fields(CostSettings)])
def test_a_model_under_other_settings_shares_what_they_do_not_change(name: str) -> None:
    grid = layouts(RICH)[0][1]
    for which in ("dense", "experts"):
        model = CostModel(JOBS[which].model.spec, JOBS[which].model.cluster, SETTINGS)
        assert stage_problem(model, grid)
        for settings in other_settings(name):
            alone = CostModel(model.spec, model.cluster, settings)
            assert stage_problem(
                model.with_figures(model.cluster, settings), grid
            ) == stage_problem(alone, grid)


def other_settings(name: str) -> Iterator[CostSettings]:
    """Settings with one field changed, or one of a record in it, as far as there are such."""
    now = getattr(SETTINGS, name)
    if isinstance(now, float):
        yield from (made for _, made in _made(SETTINGS, name, {name: 0.9 * now + 0.05}))
    elif isinstance(now, int) and not isinstance(now, (bool, Enum)):
        yield from (made for _, made in _made(SETTINGS, name, {name: 2 * now + 1}))
    elif dataclasses.is_dataclass(now):
        for field in dataclasses.fields(now):
            value = getattr(now, field.name)
            if isinstance(value, bool):
                values = {name: dataclasses.replace(now, **{field.name: not value})}
                yield from (made for _, made in _made(SETTINGS, name, values))


def test_a_new_field_has_to_be_put_somewhere() -> None:
    with pytest.raises(AssertionError, match="Recompute"):
        Key(Recompute, reads=("granularity", "method"), without_effect=("modules",))
    with pytest.raises(AssertionError, match="Recompute"):
        Key(Recompute, reads=("granularity", "method", "num_layers", "modules", "method"))
