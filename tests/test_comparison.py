"""One job through all planners."""

from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from nest_megatron.api.jobs import plan_job
from nest_megatron.config.compose import compose
from nest_megatron.config.overrides import parse
from nest_megatron.cost_model.estimate import estimate
from nest_megatron.cost_model.peak_limit import PeakLimit
from nest_megatron.errors import UserInputError
from nest_megatron.planner import Request
from nest_megatron.report.plan_rows import tokens_per_s
from nest_megatron.research.baselines import network_blind
from nest_megatron.research.baselines.job import ComparisonJob
from nest_megatron.research.comparison import NEST, PLANNERS, Compared, compare
from nest_megatron.research.comparison_run import compare_composed, comparison_report
from tests.catalogue import cluster, model
from tests.solver.jobs import KERNEL


def request(name: str = "llama3_8b", num_gpus: int = 8) -> Request:
    return Request(
        spec=model(name),
        cluster=cluster("dgx_h100", num_gpus),
        global_batch_size=32,
        max_oom_chance=0.5,
        tie_percent=0.0,
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


#: A job whose plan is another one with and without choices of execution.
SETTINGS = [
    *("model=llama3_8b", "cluster=dgx_h100", "cluster.num_gpus=16"),
    *("train.global_batch_size=32", "search.num_alternatives=3"),
]


@pytest.mark.parametrize("chance", [0.05, 0.5])
def test_our_row_is_the_plan_of_the_same_settings(chance: float) -> None:
    composed = compose(parse([*SETTINGS, f"memory.max_oom_chance={chance}"]))
    ours = compare_composed(composed, ["nest"]).rows[0].plan
    planned = plan_job(composed).record
    assert ours is not None
    assert (ours.layout, ours.layout.execution, ours.predicted, ours.uncertainty) == (
        *(planned.layout, planned.layout.execution, planned.predicted, planned.uncertainty),
    )
    assert ours.search.certificate == planned.search.certificate


def test_all_planners_choose_how_layers_run_and_keep_to_the_same_chance() -> None:
    composed = compose(parse(SETTINGS))
    found = compare_composed(composed, ["nest", "manual", "mist", "autoconfigurator"])
    plans = [row.plan for row in found.rows if row.plan is not None]
    assert len(plans) == 4
    split = [plan for plan in plans if plan.layout.dims.tensor_model_parallel_size > 1]
    assert split
    assert all(plan.layout.execution.tp_comm_overlap for plan in split)
    for plan in plans:
        assert plan.uncertainty is not None
        assert plan.uncertainty.out_of_memory <= 0.05 + 1e-6
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(*found.report())
    assert "P(OOM)" in console.export_text()


def test_unknown_names_are_refused_with_the_list() -> None:
    with pytest.raises(
        UserInputError, match=r"nest, manual, mcmc, .*Did you mean manual"
    ) as caught:
        compare(request(), ["manuel"])
    assert caught.value.value == "manuel"


def test_a_likely_plan_is_taken_where_the_fastest_runs_out_too_often() -> None:
    job = request("llama3_8b", 8)
    model = job.cost_model()
    common = {
        "model": model,
        "global_batch_size": 32,
        "space": job.space,
        "solve_stages": KERNEL,
    }
    fastest = network_blind.find_mist(ComparisonJob(**common, peaks=PeakLimit(model))).plan
    cautious = ComparisonJob(**common, peaks=PeakLimit(model, 1e-3))
    found = network_blind.find_mist(cautious).plan
    assert fastest is not None
    assert found is not None
    limit = cautious.peaks.of(found.layout)
    assert limit < model.capacity_bytes
    assert estimate(model, found.layout).peak_memory_bytes <= limit
    assert found.iteration >= fastest.iteration


def test_no_number_is_cut_at_80_columns(rows: tuple[Compared, ...]) -> None:
    wide = [dataclasses.replace(row, search_s=99.99, chance_slower=0.5) for row in rows]
    console = Console(width=80)
    with console.capture() as captured:
        console.print(comparison_report(wide))
    lines = captured.get().splitlines()
    assert max(map(len, lines)) <= 80
    assert {"Planner", "Tokens/s", "P(OOM)", "Search"} <= {*captured.get().split()}
    for row in wide:
        (line,) = (line for line in lines if line.split()[:1] == [row.name] and "99.99 s" in line)
        assert row.plan is not None
        assert f"{tokens_per_s(row.plan):,.0f}" in line


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
