"""The page's sections on what runs today, on sensitivity, and on a site's runs."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from functools import cache
from html import unescape
from pathlib import Path

import pytest

from nest_megatron.api import planned_command
from nest_megatron.cluster.records import Cluster
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.layout.estimate import BeforeAfter, MechanismChange, Shortlist, SiteChange
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.planner.pins import PinnedPlan, read_pinned
from nest_megatron.report.html import _overtaken, _Priced, html_report
from nest_megatron.report.layout_tables import (
    before_after_section,
    plan_and_alternatives,
    shortlist_words,
    sum_words,
    term_differences,
    verdict,
)
from nest_megatron.report.terminal import summary_rows
from nest_megatron.report.words import confidence_words, proof
from nest_megatron.units import format_seconds
from tests.estimates import estimate_plan
from tests.integrations.test_as_typed import DENSE, compared, settings
from tests.report.plans import searched_plan
from tests.report.test_html import Page

SITE = SiteChange(
    name="our-h100",
    digest="0123456789abcdef",
    runs=12,
    jobs=3,
    own_runs=0,
    first="2026-11-01",
    last="2026-11-20",
    without_s=1.0,
    without_low_s=0.9,
    without_high_s=1.1,
    changed_versions=(),
    mechanisms=(
        MechanismChange(
            mechanism="tensor_parallel", price_percent=30, deviation_percent=5, step_percent=4
        ),
    ),
)


@cache
def command_page() -> tuple[ParallelPlan, BeforeAfter, Page]:
    """A command's plan, what runs today, and the page of both."""
    found, _ = compared(DENSE)
    planned = planned_command(found, settings("search.num_alternatives=1"))
    assert planned.before is not None
    return planned.record, planned.before, Page(planned.explain().to_html())


def test_what_runs_today_stands_beside_the_plan() -> None:
    plan, found, page = command_page()
    assert found.before is not None
    rows = {row[0]: row[1:] for row in page.table("What runs today beside the plan")}
    today, planned = found.before.predicted, plan.predicted
    steps = [format_seconds(each.iteration_time_s) for each in (today, planned)]
    assert rows["Step"][:2] == steps
    assert "in 9 of 10" in rows["Step"][2]
    tokens = [f"{16 * each.tokens_per_s_per_gpu:,.0f}" for each in (today, planned)]
    assert rows["Tokens/s"][:2] == tokens
    assert rows["TP"][0] == "4"


def test_changes_of_a_command_end_with_the_plan() -> None:
    plan, found, page = command_page()
    assert found.changes is not None
    alone = page.table("What each change brings alone")
    assert [row[0] for row in alone] == [str(n) for n in range(1, len(found.changes.alone) + 1)]
    first, *others = page.table("One after another")
    assert first[1] == "today"
    assert sum_words(found.changes.whole) in unescape(html_report(plan))
    assert others[-1][2] == format_seconds(plan.predicted.iteration_time_s)


def test_the_verdict_is_that_of_the_terminal() -> None:
    plan, found, _ = command_page()
    assert found.before is not None
    assert found.changes is not None
    text = unescape(html_report(plan))
    assert f'<p class="verdict">{verdict(found.before, found.changes.whole)}</p>' in text
    needs = dataclasses.replace(found, needs=("A package <b>.",))
    assert "<li>A package &lt;b&gt;.</li>" in html_report(dataclasses.replace(plan, today=needs))


def test_what_does_not_fit_is_not_called_faster() -> None:
    _, found, _ = command_page()
    assert found.before is not None
    assert found.changes is not None
    before = found.before
    predicted = dataclasses.replace(before.predicted, peak_memory_bytes=1 << 40, fits=False)
    known = dataclasses.replace(before.uncertainty, out_of_memory=0.997)
    before = dataclasses.replace(before, predicted=predicted, uncertainty=known)
    slower = dataclasses.replace(found.changes.whole, chance_faster=0.01)
    said = verdict(before, slower)
    assert re.fullmatch(
        r"The present layout does not fit, as predicted: [\d.]+ GiB missing\.", said
    )


