"""Ranks over hosts: the order, and the levels that are left of a cluster's network."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nest_megatron.cluster.placement import (
    Launcher,
    launch_file,
    launch_file_words,
    network_order,
    on_hosts,
    whole_groups,
)
from nest_megatron.errors import UserInputError
from tests import catalogue
from tests.cli.runs import run

HOSTS = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xy")), min_size=1, max_size=24)


@given(HOSTS)
def test_no_block_of_ranks_crosses_a_group(groups: list[tuple[str, str]]) -> None:
    order = network_order(groups)
    assert sorted(order) == list(range(len(groups)))
    assert order[0] == 0
    placed = [groups[i] for i in order]
    for level, size in enumerate(whole_groups(groups)):
        for start in range(0, len(placed), size):
            assert len({names[level:] for names in placed[start : start + size]}) == 1


@given(HOSTS)
def test_each_group_is_in_one_piece(groups: list[tuple[str, str]]) -> None:
    placed = [groups[i] for i in network_order(groups)]
    for level in range(2):
        names = [each[level:] for each in placed]
        changes = sum(a != b for a, b in itertools.pairwise(names))
        assert changes == len(set(names)) - 1


def test_levels_of_an_allocation() -> None:
    cluster = catalogue.cluster("h100_spine_leaf", 128)
    apart = on_hosts(cluster, [("a",)] * 6 + [("b",)] * 10)
    assert [(x.name, x.num_devices) for x in apart.levels] == [
        ("node", 8),
        ("leaf", 16),
        ("spine", None),
    ]
    assert apart.num_gpus == 128
    together = on_hosts(cluster, [("a",)] * 4)
    assert [(x.name, x.num_devices) for x in together.levels] == [("node", 8), ("leaf", None)]
    assert together.levels[1].bandwidth_bytes_per_s == cluster.levels[1].bandwidth_bytes_per_s
    alone = on_hosts(cluster, [("a",), ("b",), ("c",)])
    assert [x.name for x in alone.levels] == ["node", "spine"]


def test_groups_that_are_not_the_cluster_s_levels_are_refused() -> None:
    cluster = catalogue.cluster("h100_spine_leaf", 128)
    with pytest.raises(UserInputError, match="has leaf between node and outermost level"):
        on_hosts(cluster, [("a", "x"), ("b", "y")])
    # a group of all hosts is the outermost level
    shared = on_hosts(cluster, [("a", "x"), ("b", "x")])
    assert shared == on_hosts(cluster, [("a",), ("b",)])
    with pytest.raises(UserInputError, match="several hosts"):
        on_hosts(catalogue.cluster("gb200_nvl72", 72), [()] * 18)


def test_files_of_launchers() -> None:
    assert launch_file(Launcher.MPIRUN, ["b", "a"], 2) == "b\nb\na\na\n"
    assert launch_file(Launcher.TORCHRUN, ["b", "a"], 2) == "b\na\n"
    words = launch_file_words(Launcher.TORCHRUN, "h", ["b", "a"], 8)
    assert "--nnodes 2" in words
    assert "--master-addr=b" in words


def hosts_file(folder: Path, *racks: str) -> Path:
    path = folder / "hosts.txt"
    path.write_text("".join(f"n{i} {rack}\n" for i, rack in enumerate(racks)))
    return path


JOB = (
    *("model=llama3_8b", "cluster=h100_spine_leaf", "search.num_alternatives=0"),
    *("parallel.tensor_model_parallel_size=2", "parallel.pipeline_model_parallel_size=2"),
    *("parallel.context_parallel_size=1", "train.micro_batch_size=1"),
)


def test_a_plan_says_what_hosts_side_by_side_would_give(tmp_path: Path) -> None:
    path, ranks = hosts_file(tmp_path, "a", "b", "a", "b"), tmp_path / "ranks.txt"
    done = run("plan", *JOB, "--hosts", str(path), "--write-hostfile", str(ranks))
    told = " ".join(done.out.split())
    assert done.code == 0, done.err
    assert "4 hosts in 2 groups of level leaf (2, 2)" in told
    assert "on hosts side by side in full groups" in told
    assert f"SLURM_HOSTFILE={ranks} srun --distribution=arbitrary --ntasks=32" in told
    assert ranks.read_text().split() == ["n0"] * 8 + ["n2"] * 8 + ["n1"] * 8 + ["n3"] * 8


def test_hosts_side_by_side_are_said_to_be(tmp_path: Path) -> None:
    path = hosts_file(tmp_path, "a", "a", "a", "a")
    done = run("plan", *JOB, "--hosts", str(path), "--json")
    assert done.json()["cluster"]["num_gpus"] == 32
    assert any("fill their groups" in note for note in done.json()["notes"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--write-hostfile", "x.txt"), "Add --hosts"),
        (("--hosts", "hosts.txt", "--for-nodes", "1..2"), "one job runs on the hosts"),
        (("--hosts", "hosts.txt", "-m"), "one job runs on the hosts"),
        (("--hosts", "hosts.txt", "cluster.num_gpus=8"), "names 2 hosts with 16 GPUs"),
        (
            (
                "--hosts",
                "none.txt",
            ),
            "cannot be read",
        ),
    ],
)
def test_wrong_words_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], told: str
) -> None:
    hosts_file(tmp_path, "a", "a")
    monkeypatch.chdir(tmp_path)
    done = run("plan", "model=llama3_8b", "cluster=h100_spine_leaf", *words)
    assert (done.code, told in " ".join(done.err.split())) == (2, True), done.err
