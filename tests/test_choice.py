"""The rule of choice: the fastest plan of the allowed risk, and on a tie the simplest."""

from __future__ import annotations

import dataclasses
import io
import json
from functools import cache
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from nest_megatron.config.compose import compose
from nest_megatron.config.overrides import parse
from nest_megatron.config.request import request_of
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.peak_limit import PeakLimit, out_of_memory
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.plan_output import launched_report
from nest_megatron.layout import plan_file
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.stage_layout import is_uniform
from nest_megatron.planner import NoPlan, Request, plan
from nest_megatron.planner.choice import Candidate, candidate, choose_plan
from nest_megatron.report.html import html_report
from nest_megatron.report.terminal import answer_report, plan_report
from nest_megatron.report.words import other_layouts, proof
from nest_megatron.solver.backend import backend_to_run, solver_of
from nest_megatron.solver.ranking import SearchResult
from nest_megatron.solver.search import Search
from nest_megatron.units import format_seconds
from tests import catalogue
from tests.cli.runs import run

JOBS = [("llama3_70b", 64), ("mixtral_8x7b", 16), ("llama3_8b", 8)]
NAMED = ("model=llama3_70b", "cluster=dgx_h100", "cluster.num_gpus=64")


def request(model: str = "llama3_70b", num_gpus: int = 64, **changes: object) -> Request:
    return Request(
        spec=catalogue.model(model),
        cluster=catalogue.cluster("dgx_h100", num_gpus),
        global_batch_size=128,
        **changes,  # type: ignore[arg-type]
    )


def found(asked: Request, **options: int) -> ParallelPlan:
    answer = plan(asked, **options)
    assert isinstance(answer, ParallelPlan)
    return answer


@cache
def planned(model: str = "llama3_70b", num_gpus: int = 64, **changes: float) -> ParallelPlan:
    return found(request(model, num_gpus, **changes))


@cache
def searched(model: str, num_gpus: int, tie_percent: float) -> tuple[CostModel, SearchResult]:
    asked = request(model, num_gpus)
    cost = asked.cost_model()
    search = Search(
        cost,
        asked.global_batch_size,
        asked.space,
        solver_of(backend_to_run(None), lambda: False),
        limit=PeakLimit(cost, asked.max_oom_chance),
        tie_percent=tie_percent,
    )
    return cost, search.run()


def chosen(model: str, num_gpus: int, tie_percent: float = 1.0, **own: object) -> Candidate:
    cost, result = searched(model, num_gpus, tie_percent)
    asked = request(model, num_gpus, tie_percent=tie_percent, **own)
    (taken, *_), _ = choose_plan(asked, cost, result)
    return taken


