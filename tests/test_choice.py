"""Which of the plans that a search kept is taken, and what is said of it."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from nest_megatron import planner as planning
from nest_megatron.api import load_plan
from nest_megatron.catalogue_files import default_setting
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.pipeline import evaluate
from nest_megatron.cost_model.stage_problems import stage_problem
from nest_megatron.deadline import Deadline
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.launched import launched_report
from nest_megatron.layout import plan_file
from nest_megatron.layout.objective import Objective
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.stage_layout import is_uniform
from nest_megatron.planner import Request, plan
from nest_megatron.planner import choice as choosing
from nest_megatron.planner.choice import Candidate, choose_plan, worth_comparing
from nest_megatron.planner.request import DEFAULT_HEADROOM, NUM_COMPARED
from nest_megatron.report.html import html_report
from nest_megatron.report.terminal import plan_report
from nest_megatron.report.words import proof
from nest_megatron.solver.backend import choose, solver_of
from nest_megatron.solver.grids import GridSpace
from nest_megatron.solver.neighbours import neighbours, peak_of
from nest_megatron.solver.ranking import SearchResult
from nest_megatron.solver.search import Search
from tests import catalogue
from tests.cli.runs import run

JOBS = [("llama3_70b", 64), ("mixtral_8x7b", 16), ("llama3_8b", 8)]
NAMED = ("model=llama3_70b", "cluster=dgx_h100", "cluster.num_gpus=64")


def request(model: str = "llama3_70b", num_gpus: int = 64, **changes: object) -> Request:
    return Request(
        spec=catalogue.model(model),
        cluster=catalogue.cluster("dgx_h100", num_gpus),
        global_batch_size=128,
        **{"headroom": None, **changes},  # type: ignore[arg-type]
    )


def found(asked: Request, **options: int) -> ParallelPlan:
    answer = plan(asked, **options)
    assert isinstance(answer, ParallelPlan)
    return answer


@cache
def planned(model: str, num_gpus: int, objective: Objective) -> ParallelPlan:
    return found(request(model, num_gpus, objective=objective))


@cache
def searched(model: str, num_gpus: int) -> tuple[GridSpace, SearchResult]:
    asked = request(model, num_gpus)
    search = Search(
        CostModel(asked.spec, asked.cluster, asked.settings),
        asked.global_batch_size,
        asked.space,
        solver_of(choose(None), lambda: False),
        num_layouts=NUM_COMPARED,
    )
    return search.grids, search.run()


def chosen(model: str, num_gpus: int, **changes: object) -> choosing.Chosen:
    grids, result = searched(model, num_gpus)
    asked = request(model, num_gpus, **changes)
    found = worth_comparing(asked, grids, result.plans, solver_of(choose(None), lambda: False))
    return choose_plan(asked, grids.model, result, found)


def values(known: choosing.Chosen, objective: Objective, most: float = 1.0) -> list[float]:
    """What an objective makes of all plans whose chance to run out is not above a limit."""
    plans = [each for each in known.known.values() if each.out_of_memory <= most]
    return choosing.values_of(plans, objective, default_setting("search.failed_start_percent"))


def text_of(report: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(report)
    assert isinstance(console.file, io.StringIO)
    return " ".join(console.file.getvalue().split())


@pytest.mark.parametrize(("model", "num_gpus"), JOBS)
def test_nominal_is_what_the_search_proves(model: str, num_gpus: int) -> None:
    best = planned(model, num_gpus, Objective.NOMINAL)
    _, result = searched(model, num_gpus)
    assert best.search.certificate == "optimal"
    assert best.layout == result.plans[0].layout
    assert best.layout.partition.boundaries == result.plans[0].layout.partition.boundaries
    assert best.choice is None


@pytest.mark.parametrize("objective", [Objective.EXPECTED, Objective.CAUTIOUS])
@pytest.mark.parametrize(("model", "num_gpus"), JOBS)
def test_the_fastest_stands_beside_the_plan(
    model: str, num_gpus: int, objective: Objective
) -> None:
    nominal = planned(model, num_gpus, Objective.NOMINAL)
    taken = planned(model, num_gpus, objective)
    assert taken.choice is not None
    assert taken.choice.objective is objective
    if taken.layout == nominal.layout and taken.layout.partition == nominal.layout.partition:
        assert taken.search.certificate == "optimal"
        return
    fastest = taken.alternatives[0]
    assert fastest.iteration_time_s == nominal.predicted.iteration_time_s
    assert taken.search.certificate == "chosen"
    assert taken.choice.separates
    slower = 100 * (taken.predicted.iteration_time_s / fastest.iteration_time_s - 1)
    assert taken.choice.slower_percent == pytest.approx(slower)
    assert taken.search.gap_percent == pytest.approx(slower)
    told = text_of(plan_report(taken))
    assert "Preferred to" in told
    assert "chance of 0 %" not in told
    assert all(words in told for words in taken.choice.separates)
    assert "not taken" not in told


def test_the_fastest_stands_there_however_few_runners_up_are_asked_for() -> None:
    many = planned("llama3_70b", 64, Objective.EXPECTED)
    none = found(request(num_alternatives=0))
    assert none.layout == many.layout
    assert none.layout.partition == many.layout.partition
    assert none.alternatives == many.alternatives[:1]


@pytest.mark.parametrize(("model", "num_gpus"), JOBS)
def test_a_chosen_plan_is_least_by_its_objective(model: str, num_gpus: int) -> None:
    for objective in (Objective.EXPECTED, Objective.CAUTIOUS):
        taken = chosen(
            model,
            num_gpus,
            objective=objective,
            tie_percent=0.0,
            max_out_of_memory_percent=20.0,
        )
        limit = 0.2 if objective is Objective.CAUTIOUS else 0.5
        assert taken.choice is not None
        assert taken.choice.value_s == min(values(taken, objective, limit))


@pytest.mark.parametrize(("model", "num_gpus"), JOBS)
@pytest.mark.parametrize("percent", [0.5, 1.0, 3.0])
def test_no_plan_of_a_tie_is_simpler(model: str, num_gpus: int, percent: float) -> None:
    taken = chosen(model, num_gpus, tie_percent=percent)
    mine = taken.known[taken.plan]
    everything = [each for each in taken.known.values() if each.out_of_memory <= 0.5]
    worth = values(taken, Objective.EXPECTED, 0.5)
    most = min(worth) * (1 + percent / 100)
    risk = max(0.1, everything[worth.index(min(worth))].out_of_memory)
    ties = [
        each
        for each, value in zip(everything, worth, strict=True)
        if value <= most and each.out_of_memory <= risk
    ]
    assert mine in ties
    assert mine.complexity == min(each.complexity for each in ties)


def candidate(**changes: object) -> Candidate:
    taken = chosen("llama3_8b", 8)
    known = dataclasses.replace(
        taken.known[taken.plan],
        is_custom=True,
        changes=2,
        peak_memory_bytes=60 << 30,
        capacity_bytes=70 << 30,
    )
    return dataclasses.replace(known, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "simpler",
    [
        {"is_custom": False, "peak_memory_bytes": 69 << 30, "changes": 9},
        {"peak_memory_bytes": 55 << 30, "changes": 9},
        {"changes": 1},
    ],
)
def test_ties_go_by_the_stated_order(simpler: dict[str, object]) -> None:
    assert candidate(**simpler).complexity < candidate().complexity


def test_memory_that_is_of_no_use_breaks_no_tie() -> None:
    little, much = (candidate(peak_memory_bytes=gib << 30) for gib in (20, 40))
    assert little.complexity == much.complexity


def test_what_a_plan_changes_of_the_users_settings_is_counted() -> None:
    taken = chosen("llama3_70b", 64)
    dims = taken.plan.layout.dims
    own = {
        "tensor_model_parallel_size": dims.tensor_model_parallel_size,
        "pipeline_model_parallel_size": dims.pipeline_model_parallel_size,
        "micro_batch_size": taken.plan.layout.micro_batch_size,
        "train_iters": 10,
    }
    same = chosen("llama3_70b", 64, own=own)
    assert same.known[taken.plan].changes == 0
    other = chosen("llama3_70b", 64, own={**own, "micro_batch_size": 99})
    assert other.known[taken.plan].changes == 1


def test_what_more_likely_runs_out_of_memory_than_not_is_not_taken() -> None:
    nominal = found(request(num_gpus=32, objective=Objective.NOMINAL, shortlist=True))
    assert nominal.uncertainty is not None
    assert nominal.uncertainty.out_of_memory > 0.5
    taken = found(request(num_gpus=32))
    assert taken.uncertainty is not None
    assert taken.uncertainty.out_of_memory <= 0.5
    fastest = taken.alternatives[0]
    assert fastest.iteration_time_s == nominal.predicted.iteration_time_s
    assert fastest.uncertainty == nominal.uncertainty
    assert "that run out of memory with a chance of at most 50 %" in proof(taken)


def test_where_every_plan_more_likely_runs_out_the_least_likely_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(choosing, "out_of_memory", lambda *plan: 0.6 + plan[2] * 1e-13)
    taken = chosen("llama3_8b", 8)
    assert taken.choice is not None
    least = min(each.out_of_memory for each in taken.known.values())
    assert taken.known[taken.plan].out_of_memory == least
    assert taken.choice.max_out_of_memory_percent == 50


def test_cautious_takes_no_risk_above_its_limit() -> None:
    taken = chosen("llama3_70b", 64, objective=Objective.CAUTIOUS, max_out_of_memory_percent=3.0)
    assert taken.known[taken.plan].out_of_memory <= 0.03
    least = chosen("llama3_70b", 64, objective=Objective.CAUTIOUS, max_out_of_memory_percent=0.0)
    risks = [each.out_of_memory for each in least.known.values()]
    assert least.known[least.plan].out_of_memory == min(risks)
    told = proof(found(request(objective=Objective.CAUTIOUS, max_out_of_memory_percent=0.0)))
    assert "None of the" in told


@pytest.mark.parametrize(("model", "num_gpus"), JOBS)
def test_neighbours_are_plans_of_the_space(model: str, num_gpus: int) -> None:
    grids, result = searched(model, num_gpus)
    cost = grids.model
    best = result.plans[0]
    slowest = math.floor(1.1 * best.iteration)
    solve = solver_of(choose(None), lambda: False)
    others = dict(neighbours(grids, best, solve, slowest, cost.capacity_bytes // 2))
    assert best not in others
    assert others
    for each, peak in {best: peak_of(grids, best), **others}.items():
        answer = evaluate(stage_problem(cost, each.layout), each.layout.partition.boundaries)
        assert answer.iteration == each.iteration <= slowest
        assert answer.fits
        assert max(rank.total for rank in answer.memory) == peak
        assert each.iteration >= best.iteration
        family = dataclasses.replace(each.layout, recompute=best.layout.recompute)
        assert family.dims.world_size == num_gpus


def test_even_stages_are_taken_where_they_cost_less_than_the_tie() -> None:
    """The fastest plan of GPT-3 needs a layout; even stages cost 0.1 %."""
    spec = catalogue.model("gpt3_175b")
    asked = Request(spec=spec, cluster=catalogue.cluster("dgx_a100", 512), global_batch_size=1536)
    nominal = found(dataclasses.replace(asked, objective=Objective.NOMINAL))
    assert not is_uniform(spec, nominal.layout.partition)
    assert is_uniform(spec, found(asked).layout.partition)


def test_a_runner_up_is_the_one_of_the_list() -> None:
    listed = planned("llama3_70b", 64, Objective.EXPECTED)
    for number in (1, 2):
        taken = found(request(), choose=number)
        other = listed.alternatives[number - 1]
        assert taken.predicted.iteration_time_s == other.iteration_time_s
        assert taken.search.certificate == "runner-up"
        assert taken.choice is None
    with pytest.raises(UserInputError, match="runners-up"):
        plan(request(), choose=99)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("search.objective", "fastest"),
        ("search.tie_percent", "-1"),
        ("search.tie_percent", "inf"),
        ("search.tie_percent", "nan"),
        ("search.max_out_of_memory_percent", "101"),
        ("search.failed_start_percent", "-1"),
    ],
)
def test_bad_settings_name_the_value(name: str, value: str) -> None:
    done = run("plan", *NAMED, f"{name}={value}")
    assert done.code == 2
    assert name in done.err
    assert value in done.err


@pytest.mark.parametrize(("model", "num_gpus"), JOBS)
def test_the_certificate_says_what_is_proven_under_the_objective(model: str, num_gpus: int) -> None:
    taken = planned(model, num_gpus, Objective.EXPECTED)
    choice = taken.choice
    assert choice is not None
    fastest_s = min(
        [taken.predicted.iteration_time_s, *(o.iteration_time_s for o in taken.alternatives)]
    )
    assert fastest_s < choice.bound_s <= choice.value_s
    assert "search.objective=expected" in proof(taken)
    said = "that no plan of the space takes less than"
    assert (said in proof(taken)) == choice.is_proven
    assert min(values(chosen(model, num_gpus), Objective.EXPECTED)) >= choice.bound_s


def test_a_search_that_time_ended_claims_no_fastest_plan() -> None:
    early = found(request("mixtral_8x7b", 1024, max_seconds=1e-9))
    assert early.search.certificate == "gap"
    assert "Time ran out" in proof(early)
    assert "is known" not in proof(early)


def test_time_that_ends_the_search_for_others_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = planning._search_within

    def cut(asked: Request, deadline: Deadline, *args: Any, **options: Any) -> Any:
        if options.get("num_layouts"):  # not the search of the whole space
            deadline = deadline.within(1e-9)
        return whole(asked, deadline, *args, **options)

    monkeypatch.setattr(planning, "_search_within", cut)
    taken = found(request("gpt3_175b", 512))
    assert taken.choice is not None
    assert taken.choice.ended_early
    assert "Time ended the search for plans to compare (search.max_seconds)" in proof(taken)
    assert not planned("llama3_70b", 64, Objective.EXPECTED).choice.ended_early  # type: ignore[union-attr]


def test_every_plan_says_its_range_everywhere() -> None:
    taken = planned("llama3_70b", 64, Objective.EXPECTED)
    known = taken.uncertainty
    assert known is not None
    assert known.low_s < taken.predicted.iteration_time_s < known.high_s
    assert known.percentile_90_s < known.high_s
    assert 0 < known.out_of_memory < 1
    for told in (
        text_of(plan_report(taken)),
        text_of(launched_report(taken, (), ())),
        html_report(taken),
    ):
        assert "9 of 10 runs" in told
        assert "runs like it" in told
        assert " % off in the mean" in told
    assert "chance to run out" in text_of(plan_report(taken))
    assert plan_file.load(plan_file.dump(taken)) == taken


def test_runners_up_within_the_error_are_ties() -> None:
    taken = planned("llama3_70b", 64, Objective.EXPECTED)
    sure = [other.chance_slower for other in taken.alternatives]
    assert all(each is not None and 0 < each < 1 for each in sure)
    told = text_of(plan_report(taken))
    assert "A tie within the error of predictions" in told
    assert (
        "A tie"
        not in text_of(
            plan_report(dataclasses.replace(taken, alternatives=taken.alternatives[-1:]))
        )
        or sure[-1] < 0.9
    )  # type: ignore[operator]


def test_estimate_says_its_range() -> None:
    done = run("estimate", *NAMED, "parallel.tensor_model_parallel_size=8", "--json")
    known = json.loads(done.out)["uncertainty"]
    assert known["low_s"] < json.loads(done.out)["predicted"]["iteration_time_s"] < known["high_s"]
    assert known["out_of_memory"] > 0.5  # it does not fit


def test_the_shortlist_is_the_smallest_that_holds_the_best() -> None:
    done = run("plan", *NAMED, "train.global_batch_size=128", "--shortlist", "--json")
    document = json.loads(done.out)
    short = document["shortlist"]
    assert len(short["numbers"]) == len(short["chances"])
    assert short["chance"] >= 0.9
    assert max(short["chances"]) < short["chance"]
    assert short["chances"] == sorted(short["chances"], reverse=True)
    assert max(short["numbers"]) <= len(document["alternatives"])
    assert short["measurements"]
    assert all(": expected to " in each for each in short["measurements"]), (
        "nothing is measured yet"
    )


@pytest.mark.parametrize("objective", Objective)
def test_the_shortlist_is_printed(objective: Objective) -> None:
    done = run(
        "plan",
        *NAMED,
        "train.global_batch_size=128",
        "--shortlist",
        f"search.objective={objective}",
    )
    assert done.code == 0
    assert "Which plans could be the fastest" in done.out
    assert "What would tell most" in done.out


def test_a_shortlist_is_kept_in_the_plan_file(tmp_path: Path) -> None:
    path, page = tmp_path / "plan.yaml", tmp_path / "plan.html"
    job = (*NAMED, "train.global_batch_size=128", "--shortlist", f"out={path}")
    assert run("plan", *job).code == 0
    done = run("explain", str(path), "--html", str(page))
    assert "Which plans could be the fastest" in done.out
    assert "one of these is as fast as the fastest of the plan" in page.read_text()


def test_a_sweep_has_no_shortlist() -> None:
    done = run("plan", "-m", *NAMED, "train.global_batch_size=128,256", "--shortlist")
    assert done.code == 2
    assert "--shortlist" in done.err


def test_a_layout_is_needed_only_where_it_gains_more_than_the_tie() -> None:
    """The best plan of Llama 2 13B needs a layout, and one that needs none costs 0.3 % more."""
    asked = dataclasses.replace(request("llama2_13b", 16), headroom=DEFAULT_HEADROOM)
    even = dataclasses.replace(asked.space, even_stages=True)
    best, simple = (
        found(dataclasses.replace(asked, space=space, tie_percent=0.0)).choice
        for space in (asked.space, even)
    )
    assert best is not None
    assert simple is not None
    taken = found(asked)
    needs_layout = not is_uniform(asked.spec, taken.layout.partition)
    assert needs_layout == (simple.value_s > 1.01 * best.value_s)


def test_neighbours_are_those_of_it_where_one_layout_is_compared() -> None:
    found = load_plan("recipes/mixtral_8x7b_dgx_h100_64.yaml").record
    assert found.choice is not None
    for layouts, whose in (
        (1, "one layout and 2 neighbours of it"),
        (3, "2 neighbours of them"),
    ):
        choice = dataclasses.replace(found.choice, num_layouts=layouts, num_neighbours=2)
        assert whose in proof(dataclasses.replace(found, choice=choice))
