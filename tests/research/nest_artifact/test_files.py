"""What is read, and what is refused with its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nest_megatron.errors import UserInputError
from nest_megatron.research.nest_artifact.files import (
    baseline_placement,
    read_instance,
    read_placement,
)
from nest_megatron.research.nest_artifact.price import FixedPlan, Optimizer
from tests.research.nest_artifact.instances import DATA, plain, recorded


def changed(tmp_path: Path, keys: tuple[Any, ...], value: object) -> Path:
    """The instance llama2_64 with one value changed."""
    document = plain("llama2_64")
    inner: Any = document
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    path = tmp_path / "instance.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def test_what_is_read() -> None:
    instance = recorded("llama2_64")
    assert [layer.node_id for layer in instance.chains[1].layers] == list(range(-1, 32))
    assert instance.num_micro_batches == 4096
    assert instance.network.fan_outs == (8, 4, 2)
    assert instance.optimizer is Optimizer.SGD
    assert instance.baselines["MCMC"].p == 32
    assert not instance.notes


@pytest.mark.parametrize(
    ("keys", "value", "words"),
    [
        (("mbsInBatch",), 0, "mbsInBatch = 0: it must be at least 1"),
        (("mbsInBatch",), 1.5, "whole number"),
        (("maxDevices",), "64", "maxDevices = '64': it must be a whole number"),
        (("maxDevices",), 10**400, "it must be a finite number"),
        (("maxDevices",), 10**7, "it must be at most 1,000,000"),
        (("nodes", "1"), [], "nodes.1 = 0: it must hold 1 to 1,000 nodes"),
        (("maxDevices",), 128, "its product must be maxDevices, 128"),
        (
            ("maxMemoryPerDevice",),
            float("nan"),
            "maxMemoryPerDevice = nan: it must be a finite number",
        ),
        (("bandwidth",), 0, "bandwidth = 0: it must be above 0"),
        (("bws",), [1e9], "devices_per_level has 3 levels"),
        (("bws", 1), -1.0, r"bws\[1\] = -1.0"),
        (("latency_per_level", 2), True, r"latency_per_level\[2\] = True"),
        (("optimizerAlgorithm",), "Adagrad", "it must be one of SGD, Adam"),
        (("sp_enabled",), "no", "it must be true or false"),
        (("nodes",), {}, "there is no tensor degree"),
        (("nodes", "2"), [], "it must hold the tensor degrees of nodes"),
        (("nodes", "1", 3, "id"), 1, r"nodes.1\[3\].id = 1: two nodes"),
        (("nodes", "1", 3, "parameterSize"), -5, r"nodes.1\[3\].parameterSize = -5"),
        (("nodes", "1", 3, "isTensorParallelized"), True, "nothing is tensor parallel"),
        (("nodes", "1", 3), 7, r"nodes.1\[3\] = 7: it must be a mapping"),
        (("edges", "1", 0, "destId"), 99, r"edges.1\[0\].destId = 99: there is no node"),
        (("edges", "1", 5, "destId"), 0, "two edges|cycle|no edges order"),
        (("edges", "1", 4), {"sourceId": 0, "destId": 1}, "communicationCost"),
        (("edges", "1"), [], "no edges order these nodes"),
        (("baselines", "Manual", "p"), 0, "baselines.Manual.p = 0"),
        (("baselines", "Manual", "layer_partition"), [1, "x"], r"layer_partition\[1\] = 'x'"),
    ],
)
def test_wrong_values_are_named(
    tmp_path: Path, keys: tuple[Any, ...], value: object, words: str
) -> None:
    with pytest.raises(UserInputError, match=words):
        read_instance(changed(tmp_path, keys, value))


@pytest.mark.parametrize("name", ["bws", "nodes", "ep_degree", "activationRecomputation"])
def test_missing_fields_are_named(tmp_path: Path, name: str) -> None:
    document = plain("llama2_64")
    del document[name]
    (tmp_path / "x.json").write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(UserInputError, match=f"{name} = None: it is missing"):
        read_instance(tmp_path / "x.json")


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "not readable JSON"), ("[1]", "must be a mapping"), ('{"a": 1, "a": 2}', "twice")],
)
def test_what_is_no_instance(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "x.json").write_text(text, encoding="utf-8")
    with pytest.raises(UserInputError, match=words):
        read_instance(tmp_path / "x.json")


def test_a_cycle(tmp_path: Path) -> None:
    document = plain("llama2_64")
    document["edges"]["1"].append({"sourceId": 5, "destId": 2, "communicationCost": 1})
    (tmp_path / "x.json").write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(UserInputError, match="cycle"):
        read_instance(tmp_path / "x.json")


def test_fields_that_the_format_lacks_are_noted(tmp_path: Path) -> None:
    path = changed(tmp_path, ("nodes", "1", 3, "colour"), "red")
    assert read_instance(path).notes == ("nodes: colour is not read",)


def test_an_instance_without_baselines(tmp_path: Path) -> None:
    assert read_instance(changed(tmp_path, ("baselines",), None)).baselines == {}


@pytest.mark.parametrize(
    ("keys", "value", "words"),
    [
        (("stages", 1, "nodes"), [4, 5], r"output.stages\[1\].nodes = \[4, 5\].*begins with 3"),
        (("stages",), [], "are in no stage"),
        (("stages", 0, "devicesForStage"), 0, r"output.stages\[0\].devicesForStage = 0"),
        (("tensorParallelDegree",), 2, "the instance has tensor degrees 1"),
        (("dataParallelDegree",), None, "dataParallelDegree = None: it must be a whole number"),
        (("networkSkeleton", 0), [7], r"networkSkeleton\[0\] = \[7\]: it must be a list of 2"),
        (("networkSkeleton",), [[0, [1]]], "it must hold the layers 0 to 32"),
    ],
)
def test_wrong_placements_are_named(
    tmp_path: Path, keys: tuple[Any, ...], value: object, words: str
) -> None:
    document = plain("llama2_64.result")
    inner: Any = document["output"]
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    (tmp_path / "x.json").write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(UserInputError, match=words):
        read_placement(tmp_path / "x.json", recorded("llama2_64"))


def test_a_baseline_in_a_file(tmp_path: Path) -> None:
    text = '{"p": 4, "d": 16, "t": 1, "num_transformer_layers": 32}'
    (tmp_path / "mine.json").write_text(text, encoding="utf-8")
    placement, given = read_placement(tmp_path / "mine.json", recorded("llama2_64"))
    assert placement.is_baseline
    assert given is None
    assert [stage.end - stage.first for stage in placement.stages] == [8, 8, 8, 9]


@pytest.mark.parametrize(
    ("num_stages", "num_layers", "partition", "words"),
    [
        (15, 32, (), "stage 11 of 15 would be empty"),
        (2, 34, (), "num_transformer_layers = 34"),
        (2, 32, (16, 15), "it must share 32 layers among 2 stages"),
        (3, 32, (16, 16), "among 3 stages"),
    ],
)
def test_baselines_that_make_no_stages(
    num_stages: int, num_layers: int, partition: tuple[int, ...], words: str
) -> None:
    baseline = FixedPlan(
        p=num_stages, d=1, t=1, num_transformer_layers=num_layers, layer_partition=partition
    )
    with pytest.raises(UserInputError, match=words):
        baseline_placement(recorded("llama2_64"), "mine", baseline)


def test_the_data_says_where_it_is_from() -> None:
    assert "3e163ad" in (DATA / "README.md").read_text(encoding="utf-8")
