"""Plan files: exact round trip, and a clear error for every way a file can be wrong."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest
import yaml

from nest_megatron.errors import PlanFileError, UserInputError
from nest_megatron.layout import plan_file
from nest_megatron.layout.plan import LaunchCommand, ParallelPlan
from nest_megatron.planner import Request, plan
from tests import catalogue

JOBS = [("llama3_70b", 64), ("mixtral_8x7b", 16), ("deepseek_v3", 256), ("bert_large", 8)]


@cache
def made(model: str, num_gpus: int) -> ParallelPlan:
    request = Request(
        spec=catalogue.model(model),
        cluster=catalogue.cluster("dgx_h100", num_gpus),
        global_batch_size=256,
    )
    found = plan(request)
    assert isinstance(found, ParallelPlan)
    return found


@pytest.mark.parametrize(("model", "num_gpus"), JOBS)
def test_round_trip_is_exact(model: str, num_gpus: int) -> None:
    original = made(model, num_gpus)
    text = plan_file.dump(original)
    again = plan_file.load(text)
    assert again == original
    assert plan_file.dump(again) == text
    assert again.layout.dims.world_size == num_gpus
    assert again.layout.partition.boundaries[-1] == len(original.model.layer_kinds())


def test_top_level_keys_are_the_documented_ones() -> None:
    keys = list(yaml.safe_load(plan_file.dump(made("llama3_70b", 64))))
    assert keys == [
        "schema",
        "model",
        "cluster",
        "train",
        "layout",
        "placement",
        "predicted",
        "alternatives",
        "search",
        "provenance",
        "launch",
        "uncertainty",
        "choice",
    ]


def test_every_way_of_cutting_a_file_short_is_noticed() -> None:
    text = plan_file.dump(made("mixtral_8x7b", 16))
    for length in [*range(0, len(text) - 1, 97), len(text) - 2]:
        with pytest.raises(PlanFileError):
            plan_file.load(text[:length])


def test_an_edited_file_is_refused() -> None:
    text = plan_file.dump(made("mixtral_8x7b", 16))
    with pytest.raises(PlanFileError, match="checksum"):
        plan_file.load(text.replace("global_batch_size: 256", "global_batch_size: 512", 1))


def test_an_older_schema_is_refused() -> None:
    text = plan_file.dump(made("mixtral_8x7b", 16)).replace("schema: 2", "schema: 1", 1)
    with pytest.raises(PlanFileError, match=r"schema 2\. Plan again"):
        plan_file.load(text)


@pytest.mark.parametrize("text", ["x: 1\n", "a: [\n", "\0"])
def test_another_file_is_named_as_that(text: str) -> None:
    with pytest.raises(PlanFileError, match=r"(?i)name a (plan )?file"):
        plan_file.load(text)


def test_a_newer_schema_is_refused() -> None:
    text = plan_file.dump(made("mixtral_8x7b", 16)).replace("schema: 2", "schema: 3", 1)
    with pytest.raises(PlanFileError, match="Upgrade"):
        plan_file.load(text)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("mfu:", "mfo:", "mfu"),
        ("num_layers: 32", "num_layers: many", "num_layers"),
        ("micro_batch_size:", "micro_batch_sizes:", "micro_batch_size"),
        ("precision: bf16", "precision: int4", "bf16"),
    ],
)
def test_errors_name_the_field(before: str, after: str, message: str) -> None:
    text = plan_file.dump(made("mixtral_8x7b", 16))
    assert before in text
    with pytest.raises(PlanFileError, match=message):
        plan_file.load(text.replace(before, after, 1))


def test_not_a_number_is_refused() -> None:
    text = plan_file.dump(made("mixtral_8x7b", 16))
    line = next(row for row in text.splitlines() if row.strip().startswith("mfu:"))
    with pytest.raises(PlanFileError, match="finite"):
        plan_file.load(text.replace(line, "  mfu: .nan", 1))


def test_a_file_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("old")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        plan_file.write(made("llama3_70b", 64), path)
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.yaml"]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match="mkdir"):
        plan_file.write(made("llama3_70b", 64), tmp_path / "none" / "plan.yaml")
    with pytest.raises(UserInputError, match="cannot be read"):
        plan_file.read(tmp_path / "absent.yaml")


@pytest.mark.parametrize("text", ["", "words", "- 1", "12", "name: site\nlevels: []\n"])
def test_a_file_of_something_else_is_no_plan_file(text: str) -> None:
    with pytest.raises(PlanFileError, match=r"plan = 'x.yaml': it is no plan file"):
        plan_file.load(text, "x.yaml")


def test_only_variables_that_must_be_unset_have_a_note() -> None:
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": None, "OMP_NUM_THREADS": "1"}
    command = LaunchCommand(script="train.py", argv=(), environment=environment)
    assert command.unset_notes() == ("CUDA_DEVICE_MAX_CONNECTIONS must not be set.",)
