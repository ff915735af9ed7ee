"""A site's own calibration: from its history to a file, to plans, and to what is said of them."""

from __future__ import annotations

import dataclasses
import errno
import io
import math
import os
from collections.abc import Iterable
from pathlib import Path

import pytest
import yaml
from rich.console import Console

import nest_megatron
from nest_megatron.cluster.discovery import with_hosts_of
from nest_megatron.cluster.records import Cluster
from nest_megatron.config.compose import compose
from nest_megatron.config.overrides import parse
from nest_megatron.config.request import request_of
from nest_megatron.cost_model import site_file
from nest_megatron.cost_model.mechanisms import Mechanism
from nest_megatron.cost_model.peak_limit import allocatable
from nest_megatron.cost_model.peak_posterior import PARTS
from nest_megatron.cost_model.site import Site, job_of, unseen_errors
from nest_megatron.cost_model.site_calibration import FORMAT, SiteCalibration, calibrations
from nest_megatron.cost_model.uncertainty import predictive
from nest_megatron.errors import UserInputError
from nest_megatron.history import store
from nest_megatron.history.records import Outcome, RunRecord, cluster_key, job_key
from nest_megatron.integrations.megatron_lm import other_layout
from nest_megatron.layout import plan_file
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.planner import Request, plan
from nest_megatron.report.site import site_rows
from nest_megatron.report.terminal import plan_report
from tests.cli.runs import run
from tests.history.runs import MEASURED, run_record

TODAY = "2026-11-23"
JOB = ("model=llama3_8b", "cluster=dgx_h100", "search.num_alternatives=2")


def request(*overrides: str) -> Request:
    """A small job."""
    return request_of(compose(parse([*JOB, *overrides])))


def planned(*overrides: str) -> ParallelPlan:
    """The plan of a small job."""
    found = plan(request(*overrides))
    assert isinstance(found, ParallelPlan)
    return found


def ran(found: ParallelPlan, factor: float, **fields: object) -> RunRecord:
    """A run of a plan whose steps take so many times what was predicted."""
    asked = request(f"cluster.num_gpus={found.cluster.num_gpus}")
    model = asked.cost_model()
    step_s = found.predicted.iteration_time_s
    known = predictive(model, found.layout, step_s)
    record = run_record(
        plan=plan_file.checksum(found),
        job=job_key(found),
        cluster=cluster_key(found),
        grid=found.layout,
        predicted=dataclasses.replace(
            run_record().predicted,
            step_s=step_s,
            shares={name.value: share for name, share in known.shares.items()},
            features=tuple(feature.value for feature in known.features),
        ),
        measured=dataclasses.replace(MEASURED, step_times_s=(9.0, *(factor * step_s,) * 3)),
    )
    return dataclasses.replace(record, **fields)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def plans() -> list[ParallelPlan]:
    """Plans of jobs that spend different shares on tensor-parallel traffic."""
    return [
        planned(f"cluster.num_gpus={gpus}", f"parallel.tensor_model_parallel_size={tensor}")
        for gpus, tensor in ((16, 4), (16, 8), (32, 4), (8, 8))
    ]


def slow_traffic(plans: Iterable[ParallelPlan]) -> list[RunRecord]:
    """Runs whose tensor-parallel traffic takes half as long again."""
    found = []
    for number, each in enumerate(plans):
        record = ran(each, 1.0, id=f"{number}", start=f"2026-11-{10 + number}T12:00:00+00:00")
        share = record.predicted.shares.get("tensor_parallel", 0.0)
        found.append(ran(each, math.exp(0.4 * share), id=record.id, start=record.start))
    return found


@pytest.fixture(scope="module")
def calibration(plans: list[ParallelPlan]) -> SiteCalibration:
    (found,) = calibrations(slow_traffic(plans[:3]), TODAY)
    return found


def test_runs_of_a_site_teach_its_mechanisms(calibration: SiteCalibration) -> None:
    assert (calibration.cluster, calibration.num_runs, calibration.unusual) == ("dgx_h100", 3, 0)
    learned = {each.mechanism: each for each in Site(calibration, "site").mechanisms()}
    tensor = learned[Mechanism.TENSOR]
    assert 10.0 < tensor.price_percent < 50.0
    assert tensor.deviation_percent < tensor.prior_percent
    others = [abs(each.price_percent) for name, each in learned.items() if name != Mechanism.TENSOR]
    assert max(others) < 5.0
    errors = unseen_errors(calibration)
    assert errors is not None
    assert errors.after_percent < errors.before_percent


