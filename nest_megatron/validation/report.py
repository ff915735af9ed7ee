"""Scores of a file of measurements, by source and in all."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nest_megatron.validation.outcome import RowOutcome
from nest_megatron.validation.rows import RowKind
from nest_megatron.validation.scores import ErrorScores, RankScores, error_scores, rank_scores

#: Kinds whose error is that of memory.
_MEMORY_KINDS = frozenset({RowKind.MEMORY_PEAK, RowKind.MEMORY_GOLDEN})


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """How well the rows of one source, or of a file, are predicted.

    Args:
        refused: rows without a prediction, by reason.
        errors: of what the file is about: seconds, or bytes in a file of memory.
        memory: errors of memory where a file of throughput has it.
        groups: ranking of the layouts of each job that has at least two rows.
        out_of_memory: runs that ended for want of memory, and how many of them we call infeasible.
        ran: runs that ran, and how many of them we call infeasible.
    """

    source: str
    rows: int
    predicted: int
    refused: Mapping[str, int]
    errors: ErrorScores | None
    memory: ErrorScores | None
    groups: tuple[RankScores, ...]
    out_of_memory: tuple[int, int]
    ran: tuple[int, int]

    @property
    def spearman_mean(self) -> float | None:
        """Mean rank correlation over the groups that have one."""
        known = [group.spearman for group in self.groups if group.spearman is not None]
        return statistics.fmean(known) if known else None

    @property
    def regret_mean_pct(self) -> float | None:
        """Mean over the groups of how much slower our choice was than the best."""
        return statistics.fmean(g.regret_pct for g in self.groups) if self.groups else None

    @property
    def regret_max_pct(self) -> float | None:
        """The worst group."""
        return max((g.regret_pct for g in self.groups), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileScores:
    """Scores of one file."""

    path: Path
    kind: RowKind
    sources: tuple[Scores, ...]
    total: Scores


def file_scores(path: Path, kind: RowKind, outcomes: Sequence[RowOutcome]) -> FileScores:
    """Score a file by source, in the order in which sources appear, and in all."""
    by_source: dict[str, list[RowOutcome]] = defaultdict(list)
    for outcome in outcomes:
        by_source[outcome.source].append(outcome)
    return FileScores(
        path=path,
        kind=kind,
        sources=tuple(scores(name, kind, rows) for name, rows in by_source.items()),
        total=scores("total", kind, outcomes),
    )


def scores(source: str, kind: RowKind, outcomes: Sequence[RowOutcome]) -> Scores:
    """Score some rows of one kind."""
    is_memory = kind in _MEMORY_KINDS
    times = [o.time for o in outcomes if o.time is not None]
    memory = [o.memory for o in outcomes if o.memory is not None]
    return Scores(
        source=source,
        rows=len(outcomes),
        predicted=sum(not o.refused for o in outcomes),
        refused=dict(Counter(o.refused for o in outcomes if o.refused).most_common()),
        errors=error_scores(memory if is_memory else times),
        memory=None if is_memory else error_scores(memory),
        groups=group_scores(outcomes) if kind is RowKind.THROUGHPUT else (),
        out_of_memory=_infeasible(o for o in outcomes if o.out_of_memory),
        ran=_infeasible(o for o in outcomes if not o.out_of_memory),
    )


def group_scores(outcomes: Iterable[RowOutcome]) -> tuple[RankScores, ...]:
    """Ranking of each job that was measured in at least two layouts."""
    groups: dict[tuple[str, ...], list[tuple[float, float]]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.time is not None:
            groups[outcome.group].append(outcome.time)
    return tuple(rank_scores(pairs) for pairs in groups.values() if len(pairs) > 1)


def _infeasible(outcomes: Iterable[RowOutcome]) -> tuple[int, int]:
    """Rows that have a verdict, and those of them that are called infeasible."""
    verdicts = [outcome.fits for outcome in outcomes if outcome.fits is not None]
    return len(verdicts), verdicts.count(False)


def as_document(file: FileScores) -> dict[str, object]:
    """For ``--json``."""
    return {
        "file": str(file.path),
        "kind": str(file.kind),
        "sources": [_document(each) for each in file.sources],
        "total": _document(file.total),
    }


def _document(each: Scores) -> dict[str, object]:
    return {
        "source": each.source,
        "rows": each.rows,
        "predicted": each.predicted,
        "refused": dict(each.refused),
        **_errors(each.errors),
        "groups": len(each.groups),
        "spearman_mean": each.spearman_mean,
        "regret_mean_pct": each.regret_mean_pct,
        "regret_max_pct": each.regret_max_pct,
        "memory": None if each.memory is None else _errors(each.memory),
        "out_of_memory": {"rows": each.out_of_memory[0], "infeasible": each.out_of_memory[1]},
        "ran": {"rows": each.ran[0], "infeasible": each.ran[1]},
    }


def _errors(errors: ErrorScores | None) -> dict[str, float | None]:
    return {
        "mape_pct": errors.mape_pct if errors else None,
        "median_signed_pct": errors.median_signed_pct if errors else None,
        "p90_abs_pct": errors.p90_abs_pct if errors else None,
    }
