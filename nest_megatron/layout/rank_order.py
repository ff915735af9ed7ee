"""Where each rank lies in the grid, who talks to whom, and through which network level.

Megatron lays two grids over the same ranks: the dense one (tp, cp, dp, pp) and the expert one
(etp, ep, expert dp, pp). In both the leftmost dimension of the order varies fastest, so every group
is an arithmetic progression of ranks, or two nested ones. So what a search needs thousands of times
(how many members of a group share a node, a leaf, a pod) is computed from sizes and strides alone.

Source: ``megatron.core.parallel_state.RankGenerator`` and ``initialize_model_parallel`` (0.16.1).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate, product
from math import gcd, prod
from operator import mul

from nest_megatron.layout.dims import ParallelDims, RankOrder
from nest_megatron.plain import Name


class GroupKind(Name):
    """A kind of process group, named by the grid dimensions that its members differ in."""

    TP = "tp"
    CP = "cp"
    DP = "dp"
    DP_CP = "dp-cp"
    PP = "pp"
    ETP = "etp"
    EP = "ep"
    EDP = "edp"


#: Sizes and strides of dimensions of a grid, that of the fastest first.
_Axes = tuple[tuple[int, int], ...]


def group_of_rank(dims: ParallelDims, kind: GroupKind, rank: int) -> tuple[int, ...]:
    """Ranks of the group of one kind that a rank belongs to, in Megatron's order.

    >>> group_of_rank(ParallelDims(tensor_model_parallel_size=2, data_parallel_size=4),
    ...               GroupKind.DP, 3)
    (1, 3, 5, 7)
    """
    members = _axes(dims, kind)
    base = rank - sum(rank // stride % size * stride for size, stride in members)
    spans = (range(0, size * stride, stride) for size, stride in reversed(members))
    return tuple(base + sum(steps) for steps in product(*spans))


@lru_cache(maxsize=1 << 16)
def group_shape(
    dims: ParallelDims, kind: GroupKind, group_sizes: tuple[int, ...]
) -> tuple[int, ...]:
    """How the members of a group spread over the network levels, as fan-outs.

    Entry 0 is the number of members inside one level-0 group, entry ``l`` the number of level
    ``l - 1`` groups that they take inside one level-``l`` group; the product is the group's size.
    The member with the fewest neighbours on the inner levels counts, for it sets the time.

    Where groups and levels do not align (three GPUs of a group over nodes of eight), each level
    takes the guaranteed number of members rounded down, and the outermost the rest rounded up: no
    member is put nearer than it is.

    Args:
        group_sizes: devices in one group of each level, innermost first; the last takes in all.

    >>> dims = ParallelDims(tensor_model_parallel_size=4, data_parallel_size=16)
    >>> group_shape(dims, GroupKind.DP, (8, 32, 64))
    (2, 4, 2)
    """
    axes = _merged(_axes(dims, kind))
    size = prod(size for size, _ in axes)
    shape = []
    placed = 1
    for devices in group_sizes[:-1]:
        fan_out = max(1, min(_fewest_members(axes, devices, dims.world_size), size) // placed)
        shape.append(fan_out)
        placed *= fan_out
    shape.append(-(-size // placed))
    return tuple(shape)


def group_level(dims: ParallelDims, kind: GroupKind, group_sizes: tuple[int, ...]) -> int:
    """Outermost network level that a group of this kind crosses (0 if it stays in a node)."""
    shape = group_shape(dims, kind, group_sizes)
    return max((level for level, fan_out in enumerate(shape) if fan_out > 1), default=0)


@lru_cache(maxsize=1 << 16)
def pipeline_link_level(dims: ParallelDims, stage: int, group_sizes: tuple[int, ...]) -> int:
    """Network level that the farthest pair between pipeline rank ``stage`` and the next crosses.

    The next rank of the last one is rank 0: the link that virtual stages add, and over which both
    share tied embeddings.
    """
    size = dims.pipeline_model_parallel_size
    first, last = sorted((stage, (stage + 1) % size))
    ((_, stride),) = _axes(dims, GroupKind.PP)
    begin, distance = first * stride, (last - first) * stride
    if distance == 0:
        return 0
    # ``stride`` neighbouring ranks have their peers as far away, repeated along the axes that
    # vary more slowly than the pipeline's
    for level, devices in enumerate(group_sizes[:-1]):
        starts = _starts(size * stride, devices, dims.world_size)
        if all((at + begin) % devices + stride - 1 + distance < devices for at in starts):
            return level
    return len(group_sizes) - 1


def _axes(dims: ParallelDims, kind: GroupKind) -> _Axes:
    """Axes along which the members of a group differ."""
    if kind.startswith("e"):
        inner = {"etp": dims.expert_tensor_parallel_size, "ep": dims.expert_model_parallel_size}
        replicas = {"edp": dims.expert_data_parallel_size}
    else:
        inner = {"tp": dims.tensor_model_parallel_size, "cp": dims.context_parallel_size}
        replicas = {"dp": dims.data_parallel_size}
    stages = {"pp": dims.pipeline_model_parallel_size}
    inside = dims.rank_order is RankOrder.TP_CP_EP_PP_DP
    sizes = {**inner, **stages, **replicas} if inside else {**inner, **replicas, **stages}
    strides = accumulate(sizes.values(), mul, initial=1)
    axes = zip(sizes.items(), strides, strict=False)  # the last stride is the number of ranks
    return tuple((size, stride) for (name, size), stride in axes if name in kind.split("-"))


def _merged(axes: _Axes) -> _Axes:
    """Axes without those of size 1, neighbouring ones joined to one progression."""
    merged: list[tuple[int, int]] = []
    for size, stride in axes:
        if merged and prod(merged[-1]) == stride:
            merged[-1] = (merged[-1][0] * size, merged[-1][1])
        elif size > 1:
            merged.append((size, stride))
    return tuple(merged)


def _fewest_members(axes: _Axes, devices: int, world_size: int) -> int:
    """Fewest members of any group with these axes that share one block of ``devices`` devices."""
    members = 1
    for position, (size, stride) in enumerate(axes):
        if stride >= devices or (position > 0 and devices % stride):
            break  # in the second case the block may cut an inner run: count one run only
        members *= _fewest_of_axis(size, stride, devices, world_size)
    return members


def _fewest_of_axis(size: int, stride: int, devices: int, world_size: int) -> int:
    """Fewest members of a progression of ranks that share one block of ``devices`` devices.

    The progressions start at ``offset + k * size * stride`` with ``offset < stride``. For each
    ``k`` the first block is emptiest at the last offset, and the last block at offset 0.
    """
    span = size * stride
    if size == 1 or stride >= devices:
        return 1
    if devices % span == 0:
        return size
    fewest = min(size, devices // stride)
    for start in _starts(span, devices, world_size):
        end = (start + (size - 1) * stride) % devices
        left_in_first = devices - (start + stride - 1) if start + stride <= devices else 1
        into_last = 0 if end + stride > devices else end
        fewest = min(fewest, -(-left_in_first // stride), into_last // stride + 1)
    return fewest


def _starts(step: int, devices: int, world_size: int) -> Iterator[int]:
    """Places inside a block at which groups ``step`` ranks apart start; they repeat."""
    count = min(max(1, world_size // step), devices // gcd(step, devices))
    return (k * step % devices for k in range(count))