def test_what_teaches_nothing_is_left_out(plans: list[ParallelPlan]) -> None:
    good = ran(plans[0], 1.1)
    bare = dataclasses.replace(good.predicted, shares={})
    later = dataclasses.replace(good.predicted, features=("quantum_links",))
    records = [
        good,
        ran(plans[0], 1.2, id="again"),
        ran(plans[1], 9.0, id="broken"),
        ran(plans[1], 1.0, id="failed", outcome=Outcome.FAILED),
        ran(plans[1], 1.0, id="short", measured=None),
        ran(plans[2], 1.0, id="unknown", predicted=bare),
        ran(plans[2], 1.0, id="later", predicted=later),
        ran(plans[3], 1.0, id="on a CPU", device=None),
    ]
    (found,) = calibrations(records, TODAY)
    assert [each.runs for each in found.runs] == [2]
    assert found.runs[0].step_s == pytest.approx(good.predicted.step_s * math.sqrt(1.1 * 1.2))
    assert found.unusual == 1


def test_the_file_holds_it_all(calibration: SiteCalibration, tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    site_file.write_site(calibration, path)
    assert site_file.read_site(path) == calibration
    whole = path.read_text()
    for text, words in (
        ("runs: 1", "incomplete"),
        (whole.replace(f"format: {FORMAT}", "format: 99"), "format 99"),
        (yaml.safe_dump({**yaml.safe_load(whole), "runs": []}), "no run"),
        (whole.replace("tensor_parallel:", "quantum_links:"), "does not know quantum_links"),
    ):
        path.write_text(text)
        with pytest.raises(UserInputError, match=words):
            site_file.read_site(path)


@pytest.fixture
def sites(
    calibration: SiteCalibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> SiteCalibration:
    """A folder that holds the calibration."""
    monkeypatch.setenv(site_file.VARIABLE, str(tmp_path))
    path = site_file.site_path(calibration.cluster, calibration.accelerator)
    site_file.write_site(calibration, path)
    return calibration


def test_a_discovered_cluster_has_the_calibration_of_the_same_machines(
    sites: SiteCalibration,
) -> None:
    described = request("cluster.num_gpus=16").cluster
    path = site_file.site_path(sites.cluster, sites.accelerator)

    def found(cluster: Cluster) -> Path | None:
        return next(iter(site_file.find_site(cluster) or ()), None)

    def with_level(index: int, **changes: object) -> Cluster:
        levels = list(seen.levels)
        levels[index] = dataclasses.replace(levels[index], **changes)  # type: ignore[arg-type]
        return dataclasses.replace(seen, levels=tuple(levels))

    seen = dataclasses.replace(described, name="dgx_h100_discovered", description="by discovery")
    assert found(described) == path
    assert found(seen) == path
    assert found(with_level(1, source="seen: 8 adapters of 400 Gb/s InfiniBand")) == path
    rate = seen.levels[1].bandwidth_bytes_per_s
    assert found(with_level(1, bandwidth_bytes_per_s=0.99 * rate)) is None
    assert found(with_hosts_of(seen, 4)) is None
    assert found(dataclasses.replace(seen, name="dgx_h100_copy")) is None
    assert found(dataclasses.replace(seen, name="h200_discovered")) is None


def test_runs_on_a_discovered_cluster_teach_what_is_seen_in_a_job(
    calibration: SiteCalibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(site_file.VARIABLE, str(tmp_path))
    described, name = request("cluster.num_gpus=16").cluster, "dgx_h100_discovered"
    path = site_file.site_path(name, calibration.accelerator)
    site_file.write_site(dataclasses.replace(calibration, cluster=name), path)
    assert site_file.find_site(described) is not None
    nothing_known = dataclasses.replace(calibration, cluster=name, links=())
    site_file.write_site(nothing_known, path)
    assert site_file.find_site(described) is None


def test_other_layouts_of_a_plan_have_it_too(
    sites: SiteCalibration, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan = planned("cluster.num_gpus=8", "parallel.tensor_model_parallel_size=8")
    found = other_layout.versus(plan, "tp=4")
    for each in (found.plan, found.other):
        assert each.provenance.site is not None
        assert each.provenance.site.digest == plan.provenance.site.digest  # type: ignore[union-attr]
    assert found.plan.uncertainty == plan.uncertainty
    assert found.notes == ()
    monkeypatch.setenv(site_file.VARIABLE, str(tmp_path / "absent"))
    found = other_layout.versus(plan, "tp=4")
    assert found.plan.provenance.site is None
    assert "is not here" in found.notes[0]


def test_other_clusters_of_a_plan_are_said_to_be_without_it(
    sites: SiteCalibration, tmp_path: Path
) -> None:
    path = tmp_path / "plan.yaml"
    plan_file.write(planned("cluster.num_gpus=8", "parallel.tensor_model_parallel_size=8"), path)
    changes = {"cluster.accelerator": "h200_sxm_141gb"}
    found = nest_megatron.whatif(path, changes)
    again, other = (row.row.plan for row in found.variants)
    assert again is not None
    assert other is not None
    assert again.provenance.site is not None
    assert other.provenance.site is None
    words = " ".join(str(found).split())
    assert "calibration is of the unchanged cluster, and not of accelerator=h200" in words


def text_of(found: ParallelPlan) -> str:
    stream = io.StringIO()
    Console(file=stream, width=200).print(plan_report(found))
    return " ".join(stream.getvalue().split())


def test_plans_of_the_same_kind_of_cluster_use_it_and_say_so(
    sites: SiteCalibration, plans: list[ParallelPlan]
) -> None:
    fixed = ("cluster.num_gpus=8", "parallel.tensor_model_parallel_size=8")
    found, without = planned(*fixed), planned(*fixed, "profile.site=false")
    assert without.provenance.site is None
    assert without.uncertainty == plans[3].uncertainty
    site, known = found.provenance.site, found.uncertainty
    assert site is not None
    assert known is not None
    assert without.uncertainty is not None
    assert found.predicted == without.predicted
    assert known.median_s is not None
    assert known.median_s > without.predicted.iteration_time_s
    assert site.without_s == without.predicted.iteration_time_s
    assert site.without_low_s == without.uncertainty.low_s
    ratio = without.uncertainty.high_s / without.uncertainty.low_s
    assert known.high_s / known.low_s < ratio
    assert site.mechanisms[0].mechanism == "tensor_parallel"
    said = text_of(found)
    assert f"{known.median_s:.3f}"[:4] in said
    assert "3 runs of 3 jobs" in said or "3 runs of 2 jobs" in said
    assert "compared by this site's calibration" in said
    elsewhere = planned("cluster=dgx_a100", "cluster.num_gpus=8")
    assert elsewhere.provenance.site is None


def test_a_plan_knows_of_its_own_runs(sites: SiteCalibration) -> None:
    found = planned("cluster.num_gpus=16")
    assert found.provenance.site is not None
    assert found.provenance.site.own_runs == 2


def test_a_job_of_a_plan_is_that_of_its_run(plans: list[ParallelPlan]) -> None:
    (found,) = calibrations([ran(plans[0], 1.0)], TODAY)
    asked = request("cluster.num_gpus=16")
    assert job_of(asked.cost_model(), plans[0].layout) == found.runs[0].job


def test_changed_versions_are_named_and_widen(calibration: SiteCalibration) -> None:
    same, other = (
        Site(calibration, "site", {"torch": version, "nest_megatron": "x"})
        for version in ("2.13.0", "2.14.0")
    )
    assert "torch" not in same.changed_versions
    assert "torch" in other.changed_versions
    deviations = [
        {each.mechanism: each.deviation_percent for each in site.mechanisms()}[Mechanism.TENSOR]
        for site in (same, other)
    ]
    assert deviations[0] < deviations[1]


def test_a_file_that_cannot_be_read_is_told_and_not_used(sites: SiteCalibration) -> None:
    path = site_file.site_path(sites.cluster, sites.accelerator)
    path.write_text("format: [")
    asked = request("cluster.num_gpus=8")
    assert asked.site is None
    assert any("No calibration of the site is used" in note for note in asked.notes)


def test_a_home_that_may_not_be_entered_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = nest_megatron.clusters()["dgx_h100"]

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "exists", refuse)
    assert site_file.find_site(cluster) is None


def test_the_command_writes_it_and_says_what_it_learnt(
    plans: list[ParallelPlan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(store.VARIABLE, str(tmp_path / "runs.jsonl"))
    monkeypatch.setenv(site_file.VARIABLE, str(tmp_path / "sites"))
    done = run("calibrate", "--site")
    assert (done.code, "no run on NVIDIA GPUs that finished" in done.err) == (2, True)
    for record in slow_traffic(plans[:3]):
        store.append(record)
    later = dataclasses.replace(run_record().predicted, features=("quantum_links",))
    store.append(ran(plans[3], 1.0, id="later", predicted=later))
    done = run("calibrate", "--site")
    assert done.code == 0, done.err
    assert "of a later nest-megatron say nothing of steps: quantum_links" in done.err
    assert "tensor parallel" in done.out
    assert "Each job left out in turn" in done.out
    assert len(list((tmp_path / "sites").iterdir())) == 1
    done = run("calibrate", "--site", "rows.csv")
    assert (done.code, "with --site, the history alone is read" in done.err) == (2, True)


def with_peak(record: RunRecord, found: ParallelPlan, factor: float | None) -> RunRecord:
    """The run with a measured peak of its tensors, or, without a factor, out of memory."""
    highest = max(found.predicted.stages, key=lambda stage: sum(stage.memory_bytes.values()))
    peak = found.predicted.peak_memory_bytes
    model = request(f"cluster.num_gpus={found.cluster.num_gpus}").cost_model()
    predicted = dataclasses.replace(
        record.predicted,
        peak_terms=highest.memory_bytes,
        allocatable_bytes=allocatable(model, found.layout),
    )
    if factor is None:
        return dataclasses.replace(
            record, predicted=predicted, measured=None, outcome=Outcome.OUT_OF_MEMORY
        )
    assert record.measured is not None
    measured = dataclasses.replace(
        record.measured, peak_allocated_bytes=(None, round(factor * peak), 1)
    )
    return dataclasses.replace(record, predicted=predicted, measured=measured)


def test_measured_peaks_and_runs_out_of_memory_are_observations(
    plans: list[ParallelPlan],
) -> None:
    records = [
        with_peak(ran(plans[0], 1.0, id="a"), plans[0], 1.06),
        with_peak(ran(plans[0], 1.0, id="b"), plans[0], 1.08),
        with_peak(ran(plans[0], 1.0, id="c"), plans[0], None),
        with_peak(ran(plans[1], 1.0, id="d", device=None), plans[1], 1.0),
        ran(plans[2], 1.0, id="e"),
    ]
    (found,) = calibrations(records, TODAY)
    measured, short = found.peaks
    peak = plans[0].predicted.peak_memory_bytes
    assert (measured.ran_out, measured.bytes) == (False, round(1.08 * peak))
    assert (short.ran_out, short.bytes) == (True, records[2].predicted.allocatable_bytes)
    assert sum(short.terms.values()) == peak
    assert {each.runs for each in found.runs} == {1, 2}


def test_plans_say_what_the_site_makes_of_their_memory(
    plans: list[ParallelPlan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(site_file.VARIABLE, str(tmp_path))
    records = [with_peak(ran(plan, 1.0, id=f"{n}"), plan, 1.1) for n, plan in enumerate(plans[:2])]
    (known,) = calibrations(records, TODAY)
    path = site_file.site_path(known.cluster, known.accelerator)
    site_file.write_site(known, path)
    assert site_file.read_site(path) == known
    fixed = ("cluster.num_gpus=8", "parallel.tensor_model_parallel_size=8")
    found, without = planned(*fixed), planned(*fixed, "profile.site=false")
    assert found.provenance.site is not None
    memory = found.provenance.site.memory
    assert memory is not None
    assert found.predicted == without.predicted
    assert 1.03 < memory.peak_bytes / found.predicted.peak_memory_bytes < 1.1
    assert memory.low_bytes < memory.peak_bytes < memory.high_bytes
    assert without.uncertainty is not None
    assert memory.without_out_of_memory == without.uncertainty.out_of_memory
    assert "Memory here" in text_of(found)
    assert {each.part for each in memory.parts} == set(PARTS)
    assert memory.parts[0].peak_percent > 1
    assert memory.parts[-1].peak_percent == pytest.approx(0.0), "none of this job ran"
    told = [said for _, said in site_rows(found.provenance.site)]
    assert any("% of peak memory by itself" in said for said in told)
    assert "by 2 measured peaks" in text_of(found)


def test_a_plan_that_ran_out_of_memory_is_not_chosen_where_another_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no run was finished, so that nothing is known of steps."""
    monkeypatch.setenv(site_file.VARIABLE, str(tmp_path))
    job = ("cluster.num_gpus=8", "train.global_batch_size=256")
    first = planned(*job)
    (known,) = calibrations([with_peak(ran(first, 1.0), first, None)], TODAY)
    assert (known.runs, len(known.peaks), known.num_jobs) == ((), 1, 1)
    site_file.write_site(known, site_file.site_path(known.cluster, known.accelerator))
    found = planned(*job)
    assert found.layout != first.layout
    assert found.uncertainty is not None
    assert found.uncertainty.out_of_memory < 0.2
    assert found.provenance.site is not None
    assert found.provenance.site.runs == 0
    assert "1 run out of memory, 1 of them of this very job" in text_of(found)


def test_trials_of_a_tuning_are_not_counted_twice(plans: list[ParallelPlan]) -> None:
    records = [
        with_peak(ran(plans[0], 1.1, id="trial", trial=True), plans[0], 1.05),
        with_peak(ran(plans[1], 1.1, id="own"), plans[1], 1.05),
    ]
    (known,) = calibrations(records, TODAY)
    site = Site(known, "site")
    left = site.without(["trial"])
    assert left is not None
    assert (len(left.posterior.observations), len(left.peaks.runs)) == (1, 1)
    assert len(site.without([]).posterior.observations) == 2  # type: ignore[union-attr]
    (alone,) = calibrations(records[:1], TODAY)
    assert Site(alone, "site").without(["trial"]) is None


def test_a_network_with_other_figures_is_another(
    plans: list[ParallelPlan], calibration: SiteCalibration
) -> None:
    cluster = plans[0].cluster
    node, unit, spine = cluster.levels
    slow = [dataclasses.replace(level, bandwidth_bytes_per_s=1e10) for level in (unit, spine)]
    measured = dataclasses.replace(cluster, levels=(node, *slow))
    assert calibration.differences(cluster) == ()
    assert calibration.differences(measured) == ("links with other figures",)
    # an allocation on one switch, or in other groups, has the same links
    packed = dataclasses.replace(unit, num_devices=None)
    scattered = dataclasses.replace(unit, num_devices=16)
    for levels in ((node, packed), (node, scattered, spine)):
        assert calibration.differences(dataclasses.replace(cluster, levels=levels)) == ()


def test_runs_on_other_links_than_the_last_are_left_out(plans: list[ParallelPlan]) -> None:
    old, new = ran(plans[0], 1.1), ran(plans[1], 1.2, start="2026-11-24T12:00:00+00:00")
    moved = dataclasses.replace(old.cluster, links=("0123456789abcdef",))
    (found,) = calibrations([dataclasses.replace(old, cluster=moved), new], TODAY)
    assert (found.num_runs, found.other_links, found.links) == (1, 1, new.cluster.links)
    # records of older versions say nothing of links
    older = dataclasses.replace(old, cluster=dataclasses.replace(old.cluster, links=()))
    (found,) = calibrations([older, new], TODAY)
    assert (found.num_runs, found.other_links) == (2, 0)


def test_files_of_older_versions_are_read(calibration: SiteCalibration, tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    older = dataclasses.replace(calibration, links=())
    site_file.write_site(older, path)
    assert "links" not in path.read_text()
    assert site_file.read_site(path).differences(request().cluster) == ()


def test_a_comparison_leaves_it_out_and_says_so(sites: SiteCalibration, tmp_path: Path) -> None:
    page = tmp_path / "planners.html"
    job = ("compare", *JOB, "cluster.num_gpus=8", "planners=[manual]")
    found, without = run(*job, "--chart", str(page)), run(*job, "profile.site=false")
    said = "Planners are compared without the calibration of this site"
    assert said in " ".join(found.out.split())
    assert said in page.read_text(encoding="utf-8")
    assert said not in " ".join(without.out.split())
