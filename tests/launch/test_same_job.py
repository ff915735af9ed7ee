"""What all ranks must share: values as text, and the table of what may differ."""

from __future__ import annotations

import enum
import functools
import re
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nest_megatron.integrations.megatron_lm.launch import comparable_arguments
from nest_megatron.integrations.megatron_lm.parser import load_arguments
from nest_megatron.integrations.megatron_lm.rendezvous import (
    MAY_DIFFER,
    comparable_fields,
    comparable_text,
    differences,
    versions,
)
from nest_megatron.layout.rulebook.facts import RELEASES
from tests.cli.runs import ROOT


class Kind(enum.Enum):
    FLASH = 1


class Layout:
    def __init__(self, stages: list[str]) -> None:
        self.stages = stages


@dataclass
class Model:
    depth: int
    init: Any = None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        (True, "True"),
        (1, "1"),
        (1e-4, "0.0001"),
        (float("nan"), "nan"),
        ("a", "'a'"),
        (Path("/a/b"), "'/a/b'"),
        (Kind.FLASH, "Kind.FLASH"),
        ([1, (2, None)], "[1, [2, None]]"),
        ({"b": 1, "a": {"x", "w"}}, "{'a': {'w', 'x'}, 'b': 1}"),
        (Layout(["E", "tL"]), "Layout(stages=['E', 'tL'])"),
        (Model(2), "Model(depth=2, init=None)"),
        (SimpleNamespace(x=1), "SimpleNamespace(x=1)"),
        (functools.partial(int, base=2), "partial(args=[], base=2, func=builtins.int)"),
        (len, "builtins.len"),
        (object(), "object"),
    ],
)
def test_values_have_one_text_in_every_process(value: object, text: str) -> None:
    assert comparable_text(value) == text


def test_a_value_that_holds_itself_has_a_text() -> None:
    ring: list[object] = [1]
    ring.append(ring)
    assert comparable_text(ring) == "[1, list]"


def test_torch_s_values_have_one_text() -> None:
    torch = pytest.importorskip("torch")
    assert comparable_text(torch.bfloat16) == "torch.bfloat16"
    assert comparable_text(torch.zeros(2, 3)) == "Tensor(torch.Size([2, 3]), torch.float32)"


def test_every_argument_is_compared_but_those_of_the_table() -> None:
    mine = Namespace(lr=0.1, rank=3, local_rank=1, tensorboard_dir="/a", own=1, kind=Kind.FLASH)
    found = comparable_arguments(mine, RELEASES[0], ["own"])
    assert found == {"--lr": "0.1", "args.kind": "Kind.FLASH"}


def test_a_flag_that_switches_off_is_named_with_what_it_sets() -> None:
    found = comparable_arguments(Namespace(bias_gelu_fusion=True), RELEASES[0])
    assert found == {"bias_gelu_fusion (--no-bias-gelu-fusion makes it False)": "True"}


def test_the_leaves_of_a_configuration_are_named() -> None:
    config = SimpleNamespace(model=Model(2), logger={"tensorboard_dir": "/a", "every": [1]})
    found = comparable_fields(config)
    assert found == {"model.depth": "2", "model.init": "None", "logger.every": "[1]"}


def test_a_section_is_compared_whatever_its_name() -> None:
    config = {
        "lora": {"rank": 8},
        "profile": {"lr": 1},
        "tensorboard_dir": {"of": "a section"},
        "out": {"depth": 2},
        "nest": {"out": "/a"},
        "dist": {"local_rank": 1},
        "mine": {"seed": 3, "name": "x"},
    }
    assert comparable_fields(config, ("nest.out", "mine.seed", "lr")) == {
        "lora.rank": "8",
        "tensorboard_dir.of": "'a section'",
        "out.depth": "2",
        "mine.name": "'x'",
    }
    assert "mine.name" not in comparable_fields(config, ("mine",))


def test_each_value_is_named_with_its_ranks_and_hosts() -> None:
    of_ranks = {0: {"--lr": "1", "x": "a"}, 1: {"--lr": "2", "x": "a"}, 2: {"--lr": "1"}}
    text = differences(of_ranks, {0: "a", 1: "b", 2: "b"})
    assert "\n  --lr: 1 on ranks 0, 2 (a, b); 2 on rank 1 (b)\n" in text
    assert "\n  x: a on ranks 0-1 (a, b); not set on rank 2 (b)\n" in text


def test_many_differences_are_counted() -> None:
    of_ranks = {rank: {str(name): str(rank) for name in range(100)} for rank in range(2)}
    text = differences(of_ranks, {})
    assert "... and 40 more" in text


def test_versions_are_compared() -> None:
    assert {"nest-megatron", "Python", "megatron-core", "torch"} <= {
        name.removeprefix("version of ") for name in versions()
    }


def test_the_table_names_arguments_that_exist_and_is_documented() -> None:
    known = {each.dest for version in RELEASES for each in load_arguments(version)} | {"rank"}
    assert set(MAY_DIFFER) <= known
    text = (ROOT / "docs" / "launching.md").read_text(encoding="utf-8")
    section = text.partition("## What may differ by rank")[2].partition("\n## ")[0]
    assert set(re.findall(r"`(\w+)`", section)) >= set(MAY_DIFFER)
