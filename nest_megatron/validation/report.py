"""Scores of files of measurements: by source, in all, and by regime, each on both bases."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.planner.choice import Candidate
from nest_megatron.validation.judging import Certainty, ChoiceScores, choice_scores, choice_summary
from nest_megatron.validation.margin import RiskBin, samples, whole_risk
from nest_megatron.validation.outcome import Basis, Judged, RowOutcome
from nest_megatron.validation.regimes import REGIMES, RegimeName
from nest_megatron.validation.rows import RowKind
from nest_megatron.validation.scores import (
    Coverage,
    ErrorScores,
    RankScores,
    coverage_of,
    error_scores,
    rank_scores,
)

#: Kinds whose error is that of memory.
_MEMORY_KINDS = frozenset({RowKind.MEMORY_PEAK, RowKind.MEMORY_GOLDEN})


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """How well some rows are predicted, on one basis.

    Args:
        refused: rows without a prediction, by reason.
        errors: of what the file is about: seconds, or bytes in a file of memory.
        memory: errors of memory where a file of throughput has it.
        coverage: of runs with a predicted time, shares inside the 50 and the 90 % interval.
        groups: ranking of the layouts of each job that was measured in at least two.
        out_of_memory: runs that ended for want of memory, and how many of them we call infeasible.
        ran: runs that ran and are predicted, and how many of them we call infeasible.
    """

    rows: int
    predicted: int
    refused: Mapping[str, int]
    errors: ErrorScores | None
    memory: ErrorScores | None
    coverage: Coverage | None
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

    @property
    def pairs_in_order_pct(self) -> float | None:
        """Share of all pairs of layouts of one job that are predicted in their order."""
        pairs = sum(group.pairs for group in self.groups)
        right = sum(group.pairs_in_order for group in self.groups)
        return 100.0 * right / pairs if pairs else None


@dataclass(frozen=True, slots=True, kw_only=True)
class BothScores:
    """The same rows on both bases.

    Args:
        name: a source, ``total``, or a regime.
    """

    name: str
    as_stated: Scores
    as_planned: Scores

    def on(self, basis: Basis) -> Scores:
        """The scores of one basis."""
        return self.as_stated if basis is Basis.AS_STATED else self.as_planned


@dataclass(frozen=True, slots=True, kw_only=True)
class FileScores:
    """Scores of one file."""

    path: Path
    kind: RowKind
    sources: tuple[BothScores, ...]
    total: BothScores
    regimes: Mapping[RegimeName, BothScores]


def file_scores(judged: Judged) -> FileScores:
    """Score a file by source, in the order in which sources appear, in all, and by regime."""
    kind = judged.file.kind
    names = dict.fromkeys(each.source for each in judged.as_stated)
    return FileScores(
        path=judged.file.path,
        kind=kind,
        sources=tuple(
            both_scores(name, kind, [judged], functools.partial(_is_of, name)) for name in names
        ),
        total=both_scores("total", kind, [judged], lambda _: True),
        regimes=regime_scores(kind, [judged]),
    )


def _is_of(source: str, each: RowOutcome) -> bool:
    return each.source == source


def regime_scores(kind: RowKind, files: Iterable[Judged]) -> Mapping[RegimeName, BothScores]:
    """Scores of every regime over all rows of one kind; without rows, of none.

    Collectives belong to no regime.
    """
    members = [file for file in files if file.file.kind is kind is not RowKind.COLLECTIVES]
    return {each.name: both_scores(each.name, kind, members, each.holds) for each in REGIMES}


def both_scores(
    name: str, kind: RowKind, files: Iterable[Judged], holds: Callable[[RowOutcome], bool]
) -> BothScores:
    """Score the rows of which something holds as they are stated."""
    pairs = [
        pair
        for file in files
        for pair in zip(file.as_stated, file.as_planned, strict=True)
        if holds(pair[0])
    ]
    return BothScores(
        name=name,
        as_stated=scores(kind, [stated for stated, _ in pairs]),
        as_planned=scores(kind, [planned for _, planned in pairs]),
    )


def scores(kind: RowKind, outcomes: Sequence[RowOutcome]) -> Scores:
    """Score some rows of one kind."""
    is_memory = kind in _MEMORY_KINDS
    times = [o.time for o in outcomes if o.time is not None]
    memory = [o.memory for o in outcomes if o.memory is not None]
    off = [o.standardized_error for o in outcomes if o.standardized_error is not None]
    return Scores(
        rows=len(outcomes),
        predicted=sum(not o.refused for o in outcomes),
        refused=dict(Counter(o.refused for o in outcomes if o.refused).most_common()),
        errors=error_scores(memory if is_memory else times),
        memory=None if is_memory else error_scores(memory),
        coverage=coverage_of(off) if off else None,
        groups=group_scores(outcomes) if kind is RowKind.THROUGHPUT else (),
        out_of_memory=_infeasible(o for o in outcomes if o.out_of_memory),
        ran=_infeasible(o for o in outcomes if o.ran),
    )


def group_scores(outcomes: Iterable[RowOutcome]) -> tuple[RankScores, ...]:
    """Ranking of each job that was measured in at least two layouts."""
    return tuple(each.scores for each in measured_jobs(outcomes))


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredJob:
    """A job that was measured in at least two layouts.

    Args:
        rows: all its runs.
        layouts: predicted and measured seconds, by the layouts' columns.
    """

    rows: tuple[RowOutcome, ...]
    layouts: Mapping[tuple[str, ...], tuple[float, float]]

    @property
    def row(self) -> RowOutcome:
        """Its first row."""
        return self.rows[0]

    @property
    def candidates(self) -> list[tuple[Candidate, float]]:
        """Each layout at its fastest prediction, with its fastest measured step."""
        found: dict[tuple[str, ...], Candidate] = {}
        for each in self.rows:
            known = found.get(each.layout)
            step = each.candidate
            if step and (known is None or step.solved.iteration < known.solved.iteration):
                found[each.layout] = step
        return [(plan, self.layouts[layout][1]) for layout, plan in found.items()]

    @property
    def scores(self) -> RankScores:
        """How well its layouts are ranked."""
        return rank_scores(list(self.layouts.values()))


def measured_jobs(outcomes: Iterable[RowOutcome]) -> tuple[MeasuredJob, ...]:
    """The jobs that were measured in at least two layouts.

    A layout that was measured several times, or with settings that no column has, counts once, by
    its fastest run and its fastest prediction: who chooses a layout runs it at its best.
    """
    groups: dict[tuple[str, ...], list[RowOutcome]] = defaultdict(list)
    for each in outcomes:
        if each.time is not None:
            groups[each.group].append(each)
    jobs = (MeasuredJob(rows=tuple(rows), layouts=_layouts(rows)) for rows in groups.values())
    return tuple(job for job in jobs if len(job.layouts) > 1)


def _layouts(rows: Iterable[RowOutcome]) -> dict[tuple[str, ...], tuple[float, float]]:
    found: dict[tuple[str, ...], tuple[float, float]] = {}
    for each in rows:
        if each.time is not None:
            predicted, measured = each.time
            known = found.get(each.layout, each.time)
            found[each.layout] = min(predicted, known[0]), min(measured, known[1])
    return found


def _infeasible(outcomes: Iterable[RowOutcome]) -> tuple[int, int]:
    """Rows that have a verdict, and those of them that are called infeasible."""
    verdicts = [outcome.fits for outcome in outcomes if outcome.fits is not None]
    return len(verdicts), verdicts.count(False)


def as_document(files: Sequence[Judged]) -> dict[str, object]:
    """For ``--json``: every file, and the regimes over all files of throughput."""
    return {
        "files": [_file_document(file_scores(file)) for file in files],
        "regimes": _regimes(regime_scores(RowKind.THROUGHPUT, files)),
        "certainty": {
            name: {str(basis): dataclasses.asdict(found) for basis, found in each.items()}
            for name, each in certainty_by_regime(files).items()
        },
        "memory_risk": {
            name: dataclasses.asdict(each) for name, each in risks_by_regime(files).items()
        },
        "regime_definitions": {str(each.name): each.definition for each in REGIMES},
    }


def certainty_by_regime(files: Iterable[Judged]) -> dict[str, dict[Basis, Certainty]]:
    """Intervals of all runs and choices among measured layouts, by regime and over all."""
    pairs = [
        pair
        for file in files
        if file.file.kind is RowKind.THROUGHPUT
        for pair in zip(file.as_stated, file.as_planned, strict=True)
    ]
    holding = {str(each.name): [p for p in pairs if each.holds(p[0])] for each in REGIMES}
    known: dict[tuple[int, ...], ChoiceScores] = {}
    return {
        name: {
            Basis.AS_STATED: _certainty([stated for stated, _ in held], known),
            Basis.AS_PLANNED: _certainty([planned for _, planned in held], known),
        }
        for name, held in {**holding, "all": pairs}.items()
    }


def _certainty(
    outcomes: Sequence[RowOutcome], known: dict[tuple[int, ...], ChoiceScores]
) -> Certainty:
    """Intervals and choices of some runs.

    Args:
        known: scores of jobs by the identity of their layouts, as most regimes share their jobs.
    """
    off = [o.standardized_error for o in outcomes if o.standardized_error is not None]
    scored = []
    for job in measured_jobs(outcomes):
        layouts = job.candidates
        key = tuple(id(candidate) for candidate, _ in layouts)
        if len(layouts) > 1:
            if key not in known:
                known[key] = choice_scores(layouts)
            scored.append(known[key])
    return Certainty(coverage=coverage_of(off) if off else None, choice=choice_summary(scored))


def risks_by_regime(files: Iterable[Judged]) -> dict[str, RiskBin]:
    """How many runs were expected to run out of memory, and how many did.

    Regimes are of runs that say what they recomputed; what the others are predicted with is a
    guess, which they show to be wrong where they were expected to run out.
    """
    runs = [o for each in files if each.file.kind is RowKind.THROUGHPUT for o in each.as_stated]
    holding = {str(each.name): [o for o in runs if each.holds(o)] for each in REGIMES}
    reserve = CostSettings().memory_reserve_bytes
    risks = {
        name: whole_risk(samples(held, reserve)) for name, held in {**holding, "all": runs}.items()
    }
    risks["recompute not stated"] = whole_risk(samples(runs, reserve, stated=False))
    return {name: each for name, each in risks.items() if each.runs}


def _file_document(file: FileScores) -> dict[str, object]:
    return {
        "file": str(file.path),
        "kind": str(file.kind),
        "sources": [_document(each) for each in file.sources],
        "total": _document(file.total),
        "regimes": _regimes(file.regimes),
    }


def _regimes(regimes: Mapping[RegimeName, BothScores]) -> dict[str, object]:
    return {str(name): _bases(each) for name, each in regimes.items()}


def _document(each: BothScores) -> dict[str, object]:
    """One source or total; what is not inside a basis is as stated."""
    stated = each.as_stated
    return {
        "source": each.name,
        "rows": stated.rows,
        "predicted": stated.predicted,
        "refused": dict(stated.refused),
        **_errors(stated.errors),
        "groups": len(stated.groups),
        "spearman_mean": stated.spearman_mean,
        "regret_mean_pct": stated.regret_mean_pct,
        "regret_max_pct": stated.regret_max_pct,
        "memory": None if stated.memory is None else _errors(stated.memory),
        "out_of_memory": _verdicts(stated.out_of_memory),
        "ran": _verdicts(stated.ran),
        **_bases(each),
    }


def _bases(each: BothScores) -> dict[str, object]:
    return {str(basis): _basis_document(each.on(basis)) for basis in Basis}


def _basis_document(each: Scores) -> dict[str, float | None]:
    """The figures of one basis; docs/accuracy.md says what each one counts."""
    return {
        "rows": each.rows,
        "predicted": each.predicted,
        "refused": each.rows - each.predicted,
        **_errors(each.errors),
        "coverage_50_pct": each.coverage.within_50_pct if each.coverage else None,
        "coverage_90_pct": each.coverage.within_90_pct if each.coverage else None,
        "ran_called_infeasible": each.ran[1],
        "ran": each.ran[0],
        "oom_caught": each.out_of_memory[1],
        "oom": each.out_of_memory[0],
        "groups": len(each.groups),
        "regret_mean_pct": each.regret_mean_pct,
        "regret_max_pct": each.regret_max_pct,
        "pairs_in_order_pct": each.pairs_in_order_pct,
    }


def _verdicts(counts: tuple[int, int]) -> dict[str, int]:
    return {"rows": counts[0], "infeasible": counts[1]}


def _errors(errors: ErrorScores | None) -> dict[str, float | None]:
    return {
        "mape_pct": errors.mape_pct if errors else None,
        "median_signed_pct": errors.median_signed_pct if errors else None,
        "p90_abs_pct": errors.p90_abs_pct if errors else None,
    }
