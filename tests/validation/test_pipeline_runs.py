"""PyTorch's pipelines fill and drain once a local batch, Megatron's once a step."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path

import pytest

from nest_megatron.layout.stage_layout import uniform_partition
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.validation.assess import Assessor, Predictor
from nest_megatron.validation.job import job_of
from nest_megatron.validation.models import ModelBook
from nest_megatron.validation.outcome import Basis
from nest_megatron.validation.row_settings import balanced_stages
from nest_megatron.validation.rows import RowFile, RowKind

ROW = {
    "model": "Llama 3.1 70B",
    "gpu": "H100-80GB",
    "gpus_per_node": "8",
    "n_gpus": "64",
    "seq": "4096",
    "gbs": "256",
    "mbs": "4",
    "tp": "8",
    "pp": "4",
    "cp": "1",
    "precision": "BF16",
    "framework": "torchtitan",
    "recompute": "full",
}


@pytest.mark.parametrize(
    ("cells", "runs"),
    [
        ({}, 32),  # 128 sequences of a replica, 4 in a local batch
        ({"mbs": "1", "ambiguity": "LBS 8, GA 16 as printed"}, 16),
        ({"mbs": "3"}, 1),  # divides nothing: not known
        ({"pp": "1"}, 1),
        ({"framework": "Megatron-LM with TE"}, 1),
    ],
)
def test_runs_are_local_batches(cells: dict[str, str], runs: int) -> None:
    assert job_of({**ROW, **cells}, ModelBook.load()).pipeline_runs == runs


@pytest.mark.parametrize(
    ("pp", "boundaries"),
    [
        (1, (0, 82)),
        (2, (0, 42, 82)),  # the head weighs as much as one layer and a quarter
        (4, (0, 22, 42, 62, 82)),
    ],
)
def test_stages_of_nanotron_weigh_the_same(pp: int, boundaries: tuple[int, ...]) -> None:
    row = {**ROW, "model": "Llama-like 80.0B", "framework": "nanotron v0.5", "pp": str(pp)}
    partition = job_of({**row, "recompute": ""}, ModelBook.load()).partition
    assert partition is not None
    assert partition.boundaries == boundaries


def test_what_nanotron_cannot_balance_is_not_known() -> None:
    spec = job_of({**ROW, "model": "Llama-like 1.34B"}, ModelBook.load()).spec
    assert balanced_stages(dataclasses.replace(spec, vocab_size=10**7), 4) is None


def test_each_run_pays_for_its_own_bubble() -> None:
    job = job_of(ROW, ModelBook.load())
    once = dataclasses.replace(job, pipeline_runs=1)
    long, short = (Predictor().predict(each).iteration_time_s for each in (job, once))
    # One micro batch for each of four ranks: seven turns instead of four.
    assert long / short == pytest.approx(7 * 32 / (128 + 3), rel=0.1)


@pytest.mark.parametrize("name", ["target", "flags", "assumptions"])
def test_what_a_prediction_does_not_depend_on_is_no_part_of_its_key(name: str) -> None:
    """The fields that are left out of it; all others are in."""
    job, keeping = job_of(ROW, ModelBook.load()), Predictor()
    found = keeping.predict(job)
    other = dataclasses.replace(job, **{name: None})
    assert keeping.predict(other) is found
    assert inspect.unwrap(Predictor.predict)(Predictor(), other) == found


@pytest.mark.parametrize("name", ["grids", "partition", "pipeline_runs", "settings", "spec"])
def test_what_a_prediction_depends_on_is_part_of_its_key(name: str) -> None:
    job, keeping = job_of(ROW, ModelBook.load()), Predictor()
    changed = {
        "grids": tuple(dataclasses.replace(each, zero=ZeroStage.NONE) for each in job.grids),
        "partition": uniform_partition(job.spec, 4),
        "pipeline_runs": 1,
        "settings": dataclasses.replace(job.settings, iteration_floor_s=1.0),
        "spec": dataclasses.replace(job.spec, seq_length=2 * job.spec.seq_length),
    }
    other = dataclasses.replace(job, **{name: changed[name]})
    assert keeping.predict(job) is not keeping.predict(other)
    assert keeping.predict(other) == Predictor().predict(other)


def test_virtual_stages_of_nanotron_are_even() -> None:
    """It has none; a row that states them is predicted all the same."""
    row = {**ROW, "framework": "nanotron v0.5", "vp": "2", "recompute": ""}
    job = job_of(row, ModelBook.load())
    assert job.partition is None
    assert Predictor().predict(job).layout.dims.virtual_pipeline_model_parallel_size == 2


def test_a_row_with_fewer_micro_batches_than_ranks_is_refused() -> None:
    cells = {"framework": "Megatron-LM", "vp": "2", "gbs": "2", "mbs": "1"}
    row = {**ROW, **cells, "iter_time_s": "1", "source": "s"}
    file = RowFile(path=Path("rows.csv"), kind=RowKind.THROUGHPUT, rows=(row,))
    for basis in Basis:
        (found,) = Assessor(ModelBook.load()).outcomes(file, basis)
        assert found.refused == "the job is impossible"
        assert "each of the 4 pipeline ranks" in found.detail
