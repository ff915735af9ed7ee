"""Which ranks are called slow, and which are not."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest

from nest_megatron.history.records import RankMeasured, RunRecord, measured_by_ranks
from nest_megatron.integrations.run_record import _experts, run_warnings
from nest_megatron.layout.dims import ParallelDims
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.zero import ZeroStage
from tests.history.runs import run_record

DENSE = ParallelDims(tensor_model_parallel_size=2, data_parallel_size=4)
PIPELINE = ParallelDims(pipeline_model_parallel_size=4)
EXPERTS = ParallelDims(data_parallel_size=8, expert_model_parallel_size=4)
BUSY_S = 1.4  # as predicted


def warned(
    dims: ParallelDims,
    busy: Mapping[int, float],
    *,
    memory: Mapping[int, int] | None = None,
    zero: ZeroStage = ZeroStage.OPTIMIZER,
    steps: int = 8,
) -> tuple[str, ...]:
    """Warnings of a run in which some ranks take longer, and steps are as uneven as they are."""
    grid = PartialLayout(
        dims=dims, global_batch_size=8, micro_batch_size=1, sequence_parallel=False, zero=zero
    )
    run: RunRecord = run_record(grid=grid, hosts=("a",) * dims.world_size)
    stages = dims.pipeline_model_parallel_size
    predicted = dataclasses.replace(
        run.predicted, busy_s=(BUSY_S,) * stages, peak_memory_bytes=(50 << 30,) * stages
    )
    uneven = (1.0, 0.99, 1.01, 1.0)
    parts = {
        rank: RankMeasured(
            rank=rank,
            host="ab"[rank >= dims.world_size // 2],
            step_times_s=(2.0,) * steps,
            warm_up=0,
            busy_s=tuple(busy.get(rank, BUSY_S) * uneven[n % 4] for n in range(steps)),
            peak_memory_bytes=(memory or {}).get(rank, 50 << 30),
        )
        for rank in range(dims.world_size)
        if busy.get(rank) != 0.0
    }
    measured = measured_by_ranks(parts, dims.world_size)
    return run_warnings(dataclasses.replace(run, predicted=predicted, measured=measured), parts)


@pytest.mark.parametrize("dims", [DENSE, PIPELINE, EXPERTS])
def test_even_ranks_are_not_warned_of(dims: ParallelDims) -> None:
    assert warned(dims, {}) == ()


def test_a_tensor_parallel_group_is_slow_together() -> None:
    (warning,) = warned(DENSE, {4: 1.09 * BUSY_S, 5: 1.09 * BUSY_S})
    assert warning == (
        "ranks 4-5 (b), pipeline rank 0: forward and backward passes take 9 % longer than those of "
        "replicas (1.526 s a step, 1.400 s): a slow GPU or host, or uneven data"
    )


def test_experts_are_slow_together() -> None:
    (warning,) = warned(EXPERTS, dict.fromkeys(range(4), 1.09 * BUSY_S))
    assert warning.startswith("ranks 0-3 (a), pipeline rank 0: ")


def test_a_pipeline_rank_without_replicas_is_held_against_its_prediction() -> None:
    slow = warned(PIPELINE, {3: 1.3 * BUSY_S})
    assert slow[0].startswith("rank 3 (b), pipeline rank 3: forward and backward passes take 1.820")
    assert "30 % more than predicted beside the other pipeline ranks" in slow[0]
    assert slow[1].startswith("forward and backward passes take 1.820 s a step on the busiest")
    assert warned(PIPELINE, {3: 1.09 * BUSY_S}) == ()  # its layers may be mispriced by as much


@pytest.mark.parametrize(
    ("busy", "changes"),
    [
        ({4: 1.04 * BUSY_S, 5: 1.04 * BUSY_S}, {}),
        ({4: 1.09 * BUSY_S, 5: 1.09 * BUSY_S}, {"zero": ZeroStage.WEIGHTS}),
        ({4: 1.09 * BUSY_S, 5: 1.09 * BUSY_S}, {"steps": 3}),
    ],
    ids=["within the noise", "FSDP waits for all", "too few steps"],
)
def test_what_cannot_be_told_is_not_said(busy: dict[int, float], changes: dict[str, int]) -> None:
    assert warned(DENSE, busy, **changes) == ()  # type: ignore[arg-type]


def test_memory_above_the_prediction_names_the_worst_rank() -> None:
    (warning,) = warned(DENSE, {}, memory={3: 56 << 30, 6: 60 << 30})
    assert warning == (
        "peak memory of rank 6 (b) is 20 % above the prediction (60.0 GiB, predicted 50.0 GiB); "
        "so are 2 ranks in all"
    )


def test_a_rank_that_is_silent_is_named() -> None:
    assert warned(DENSE, {7: 0.0}) == ("nothing was heard from rank 7 (a)",)


@pytest.mark.parametrize(("measured", "planned", "told"), [(1.4, 1.0, True), (1.4, 1.35, False)])
def test_uneven_experts_are_told_beside_what_was_planned_for(
    measured: float, planned: float, told: bool
) -> None:
    run = run_record()
    assert run.measured is not None
    predicted = dataclasses.replace(run.predicted, expert_imbalance=planned)
    uneven = dataclasses.replace(run.measured, expert_imbalance=measured)
    found = list(_experts(dataclasses.replace(run, predicted=predicted, measured=uneven)))
    assert bool(found) == told
    assert all("1.40x imbalanced (planned for 1.00x)" in each for each in found)
