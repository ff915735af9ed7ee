"""What planning answers within its time, and leaves behind in the process that asked for it."""

from __future__ import annotations

import dataclasses
import gc
import io
import itertools
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from rich.console import Console, RenderableType

from nest_megatron.config.compose import compose
from nest_megatron.config.overrides import parse
from nest_megatron.cost_model.model import CostModel
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.plan_job import RecipeJob
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.planner import EndedEarly, NoPlan, Request, plan
from nest_megatron.planner.request import Deadline
from nest_megatron.planner.shortage import no_plan
from nest_megatron.report.terminal import ended_report, no_plan_report
from nest_megatron.report.words import certificate, early_words, ended_early
from nest_megatron.solver.space import SearchSpace
from tests import catalogue
from tests.architecture.imports import ROOT


def request(model: str, *, num_gpus: int = 16, **changes: object) -> Request:
    return Request(
        spec=catalogue.model(model),
        cluster=catalogue.cluster("dgx_h100", num_gpus),
        global_batch_size=32,
        **changes,  # type: ignore[arg-type]
    )


#: In a process of its own: what other tests' threads leave behind is garbage, too. The first plan
#: imports, which makes cycles.
CYCLES = """
import gc, sys
from nest_megatron.planner import plan
from tests.test_planner import request
plan(request("llama3_8b", num_gpus=1))
gc.collect()
gc.disable()
plan(request(sys.argv[1]))
print(gc.collect(), gc.isenabled())
"""


@pytest.mark.parametrize("model", ["llama3_8b", "mixtral_8x7b"])
def test_planning_makes_no_reference_cycles(model: str) -> None:
    command = [sys.executable, "-c", CYCLES, model]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout == "0 False\n"


@pytest.mark.parametrize("name", ["disable", "enable", "freeze", "collect"])
def test_planning_leaves_the_collector_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It belongs to the process: Megatron collects by hand while another thread plans.

    Its threshold alone is raised meanwhile (decision 016; ``tests/architecture``).
    """
    impossible = SearchSpace(fixed={"tensor_model_parallel_size": 3})
    called = []
    with monkeypatch.context() as watched:
        watched.setattr(gc, name, lambda *_: called.append(name))
        with ThreadPoolExecutor(1) as threads:
            threads.submit(plan, request("llama3_8b")).result()
        with pytest.raises(UserInputError):
            plan(request("llama3_8b", space=impossible))
    assert called == []


def test_a_search_that_time_ended_proves_nothing() -> None:
    """Nothing fits here, but that is proven only by looking at everything."""
    found = plan(request("deepseek_v3", num_gpus=64, max_seconds=1e-9))
    assert isinstance(found, EndedEarly)
    assert found.search.certificate == "ended-early"
    assert 0 < found.lower_bound_s < 10
    assert found.search.bounded == 0
    told = " ".join((certificate(found.search), ended_early(found), text_of(ended_report(found))))
    assert not re.search(r"(?i)proven|\bfits?\b|missing", told)
    assert "max_seconds" in told


def test_what_was_looked_at_and_does_not_fit_proves_nothing_of_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only a search that has seen everything says that nothing fits."""
    refused = []
    for enough in range(0, 100, 10):
        asked = itertools.count()
        monkeypatch.setattr(Deadline, "passed", lambda *_, a=asked, e=enough: next(a) > e)
        found = plan(request("llama3_8b", num_gpus=2))
        misfits = sum(found.search.infeasible.values())
        if isinstance(found, EndedEarly):
            refused.append(misfits)
            assert found.search.certificate == "ended-early"
            assert misfits < found.search.candidates or not misfits
        else:
            assert isinstance(found, NoPlan)
            assert misfits == found.search.candidates
    assert any(refused)


def test_time_that_began_with_the_command_counts() -> None:
    begun_s = time.monotonic() - 30
    late = request("llama3_70b", num_gpus=8, max_seconds=29, begun_s=begun_s)
    assert isinstance(plan(late), EndedEarly)
    assert isinstance(plan(dataclasses.replace(late, max_seconds=3600)), NoPlan)


