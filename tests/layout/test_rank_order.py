"""Rank groups, and the closed forms for where they lie, against plain enumeration."""

from __future__ import annotations

from itertools import pairwise, product

import pytest

from nest_megatron.errors import UserInputError
from nest_megatron.layout.dims import ParallelDims, RankOrder
from nest_megatron.layout.rank_order import (
    GroupKind,
    group_of_rank,
    group_shape,
    pipeline_link_level,
)

LEVELS = ((4, 8, 64), (8, 64), (2, 8, 32, 512), (8, 24, 96), (6, 12, 72), (3, 9, 27), (64,))


def _dims(sizes: tuple[int, ...], order: RankOrder) -> ParallelDims | None:
    tp, cp, dp, pp, etp, ep = sizes
    try:
        return ParallelDims(
            tensor_model_parallel_size=tp,
            context_parallel_size=cp,
            data_parallel_size=dp,
            pipeline_model_parallel_size=pp,
            expert_tensor_parallel_size=etp,
            expert_model_parallel_size=ep,
            rank_order=order,
        )
    except UserInputError:
        return None


ALL_DIMS = [
    dims
    for sizes in product((1, 2, 3, 4), (1, 2, 3), (1, 2, 3, 4), (1, 2, 3, 4), (1, 2), (1, 2, 4, 6))
    for order in RankOrder
    if (dims := _dims(sizes, order)) is not None
]
ALIGNED_DIMS = [
    dims
    for sizes in product((1, 2, 8), (1, 2), (1, 4, 8), (1, 4), (1, 2), (1, 8))
    for order in RankOrder
    if (dims := _dims(sizes, order)) is not None
]


def _counts(group: tuple[int, ...], devices: int) -> list[int]:
    blocks = [rank // devices for rank in group]
    return [blocks.count(block) for block in sorted(set(blocks))]


def _exact_shape(group: tuple[int, ...], group_sizes: tuple[int, ...]) -> tuple[int, ...] | None:
    """Fan-outs of one group, or None where its members do not spread evenly."""
    shape, inner = [], 1
    for devices in (*group_sizes[:-1], 1 << 40):
        counts = set(_counts(group, devices))
        count = counts.pop()
        if counts or count % inner:
            return None
        shape.append(count // inner)
        inner = count
    return tuple(shape)


def rank_groups(dims: ParallelDims, kind: GroupKind) -> list[tuple[int, ...]]:
    """All groups of one kind."""
    groups: list[tuple[int, ...]] = []
    left = list(range(dims.world_size))
    while left:
        groups.append(group_of_rank(dims, kind, left[0]))
        left = [rank for rank in left if rank not in groups[-1]]
    return groups


@pytest.mark.parametrize("order", list(RankOrder))
def test_groups_partition_the_ranks(order: RankOrder) -> None:
    dims = _dims((2, 3, 4, 2, 1, 6), order)
    assert dims is not None
    for kind in GroupKind:
        groups = rank_groups(dims, kind)
        ranks = sorted(rank for group in groups for rank in group)
        assert ranks == list(range(dims.world_size)), kind
        assert len({len(group) for group in groups}) == 1
        for rank in range(dims.world_size):
            assert rank in group_of_rank(dims, kind, rank)


def test_the_documented_example() -> None:
    dims = _dims((4, 1, 4, 4, 1, 8), RankOrder.TP_CP_EP_DP_PP)
    assert dims is not None
    groups = {kind: group_of_rank(dims, kind, 37) for kind in GroupKind}
    assert groups[GroupKind.TP] == (36, 37, 38, 39)
    assert groups[GroupKind.DP] == (33, 37, 41, 45)
    assert groups[GroupKind.PP] == (5, 21, 37, 53)
    assert groups[GroupKind.EP] == tuple(range(32, 40))
    assert groups[GroupKind.EDP] == (37, 45)


@pytest.mark.parametrize("group_sizes", [(8, 64, 512), (4, 8, 32, 4096)])
def test_aligned_shapes_are_exact_and_the_same_for_every_group(
    group_sizes: tuple[int, ...],
) -> None:
    for dims in ALIGNED_DIMS:
        for kind in GroupKind:
            shapes = {_exact_shape(group, group_sizes) for group in rank_groups(dims, kind)}
            assert shapes == {group_shape(dims, kind, group_sizes)}, (dims, kind)


@pytest.mark.parametrize("group_sizes", LEVELS)
def test_shapes_are_never_better_than_the_worst_member(group_sizes: tuple[int, ...]) -> None:
    exact = 0
    for dims in ALL_DIMS[::7]:
        for kind in GroupKind:
            groups = rank_groups(dims, kind)
            shape = group_shape(dims, kind, group_sizes)
            size = len(groups[0])
            assert len(shape) == len(group_sizes)
            placed = 1
            for fan_out, devices in zip(shape, group_sizes[:-1], strict=False):
                placed *= fan_out
                worst = min(min(_counts(group, devices)) for group in groups)
                assert placed <= worst, (dims, kind, devices, shape)
            placed *= shape[-1]
            assert placed >= size
            shapes = {_exact_shape(group, group_sizes) for group in groups}
            if len(shapes) == 1 and None not in shapes:
                exact += shapes == {shape}
    assert exact > 100


@pytest.mark.parametrize("group_sizes", LEVELS[:-1])
def test_the_innermost_count_is_exact_where_strides_divide_the_node(
    group_sizes: tuple[int, ...],
) -> None:
    kinds = (GroupKind.TP, GroupKind.CP, GroupKind.DP, GroupKind.EP, GroupKind.EDP, GroupKind.PP)
    node = group_sizes[0]
    for dims in ALL_DIMS[::7]:
        for kind in kinds:
            groups = rank_groups(dims, kind)
            strides = {b - a for group in groups for a, b in pairwise(group)} or {1}
            worst = min(min(_counts(group, node)) for group in groups)
            fan_out = group_shape(dims, kind, group_sizes)[0]
            assert fan_out == worst or (node % strides.pop() and 1 <= fan_out < worst), (dims, kind)


@pytest.mark.parametrize("group_sizes", LEVELS)
def test_pipeline_and_embedding_levels(group_sizes: tuple[int, ...]) -> None:
    def level(a: int, b: int) -> int:
        inner = (n for n, size in enumerate(group_sizes[:-1]) if a // size == b // size)
        return next(inner, len(group_sizes) - 1)

    for dims in ALL_DIMS[::7]:
        pipelines = rank_groups(dims, GroupKind.PP)
        size = dims.pipeline_model_parallel_size
        for stage in range(size):
            worst = max(level(p[stage], p[(stage + 1) % size]) for p in pipelines)
            if size == 1:
                worst = 0
            assert pipeline_link_level(dims, stage, group_sizes) == worst, (dims, stage)
        worst = max(level(p[0], p[-1]) for p in pipelines) if size > 1 else 0
        assert pipeline_link_level(dims, size - 1, group_sizes) == worst
