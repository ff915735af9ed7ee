"""One job through all planners."""

from __future__ import annotations

import pytest

from nest_megatron.errors import UserInputError
from nest_megatron.planner import PlanRequest
from nest_megatron.research.comparison import NEST, PLANNERS, Compared, compare
from tests.catalogue import cluster, model


def request(name: str = "llama3_8b", num_gpus: int = 8) -> PlanRequest:
    return PlanRequest(
        spec=model(name), cluster=cluster("dgx_h100", num_gpus), global_batch_size=32
    )


@pytest.fixture(scope="module")
def rows() -> tuple[Compared, ...]:
    return compare(request())


def test_all_take_part_in_order(rows: tuple[Compared, ...]) -> None:
    assert tuple(row.name for row in rows) == PLANNERS
    assert all(row.title and row.reason and row.search_s >= 0 for row in rows)


def test_ours_is_proven_and_never_slower(rows: tuple[Compared, ...]) -> None:
    ours = rows[0]
    assert ours.plan is not None
    assert (ours.reason, ours.relative_throughput) == ("proven optimal in its space", 1.0)
    assert (ours.worst_term, ours.lost_s) == (None, 0.0)
    for row in rows[1:]:
        assert row.plan is None or 0 < (row.relative_throughput or 0) <= 1.0


def test_losses_add_up(rows: tuple[Compared, ...]) -> None:
    best = rows[0].plan
    assert best is not None
    for row in rows[1:]:
        if row.plan is not None:
            slower = row.plan.predicted.iteration_time_s - best.predicted.iteration_time_s
            assert row.lost_s == pytest.approx(slower, abs=1e-9)
            if row.worst_term:
                assert row.differences[row.worst_term] == max(row.differences.values()) > 0


def test_named_planners_and_ours() -> None:
    told: list[str] = []
    rows = compare(request(), ["manual", "phaze", "manual"], told.append)
    assert [row.name for row in rows] == told == [NEST, "manual", "phaze"]


def test_nothing_fits() -> None:
    rows = compare(request("llama3_70b"), ["mist"])
    assert all(row.plan is None and row.relative_throughput is None for row in rows)
    assert "the nearest plan lacks" in rows[0].reason


def test_unknown_planners_are_refused_before_anything_is_planned() -> None:
    with pytest.raises(UserInputError, match="the planners are nest, manual"):
        compare(request(), ["gurobi"], lambda name: pytest.fail(f"{name} was started"))
