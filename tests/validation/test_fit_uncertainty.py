"""Scales of errors are fitted to runs whose source was left out, and their intervals hold."""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path

import yaml

from nest_megatron.cluster.records import Precision
from nest_megatron.cost_model.features import Feature, Runs
from nest_megatron.cost_model.mechanisms import Mechanism
from nest_megatron.cost_model.uncertainty import (
    Scales,
    applies,
    shipped_scales,
)
from nest_megatron.validation.assess import Predictor
from nest_megatron.validation.job import job_of
from nest_megatron.validation.models import ModelBook
from tests.cli.runs import ROOT
from tests.cli.test_validate import RUN
from tools.calibration.parameters import LeftOutConstants, shipped_left_out
from tools.calibration.uncertainty import (
    Residual,
    UncertaintyFit,
    coverage_by_feature,
    coverage_by_source,
    fit_scales,
    standardized,
)

FILE = ROOT / "hydra_configs" / "calibration" / "uncertainty.yaml"


def residuals(expert_error: float, seed: int = 0) -> list[Residual]:
    """Runs of twelve sources whose dense jobs are 3 % off, and whose experts' exchange more."""
    rng = random.Random(seed)
    found = []
    for source in range(12):
        for job in range(20):
            experts = job % 2 == 0
            share = rng.uniform(0.2, 0.6) if experts else 0.0
            error = rng.gauss(0.0, 0.03) + share * rng.gauss(0.0, expert_error)
            found.append(
                Residual(
                    source=f"source {source}",
                    job=(source, job),
                    device="H100",
                    precision=Precision.BF16,
                    error=error,
                    shares={Mechanism.GEMM: 1.0 - share, Mechanism.EXPERT: share},
                    features=frozenset({Feature.EXPERTS} if experts else ()),
                    point=(0.0,),
                )
            )
    return found


def fitted(runs: list[Residual]) -> Scales:
    """Scales, from where the shipped ones are."""
    return fit_scales(runs, start=shipped_scales())


def test_a_mechanism_that_is_further_off_has_the_larger_scale() -> None:
    small, large = (fitted(residuals(error)) for error in (0.1, 0.6))
    assert large.mechanisms["expert_parallel"] > 2 * small.mechanisms["expert_parallel"]
    assert large.mechanisms["gemm"] < 0.05


def test_intervals_hold_on_sources_that_no_fit_has_seen() -> None:
    runs = residuals(0.5)
    found = coverage_by_feature(standardized(runs, fitted(runs)))
    assert 40 < found["any"].within_50_pct < 62
    assert 85 < found["any"].within_90_pct < 99
    assert found["dense"].runs + found["experts"].runs == found["any"].runs


def test_a_source_that_is_far_off_shows_when_it_is_left_out() -> None:
    """Its own runs must not widen the intervals that it is judged by."""
    runs = residuals(0.1)
    odd = [dataclasses.replace(r, error=0.5) for r in runs if r.source == "source 3"]
    rest = [r for r in runs if r.source != "source 3"]
    off = standardized([*rest, *odd], fitted([*rest, *odd]))
    assert all(abs(z) > 3 for each, z in off if each.source == "source 3")


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    runs = residuals(0.3)
    scales = fitted(runs)
    found = standardized(runs, scales)
    fit = UncertaintyFit(
        scales=scales,
        residuals=tuple(runs),
        coverage=coverage_by_feature(found),
        coverage_of_sources=coverage_by_source(found),
    )
    (tmp_path / "calibration").mkdir()
    (path,) = fit.write(tmp_path)
    read = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert Scales(**read["scales"]) == scales
    assert {*read["devices"]} == {"H100"}
    assert sum(Runs.from_plain(each).runs for each in read["runs"]) == len(runs)
    shipped = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    assert read.keys() == shipped.keys()


def binomial_reach(share: float, count: int) -> float:
    """Points by which a share of so many runs is uncertain, at 95 %.

    Runs of one source are alike, so that it is off by more; that is no excuse here.
    """
    return 196.0 * math.sqrt(share * (1.0 - share) / count)


def misses(within: float, count: int, level: float, margin: float) -> bool:
    """Whether a coverage in per cent lies off its level by more than the margin and its error."""
    return abs(within - 100 * level) > margin + binomial_reach(level, count)


def test_the_shipped_intervals_hold_on_left_out_sources() -> None:
    """Within 5 points of the level over all runs, 10 by regime, 15 by one of under 100 runs."""
    record = yaml.safe_load(FILE.read_text(encoding="utf-8"))["coverage_pct"]
    assert record["any"][0] > 700
    margins = {name: 15.0 if count < 100 else 10.0 for name, (count, *_) in record.items()}
    margins["any"] = 5.0
    missed = {
        name
        for name, (count, *within) in record.items()
        for level, share in zip((0.5, 0.9), within, strict=True)
        if misses(share, count, level, margins[name])
    }
    assert not missed


def test_a_mean_over_sources_does_not_count_runs() -> None:
    runs = [dataclasses.replace(r, source="large") for r in residuals(0.1)]
    few = [dataclasses.replace(r, source="small") for r in runs[:2]]
    off = [(r, 0.0) for r in runs] + [(r, 9.0) for r in few]
    found = coverage_by_source(off)
    assert (found.runs, found.within_50_pct, found.within_90_pct) == (2, 50.0, 50.0)


def test_a_scale_of_two_features_is_of_layouts_that_have_both() -> None:
    """Experts with FSDP are further off than either: 40 % where four fifths of the others hold."""
    assert applies("any", frozenset())
    assert applies("experts+fsdp", frozenset({Feature.EXPERTS, Feature.FSDP, Feature.FP8}))
    assert not applies("experts+fsdp", frozenset({Feature.EXPERTS}))
    layout = shipped_scales().layout
    assert layout["experts+fsdp"] > 3 * layout["experts"]
    assert layout["lora+small_step"] > layout["small_step"]


def test_every_scale_that_a_plan_may_ask_for_is_shipped() -> None:
    scales = shipped_scales()
    assert scales.mechanisms.keys() == set(Mechanism)
    assert all(0 < scale < 1 for scale in scales.mechanisms.values())
    assert {"any", "experts", "other_framework", "other_device"} <= scales.job.keys()
    assert {"any", "experts", "small_step"} < scales.layout.keys()


def test_a_source_is_predicted_without_what_it_taught() -> None:
    job = job_of(RUN, ModelBook.load())
    seen = Predictor().predict(job).iteration_time_s
    constants = LeftOutConstants({"tests": {"hopper.gemm_efficiency.bf16": 0.5}})
    unseen = Predictor().predict(constants("tests", job)).iteration_time_s
    assert unseen > 1.1 * seen
    assert constants("others", job) is job


def test_left_out_constants_are_near_the_shipped_ones() -> None:
    found = shipped_left_out().by_source
    assert {"vtrain-ground-truth", "nvidia-dgxc-benchmarking"} <= found.keys()
    for source, values in found.items():
        for key, value in values.items():
            assert math.isfinite(value), (source, key)
            assert value >= 0, (source, key)