@pytest.mark.parametrize("model", ["llama3_8b", "mixtral_8x7b", "deepseek_v3"])
def test_some_plan_is_found_however_little_time_there_is(model: str) -> None:
    found = plan(request(model, num_gpus=1024, max_seconds=1e-9))
    assert isinstance(found, ParallelPlan)
    assert found.predicted.fits
    assert found.search.certificate == "gap"
    assert found.search.gap_percent > 0
    assert found.search.bounded == found.search.solved == 0
    assert "the best of a dozen rules of thumb" in certificate(found.search)
    assert "Of 0 candidates" not in certificate(found.search)


#: The job of which a busy machine once planned a layout six times as slow as the best.
WITH_PACKAGES = (
    *("model=qwen3_30b_a3b", "cluster=dgx_h100", "cluster.num_gpus=16", "train.seq_length=4096"),
    "train.global_batch_size=1024",
    "search.packages=[deep_ep,hybrid_ep,transformer_engine_2_9]",
)


def test_a_search_without_time_has_a_plan_near_the_best() -> None:
    """No clock is asked before rules of thumb are priced."""
    asked = RecipeJob().request(compose(parse(WITH_PACKAGES)))
    late = dataclasses.replace(asked, begun_s=time.monotonic() - 1e6, num_alternatives=0)
    early = plan(late)
    assert isinstance(early, ParallelPlan)
    assert early.search.ended_early
    assert early.search.may_be_far_off
    assert early.search.candidates == 0
    assert early_words(early.search).startswith("Search ended early: within ")
    best = planned_in_time(dataclasses.replace(asked, max_seconds=600, num_alternatives=0))
    assert early.predicted.iteration_time_s < 1.25 * best.predicted.iteration_time_s


def test_only_a_large_distance_is_told_by_the_exit_code() -> None:
    record = planned_in_time(request("llama3_8b")).search
    assert not record.ended_early
    near = dataclasses.replace(record, certificate="gap", gap_percent=9.9)
    far = dataclasses.replace(near, gap_percent=10.1)
    assert (near.ended_early, near.may_be_far_off) == (True, False)
    assert (far.ended_early, far.may_be_far_off) == (True, True)


def planned_in_time(asked: Request) -> ParallelPlan:
    found = plan(asked)
    assert isinstance(found, ParallelPlan)
    return found


@pytest.mark.parametrize("number", [0, 1])
def test_a_plan_found_in_time_says_how_far_it_may_be_from_the_best(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = [itertools.count(), itertools.count()]
    monkeypatch.setattr(Deadline, "passed", lambda *_: next(counts[0]) < 0)
    asked = request("mixtral_8x7b", tie_percent=0.0)
    best = plan(asked, choose=number)
    enough = (0.3, 0.37)[number] * next(counts[0])
    monkeypatch.setattr(Deadline, "passed", lambda *_: next(counts[1]) > enough)
    found = plan(asked, choose=number)
    assert isinstance(best, ParallelPlan)
    assert isinstance(found, ParallelPlan)
    assert best.search.certificate == ("runner-up" if number else "optimal")
    assert found.search.certificate == "gap"
    assert found.search.gap_percent > 0
    assert "Time ran out" in certificate(found.search)


def test_what_does_not_fit_is_explained_as_far_as_time_allows() -> None:
    job = request("llama3_70b", num_gpus=8)
    whole = plan(job)
    assert isinstance(whole, NoPlan)
    assert whole.complete
    assert whole.search.certificate == "infeasible"
    model = CostModel(job.spec, job.cluster, job.settings)
    over = Deadline(begun_s=time.monotonic() - 2, seconds=1)
    cut = no_plan(job, model, whole.search, over, lambda *_: None)
    assert not cut.complete
    assert cut.missing_bytes >= whole.missing_bytes
    least = int(whole.remedies[0].change.removeprefix("cluster.num_gpus="))
    bound, words = cut.remedies[0].change.removeprefix("cluster.num_gpus=").split(" ", 1)
    assert words.startswith("at least")
    assert 8 < int(bound) <= least
    assert "Time ended the search for the nearest" in text_of(no_plan_report(cut))
    assert "at most" in text_of(no_plan_report(cut))
    assert "Time ended" not in text_of(no_plan_report(whole))


def text_of(report: RenderableType) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(report)
    return console.export_text()


def test_expert_parallelism_of_a_dense_model_is_refused() -> None:
    space = SearchSpace(fixed={"expert_model_parallel_size": 2})
    with pytest.raises(UserInputError, match="expert_model_parallel_size=2"):
        plan(request("llama3_8b", space=space))
