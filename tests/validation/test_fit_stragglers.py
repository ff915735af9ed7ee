"""The delay of ranks is fitted to ratios within weak scalings."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.validation.models import ModelBook
from nest_megatron.validation.rows import read_rows
from tests.cli.runs import ROOT
from tests.cli.test_validate import RUN, table
from tools.calibration.stragglers import (
    Scaling,
    ScalingRun,
    fit_stragglers,
    scalings_of,
)


def scaling(model: str, delay_s: float, error: float) -> Scaling:
    """A scaling that is wrong by a factor as a whole, and late by a delay."""
    runs = tuple(
        ScalingRun(
            num_gpus=n, predicted_s=8.0, wait_s=wait, measured_s=error * (8.0 + delay_s * wait)
        )
        for n, wait in ((64, 4.0), (512, 11.0), (2048, 15.0))
    )
    return Scaling(source="tests", model=model, runs=runs)


def test_the_delay_is_found_whatever_the_error_of_the_whole() -> None:
    fit = fit_stragglers([scaling("a", 0.03, 1.2), scaling("b", 0.03, 0.7)])
    assert fit.delay_s == pytest.approx(0.03, abs=0.0011)
    assert fit.with_pct < 0.1 < 1.0 < fit.without_pct
    assert all(unseen < without for without, unseen in fit.left_out_pct.values())


def test_scalings_are_read_from_a_table(tmp_path: Path) -> None:
    sizes = {"16": "9.0", "64": "9.1", "256": "9.3"}
    same = {"tp": "2", "pp": "2", "cp": "1", "vp": "", "mbs": "1"}
    rows = [
        {**RUN, **same, "row_id": n, "n_gpus": n, "gbs": str(8 * int(n)), "iter_time_s": seconds}
        for n, seconds in sizes.items()
    ]
    other = {**rows[0], "row_id": "x", "gbs": "64"}
    alone = [{**rows[2], "row_id": f"y{tp}", "framework": "NeMo 25.02"} for tp in "12"]
    files = [read_rows(table(tmp_path / "runs.csv", *rows, other, *alone))]
    found = scalings_of(files, ModelBook.load())
    assert [[run.num_gpus for run in each.runs] for each in found] == [[16, 64, 256]]
    assert fit_stragglers(found).delay_s > 0


def test_the_default_is_the_fitted_delay(tmp_path: Path) -> None:
    path = ROOT / "hydra_configs" / "calibration" / "stragglers.yaml"
    fitted = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert fitted["straggler_delay_s"] == CostSettings().straggler_delay_s
    (tmp_path / "calibration").mkdir()
    (again,) = fit_stragglers([scaling("a", 0.03, 1.0)]).write(tmp_path)
    assert yaml.safe_load(again.read_text(encoding="utf-8")).keys() == fitted.keys()
