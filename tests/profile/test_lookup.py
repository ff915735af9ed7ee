"""Which timings speak for a shape, what prices become of them, and that searches stay exact."""

from __future__ import annotations

import itertools
import random

import pytest

from nest_megatron.cost_model.estimate import estimate
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.layout.dims import ParallelDims
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.stage_layout import uniform_partition
from nest_megatron.model.layer_pattern import LayerBlock, LayerKind
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.planner import Request, plan
from nest_megatron.profile.lookup import LayerTimes
from nest_megatron.profile.records import LayerProfile, Source
from nest_megatron.solver import backend
from nest_megatron.solver.search import Search
from tests import catalogue
from tests.estimates import estimate_plan
from tests.profile.profiles import profile, random_timings, timing, whole_profile
from tests.solver.jobs import KERNEL, small_cluster, small_settings, small_spec
from tests.solver.test_search import SMALL_SPACE, look_at_everything

LLAMA = catalogue.model("llama3_8b")
MIXTRAL = catalogue.model("mixtral_8x7b")
NODE = catalogue.cluster("dgx_h100", 8)


def times_of(*profiles: LayerProfile, spec: TransformerSpec = LLAMA) -> LayerTimes:
    return LayerTimes(spec=spec, profiles=profiles)


def one_stage(tp: int = 1, cp: int = 1, micro: int = 1, ep: int = 1, etp: int = 1) -> PartialLayout:
    dims = ParallelDims(
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        data_parallel_size=8 // tp // cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )
    return PartialLayout(
        dims=dims, global_batch_size=64, micro_batch_size=micro, sequence_parallel=tp > 1
    )


def compute_of(model: CostModel, kind: LayerKind, grid: PartialLayout) -> tuple[float, float]:
    times = model.unit_time(kind, model.places(grid.dims), model.shard(grid))
    return times.whole_forward.compute, times.backward.compute


def test_precedence() -> None:
    own = profile([timing(micro_batch_size=2)], name="own")
    foreign = profile([timing(), timing(LayerBlock.HEAD)], name="foreign", imported=True)
    times = times_of(foreign, own)
    assert times.find(LayerBlock.ATTENTION, LayerShard(micro_batch_size=2))[0] is Source.MEASURED
    assert times.find(LayerBlock.ATTENTION, LayerShard())[0] is Source.INTERPOLATED
    assert times.find(LayerBlock.HEAD, LayerShard())[0] is Source.IMPORTED
    assert times.find(LayerBlock.DENSE, LayerShard())[0] is Source.ANALYTIC
    (near,) = times.find(LayerBlock.ATTENTION, LayerShard())[1]
    assert near.timing.micro_batch_size == 2


@pytest.mark.parametrize("grid", [one_stage(), one_stage(4), one_stage(8), one_stage(1, micro=2)])
@pytest.mark.parametrize("changes", [{}, {"compute_slowdown": 1.7, "host_kernel_s": 1e-3}])
def test_a_measured_shape_takes_its_measured_time(
    grid: PartialLayout, changes: dict[str, float]
) -> None:
    """Whatever the settings assume of analytic times, the host's floor among it."""
    model = CostModel(LLAMA, NODE, CostSettings(**changes), times_of(whole_profile()))
    share = grid.micro_batch_size / grid.dims.tensor_model_parallel_size
    assert compute_of(model, LayerKind.HEAD, grid) == pytest.approx((4e-3 * share, 9e-3 * share))
    assert compute_of(model, LayerKind.DENSE, grid) == pytest.approx((8e-3 * share, 18e-3 * share))
    assert set(model.sources(grid).values()) == {Source.MEASURED}


def test_parts_keep_their_proportions() -> None:
    grid = one_stage(4)
    analytic = CostModel(LLAMA, NODE, CostSettings())
    measured = CostModel(LLAMA, NODE, CostSettings(), times_of(whole_profile()))
    before, after = (dense_parts(model, grid) for model in (analytic, measured))
    ratios = [after[part] / before[part] for part in before]
    assert ratios == pytest.approx([ratios[0]] * len(ratios))
    assert sum(after.values()) == pytest.approx(1e-3)


def dense_parts(model: CostModel, grid: PartialLayout) -> dict[str, float]:
    """Forward compute time of a dense MLP half by part."""
    _, dense = model._blocks.of_units(model.places(grid.dims), model.shard(grid))[LayerKind.DENSE]
    return {part: time.compute for part, time in dense.forward.items()}


def test_communication_and_memory_stay_in_closed_form() -> None:
    grid = one_stage(4)
    partition = uniform_partition(LLAMA, 1)
    without = estimate(CostModel(LLAMA, NODE, CostSettings()), grid.with_stages(partition))
    times = times_of(whole_profile())
    having = estimate(CostModel(LLAMA, NODE, CostSettings(), times), grid.with_stages(partition))
    assert having.stages[0].memory_bytes == without.stages[0].memory_bytes
    assert having.terms["compute"] != without.terms["compute"]
    assert having.terms["tp_communication"] == without.terms["tp_communication"]


def test_an_imbalance_of_experts_lengthens_measured_times() -> None:
    times = times_of(whole_profile(spec=MIXTRAL), spec=MIXTRAL)
    grid = one_stage(ep=8)
    even, uneven = (
        compute_of(
            CostModel(MIXTRAL, NODE, CostSettings(expert_imbalance=f), times), LayerKind.MOE, grid
        )
        for f in (1.0, 1.5)
    )
    assert even[0] < uneven[0] < 1.5 * even[0]


@pytest.mark.parametrize("grid", [one_stage(2, micro=4), one_stage(4, cp=2), one_stage(8, micro=8)])
def test_interpolation_carries_the_ratio_over(grid: PartialLayout) -> None:
    """Shapes that all took twice the analytic time say that any other does."""
    analytic = CostModel(LLAMA, NODE, CostSettings())
    timings = []
    for tp, micro in ((1, 1), (2, 1), (4, 1), (8, 1), (1, 2)):
        shape = one_stage(tp, micro=micro)
        units = analytic._blocks.of_units(analytic.places(shape.dims), analytic.shard(shape))
        for block, priced in zip(
            (LayerBlock.ATTENTION, LayerBlock.DENSE), units[LayerKind.DENSE], strict=True
        ):
            timings.append(
                timing(
                    block,
                    tensor_model_parallel_size=tp,
                    sequence_parallel=tp > 1,
                    micro_batch_size=micro,
                    forward_s=2 * priced.whole_forward.compute,
                    backward_s=2 * priced.backward.compute,
                )
            )
    model = CostModel(LLAMA, NODE, CostSettings(), times_of(profile(timings)))
    plain = compute_of(analytic, LayerKind.DENSE, grid)
    assert compute_of(model, LayerKind.DENSE, grid) == pytest.approx([2 * s for s in plain])
    assert model.sources(grid)[LayerBlock.ATTENTION] is Source.INTERPOLATED
    assert model.sources(grid)[LayerBlock.HEAD] is Source.ANALYTIC


def test_an_interpolation_lies_between_its_neighbours_and_next_to_the_nearest() -> None:
    timings = [timing(micro_batch_size=size, forward_s=size * 1e-3) for size in (1, 2, 4, 64)]
    _, neighbours = times_of(profile(timings)).find(
        LayerBlock.ATTENTION, LayerShard(micro_batch_size=3)
    )
    weights = {near.timing.micro_batch_size: near.weight for near in neighbours}
    assert sum(weights.values()) == pytest.approx(1.0)
    assert weights[4] > weights[2] > weights[1] > weights[64]


def test_all_but_attention_see_the_tokens_of_a_rank_alone() -> None:
    """As the cost model prices them: a shape's key there and here must merge the same shapes."""
    times = times_of(profile([timing(block, micro_batch_size=2) for block in LayerBlock]))
    halved = LayerShard(micro_batch_size=4, context_parallel_size=2)
    for block in LayerBlock:
        expected = Source.INTERPOLATED if block.mixes_tokens else Source.MEASURED
        assert times.find(block, halved)[0] is expected


@pytest.mark.parametrize("order", [1, -1])
def test_prices_do_not_depend_on_what_was_priced_before(order: int) -> None:
    rng = random.Random(1)
    times = times_of(profile(random_timings(rng, MIXTRAL), spec=MIXTRAL), spec=MIXTRAL)
    grids = [
        one_stage(tp, cp, micro, ep)
        for tp, cp, micro, ep in itertools.product((1, 2), (1, 2), (1, 2, 4), (1, 2))
        if 8 // tp // cp >= ep
    ][::order]
    model = CostModel(MIXTRAL, NODE, CostSettings(), times)
    for grid in grids:
        alone = CostModel(MIXTRAL, NODE, CostSettings(), times)
        for kind in (LayerKind.MOE, LayerKind.HEAD):
            assert compute_of(model, kind, grid) == compute_of(alone, kind, grid)


def measured_search(seed: int, **options: object) -> Search:
    rng = random.Random(seed)
    spec, cluster = small_spec(rng), small_cluster(rng)
    made = profile(random_timings(rng, spec), spec=spec)
    model = CostModel(spec, cluster, small_settings(), times_of(made, spec=spec))
    solver = options.pop("solver", KERNEL)
    return Search(model, rng.choice([4, 8, 12]), SMALL_SPACE, solver, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(30))
def test_a_search_under_any_profile_is_brute_force(seed: int) -> None:
    """Measured tables need not be monotone in any degree; no bound may take them to be."""
    found = measured_search(seed, num_layouts=4).run()
    expected, count = look_at_everything(measured_search(seed))
    assert list(found.plans) == expected[:4]
    assert found.candidates == count
    assert found.optimal == bool(expected)


@pytest.mark.parametrize("seed", range(5))
def test_both_backends_find_the_same_under_a_profile(seed: int) -> None:
    reference = backend.solver_of(backend.Backend.REFERENCE)
    assert measured_search(seed).run() == measured_search(seed, solver=reference).run()


def test_a_plan_says_what_stands_behind_its_times() -> None:
    made = profile(
        (t for t in whole_profile().timings if t.block is not LayerBlock.HEAD), name="most"
    )
    request = Request(spec=LLAMA, cluster=NODE, global_batch_size=64, times=times_of(made))
    found = plan(request)
    assert isinstance(found, ParallelPlan)
    name, _, words = found.provenance.profile.partition(": ")
    assert name == "most"
    assert words.endswith("1 analytic")
    counts = [int(word.split()[0]) for word in words.split(", ")]
    assert sum(counts) == 4
    again = estimate_plan(LLAMA, NODE, request.settings, found.layout, request.times)
    assert again.predicted == found.predicted
    assert again.provenance.profile == found.provenance.profile


def test_without_a_profile_a_plan_is_analytic() -> None:
    found = plan(Request(spec=LLAMA, cluster=NODE, global_batch_size=64))
    assert isinstance(found, ParallelPlan)
    assert found.provenance.profile == "analytic"