def told_at(out_of_memory: float, plan: ParallelPlan) -> str:
    """The verdict's paragraph on the page of a plan with a chance to run out of memory."""
    assert plan.uncertainty is not None
    known = dataclasses.replace(plan.uncertainty, out_of_memory=out_of_memory)
    text = unescape(html_report(dataclasses.replace(plan, uncertainty=known)))
    section = text.partition('<section id="plan">')[2].partition("</section>")[0]
    return "".join(re.findall(r'<p class="verdict.*?(?=</p>)', section))


def test_the_verdict_warns_of_a_plan_that_may_run_out_of_memory() -> None:
    plan = searched_plan()
    assert plan.predicted.fits
    assert told_at(0.05, plan) == ""
    said = "This layout may run out of memory: the chance is 23 %."
    assert told_at(0.23, plan) == f'<p class="verdict warning">{said}'
    said = "This layout more likely than not runs out of memory: the chance is 57 %."
    assert told_at(0.57, plan) == f'<p class="verdict bad">{said}'
    ended = dataclasses.replace(plan, search=dataclasses.replace(plan.search, certificate="gap"))
    assert told_at(0.05, ended).startswith('<p class="verdict warning">Search ended early')


def test_the_summary_says_that_the_search_ended_early() -> None:
    plan = searched_plan()
    ended = dataclasses.replace(plan, search=dataclasses.replace(plan.search, certificate="gap"))
    for each in (plan, ended):
        summary = html_report(each).partition("<header>")[2].partition("</header>")[0]
        assert ("Search ended early: within " in summary) is each.search.ended_early


def test_the_certificate_stands_in_no_box_of_warnings() -> None:
    plan = searched_plan()
    assert plan.uncertainty is not None
    known = dataclasses.replace(plan.uncertainty, out_of_memory=0.57)
    for each in (plan, dataclasses.replace(plan, uncertainty=known)):
        text = unescape(html_report(each))
        assert f'<p class="certificate">{proof(each)}</p>' in text
        assert "Proven" not in told_at(each.uncertainty.out_of_memory, each)


def test_what_runs_today_is_judged_by_the_same_chances() -> None:
    plan, found, _ = command_page()
    assert found.before is not None
    assert found.before.uncertainty is not None
    assert found.changes is not None
    known = dataclasses.replace(found.before.uncertainty, out_of_memory=0.6)
    before = dataclasses.replace(found.before, uncertainty=known)
    page = before_after_section(dataclasses.replace(found, before=before), plan)
    assert page["level"] == "bad"
    assert page["verdict"].endswith("runs out of memory: the chance is 60 %.")
    unknown = dataclasses.replace(found.before, not_modelled=("--ours",))
    page = before_after_section(dataclasses.replace(found, before=unknown), plan)
    assert page["level"] == ""
    slower = dataclasses.replace(found.changes.whole, chance_faster=0.3)
    changes = dataclasses.replace(found.changes, whole=slower)
    page = before_after_section(dataclasses.replace(found, changes=changes), plan)
    assert page["level"] == "warning"


def test_a_command_that_does_not_start_is_told() -> None:
    plan, _, _ = command_page()
    refused = BeforeAfter(before=None, refused="heads = 3: no")
    page = html_report(dataclasses.replace(plan, today=refused))
    assert "What runs today cannot be priced: heads = 3: no" in page
    assert "Today and planned" not in html_report(dataclasses.replace(plan, today=None))


def with_bandwidth(factor: float) -> Callable[[Cluster], Cluster]:
    def changed(cluster: Cluster) -> Cluster:
        node, *others = cluster.levels
        rate = factor * node.bandwidth_bytes_per_s
        node = dataclasses.replace(node, bandwidth_bytes_per_s=rate)
        return dataclasses.replace(cluster, levels=(node, *others))

    return changed


