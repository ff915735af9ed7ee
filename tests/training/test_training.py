"""Planned layouts, trained for real by megatron-core on the CPU, learn what one rank learns.

Needs the wheels of torch and megatron-core, and no GPU. Two things cannot run so: context
parallelism needs Transformer Engine, and experts split over tensor ranks need an uneven gather that
gloo lacks. Megatron-FSDP trains through Megatron-LM's own script (``tests/megatron_lm``).
"""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec
from typing import Any

import pytest

from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.rank_order import GroupKind, group_of_rank
from nest_megatron.layout.recompute import RecomputeGranularity, RecomputeMethod
from nest_megatron.layout.rulebook.schedule import decoder_layers
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.model.layer_pattern import LayerKind
from tests.training.layouts import LAYOUTS, STEPS, Layout, planned
from tests.training.workers import Trained, train_all


def _has(package: str) -> bool:
    """Whether a package is installed, without the seconds that importing it takes."""
    parent = package.partition(".")[0]
    return find_spec(parent) is not None and find_spec(package) is not None


for _wheel in ("torch", "megatron.core"):
    if not _has(_wheel):
        pytest.skip(f"{_wheel} is not installed", allow_module_level=True)

pytestmark = pytest.mark.slow

#: Layouts add the same 32-bit numbers in different orders: measured, losses differ by 2e-7 and
#: gradient norms by 1e-6. Trained wrongly on purpose (gradients of norms or of the embedding's
#: copies not summed, experts' scaled, replicas fed alike), norms differ by 6e-3 and more.
RELATIVE = 1e-4
#: Adam divides by a gradient's size, so noise counts in full where gradients are tiny: up to 1e-4
#: of the way that a parameter moved. One whose gradient misses a sum strays by half its way.
OF_THE_WAY = 1e-2

every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
every_laid_out = pytest.mark.parametrize(
    "layout",
    [layout for layout in LAYOUTS if not layout.is_reference],
    ids=lambda layout: layout.name,
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train_all(LAYOUTS, tmp_path_factory.mktemp("training"))


def _alone(layout: Layout, trained: Trained) -> dict[str, Any]:
    """What the one-rank run of the same model reported."""
    same = (one for one in LAYOUTS if one.is_reference and one.spec == layout.spec)
    [report] = trained.reports(next(same))
    return report


@every_laid_out
def test_losses_are_those_of_one_rank(layout: Layout, trained: Trained) -> None:
    expected = _alone(layout, trained)["losses"]
    assert len(expected) == STEPS
    for report in trained.reports(layout):
        is_last = report["chunks"][-1]["head"]
        assert report["losses"] == pytest.approx(expected if is_last else [], rel=RELATIVE)


@every_laid_out
def test_gradient_norms_are_those_of_one_rank(layout: Layout, trained: Trained) -> None:
    expected = _alone(layout, trained)["grad_norms"]
    for report in trained.reports(layout):
        assert report["grad_norms"] == pytest.approx(expected, rel=RELATIVE)


@every_laid_out
def test_every_weight_moves_as_on_one_rank(layout: Layout, trained: Trained) -> None:
    for rank, report in enumerate(trained.reports(layout)):
        assert report["stray_distance"] < OF_THE_WAY, (rank, report["stray"])


@every_layout
def test_ranks_hold_the_planned_stages(layout: Layout, trained: Trained) -> None:
    plan = planned(layout)
    kinds, partition = plan.model.layer_kinds(), plan.layout.partition
    for rank, report in enumerate(trained.reports(layout)):
        pipeline = group_of_rank(plan.layout.dims, GroupKind.PP, rank)
        stage = pipeline.index(rank)
        assert report["pipeline_rank"] == stage
        for units, chunk in zip(partition.chunks_of_rank(stage), report["chunks"], strict=True):
            held = {kinds[unit] for unit in units}
            layers = [u for u in units if kinds[u] in (LayerKind.DENSE, LayerKind.MOE)]
            assert chunk == {
                "layers": layers,
                "embedding": LayerKind.EMBEDDING in held,
                "head": LayerKind.HEAD in held,
            }
        parameters = report["dense_parameters"] + report["expert_parameters"]
        assert parameters == plan.predicted.stages[stage].parameters


@every_layout
def test_optimizer_state_is_divided_as_planned(layout: Layout, trained: Trained) -> None:
    grid, reports = planned(layout).layout, trained.reports(layout)
    sharded = grid.zero >= ZeroStage.OPTIMIZER
    dense_copies = grid.dims.data_parallel_size if sharded else 1
    expert_copies = grid.dims.expert_data_parallel_size if sharded else 1
    dense, experts, moments = (
        sum(report[name] for report in reports)
        for name in ("dense_parameters", "expert_parameters", "optimizer_moments")
    )
    assert moments == dense // dense_copies + experts // expert_copies


@every_layout
def test_work_is_done_again_where_planned(layout: Layout, trained: Trained) -> None:
    plan = planned(layout)
    for report in trained.reports(layout):
        counts = {(part, number): count for part, number, count in report["forwards"]}
        assert counts == _expected_forwards(plan, report["chunks"])
        share = plan.layout.dims.tensor_model_parallel_size if plan.layout.sequence_parallel else 1
        assert report["rows"] == ([plan.train.seq_length // share] if counts else [])


def _expected_forwards(
    plan: ParallelPlan, chunks: list[dict[str, Any]]
) -> dict[tuple[str, int], int]:
    """How often each part of each layer is computed, over all steps."""
    grid, kinds = plan.layout, plan.model.layer_kinds()
    again = grid.recompute
    once = STEPS * grid.num_microbatches
    counts: Counter[tuple[str, int]] = Counter()
    for chunk in chunks:
        for place, number in enumerate(chunk["layers"]):
            whole = again.granularity is RecomputeGranularity.FULL and (
                again.method is RecomputeMethod.UNIFORM or place < (again.num_layers or 0)
            )
            parts = ["layer", "core_attn", *["moe"] * (kinds[number] is LayerKind.MOE)]
            for part in parts:
                counts[part, number] = once * (2 if whole or part in again.modules else 1)
    return counts


@every_layout
def test_the_plan_is_what_was_asked_for(layout: Layout) -> None:
    plan = planned(layout)
    grid, dims = plan.layout, plan.layout.dims
    assert plan.search.certificate == "optimal"
    assert (dims.world_size, dims.rank_order) == (layout.num_gpus, layout.rank_order)
    assert (
        dims.tensor_model_parallel_size,
        dims.pipeline_model_parallel_size,
        dims.virtual_pipeline_model_parallel_size,
        dims.expert_model_parallel_size,
    ) == (layout.tp, layout.pp, layout.vpp, layout.ep)
    assert (grid.micro_batch_size, grid.zero) == (layout.micro, layout.zero)
    assert grid.recompute == layout.recompute
    assert plan.layout.sequence_parallel == (layout.tp > 1)


@pytest.mark.parametrize("name", ["dense pp4", "dense pp2 vpp2", "experts pp4"])
def test_the_planner_cuts_unevenly(name: str) -> None:
    plan = next(planned(layout) for layout in LAYOUTS if layout.name == name)
    assert len(set(decoder_layers(plan.model, plan.layout.partition))) > 1


def test_a_stage_with_the_head_alone_is_among_the_layouts() -> None:
    partitions = {planned(layout).layout.partition for layout in LAYOUTS if layout.pp > 1}
    assert any(len(cut.chunk(cut.num_chunks - 1)) == 1 for cut in partitions)
