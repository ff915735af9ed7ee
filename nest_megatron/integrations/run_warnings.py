"""What a run did unlike its prediction, and which ranks are slower than others that do the same.

A rank's own forward and backward passes hold no waiting for other pipeline ranks, but they do hold
waiting for the ranks of its tensor-, context- and expert-parallel groups: all of these seem as slow
as the slowest, so they are compared and named together. Under FSDP a pass waits for all replicas,
and no rank can be told from another.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from nest_megatron.history.records import RankMeasured, RunRecord
from nest_megatron.integrations.megatron_lm.same_job import named
from nest_megatron.layout.dims import ParallelDims
from nest_megatron.layout.rank_order import GroupKind, group_of_rank
from nest_megatron.units import Seconds, format_gib, format_seconds

#: From which share on ranks are slow: against replicas of theirs, and against other pipeline ranks,
#: whose layers are others, so that their prices can be wrong as well.
_SLOWER, _SLOWER_THAN_PRICED = 0.05, 0.15
#: From which share on memory is above the prediction, and passes are off it.
_MEMORY, _PASSES = 0.10, 0.10
#: From which share on tokens are spread less evenly over experts than planned for.
_IMBALANCE = 0.10
#: Steps that have to count before one rank is called slower than another.
_FEWEST_STEPS = 4
_WAITING = (GroupKind.TP, GroupKind.CP, GroupKind.ETP, GroupKind.EP)


def run_warnings(run: RunRecord, parts: Mapping[int, RankMeasured]) -> tuple[str, ...]:
    """One sentence each."""
    hosts = {rank: part.host for rank, part in parts.items()}
    warned = [*_missing(run, parts), *_memory(run, hosts), *_experts(run)]
    if not run.grid.zero.is_fsdp:
        groups = _groups(run, parts)
        warned += [*_slow(groups, hosts), *_passes(run, groups)]
    return tuple(warned)


def _missing(run: RunRecord, parts: Mapping[int, RankMeasured]) -> Iterator[str]:
    missing = [rank for rank in range(run.grid.dims.world_size) if rank not in parts]
    if missing:
        yield f"nothing was heard from {named(missing, dict(enumerate(run.hosts)))}"


def _memory(run: RunRecord, hosts: Mapping[int, str]) -> Iterator[str]:
    """The rank that is farthest above its prediction, and how many others are above theirs."""
    assert run.measured is not None
    predicted, dims = run.predicted.peak_memory_bytes, run.grid.dims
    peaks = {rank: peak for rank, peak in enumerate(run.measured.peak_memory_bytes) if peak}
    ratios = {rank: peak / predicted[pipeline_rank(dims, rank)] for rank, peak in peaks.items()}
    over = {rank: ratio for rank, ratio in ratios.items() if ratio > 1 + _MEMORY}
    if over:
        worst = max(over, key=over.__getitem__)
        peak, ratio = peaks[worst], over[worst]
        others = f"; so are {len(over)} ranks in all" if len(over) > 1 else ""
        yield (
            f"peak memory of {named([worst], hosts)} is {_percent(ratio)} above the "
            f"prediction ({format_gib(peak)}, predicted {format_gib(peak / ratio)}){others}"
        )


def _experts(run: RunRecord) -> Iterator[str]:
    """Whether tokens are spread less evenly over expert-parallel ranks than was planned for."""
    assert run.measured is not None
    found, planned = run.measured.expert_imbalance, run.predicted.expert_imbalance
    if found is not None and planned is not None and found > (1 + _IMBALANCE) * planned:
        yield (
            f"experts are {found:.2f}x imbalanced (planned for {planned:.2f}x): the busiest "
            "expert-parallel rank has that many times the mean of tokens in the watched steps; "
            f"cost.expert_imbalance={found:.2f} plans for it"
        )


class _Group(NamedTuple):
    """Ranks that wait for each other inside their passes.

    Args:
        least_s, busy_s, most_s: quartiles of the work of a step, over ranks and steps.
        predicted_s: the work of a step on their pipeline rank.
    """

    ranks: tuple[int, ...]
    pipeline_rank: int
    least_s: Seconds
    busy_s: Seconds
    most_s: Seconds
    predicted_s: Seconds

    @property
    def ratio(self) -> float:
        """Measured over predicted work."""
        return self.busy_s / self.predicted_s


def pipeline_rank(dims: ParallelDims, rank: int) -> int:
    """The pipeline rank of a global rank."""
    return group_of_rank(dims, GroupKind.PP, rank).index(rank)


def _groups(run: RunRecord, parts: Mapping[int, RankMeasured]) -> list[_Group]:
    dims, found, seen = run.grid.dims, [], set[int]()
    for rank in range(dims.world_size):
        if rank in seen:
            continue
        ranks = _waiting_for(dims, rank)
        seen |= ranks
        known = [parts[r].counted_busy_s for r in sorted(ranks) if r in parts]
        busy = [each for of_rank in known for each in of_rank]
        stage = pipeline_rank(dims, rank)
        predicted_s = run.predicted.busy_s[stage]
        if max(map(len, known), default=0) >= _FEWEST_STEPS and predicted_s > 0:
            least, middle, most = statistics.quantiles(busy, n=4, method="inclusive")
            found.append(_Group(tuple(sorted(ranks)), stage, least, middle, most, predicted_s))
    return found


def _waiting_for(dims: ParallelDims, rank: int) -> set[int]:
    """Ranks that a rank waits for inside its passes, those that they wait for, and itself."""
    found, ahead = set[int](), [rank]
    while ahead:
        if (each := ahead.pop()) not in found:
            found.add(each)
            ahead += [other for kind in _WAITING for other in group_of_rank(dims, kind, each)]
    return found


def _slow(groups: list[_Group], hosts: Mapping[int, str]) -> Iterator[str]:
    for group in groups:
        others = [each for each in groups if each is not group]
        replicas = [each for each in others if each.pipeline_rank == group.pipeline_rank]
        if replicas:
            usual = statistics.median(each.busy_s for each in replicas)
            most = statistics.median(each.most_s for each in replicas)
            if group.least_s > max(most, (1 + _SLOWER) * usual):
                yield (
                    f"{_who(group, hosts)}: forward and backward passes take "
                    f"{_percent(group.busy_s / usual)} longer than those of replicas "
                    f"({format_seconds(group.busy_s)} a step, {format_seconds(usual)}): a slow "
                    "GPU or host, or uneven data"
                )
        elif others:
            usual = statistics.median(each.ratio for each in others)
            if group.least_s / group.predicted_s > (1 + _SLOWER_THAN_PRICED) * usual:
                yield (
                    f"{_who(group, hosts)}: forward and backward passes take "
                    f"{format_seconds(group.busy_s)} a step, {_percent(group.ratio / usual)} more "
                    "than predicted beside the other pipeline ranks: a slow GPU or host, or layers "
                    "that are predicted too fast"
                )


def _passes(run: RunRecord, groups: list[_Group]) -> Iterator[str]:
    """Whether a step is off because of its passes, or of what lies between them."""
    measured = run.measured
    if not groups or measured is None:
        return
    busiest = max(groups, key=lambda group: group.busy_s)
    predicted = max(group.predicted_s for group in groups)
    passes = busiest.busy_s / predicted - 1
    rest_s, predicted_rest_s = measured.step_s - busiest.busy_s, run.predicted.step_s - predicted
    if abs(passes) > _PASSES:
        yield (
            f"forward and backward passes take {format_seconds(busiest.busy_s)} a step on the "
            f"busiest pipeline rank (predicted {format_seconds(predicted)}, {100 * passes:+.0f} %),"
            f" everything else {format_seconds(max(0.0, rest_s))} "
            f"(predicted {format_seconds(max(0.0, predicted_rest_s))})"
        )


def _who(group: _Group, hosts: Mapping[int, str]) -> str:
    return f"{named(group.ranks, hosts)}, pipeline rank {group.pipeline_rank}"


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):.0f} %"