def with_arithmetic(factor: float) -> Callable[[Cluster], Cluster]:
    def changed(cluster: Cluster) -> Cluster:
        device = cluster.accelerator
        peaks = {name: factor * peak for name, peak in device.peak_flops_per_s.items()}
        device = dataclasses.replace(device, peak_flops_per_s=peaks)
        return dataclasses.replace(cluster, accelerator=device)

    return changed


@pytest.mark.parametrize(
    ("name", "changed"),
    [("bandwidth of level node", with_bandwidth), ("arithmetic of a GPU", with_arithmetic)],
)
def test_sensitivity_is_what_estimate_says_of_the_changed_cluster(
    name: str, changed: Callable[[float], Callable[[Cluster], Cluster]]
) -> None:
    plan = searched_plan()
    rows = {row[0]: row for row in Page(html_report(plan)).table("By how much the plan's step")}
    for cell, factor in zip(rows[name][2:6], (0.5, 0.8, 1.25, 2.0), strict=True):
        found = estimate_plan(
            plan.model,
            changed(factor)(plan.cluster),
            CostSettings(),
            plan.layout,
        )
        longer = found.predicted.iteration_time_s / plan.predicted.iteration_time_s - 1
        assert cell == f"{100 * longer:+.1f} %"


def test_sensitivity_to_an_assumption_is_what_estimate_says_under_that_setting() -> None:
    plan = searched_plan()
    rows = {row[0]: row for row in Page(html_report(plan)).table("By how much the plan's step")}
    row = rows["load of the busiest experts over the mean (cost.expert_imbalance)"]
    assert row[1:4] == ["1", "not possible", "not possible"]
    for cell, load in zip(row[4:6], (1.25, 2.0), strict=True):
        settings = CostSettings(expert_imbalance=load)
        found = estimate_plan(plan.model, plan.cluster, settings, plan.layout).predicted
        longer = found.iteration_time_s / plan.predicted.iteration_time_s - 1
        assert cell == (f"{100 * longer:+.1f} %" if found.fits else "does not fit")
    assert rows["efficiency of GEMMs"][5] == "not possible"
    assert float(rows["efficiency of GEMMs"][2].removesuffix(" %")) > 0


def test_assumptions_have_their_units() -> None:
    table = Page(html_report(searched_plan())).table("By how much the plan's")
    (delay,) = (row for row in table if "cost.straggler_delay_s" in row[0])
    assert delay[1] == "25 ms"


def test_faster_means_more_steps_in_the_same_time_everywhere() -> None:
    """As "slower" does: a plan 5 % slower than another is the one than which that is 5 % faster."""
    then = [_Priced(step_s=s, peak_bytes=1, limit_bytes=2) for s in (1.05, 1.0)]
    now = [each._replace(step_s=1.0) for each in then]
    assert _overtaken(now, then, 1.0) == "runner-up 1 is 5.0 % faster"


def test_runners_up_of_a_hybrid_are_told_by_term_under_0_20() -> None:
    """Its virtual stages are legal there, and not under 0.16.1, whose rules refuse none of it."""
    pinned = read_pinned(Path("recipes/megatron_lm/plans/nemotron_h_56b_gb200_nvl72.yaml"))
    assert isinstance(pinned, PinnedPlan)
    plan = pinned.plan
    assert plan.arguments["virtual_pipeline_model_parallel_size"]
    provenance = dataclasses.replace(plan.provenance, framework=None, framework_version=None)
    alternatives = (plan_and_alternatives(plan)[0],)
    other = dataclasses.replace(plan, provenance=provenance, alternatives=alternatives)
    (lost,) = term_differences(other)
    assert lost is not None
    assert not any(lost.values())