def text_of(report: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(report)
    assert isinstance(console.file, io.StringIO)
    return " ".join(console.file.getvalue().split())


@pytest.mark.parametrize("chance", [0.01, 0.05, 0.5])
@pytest.mark.parametrize(("model", "num_gpus"), JOBS)
def test_a_plan_keeps_to_the_risk_that_is_allowed(model: str, num_gpus: int, chance: float) -> None:
    taken = planned(model, num_gpus, max_oom_chance=chance)
    for each in (taken, *taken.alternatives):
        assert each.uncertainty is not None
        assert each.uncertainty.out_of_memory <= chance + 1e-6
    assert taken.choice is not None
    assert taken.choice.max_oom_chance == chance


@pytest.mark.parametrize(("model", "num_gpus"), JOBS)
def test_more_risk_is_never_slower(model: str, num_gpus: int) -> None:
    steps = [
        planned(model, num_gpus, max_oom_chance=chance, tie_percent=0.0).predicted.iteration_time_s
        for chance in (0.01, 0.05, 0.5)
    ]
    assert steps == sorted(steps, reverse=True)


@pytest.mark.parametrize(("model", "num_gpus"), JOBS)
def test_without_ties_the_plan_is_the_fastest_of_the_allowed(model: str, num_gpus: int) -> None:
    best = planned(model, num_gpus, tie_percent=0.0)
    _, result = searched(model, num_gpus, 0.0)
    assert best.search.certificate == "optimal"
    assert best.predicted.iteration_time_s <= min(
        other.iteration_time_s for other in best.alternatives
    )
    assert best.layout in [tie.layout for tie in result.ties]


@pytest.mark.parametrize("percent", [0.5, 1.0, 3.0])
@pytest.mark.parametrize(("model", "num_gpus"), JOBS)
def test_no_plan_of_a_tie_is_simpler(model: str, num_gpus: int, percent: float) -> None:
    mine = chosen(model, num_gpus, percent)
    cost, result = searched(model, num_gpus, percent)
    asked = request(model, num_gpus)
    everything = [candidate(asked, cost, each) for each in result.known]
    most = min(each.step_s for each in everything) * (1 + percent / 100)
    tied = [each for each in everything if each.step_s <= most]
    assert mine in tied
    assert mine.complexity == min(each.complexity for each in tied)


def changed(**changes: object) -> Candidate:
    known = dataclasses.replace(chosen("llama3_70b", 64), is_custom=True, changes=2)
    dims = {name: value for name, value in changes.items() if name.endswith("parallel_size")}
    own = {name: value for name, value in changes.items() if name not in dims}
    layout = known.solved.layout
    layout = dataclasses.replace(layout, dims=dataclasses.replace(layout.dims, **dims))  # type: ignore[arg-type]
    solved = dataclasses.replace(known.solved, layout=layout)
    return dataclasses.replace(known, solved=solved, **own)  # type: ignore[arg-type]


def test_ties_go_by_the_stated_order() -> None:
    """What runs, no layout string, fewer pipeline ranks, virtual stages, changes, less risk."""
    pp, vpp = "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
    worse = {"is_custom": True, pp: 8, vpp: 4, "changes": 3, "out_of_memory": 0.04}
    order = [
        {"is_present": True},
        {"is_custom": False},
        {pp: 4},
        {vpp: 2},
        {"changes": 0},
        {"out_of_memory": 0.0},
    ]
    ranked = sorted(order, key=lambda simpler: changed(**{**worse, **simpler}).complexity)
    assert ranked == order


def test_what_a_plan_changes_of_the_users_settings_is_counted() -> None:
    taken = chosen("llama3_70b", 64)
    layout = taken.solved.layout
    own = {
        "tensor_model_parallel_size": layout.dims.tensor_model_parallel_size,
        "pipeline_model_parallel_size": layout.dims.pipeline_model_parallel_size,
        "micro_batch_size": layout.micro_batch_size,
        "train_iters": 10,
    }
    cost, _ = searched("llama3_70b", 64, 1.0)
    same = candidate(request(own=own), cost, taken.solved)
    assert same.changes == 0
    other = candidate(request(own={**own, "micro_batch_size": 99}), cost, taken.solved)
    assert other.changes == 1


def test_what_runs_today_is_kept_with_a_risk_that_a_new_layout_may_not_have() -> None:
    tight = planned(max_oom_chance=0.5, tie_percent=0.0)
    assert tight.uncertainty.out_of_memory > 0.05
    kept = found(request(present=tight.layout))
    assert kept.layout == tight.layout
    assert kept.present is not None
    assert kept.present.is_kept


def test_what_runs_today_is_left_where_it_more_likely_runs_out() -> None:
    asked = request(num_gpus=32)
    cost = asked.cost_model()
    risky = (
        Search(cost, 128, asked.space, solver_of(backend_to_run(None), lambda: False))
        .run()
        .plans[0]
    )
    peak = found(dataclasses.replace(asked, present=risky.layout)).present
    assert peak is not None
    assert out_of_memory(cost, risky.layout, peak.peak_memory_bytes) > 0.5
    assert not peak.is_kept


def test_where_only_riskier_plans_fit_the_setting_is_named() -> None:
    strict = plan(request(num_gpus=32, max_oom_chance=1e-4))
    assert isinstance(strict, NoPlan)
    assert strict.remedies[0].change.startswith("memory.max_oom_chance=0.5")
    assert strict.remedies[0].iteration_time_s is not None


def test_what_the_limit_costs_is_told() -> None:
    taken = planned()
    assert taken.choice is not None
    riskier = taken.choice.riskier
    assert riskier is not None
    free = planned(max_oom_chance=0.5, tie_percent=0.0)
    assert riskier.iteration_time_s == free.predicted.iteration_time_s
    assert riskier.iteration_time_s < taken.choice.fastest_s
    assert 0.05 < riskier.out_of_memory <= 0.5
    assert free.choice is not None
    assert free.choice.riskier is None
    told = [words for name, words in other_layouts(taken) if name == "Faster"]
    assert " risk: " in told[-1]
    assert format_seconds(riskier.iteration_time_s) in told[-1]
    assert told[-1] in text_of(plan_report(taken))
    assert told[-1] in text_of(answer_report(taken))


def test_even_stages_are_taken_where_they_cost_less_than_the_tie() -> None:
    words = ["model=llama3_70b", "cluster=h100_spine_leaf", "cluster.num_gpus=1024"]
    words += ["parallel.tensor_model_parallel_size=8", "train.micro_batch_size=1"]
    asked = request_of(
        compose(parse([*words, "train.global_batch_size=4096"])), choose_execution=True
    )
    spec = asked.spec
    fastest = found(dataclasses.replace(asked, tie_percent=0.0))
    assert not is_uniform(spec, fastest.layout.partition)
    simple = found(asked)
    assert is_uniform(spec, simple.layout.partition)
    assert simple.search.certificate == "chosen"
    assert simple.alternatives[0].iteration_time_s == fastest.predicted.iteration_time_s
    told = text_of(plan_report(simple))
    assert ", uneven stages" in told
    assert "and the simplest." in proof(simple)


def test_the_fastest_stands_there_however_few_runners_up_are_asked_for() -> None:
    many, none = planned(), found(request(num_alternatives=0))
    assert none.layout == many.layout
    assert len(none.alternatives) <= 1


def test_a_runner_up_is_the_one_of_the_list() -> None:
    listed = planned()
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
        ("search.tie_percent", "-1"),
        ("search.tie_percent", "inf"),
        ("search.tie_percent", "101.0"),
        ("search.tie_percent", "nan"),
        ("memory.max_oom_chance", "0"),
        ("memory.max_oom_chance", "0.51"),
        ("memory.max_oom_chance", "nan"),
    ],
)
def test_bad_settings_name_the_value(name: str, value: str) -> None:
    done = run("plan", *NAMED, f"{name}={value}")
    assert done.code == 2
    assert name in done.err
    assert value in done.err


