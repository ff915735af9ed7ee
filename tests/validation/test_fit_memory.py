"""The error of predicted peaks is fitted by source, and judged on sources left out."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import yaml

from nest_megatron.cost_model.memory_uncertainty import REPLICATED, SHARDED
from nest_megatron.validation.fit_memory import fit_peaks, peak_errors, write_peaks
from nest_megatron.validation.models import ModelBook
from nest_megatron.validation.rows import read_rows
from tests.cli.runs import ROOT
from tests.cli.test_validate import RUN, table


def sources(spread: float, number: int = 12, rows: int = 30) -> dict[str, list[float]]:
    draw = random.Random(7)
    centres = [draw.gauss(0.05, spread) for _ in range(number)]
    return {str(i): [draw.gauss(c, 0.02) for _ in range(rows)] for i, c in enumerate(centres)}


def test_median_and_scales_are_found() -> None:
    fit = fit_peaks(sources(0.08))
    assert fit.error.median == pytest.approx(0.05, abs=0.04)
    assert 0.03 < fit.error.above < 0.12
    assert 0.03 < fit.error.below < 0.12
    assert fit.error.runs == 360
    assert fit.error.sources == 12
    assert 75 <= fit.by_source_pct[90] <= 100


def test_a_source_with_many_rows_weighs_as_the_others() -> None:
    few = sources(0.08)
    many = {**few, "0": few["0"] * 50}
    assert fit_peaks(many).error.median == fit_peaks(few).error.median


def test_mistakes_of_either_side_are_told_apart() -> None:
    errors = {str(i): [0.0, 0.0, 0.0, -0.01, -0.02, 0.1, 0.2] for i in range(4)}
    error = fit_peaks(errors).error
    assert error.median == 0.0
    assert error.above > 3 * error.below > 0


def test_the_constants_are_the_fitted_ones(tmp_path: Path) -> None:
    path = ROOT / "hydra_configs" / "calibration" / "memory.yaml"
    fitted = yaml.safe_load(path.read_text(encoding="utf-8"))
    for name, error in (("replicated", REPLICATED), ("sharded", SHARDED)):
        found = fitted[name]
        assert [found[name] for name in ("median", "above", "below")] == [
            error.median,
            error.above,
            error.below,
        ]
        assert (sum(found["rows"].values()), len(found["rows"])) == (error.runs, error.sources)
    again = tmp_path / "memory.yaml"
    write_peaks(again, dict.fromkeys(("replicated", "sharded"), fit_peaks(sources(0.1))))
    written = yaml.safe_load(again.read_text(encoding="utf-8"))
    assert written["sharded"].keys() == fitted["sharded"].keys()


def test_peaks_are_read_once_and_apart_by_sharding(tmp_path: Path) -> None:
    peak = {**RUN, "peak_mem": "60", "peak_mem_unit": "GiB", "recompute": "none"}
    rows = [
        {**peak, "row_id": "a"},
        {**peak, "row_id": "b", "zero": "3", "framework": "torchtitan"},
        {**peak, "row_id": "c", "framework": "nanotron"},
    ]
    copy = {**rows[0], "row_id": "m", "throughput_row": "a"}
    files = [
        read_rows(table(tmp_path / "runs.csv", *rows)),
        read_rows(table(tmp_path / "peaks.csv", copy)),
    ]
    found = peak_errors(files, ModelBook.load())
    assert {name: sum(map(len, own.values())) for name, own in found.items()} == {
        "replicated": 1,
        "sharded": 1,
    }
