"""Numbers with units in settings and files; what is written holds plain numbers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from nest_megatron.cli.command_kinds import Duration
from nest_megatron.cluster.records import Cluster
from nest_megatron.config.catalogue import read_cluster, read_spec
from nest_megatron.config.compose import Settings, compose
from nest_megatron.config.launch import read_launch, read_words
from nest_megatron.config.overrides import parse
from nest_megatron.errors import UserInputError
from tests.cli.runs import ROOT, run

JOB = ("model=llama3_8b", "cluster=h100_spine_leaf")


def composed(*settings: str) -> Settings:
    return compose(parse([*JOB, *settings]))


def cluster(*settings: str) -> Cluster:
    return read_cluster(composed(*settings))


@pytest.mark.parametrize(
    ("typed", "plain"),
    [
        ("cluster.levels.leaf.bandwidth=400Gb/s", "cluster.levels.1.bandwidth_bytes_per_s=5e10"),
        ("cluster.levels.node.latency=2us", "cluster.levels.0.latency_s=2e-6"),
        ("cluster.levels.1.startup_s=1.5ms", "cluster.levels.1.startup_s=0.0015"),
        ("cluster.accelerator.memory=141GiB", "cluster.accelerator.memory_bytes=151397597184"),
        (
            "cluster.accelerator.memory_bandwidth=4.8TB/s",
            "cluster.accelerator.memory_bandwidth_bytes_per_s=4.8e12",
        ),
        (
            "cluster.accelerator.peak_flops_per_s.bf16=989TFLOP/s",
            "cluster.accelerator.peak_flops_per_s.bf16=9.89e14",
        ),
        ("cluster.num_gpus=1Ki", "cluster.num_gpus=1024"),
    ],
)
def test_a_cluster_is_the_same_with_units(typed: str, plain: str) -> None:
    assert cluster(typed) == cluster(plain)


@pytest.mark.parametrize(
    ("typed", "plain"),
    [
        ("train.seq_length=128Ki", "train.seq_length=131072"),
        ("memory.reserve_bytes=3GiB", "memory.reserve_bytes=3221225472"),
        ("search.max_seconds=2min", "search.max_seconds=120"),
        ("cost.iteration_floor_s=5ms", "cost.iteration_floor_s=0.005"),
    ],
)
def test_a_setting_is_the_same_with_a_unit(typed: str, plain: str) -> None:
    assert composed(typed) == composed(plain)


@pytest.mark.parametrize(
    ("field", "typed", "found"),
    [
        ("max_seconds", "8", 8.0),
        ("max_seconds", "90s", 90.0),
        ("max_seconds", "10min", 600.0),
        ("run_timeout_minutes", "30", 30.0),
        ("run_timeout_minutes", "90s", 1.5),
        ("run_timeout_minutes", "1.5h", 90.0),
    ],
)
def test_a_time_of_an_option_has_a_unit_or_the_one_of_its_name(
    field: str, typed: str, found: float
) -> None:
    assert Duration(field).convert(typed, None, None) == found


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("profile", "model=llama3_8b", "--max-seconds", "5GB"), "90s, or 2min"),
        (("profile", "model=llama3_8b", "--max-seconds", "nan"), "above 0"),
        (("tune", "--run-timeout", "10m"), "90s, or 10min"),
        (("tune", "--run-timeout", "-5min"), "--run-timeout = -5.0: it must be above 0"),
        (("tune", "--run-timeout", "inf"), "--run-timeout = inf: it must be above 0 and finite"),
    ],
)
def test_a_wrong_time_of_an_option_is_named(words: tuple[str, ...], told: str) -> None:
    done = run(*words)
    assert done.code == 2
    assert told in done.err.replace("\n       ", " ")


def test_a_thousand_tokens_are_not_1024() -> None:
    found = composed("train.seq_length=128k")
    assert found.train.seq_length == 128_000
    assert "128,000 tokens; 128Ki is 131,072" in found.notes[0]
    assert not composed("train.seq_length=128Ki").notes


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("cluster.levels.leaf.bandwidth=100GiB", "100GB/s, or 400Gb/s"),
        ("cluster.accelerator.memory=80Gb", "80GB, or 141GiB"),
        ("search.max_seconds=2GB", "90s, or 2min"),
        ("train.global_batch_size=1KiB", "128k"),
        ("cluster.levels.leef.latency=1us", "Did you mean leaf"),
    ],
)
def test_a_wrong_unit_names_value_unit_and_example(setting: str, words: str) -> None:
    done = run("plan", *JOB, setting)
    assert done.code == 2
    assert setting.partition("=")[2] in done.err or "leef" in done.err
    assert words in done.err.replace("\n       ", " ")


def test_a_file_may_have_units_and_no_wrong_ones(tmp_path: Path) -> None:
    text = (ROOT / "hydra_configs/cluster/h100_spine_leaf.yaml").read_text(encoding="utf-8")
    own = tmp_path / "own.yaml"
    own.write_text(text.replace("4.5e+11", "450GB/s").replace("1.52e-05", "15.2us"))
    assert read_cluster(compose(parse([f"cluster={own}"]))) == cluster()
    own.write_text(text.replace("4.5e+11", "450GB"))
    with pytest.raises(UserInputError, match=r"levels\[0\]\.bandwidth_bytes_per_s.*'450GB'"):
        read_cluster(compose(parse([f"cluster={own}"])))


def test_a_plan_file_holds_plain_numbers(tmp_path: Path) -> None:
    out = tmp_path / "plan.yaml"
    size = "cluster.accelerator.memory=141GiB"
    assert run("plan", *JOB, "cluster.num_gpus=8", size, f"out={out}").code == 0
    written = yaml.safe_load(out.read_text(encoding="utf-8"))
    assert written["cluster"]["accelerator"]["memory_bytes"] == 141 * 2**30


def test_a_model_has_units_in_settings_and_files(tmp_path: Path) -> None:
    text = (ROOT / "hydra_configs/model/mixtral_8x7b.yaml").read_text(encoding="utf-8")
    own = tmp_path / "own.yaml"
    length = re.search(r"^seq_length: (\d+)", text, re.MULTILINE)
    assert length is not None
    assert int(length[1]) % 1024 == 0
    own.write_text(text.replace(length[0], f"seq_length: {int(length[1]) // 1024}Ki"))
    plain = read_spec(compose(parse(["model=mixtral_8x7b"])))
    assert read_spec(compose(parse([f"model={own}"]))) == plain
    layers = read_spec(compose(parse(["model=mixtral_8x7b", "model.num_layers=0.064k"])))
    assert (layers.num_layers, len(layers.moe_layer_pattern)) == (64, 64)
    longer = composed("model.seq_length=128k")
    assert read_spec(longer).seq_length == 128_000
    assert "128Ki is 131,072" in longer.notes[0]
    with pytest.raises(UserInputError, match=r"seq_length.*128Ki"):
        read_spec(composed("model.seq_length=8KiB"))


def test_settings_of_a_launch_have_units() -> None:
    words = ("+nest=auto", "nest.rendezvous_timeout_s=10min", "nest.heartbeat_timeout_s=1500ms")
    launch = read_launch(read_words(words))
    assert (launch.rendezvous_timeout_s, launch.heartbeat_timeout_s) == (600, 1.5)
    with pytest.raises(UserInputError, match=r"nest\.heartbeat_timeout_s.*2us, or 1\.5ms"):
        read_launch(read_words(["+nest=auto", "nest.heartbeat_timeout_s=2GB"]))
