"""Collectives measured for real, over gloo on this machine."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nest_megatron.cluster.records import CollectiveKind
from nest_megatron.errors import ProfileError
from nest_megatron.profile import collectives, network
from nest_megatron.profile.clock import middle_half, middle_out
from nest_megatron.profile.collectives import DEFAULT_SIZES

ROOT = Path(__file__).resolve().parents[2]
WORKER = """
import json, sys
import torch.distributed as dist
from nest_megatron.profile import network
from nest_megatron.profile.collectives import measure
from nest_megatron.profile.collectives import Caller
from nest_megatron.cluster.records import CollectiveKind
rank, store, out, hosts, seconds, sizes, lacking = json.loads(sys.argv[1])
world = len(hosts)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
if lacking:
    prepared = Caller.prepared
    def refuse(self, kind, *rest):
        if kind == lacking:
            raise RuntimeError("ProcessGroup does not support it\\nmore")
        return prepared(self, kind, *rest)
    Caller.prepared = refuse
found = measure(dist.group.WORLD, hosts, seconds, sizes)
assert (found is None) == (rank != 0)
if found is not None:
    open(out, "w").write(network.dump(found))
dist.destroy_process_group()
"""


def measured(folder: Path, hosts: list[str], **more: Any) -> network.NetworkProfile:
    """Measure with a process for each host named."""
    pytest.importorskip("torch")
    settings = {"seconds": 300.0, "sizes": [2**12, 2**16, 2**20, 2**22], "lacking": "", **more}
    out = folder / "network.yaml"
    processes = []
    for rank in range(len(hosts)):
        arguments = [rank, str(folder / "store"), str(out), hosts, *settings.values()]
        command = [sys.executable, "-W", "ignore", "-c", WORKER, json.dumps(arguments)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        processes.append(
            subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        )
    for process in processes:
        _, said = process.communicate(timeout=600)
        assert process.returncode == 0, said
    return network.read(out)


def test_two_ranks_of_one_host(tmp_path: Path) -> None:
    found = measured(tmp_path, ["here", "here"])
    assert found.backend is network.NetworkBackend.GLOO
    assert found.versions.keys() == {"nest-megatron", "torch"}
    assert found.not_measured == {}
    assert {(each.kind, each.message_bytes) for each in found.samples} == {
        (kind, size) for kind in CollectiveKind for size in (2**12, 2**16, 2**20, 2**22)
    }
    for each in found.samples:
        assert each.shape == (2, 1)
        assert each.repetitions >= 3
        assert each.spread is not None
    assert [fit.name for fit in found.fits] in (["node"], [])
    assert found.fits or "No fit" in found.fit_notes[0]


def test_two_hosts_of_one_rank_and_a_kind_that_gloo_lacks(tmp_path: Path) -> None:
    found = measured(tmp_path, ["left", "right"], lacking="reduce_scatter", sizes=[2**12, 2**20])
    assert set(found.not_measured) == {CollectiveKind.REDUCE_SCATTER}
    assert found.not_measured["reduce_scatter"] == "ProcessGroup does not support it"
    assert {each.kind for each in found.samples} == set(CollectiveKind) - set(found.not_measured)
    assert {each.shape for each in found.samples} == {(1, 2)}
    assert "2 sizes are too few" in found.fit_notes[-1]
    assert found.source == "2 ranks on 2 hosts (left, right)"


def test_a_budget_that_runs_out_is_said(tmp_path: Path) -> None:
    found = measured(tmp_path, ["here", "here"], seconds=0.05, sizes=list(DEFAULT_SIZES))
    assert "measurements were left out: " in found.notes[0]


class Clocked:
    """One rank by itself, whose calls take 20 us and the bytes at 100 MB/s, by a clock of its own.

    Args:
        memory: largest message that fits.
    """

    def __init__(self, memory: int = 2**40) -> None:
        self.now, self.memory = 0.0, memory

    def agree(self, flag: bool) -> bool:
        return flag

    def same(self, number: int) -> int:
        return number

    def slowest(self, times: list[float]) -> list[float]:
        return times

    def fitting(self, kind: CollectiveKind, size: int, group: object) -> int | None:
        return size if size <= self.memory else None

    def timed(self, size: int, calls: int) -> float:
        seconds = 2e-5 + size / 1e8
        self.now += 1e-3 + calls * seconds  # a barrier, too
        return seconds


def went_through(
    caller: Clocked, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[network.CollectiveSample], list[str]]:
    monkeypatch.setattr(collectives, "time", SimpleNamespace(monotonic=lambda: caller.now))
    tasks = [*collectives._tasks([((2, 1), None)], list(CollectiveKind), DEFAULT_SIZES)]
    return collectives._measured(caller, tasks, seconds)  # type: ignore[arg-type]


@pytest.mark.parametrize("seconds", [2.0, 15.0, 100.0])
def test_the_time_that_is_said_to_be_enough_is(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples, (note,) = went_through(Clocked(), seconds, monkeypatch)
    total = len(CollectiveKind) * len(DEFAULT_SIZES)
    left_out = total - len(samples)
    assert note.startswith(f"{left_out} of {total} measurements were left out: {seconds:g} s were ")
    enough, both = map(float, re.findall(r"--max-seconds (\d+), or (\d+) where", note)[0])
    assert both == enough / network.NETWORK_SHARE
    samples, notes = went_through(Clocked(), enough, monkeypatch)
    assert (len(samples), notes) == (total, [])


def test_how_long_is_enough_is_not_guessed_from_latencies(monkeypatch: pytest.MonkeyPatch) -> None:
    _, (note,) = went_through(Clocked(), 0.01, monkeypatch)
    assert note.endswith("0.01 s were too short. A longer --max-seconds measures more.")


def test_a_message_that_does_not_fit_loses_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    samples, (note,) = went_through(Clocked(memory=2**28), 2000.0, monkeypatch)
    assert {each.message_bytes for each in samples} == set(DEFAULT_SIZES[:-1])
    kinds = len(CollectiveKind)
    assert (
        f"{kinds} of {11 * kinds} measurements, of messages from {2**30} bytes on, do not" in note
    )


def test_groups_of_two_hosts_of_four_ranks() -> None:
    hosts = ["a"] * 4 + ["b"] * 4
    patterns = collectives._patterns(hosts, 8)
    assert [pattern.shape for pattern in patterns] == [(2, 1), (4, 1), (1, 2), (4, 2)]
    assert patterns[0].groups == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert patterns[1].groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert patterns[2].groups == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert patterns[3].groups == (tuple(range(8)),)


@pytest.mark.parametrize("hosts", [["a"] * 3 + ["b"] * 3, list("abcabc"), list("aaa"), list("abc")])
def test_every_rank_has_its_part_in_every_pattern(hosts: list[str]) -> None:
    for pattern in collectives._patterns(hosts, len(hosts)):
        ranks = sorted(rank for group in pattern.groups for rank in group)
        assert ranks == list(range(len(hosts)))
        members = pattern.shape[0] * pattern.shape[1]
        assert {len(group) for group in pattern.groups} == {members}


@pytest.mark.parametrize(("hosts", "ranks"), [(["a"], 1), (["a", "b"], 3), (["a", "a", "b"], 3)])
def test_hosts_that_cannot_be_compared_are_refused(hosts: list[str], ranks: int) -> None:
    with pytest.raises(ProfileError, match="hosts"):
        collectives._patterns(hosts, ranks)


def test_every_beginning_of_the_order_covers_the_range() -> None:
    order = middle_out(DEFAULT_SIZES)
    assert sorted(order) == sorted(DEFAULT_SIZES)
    assert order[:3] == [DEFAULT_SIZES[0], DEFAULT_SIZES[5], DEFAULT_SIZES[-1]]
    for few in (5, 7):
        places = sorted(DEFAULT_SIZES.index(size) for size in order[:few])
        assert max(b - a for a, b in itertools.pairwise(places)) <= 4
    assert middle_out([7]) == [7]
    assert middle_half([5.0, 5.0]) == (5.0, 0.0)


def test_a_profile_of_a_machine_reads_as_it_was_written() -> None:
    sample = network.CollectiveSample(
        kind=CollectiveKind.SEND_RECV,
        num_ranks=2,
        shape=(2, 1),
        message_bytes=4,
        seconds=1e-5,
        spread=0.1,
    )
    profile = network.NetworkProfile(
        name="x",
        created="2026",
        source="",
        backend=network.NetworkBackend.GLOO,
        versions={},
        samples=(sample, dataclasses.replace(sample, seconds=2e-5)),
    )
    assert network.load(network.dump(profile)).samples == profile.samples
