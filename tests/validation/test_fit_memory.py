"""The error of predicted peaks is fitted by source, and judged on sources left out."""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path

import pytest
import yaml
from scipy.stats import binom

from nest_megatron.cost_model.device_memory import shipped_peak_errors
from nest_megatron.validation.models import ModelBook
from nest_megatron.validation.rows import read_rows
from tests.cli.runs import ROOT
from tests.cli.test_validate import RUN, table
from tools.calibration.peaks import PeakFits, Peaks, fit_peaks, peak_evidence

FILE = ROOT / "hydra_configs" / "calibration" / "memory.yaml"


def sources(spread: float, number: int = 12, rows: int = 30) -> dict[str, Peaks]:
    draw = random.Random(7)
    centres = [draw.gauss(0.05, spread) for _ in range(number)]
    return {
        str(i): Peaks(measured=[draw.gauss(c, 0.02) for _ in range(rows)])
        for i, c in enumerate(centres)
    }


def test_median_and_scales_are_found() -> None:
    fit = fit_peaks(sources(0.08))
    assert fit.error.median == pytest.approx(0.05, abs=0.04)
    assert 0.03 < fit.error.above < 0.12
    assert 0.03 < fit.error.below < 0.12
    assert fit.total("measured") == 360
    assert 75 <= fit.by_source_pct[90] <= 100


def test_a_source_with_many_rows_weighs_as_the_others() -> None:
    few = sources(0.08)
    many = {**few, "0": Peaks(measured=few["0"].measured * 50)}
    assert fit_peaks(many).error.median == pytest.approx(fit_peaks(few).error.median, abs=0.002)


def test_mistakes_of_either_side_are_told_apart() -> None:
    peaks = Peaks(measured=[0.0, 0.0, 0.0, -0.01, -0.02, 0.1, 0.2])
    error = fit_peaks({str(i): peaks for i in range(4)}).error
    assert error.median == pytest.approx(0.0, abs=0.005)
    assert error.above > 2 * error.below > 0


def test_runs_that_ran_make_running_out_less_likely_and_runs_that_ran_out_more() -> None:
    plain = sources(0.08)
    ran = plain | {f"ran {i}": Peaks(ran=[0.02] * 5) for i in range(6)}
    ended = plain | {f"ended {i}": Peaks(ran_out=[0.2] * 5) for i in range(6)}
    less, usual, more = (1 - fit_peaks(each).error.at_most(0.1) for each in (ran, plain, ended))
    assert less < usual < more
    assert fit_peaks(ended).expected_to_run_out > fit_peaks(plain).expected_to_run_out == 0.0


def test_the_constants_are_read_from_the_file(tmp_path: Path) -> None:
    fitted = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    for name, error in shipped_peak_errors().items():
        assert dataclasses.asdict(error) == {
            key: fitted[name][key] for key in ("median", "above", "below")
        }
    evidence = sources(0.1) | {"ran": Peaks(ran=[0.3], ran_out=[-0.3])}
    (tmp_path / "calibration").mkdir()
    fits = PeakFits(dict.fromkeys(("replicated", "sharded"), fit_peaks(evidence)))
    (again,) = fits.write(tmp_path)
    written = yaml.safe_load(again.read_text(encoding="utf-8"))
    assert written["sharded"].keys() == fitted["sharded"].keys()


def test_the_shipped_chances_hold_on_left_out_sources() -> None:
    """Sources are few and their rows alike, so that the bounds of shares are wide."""
    fitted = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    inside, count = 0.0, 0
    for each in fitted.values():
        own = len(each["measured"])
        inside, count = inside + own * each["coverage_pct"]["sources"][90] / 100, count + own
    low, high = binom.interval(0.95, count, 0.9)
    assert low <= inside <= high
    whole = fitted["replicated"]
    ran_out = sum(whole["ran_out"].values())
    assert abs(whole["expected_to_run_out"] - ran_out) < 2 * math.sqrt(ran_out)


def test_peaks_are_read_once_and_apart_by_sharding(tmp_path: Path) -> None:
    peak = {**RUN, "peak_mem": "60", "peak_mem_unit": "GiB", "recompute": "none"}
    rows = [
        {**peak, "row_id": "a"},
        {**peak, "row_id": "b", "zero": "3", "framework": "torchtitan"},
        {**peak, "row_id": "c", "framework": "nanotron"},
        {**RUN, "row_id": "d", "recompute": "none"},
        {**RUN, "row_id": "e", "recompute": "none", "outcome": "oom"},
        {**RUN, "row_id": "f", "recompute": "not stated"},
        {**peak, "row_id": "g", "recompute": "full with activation offload"},
        {**peak, "row_id": "h", "peak_mem_scope": "scope not stated"},
    ]
    copy = {**rows[0], "row_id": "m", "throughput_row": "a"}
    files = [
        read_rows(table(tmp_path / "runs.csv", *rows)),
        read_rows(table(tmp_path / "peaks.csv", copy)),
    ]
    found = peak_evidence(files, ModelBook.load())
    (whole,), (gathered,) = (found[name].values() for name in ("replicated", "sharded"))
    assert (len(whole.measured), len(whole.ran), len(whole.ran_out)) == (1, 2, 1)
    assert (len(gathered.measured), len(gathered)) == (1, 1)
