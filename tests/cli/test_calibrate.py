"""``nest-megatron calibrate``: tiny files, and what it refuses."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from tests.cli.runs import ROOT, run
from tests.cli.test_validate import COLLECTIVE, RUN, table

CATALOGUE = ROOT / "hydra_configs"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Three runs of two models and two sources."""
    return table(
        tmp_path / "runs.csv",
        RUN,
        {**RUN, "row_id": "a2", "cp": "1", "tp": "2", "iter_time_s": "9.9"},
        {**RUN, "row_id": "a3", "source": "others", "model": "Llama 3.1 70B", "n_gpus": "64"}
        | {"tp": "4", "pp": "4", "vp": "5", "cp": "2", "iter_time_s": "9.0"},
    )


def test_constants_are_fitted_and_left_out_rows_are_scored(runs: Path) -> None:
    found = run("calibrate", str(runs), "--json").json()
    assert found["rows"] == 3
    assert 0.5 <= found["values"]["hopper.memory_efficiency"] <= 1.0
    assert found["loses_pct"].keys() == found["values"].keys()
    assert found["loses_pct"]["hopper.memory_efficiency"] != 0
    assert found["loses_pct"]["hopper.grouped_gemm_ramp_rows"] == 0  # no experts
    assert found["mape_pct"].keys() == {"tests", "others"}
    assert {each["name"] for each in found["left_out"]["source"]} == {"tests", "others"}
    assert {each["rows"] for each in found["left_out"]["model"]} == {1, 2}


def test_cross_validation_can_be_left_out(runs: Path) -> None:
    assert run("calibrate", str(runs), "--no-cross-validation", "--json").json()["left_out"] == {}


def test_constants_are_written_into_a_catalogue(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "hydra_configs"
    shutil.copytree(CATALOGUE, out)
    done = run("calibrate", str(runs), "--no-cross-validation", "--out", str(out))
    assert done.code == 0
    devices = yaml.safe_load((out / "calibration" / "devices.yaml").read_text())
    values = devices["hopper"]["values"]
    h100 = yaml.safe_load((out / "accelerator" / "h100_sxm_80gb.yaml").read_text())
    assert h100["memory_efficiency"] == values["memory_efficiency"]
    assert h100["gemm_efficiency"]["bf16"] == values["gemm_efficiency.bf16"] == 0.72
    assert h100["host_kernel_s"] == 3e-5
    assert devices["hopper"]["prior"].keys() == values.keys()
    assert devices["hopper"]["rows"] == {"tests": 2, "others": 1}


def test_a_folder_that_is_no_catalogue_is_refused(runs: Path, tmp_path: Path) -> None:
    done = run("calibrate", str(runs), "--no-cross-validation", "--out", str(tmp_path))
    assert done.code == 2
    assert "no catalogue" in done.err
    assert not (tmp_path / "calibration").exists()


def test_collectives_are_read_from_the_file_that_is_named(tmp_path: Path) -> None:
    path = table(tmp_path / "mine.csv", COLLECTIVE)
    table(tmp_path / "comm_collectives.csv", *[COLLECTIVE] * 3)
    found = run("calibrate", str(path), "--no-cross-validation", "--json").json()
    assert found["collectives_overall"]["rows"] == 1


def test_small_collectives_alone_teach_nothing_of_links(tmp_path: Path) -> None:
    path = table(tmp_path / "small.csv", {**COLLECTIVE, "size_bytes": "65536", "time_us": "40"})
    done = run("calibrate", str(path))
    assert done.code == 2
    assert "no collective of 1 MB or more" in done.err
    assert "nan" not in done.out


def test_what_is_calibrated_is_asked_for() -> None:
    assert run("calibrate").err.startswith("error: calibrate: no table is given")
    both = run("calibrate", "--site", "x.csv")
    assert both.err.startswith("error: FILE.CSV = x.csv: with --site, the history")


def test_rows_without_a_time_teach_nothing(tmp_path: Path) -> None:
    path = table(tmp_path / "none.csv", {**RUN, "iter_time_s": ""})
    done = run("calibrate", str(path))
    assert done.code == 2
    assert "nest-megatron validate" in done.err
