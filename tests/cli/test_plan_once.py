"""A command is parsed once, a plan is built once, of few kinds of records, and sealed as written.

Its checksum is worked out when the file is written.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nest_megatron.integrations.megatron_lm import parser
from nest_megatron.integrations.megatron_lm.parser import read_command
from nest_megatron.integrations.megatron_lm.planning import decide
from nest_megatron.layout import plan_file
from nest_megatron.layout.plan import ParallelPlan
from tests.cli.runs import run
from tests.integrations.commands import LLAMA3_8B
from tests.launch.jobs import namespace, pad_like_megatron, place, running

README = (
    "model=llama3_70b",
    "cluster=h100_spine_leaf",
    "cluster.num_gpus=1024",
    "train.global_batch_size=4096",
)


#: Most kinds of records that one plan builds: dataclasses, and named tuples.
MOST_KINDS = {"dataclasses": 65, "named tuples": 28}
#: Runs a command and prints the kinds of records of this package that it builds, as the last line.
_KINDS = """
import collections, dataclasses, json, sys

kinds = {"dataclasses": set(), "named tuples": set()}
make_dataclass, make_tuple = dataclasses.dataclass, collections.namedtuple

def counted_class(cls):
    init = cls.__init__
    def __init__(self, *args, **kwargs):
        kinds["dataclasses"].add(type(self))
        init(self, *args, **kwargs)
    cls.__init__ = __init__
    return cls

def dataclass(cls=None, **options):
    if cls is None:
        return lambda cls: counted_class(make_dataclass(cls, **options))
    return counted_class(make_dataclass(cls, **options))

def namedtuple(*args, **options):
    kind = make_tuple(*args, **options)
    new = kind.__new__
    def __new__(cls, *args, **kwargs):
        kinds["named tuples"].add(cls)
        return new(cls, *args, **kwargs)
    kind.__new__ = __new__
    return kind

dataclasses.dataclass, collections.namedtuple = dataclass, namedtuple
import msgspec
from nest_megatron import plain

def frozen(kind, /, *args, **kwargs):
    kinds["dataclasses"].add(kind)
    return msgspec.StructMeta.__call__(kind, *args, **kwargs)

plain._Frozen.__call__ = frozen
from nest_megatron.cli import main

code = main(sys.argv[1:])
ours = {
    name: sorted(f"{kind.__module__}.{kind.__qualname__}" for kind in found
                 if kind.__module__.startswith("nest_megatron"))
    for name, found in kinds.items()
}
print(json.dumps(ours))
sys.exit(code)
"""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often commands are parsed, plans built and checksums computed."""
    found: Counter[str] = Counter()

    def count(holder: object, name: str, as_name: str) -> None:
        original: Callable[..., Any] = getattr(holder, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            found[as_name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(holder, name, counted)

    count(parser._Parser, "parse_known_args", "parsed")

    def record(kind: type, /, *args: Any, **fields: Any) -> Any:
        found["built"] += kind is ParallelPlan
        return msgspec.StructMeta.__call__(kind, *args, **fields)

    monkeypatch.setattr(type(ParallelPlan), "__call__", record)
    count(plan_file, "fields_of", "sealed")
    return found


def test_a_plan_is_built_twice_at_most_and_sealed_when_it_is_written(
    calls: Counter[str], tmp_path: Path
) -> None:
    out = tmp_path / "plan.yaml"
    assert run("plan", *README, f"out={out}").code == 0
    assert calls["built"] <= 2
    assert (calls["sealed"], calls["parsed"]) == (1, 0)


def test_a_plan_builds_few_kinds_of_records(tmp_path: Path) -> None:
    words = ("plan", *README, f"out={tmp_path / 'plan.yaml'}")
    done = subprocess.run(
        [sys.executable, "-c", _KINDS, *words], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["dataclasses"]) > 40  # they were counted
    for name, most in MOST_KINDS.items():
        assert len(found[name]) <= most, found[name]


@pytest.mark.parametrize("free", [(), ("--free", "all")], ids=["kept", "freed"])
def test_a_command_is_parsed_once(calls: Counter[str], free: tuple[str, ...]) -> None:
    command = f"{LLAMA3_8B} --tensor-model-parallel-size 4"
    assert run("plan", "--from", command, *free, "cluster=dgx_h100").code == 0
    assert (calls["parsed"], calls["sealed"]) == (1, 0)


def test_a_running_job_parses_its_command_once(
    calls: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pad_like_megatron(monkeypatch)
    argv = [*read_command(LLAMA3_8B).argv]
    args = namespace(argv)
    calls.clear()
    decide(running(args, argv), place(), free=(), alternative=0)
    assert (calls["parsed"], calls["sealed"]) == (1, 0)
    assert calls["built"] <= 2
