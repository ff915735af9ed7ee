"""Numbers beyond everything that exists are refused, with what was probably meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from nest_megatron.catalogue_files import catalogue_names
from nest_megatron.config.catalogue import read_cluster, require_plausible
from nest_megatron.config.compose import compose
from nest_megatron.config.overrides import parse
from nest_megatron.errors import BAD_INPUT, settings_typed_as
from nest_megatron.planner import EndedEarly
from nest_megatron.report.words import ended_early
from tests import catalogue
from tests.cli.runs import SMALL, run

JOB = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 8 --seq-length 1024 "
    "--max-position-embeddings 1024 --vocab-size 32000 --bf16 --global-batch-size 64 "
)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("cluster.levels.0.bandwidth_bytes_per_s=25", "Did you mean 25GB/s?"),
        ("cluster.levels.1.bandwidth_bytes_per_s=25", "Did you mean 25GB/s?"),
        ("cluster.levels.0.bandwidth_bytes_per_s=1e30", "plausible"),
        ("cluster.levels.0.latency_s=1", "Did you mean 1us?"),
        ("cluster.num_gpus=1000000000000000", "plausible"),
        ("cluster.accelerator.peak_flops_per_s.bf16=1e30", "plausible"),
        ("cluster.accelerator.peak_flops_per_s.bf16=989", "Did you mean 989TFLOP/s?"),
        ("cluster.accelerator.memory_bytes=80", "Did you mean 80GiB?"),
        ("train.global_batch_size=1000000000000", "plausible"),
        ("model.vocab_size=2000000000", "plausible"),
    ],
)
def test_implausible_numbers_are_refused(setting: str, words: str) -> None:
    done = run("plan", *SMALL, setting)
    assert done.code == BAD_INPUT
    assert words in done.err
    assert "checks.plausibility=off" in done.err


@pytest.mark.parametrize(
    ("setting", "shown"),
    [
        ("cluster.accelerator.memory=80MB", "cluster.accelerator.memory_bytes = 80MB: "),
        ("memory=80MB", "cluster.accelerator.memory_bytes = 80MB: "),
        ("cluster.levels.unit.latency=2s", "cluster.levels.1.latency_s = 2s: "),
        ("gpus=2e9", "cluster.num_gpus = 2e9: "),
        ("model.vocab_size=1Gi", "model.vocab_size = 1Gi: "),
    ],
)
def test_the_error_repeats_the_value_as_it_was_typed(setting: str, shown: str) -> None:
    settings = [each for each in SMALL if not each.startswith("cluster.num_gpus")]
    done = run("plan", *settings, setting)
    assert (done.code, done.out) == (BAD_INPUT, "")
    assert done.err.startswith(f"error: {shown}it is implausible")


def test_memory_means_the_same_in_plan_and_whatif(tmp_path: Path) -> None:
    path = str(tmp_path / "plan.yaml")
    small = ("model=gpt3_126m", "cluster=dgx_h100", "gpus=8", "train.global_batch_size=16")
    assert run("plan", *small, f"out={path}").code == 0
    errors = {run("plan", *small, "memory=80").err, run("whatif", path, "memory=80").err}
    assert len(errors) == 1
    assert "cluster.accelerator.memory_bytes = 80: it is implausible" in errors.pop()
    smaller = run("plan", *small, "memory=60GiB", "--json").json()
    row = run("whatif", path, "memory=60GiB", "--json").json()["rows"][-1]
    assert smaller["cluster"]["accelerator"]["memory_bytes"] == 60 * 2**30
    assert row["iteration_time_s"] == smaller["predicted"]["iteration_time_s"]


@pytest.mark.parametrize(
    "setting", ["train.global_batch_size=-8", "train.global_batch_size=0", "cluster.num_gpus=0"]
)
def test_what_is_less_than_one_is_wrong_and_not_implausible(setting: str) -> None:
    done = run("plan", *SMALL, setting)
    assert done.code == BAD_INPUT
    assert "at least 1" in done.err
    assert "plausib" not in done.err


def test_the_advice_names_the_setting_as_it_is_typed() -> None:
    with (
        settings_typed_as("nest.{}".format),
        pytest.raises(ValueError, match=r"add nest\.checks\.plaus"),
    ):
        require_plausible(None, None, 10**12)
    record = EndedEarly(
        search=None,
        max_seconds=1.0,
        lower_bound_s=0.5,  # type: ignore[arg-type]
    )
    with settings_typed_as("nest.{}".format):
        assert "Raise nest.search.max_seconds" in ended_early(record)
    assert "Raise search.max_seconds" in ended_early(record)


def test_the_check_can_be_turned_off() -> None:
    slow = "cluster.levels.1.bandwidth_bytes_per_s=2e7"
    assert run("plan", *SMALL, slow).code == BAD_INPUT
    assert run("plan", *SMALL, slow, "checks.plausibility=off").code == 0


def test_the_catalogue_is_plausible() -> None:
    for name in catalogue_names("cluster"):
        require_plausible(None, read_cluster(compose(parse([f"cluster={name}"]))))
    for name in catalogue_names("model"):
        require_plausible(catalogue.model(name), None)


def test_extract_refuses_what_the_cost_model_would() -> None:
    done = run("extract", "model=llama3_8b", "cost.tp_overlap=1e9", "--closed-form")
    assert done.code == BAD_INPUT
    assert "cost.tp_overlap" in done.err


@pytest.mark.parametrize(
    "launcher",
    [
        "torchrun --nproc-per-node -1",
        "torchrun --nproc-per-node 0",
        "torchrun --nproc-per-node nan",
        "torchrun --nproc_per_node=8.5",
        "torchrun --nnodes 0 --nproc-per-node 8",
        "torchrun --nnodes abc --nproc-per-node 8",
        "torchrun --nnodes 1:0 --nproc-per-node 8",
        "torchrun --nnodes 2-4 --nproc-per-node 8",
        "srun --ntasks -4",
        "srun --nodes 0-4 --ntasks-per-node 8",
        "srun --nodes -1 --ntasks-per-node 8",
        "srun --nodes nan --ntasks-per-node 8",
    ],
)
def test_a_launcher_s_count_that_is_none(launcher: str) -> None:
    done = run("plan", "--from", f"{launcher} pretrain_gpt.py {JOB}", "cluster=dgx_h100")
    assert done.code == BAD_INPUT
    assert "at least 1" in done.err


def test_unknown_flags_are_told_and_with_strict_refused() -> None:
    command = f"pretrain_gpt.py {JOB} --tensor-model-paralel-size 4 --foo 3"
    small = ("plan", "--from", command, "cluster=dgx_h100", "cluster.num_gpus=8")
    done = run(*small)
    assert done.code == 0
    said = " ".join(done.out.split())
    assert "no flag --tensor-model-paralel-size. Did you mean --tensor-model-parallel-size?" in said
    assert "no flag --foo; it is passed on" in said
    done = run(*small, "--strict")
    assert done.code == BAD_INPUT
    assert "--tensor-model-paralel-size --foo" in done.err
    assert "--tensor-model-parallel-size?" in done.err
    assert run("plan", *SMALL, "--strict").code == BAD_INPUT
    assert "goes with --from" in run("plan", *SMALL, "--megatron-version", "0.18").err