def test_sensitivity_says_where_the_plan_no_longer_fits() -> None:
    plan = searched_plan()
    rows = {row[0]: row for row in Page(html_report(plan)).table("By how much the plan's step")}
    assert rows["memory of a GPU"][2] == "does not fit"
    assert "half: " in rows["memory of a GPU"][6]
    assert "fits" in rows["memory of a GPU"][6]
    assert rows["memory of a GPU"][4:6] == ["0.0 %", "0.0 %"]


def test_sensitivity_of_another_versions_prices_is_not_shown() -> None:
    plan = searched_plan()
    stale = dataclasses.replace(plan.predicted, iteration_time_s=1.0)
    text = html_report(dataclasses.replace(plan, predicted=stale))
    assert "This version prices the plan or its runners-up otherwise" in text
    assert "By how much the plan's step" not in unescape(text)


def at_site(site: SiteChange) -> ParallelPlan:
    """The plan as a site's calibration has it."""
    plan = searched_plan()
    assert plan.uncertainty is not None
    known = dataclasses.replace(plan.uncertainty, median_s=9.5, low_s=9.0, high_s=10.0)
    provenance = dataclasses.replace(plan.provenance, site=site)
    return dataclasses.replace(plan, provenance=provenance, uncertainty=known)


def test_the_page_and_the_confidence_name_the_calibration_of_the_site() -> None:
    plan = at_site(SITE)
    text = unescape(html_report(plan))
    step = format_seconds(plan.predicted.iteration_time_s)
    assert f"9.500 s a step by this site's calibration (our-h100), {step} without it" in text
    assert "before this site's runs; the range rests on its calibration, too (our-h100)" in text
    assert "<dt>by this site's runs</dt><dd>9.500 s</dd>" in text
    rows = dict(Page(text).table("The calibration of this site"))
    assert rows["Calibration"].startswith("our-h100 (0123456789abcdef)")
    assert rows["tensor parallel"].startswith("30 % longer than predicted")
    assert "Steps are those that are predicted without this site's calibration." in text
    assert "this site" not in unescape(html_report(searched_plan()))


def test_a_calibration_of_memory_alone_moves_no_range() -> None:
    plan = at_site(dataclasses.replace(SITE, runs=0, jobs=0, mechanisms=()))
    assert plan.uncertainty is not None
    said = confidence_words(plan.uncertainty, plan.provenance.site)
    assert said == confidence_words(plan.uncertainty)


def test_the_shortlist_has_the_chance_that_was_found() -> None:
    short = Shortlist(numbers=(0, 2), chances=(0.7, 0.4), measurements=(), chance=0.93)
    page = Page(html_report(dataclasses.replace(searched_plan(), shortlist=short)))
    assert page.table("With a chance of 93 % one of these") == [
        ["this plan", "70 %"],
        ["runner-up 2", "40 %"],
    ]


def test_ranges_after_one_run_of_the_job_are_said_to_be_too_narrow() -> None:
    """On the page, in the terminal and of the shortlist; not after none or two."""
    short = Shortlist(numbers=(0, 2), chances=(0.7, 0.4), measurements=(), chance=0.93)
    for own_runs, said in ((0, False), (1, True), (2, False)):
        plan = at_site(dataclasses.replace(SITE, own_runs=own_runs))
        plan = dataclasses.replace(plan, shortlist=short)
        page = unescape(html_report(plan))
        places = (
            page.partition("headline")[2].partition("</p>")[0],
            page.partition("<caption><span>Other layouts")[2].partition("</caption>")[0],
            shortlist_words(plan),
            str(dict(summary_rows(plan))["Range"]),
        )
        told = ["likely too narrow after one run of the job" in place for place in places]
        assert told == [said] * len(places), own_runs


def test_what_is_said_of_one_run_is_what_published_tables_show() -> None:
    text = Path("docs/tuning_published.md").read_text("utf-8")
    rows = {
        cells[0]: cells[5]
        for line in text.partition("## After runs of the job itself")[2].splitlines()
        if len(cells := [each.strip() for each in line.strip("|").split("|")]) == 9
    }
    assert float(rows["1"]) < 90 < float(rows["2"])
