"""Where each rank lies in the grid, who talks to whom, and through which network level.

Megatron lays two grids over the same ranks: the dense one (tp, cp, dp, pp) and the expert one
(etp, ep, expert dp, pp). In both the leftmost dimension of the order varies fastest, so every group
is an arithmetic progression of ranks, or two nested ones. This module uses that: whole groups are
listed for tests and for reports, and what a search asks thousands of times (how many members of a
group share a node, a leaf, a pod) is computed from sizes and strides alone.

Source: ``megatron.core.parallel_state.RankGenerator`` and ``initialize_model_parallel`` (0.16.1).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import gcd

from nest_megatron.names import Name
from nest_megatron.parallel.dims import ParallelDims, RankOrder


class GroupKind(Name):
    """A kind of process group, named by the grid dimensions that its members differ in."""

    TP = "tp"
    CP = "cp"
    DP = "dp"
    DP_CP = "dp-cp"
    PP = "pp"
    MP = "tp-pp"
    TP_CP = "tp-cp"
    TP_DP = "tp-dp"
    TP_DP_CP = "tp-dp-cp"
    EMBEDDING = "embedding"
    ETP = "etp"
    EP = "ep"
    EDP = "edp"
    ETP_EP = "etp-ep"
    ETP_EP_PP = "etp-ep-pp"


_EXPERT_KINDS = frozenset(
    {GroupKind.ETP, GroupKind.EP, GroupKind.EDP, GroupKind.ETP_EP, GroupKind.ETP_EP_PP}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCoordinates:
    """Position of one rank in the dense and in the expert grid."""

    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Axis:
    """One dimension of a grid: ``size`` ranks, ``stride`` apart."""

    name: str
    size: int
    stride: int


def coordinates(dims: ParallelDims, rank: int) -> RankCoordinates:
    """Place of a rank in both grids.

    >>> coordinates(ParallelDims(tensor_model_parallel_size=4, pipeline_model_parallel_size=4,
    ...                          data_parallel_size=4, expert_model_parallel_size=8), 37).pp
    2
    >>> coordinates(ParallelDims(tensor_model_parallel_size=4, pipeline_model_parallel_size=8,
    ...                          data_parallel_size=2, rank_order=RankOrder.TP_CP_EP_PP_DP), 16).pp
    4
    """
    axes = (*_expert_axes(dims), *_dense_axes(dims))  # the dense grid's pipeline rank is the rank's
    place = {axis.name: rank // axis.stride % axis.size for axis in axes}
    return RankCoordinates(**place)


def group_of_rank(dims: ParallelDims, kind: GroupKind, rank: int) -> tuple[int, ...]:
    """Ranks of the group of one kind that a rank belongs to, in Megatron's order.

    Empty where the rank is in no such group (the embedding group of a middle pipeline stage).
    """
    base, members = rank, _member_axes(dims, kind)
    for axis in members:
        base -= rank // axis.stride % axis.size * axis.stride
    if kind is GroupKind.EMBEDDING:
        pipeline = group_of_rank(dims, GroupKind.PP, rank)
        ends = (pipeline[0], pipeline[-1])[: min(2, len(pipeline))]
        return ends if rank in ends else ()
    return tuple(_progression(base, members))


def rank_groups(dims: ParallelDims, kind: GroupKind) -> tuple[tuple[int, ...], ...]:
    """All groups of one kind, in the order in which Megatron creates them."""
    if kind is GroupKind.EMBEDDING:
        pipelines = rank_groups(dims, GroupKind.PP)
        return tuple((p[0], p[-1])[: min(2, len(p))] for p in pipelines)
    members = _member_axes(dims, kind)
    names = {axis.name for axis in members}
    others = [axis for axis in _axes_of(dims, kind) if axis.name not in names]
    return tuple(tuple(_progression(base, members)) for base in _progression(0, others))


def group_size(dims: ParallelDims, kind: GroupKind) -> int:
    """Number of members of a group."""
    size = 1
    for axis in _member_axes(dims, kind):
        size *= axis.size
    return size


@lru_cache(maxsize=1 << 16)
def group_shape(
    dims: ParallelDims, kind: GroupKind, group_sizes: tuple[int, ...]
) -> tuple[int, ...]:
    """How the members of a group spread over the network levels, as fan-outs.

    Entry 0 is the number of members inside one level-0 group, entry ``l`` the number of level
    ``l - 1`` groups that they take inside one level-``l`` group; the product is the group's size.
    Of all groups of the kind, and of all members of each, the one with the fewest neighbours on the
    inner levels counts, because the slowest member sets a collective's time.

    Where groups and levels do not align (three GPUs of a group over nodes of eight) no whole
    fan-outs exist. Then each level takes the guaranteed number of members rounded down, and the
    outermost takes the rest rounded up: the product is at least the group's size, and no member is
    put nearer than it is.

    Args:
        group_sizes: devices in one group of each level, innermost first; device ``r`` lies in group
            ``r // group_sizes[l]``. The last level takes in everything.

    >>> dims = ParallelDims(tensor_model_parallel_size=4, data_parallel_size=16)
    >>> group_shape(dims, GroupKind.DP, (8, 32, 64))
    (2, 4, 2)
    """
    axes = _merged(_member_axes(dims, kind))
    size = group_size(dims, kind)
    shape: list[int] = []
    placed = 1
    for devices in group_sizes[:-1]:
        fewest = _fewest_members(dims, kind, axes, devices)
        fan_out = max(1, min(fewest, size) // placed)
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

    The next rank of the last one is rank 0 (the link that virtual stages add).
    """
    stride, size = _pipeline_axis(dims).stride, dims.pipeline_model_parallel_size
    first = min(stage, (stage + 1) % size)
    distance = stride * (abs((stage + 1) % size - stage))
    return _pair_level(dims, first * stride, distance, group_sizes)


