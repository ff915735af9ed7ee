"""Ranks that processes take, and the check of Megatron's groups."""

from __future__ import annotations

import itertools
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nest_megatron.errors import NestError, UserInputError
from nest_megatron.integrations.megatron_lm import ranks as groups
from nest_megatron.integrations.megatron_lm.ranks import check_permutation, ranks_by_host
from nest_megatron.layout.dims import ParallelDims
from nest_megatron.layout.rank_order import group_of_rank


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=24))
def test_by_host_keeps_each_host_together_and_rank_zero(hosts: list[str]) -> None:
    ranks = ranks_by_host(hosts) or tuple(range(len(hosts)))
    assert sorted(ranks) == list(range(len(hosts)))
    assert ranks[0] == 0
    placed = [""] * len(hosts)
    for launched, new in enumerate(ranks):
        placed[new] = hosts[launched]
    changes = sum(a != b for a, b in itertools.pairwise(placed))
    assert changes == len(set(hosts)) - 1


def test_by_host_leaves_what_is_together() -> None:
    assert ranks_by_host(["a"] * 8 + ["b"] * 8) is None
    assert ranks_by_host(["a", "b"] * 2) == (0, 2, 1, 3)


@pytest.mark.parametrize("ranks", [(0, 0, 1), (0, 1), (0, 1, 3)])
def test_a_list_is_a_permutation(ranks: tuple[int, ...]) -> None:
    with pytest.raises(UserInputError, match="once"):
        check_permutation(ranks, 3, zero_may_move=True)


def test_rank_zero_stays_where_it_hosts_the_store() -> None:
    check_permutation((1, 0), 2, zero_may_move=True)
    with pytest.raises(UserInputError, match="MASTER_ADDR"):
        check_permutation((1, 0), 2, zero_may_move=False)


DIMS = ParallelDims(
    tensor_model_parallel_size=2, pipeline_model_parallel_size=2, data_parallel_size=2
)


def parallel_state(rank: int, wrong: str = "") -> ModuleType:
    """Megatron's module with groups as planned, one of them wrong."""
    module: Any = ModuleType("parallel_state")
    for kind, name in groups._GETTERS.items():
        members = (0, 7) if name == wrong else group_of_rank(DIMS, kind, rank)
        setattr(module, name, lambda members=members, **_: members)
    return module


def test_groups_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [*range(8), 3]
    distributed = SimpleNamespace(get_process_group_ranks=list, get_rank=lambda: ranks.pop(0))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(distributed=distributed))
    plan: Any = SimpleNamespace(
        layout=SimpleNamespace(dims=DIMS), model=SimpleNamespace(is_moe=False)
    )
    for rank in range(8):
        groups.compare_groups(plan, parallel_state(rank))
    wrong = parallel_state(3, wrong="get_pipeline_model_parallel_group")
    with pytest.raises(NestError, match=r"rank 3: Megatron's pp group is \[0, 7\]"):
        groups.compare_groups(plan, wrong)