@pytest.mark.parametrize(("model", "num_gpus"), JOBS)
def test_the_certificate_is_a_sentence_of_fact(model: str, num_gpus: int) -> None:
    taken = planned(model, num_gpus)
    assert taken.choice is not None
    said = "Proven: among layouts with at most 5 % risk to run out of memory none is faster than "
    assert said in proof(taken)
    slower = taken.predicted.iteration_time_s / taken.choice.fastest_s - 1
    assert taken.search.gap_percent == pytest.approx(100 * slower, abs=1e-6)
    assert slower <= 0.01


def test_a_search_that_time_ended_claims_no_fastest_plan() -> None:
    early = found(request("mixtral_8x7b", 1024, max_seconds=1e-9))
    assert early.search.certificate == "gap"
    assert "Time ran out" in proof(early)
    assert "is known" not in proof(early)


def test_every_plan_says_its_range_everywhere() -> None:
    taken = planned()
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
        assert " % off" in told
    assert "risk to run out" in text_of(plan_report(taken))
    assert plan_file.load(plan_file.dump(taken)) == taken


def test_runners_up_within_the_error_are_ties() -> None:
    taken = planned()
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


def test_the_shortlist_is_printed() -> None:
    done = run("plan", *NAMED, "train.global_batch_size=128", "--shortlist")
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
