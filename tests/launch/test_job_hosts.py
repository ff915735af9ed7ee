"""Hosts that tell rank 0 what they have, and ranks that follow their switches."""

from __future__ import annotations

import socket

import pytest

from nest_megatron.cluster.hosts import Host
from nest_megatron.integrations.megatron_lm import ranks
from nest_megatron.integrations.megatron_lm.ranks import job_hosts, ranks_by_host
from tests.launch.stores import HERE, join, on_all_ranks

GROUPS = {"a": ("s1",), "b": ("s2",), "c": ("s1",)}


def test_one_rank_of_each_host_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    told: list[str] = []

    def look(name: str) -> Host:
        told.append("looked")
        return Host(name=name, groups=("s1",))

    monkeypatch.setattr(ranks, "this_host", look)

    def act(rank: int) -> str:
        found = job_hosts(join(rank, 3, environment={**HERE, "SLURM_STEP_ID": attempt}))
        return " ".join(f"{host.name}:{host.groups[0]}" for host in found)

    attempt = "1"
    assert on_all_ranks(act) == [f"{socket.gethostname()}:s1", "", ""]
    monkeypatch.setenv("LOCAL_RANK", "1")
    told.clear()
    attempt = "2"
    assert on_all_ranks(act) == [""] * 3
    assert not told


def test_a_single_process_asks_nobody() -> None:
    assert job_hosts(None) == ()


def test_hosts_of_one_switch_are_neighbours() -> None:
    launched = ["a", "a", "b", "b", "c", "c"]
    assert ranks_by_host(launched, GROUPS) == (0, 1, 4, 5, 2, 3)
    assert ranks_by_host(["a", "a", "c", "c", "b", "b"], GROUPS) is None