@lru_cache(maxsize=1 << 16)
def embedding_group_level(dims: ParallelDims, group_sizes: tuple[int, ...]) -> int:
    """Network level between the first and the last pipeline rank, which share tied embeddings."""
    distance = _pipeline_axis(dims).stride * (dims.pipeline_model_parallel_size - 1)
    return _pair_level(dims, 0, distance, group_sizes)


def _dense_axes(dims: ParallelDims) -> tuple[_Axis, ...]:
    tp = ("tp", dims.tensor_model_parallel_size)
    cp = ("cp", dims.context_parallel_size)
    dp = ("dp", dims.data_parallel_size)
    return _laid_out(dims, (tp, cp), dp)


def _expert_axes(dims: ParallelDims) -> tuple[_Axis, ...]:
    etp = ("etp", dims.expert_tensor_parallel_size)
    ep = ("ep", dims.expert_model_parallel_size)
    edp = ("edp", dims.expert_data_parallel_size)
    return _laid_out(dims, (etp, ep), edp)


def _laid_out(
    dims: ParallelDims, inner: tuple[tuple[str, int], ...], dp: tuple[str, int]
) -> tuple[_Axis, ...]:
    """Axes of a grid with their strides, fastest first."""
    pp = ("pp", dims.pipeline_model_parallel_size)
    outer = (dp, pp) if dims.rank_order is RankOrder.TP_CP_EP_DP_PP else (pp, dp)
    axes: list[_Axis] = []
    stride = 1
    for name, size in (*inner, *outer):
        axes.append(_Axis(name=name, size=size, stride=stride))
        stride *= size
    return tuple(axes)


def _axes_of(dims: ParallelDims, kind: GroupKind) -> tuple[_Axis, ...]:
    return _expert_axes(dims) if kind in _EXPERT_KINDS else _dense_axes(dims)


def _pipeline_axis(dims: ParallelDims) -> _Axis:
    return next(axis for axis in _dense_axes(dims) if axis.name == "pp")


def _member_axes(dims: ParallelDims, kind: GroupKind) -> tuple[_Axis, ...]:
    """Axes along which the members of a group differ, fastest first."""
    if kind is GroupKind.EMBEDDING:
        pp = _pipeline_axis(dims)
        return (_Axis(name="pp", size=min(2, pp.size), stride=max(1, pp.size - 1) * pp.stride),)
    names = kind.value.split("-")
    return tuple(axis for axis in _axes_of(dims, kind) if axis.name in names)


def _progression(base: int, axes: tuple[_Axis, ...] | list[_Axis]) -> Iterator[int]:
    """Ranks reached from a base along some axes, the first axis fastest."""
    for steps in product(*(range(axis.size) for axis in reversed(axes))):
        yield base + sum(i * axis.stride for i, axis in zip(steps, reversed(axes), strict=True))


def _merged(axes: tuple[_Axis, ...]) -> tuple[_Axis, ...]:
    """Axes without those of size 1, neighbouring ones joined to one progression."""
    merged: list[_Axis] = []
    for axis in axes:
        if axis.size == 1:
            continue
        if merged and merged[-1].stride * merged[-1].size == axis.stride:
            last = merged.pop()
            merged.append(_Axis(name=last.name, size=last.size * axis.size, stride=last.stride))
        else:
            merged.append(axis)
    return tuple(merged)


def _fewest_members(
    dims: ParallelDims, kind: GroupKind, axes: tuple[_Axis, ...], devices: int
) -> int:
    """Fewest members of any group of the kind that share one block of ``devices`` devices."""
    if kind is GroupKind.EMBEDDING:
        return 2 if _pair_level(dims, 0, axes[0].stride if axes else 0, (devices, 0)) == 0 else 1
    members = 1
    for position, axis in enumerate(axes):
        if axis.stride >= devices or (position > 0 and devices % axis.stride):
            break  # in the second case the block may cut an inner run: count one run only
        members *= _fewest_of_axis(axis.size, axis.stride, devices, dims.world_size)
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
        fewest = min(fewest, _members_at_ends(start, size, stride, devices))
    return fewest


def _members_at_ends(start: int, size: int, stride: int, devices: int) -> int:
    """Fewest members in the first or the last block, over the offsets of one start."""
    end = (start + (size - 1) * stride) % devices
    left_in_first = devices - (start + stride - 1) if start + stride <= devices else 1
    into_last = 0 if end + stride > devices else end
    return min(size, -(-left_in_first // stride), into_last // stride + 1)


def _starts(step: int, devices: int, world_size: int) -> Iterator[int]:
    """Places inside a block at which groups ``step`` ranks apart start; they repeat."""
    count = min(max(1, world_size // step), devices // gcd(step, devices))
    return (k * step % devices for k in range(count))


def _pair_level(dims: ParallelDims, first: int, distance: int, group_sizes: tuple[int, ...]) -> int:
    """Innermost level whose blocks hold every pair ``(first + x, first + x + distance)``.

    ``x`` runs over the ranks of one pipeline rank: ``stride`` neighbours, repeated along the axes
    that vary more slowly than the pipeline's.
    """
    if distance == 0:
        return 0
    axis = _pipeline_axis(dims)
    for level, devices in enumerate(group_sizes[:-1]):
        starts = _starts(axis.size * axis.stride, devices, dims.world_size)
        if all(
            (start + first) % devices + axis.stride - 1 + distance < devices for start in starts
        ):
            return level
    return len(group_sizes) - 1
