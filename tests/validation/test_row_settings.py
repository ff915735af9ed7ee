"""Settings of recipes that stand beside the rows of measurements."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from nest_megatron.errors import UserInputError
from nest_megatron.layout.recompute import FULL_RECOMPUTE, NO_RECOMPUTE, selective_recompute
from nest_megatron.model.execution import GraphImpl, TokenDispatcher
from nest_megatron.validation.job import RowJob, job_of
from nest_megatron.validation.models import ModelBook
from nest_megatron.validation.row_settings import NO_SETTINGS, settings_of
from nest_megatron.validation.rows import RefusedRowError, Row, read_rows

ROW = {
    "row_id": "a1",
    "model": "Qwen3-30B-A3B",
    "framework": "Megatron-Bridge/MCore 26.04 NeMo Container",
    "gpu": "GB200",
    "gpus_per_node": "4",
    "n_gpus": "16",
    "precision": "MXFP8",
    "seq": "4096",
    "tp": "1",
    "pp": "1",
    "ep": "8",
    "gbs": "512",
    "mbs": "2",
    "iter_time_s": "1.0",
}
SETTINGS = {
    "row_id": "a1",
    "confidence": "exact",
    "layout_matches": "yes (4 fields)",
    "recompute_granularity": "selective",
    "recompute_modules": "moe_act|layernorm",
    "cuda_graph_impl": "transformer_engine",
    "cuda_graph_scope": "attn|moe_router",
    "moe_token_dispatcher": "alltoall",
    "grad_reduce_in_fp32": "true",
}


def write(path: Path, *rows: dict[str, str]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def read(folder: Path, **settings: str) -> Row:
    path = write(folder / "throughput.csv", ROW)
    write(folder / "row_settings.csv", {**SETTINGS, **settings})
    return read_rows(path).rows[0]


def job(row: Row, *, as_planned: bool = False) -> RowJob:
    return job_of(row, ModelBook.load(()), as_planned=as_planned)


@pytest.mark.parametrize(
    "layout", ["yes (4 fields)", "MISMATCH gbs:row=512,recipe=256 n_gpus:row=16,recipe=8"]
)
def test_what_is_sure_is_what_ran(tmp_path: Path, layout: str) -> None:
    found = job(read(tmp_path, layout_matches=layout))
    (grid,) = found.grids
    assert grid.recompute == selective_recompute(["moe_act", "layernorm"])
    assert grid.execution.moe_token_dispatcher_type is TokenDispatcher.ALLTOALL
    assert grid.execution.cuda_graph_impl is GraphImpl.TRANSFORMER_ENGINE
    assert grid.execution.cuda_graph_scope == ("attn", "moe_router")
    assert found.settings.traits.gradient_bytes == 4


@pytest.mark.parametrize(
    "doubt",
    [
        {"confidence": "family-default"},
        {"confidence": "same-recipe-other-release"},
        {"layout_matches": "no: EP 16"},
        {"layout_matches": "MISMATCH ep:row=8,recipe=16 gbs:row=512,recipe=256"},
    ],
)
def test_what_is_doubtful_is_one_more_thing_that_may_have_run(
    tmp_path: Path, doubt: dict[str, str]
) -> None:
    grids = job(read(tmp_path, **doubt)).grids
    dispatchers = {grid.execution.moe_token_dispatcher_type for grid in grids}
    assert dispatchers == {TokenDispatcher.ALLTOALL, TokenDispatcher.FLEX}
    settings = {grid.recompute for grid in grids}
    assert {NO_RECOMPUTE, FULL_RECOMPUTE, selective_recompute(["moe_act", "layernorm"])} <= settings


def test_selective_alone_leaves_open_what_experts_recompute(tmp_path: Path) -> None:
    row = {**read(tmp_path), "recompute": "selective"}
    (grid,) = job(row).grids
    assert grid.recompute == selective_recompute(["moe_act", "layernorm"])  # as its recipe has it
    settings = {grid.recompute for grid in job(row, as_planned=True).grids}
    assert settings
    assert settings.isdisjoint({NO_RECOMPUTE, FULL_RECOMPUTE, selective_recompute(["core_attn"])})
    named = {**row, "recompute": "selective (core_attn)"}
    assert {grid.recompute for grid in job(named, as_planned=True).grids} == {
        selective_recompute(["core_attn"])
    }


def test_a_plan_does_not_know_them(tmp_path: Path) -> None:
    found = job(read(tmp_path), as_planned=True)
    dispatchers = {grid.execution.moe_token_dispatcher_type for grid in found.grids}
    assert dispatchers == {TokenDispatcher.FLEX}
    assert found.settings.traits.gradient_bytes == 2


def test_rows_stand_alone_where_there_are_none(tmp_path: Path) -> None:
    (row,) = read_rows(write(tmp_path / "throughput.csv", ROW)).rows
    assert dict(row) == ROW
    assert settings_of(row) == NO_SETTINGS


def test_a_row_without_confidence_is_not_joined(tmp_path: Path) -> None:
    assert settings_of(read(tmp_path, confidence="")) == NO_SETTINGS


@pytest.mark.parametrize(
    ("text", "expected"),
    [("(empty list)", NO_RECOMPUTE), ("mhc", NO_RECOMPUTE), ("mlp", selective_recompute(["mlp"]))],
)
def test_modules_that_are_not_known_are_left_out(
    tmp_path: Path, text: str, expected: object
) -> None:
    assert settings_of(read(tmp_path, recompute_modules=text)).recompute == expected


@pytest.mark.parametrize("column", ["etp", "recompute_num_layers", "cuda_graph_impl"])
def test_a_setting_that_cannot_be_read_refuses_its_row(tmp_path: Path, column: str) -> None:
    words = {"recompute_granularity": "full", "recompute_method": "block", "etp": "1"}
    words |= {"recompute_num_layers": "1", column: "many"}
    with pytest.raises(RefusedRowError, match="cannot be read"):
        job(read(tmp_path, **words))


def test_another_file_of_that_name_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "throughput.csv", ROW)
    write(tmp_path / "row_settings.csv", {"name": "x"})
    with pytest.raises(UserInputError, match="row_id and confidence"):
        read_rows(path)
