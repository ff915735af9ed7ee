"""Scores of files of measurements: by source, in all, and by regime, each on both bases."""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from nest_megatron.plain import frozen
from nest_megatron.planner.choice import Candidate
from nest_megatron.validation.outcome import REGIMES, Basis, Judged, Pair, RowOutcome
from nest_megatron.validation.row_settings import states_recompute
from nest_megatron.validation.rows import RowKind
from nest_megatron.validation.scores import (
    Certainty,
    ChoiceScores,
    Coverage,
    ErrorScores,
    RankScores,
    choice_scores,
    choice_summary,
    coverage_of,
    error_scores,
    rank_scores,
)

#: Kinds whose error is that of memory.
_MEMORY_KINDS = frozenset({RowKind.MEMORY_PEAK, RowKind.MEMORY_GOLDEN})


@frozen
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
    errors: ErrorScores
    memory: ErrorScores
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


@frozen
class BothScores:
    """Rows of a source, of a regime, ``total`` or ``all``, on both bases."""

    name: str
    as_stated: Scores
    as_planned: Scores

    def on(self, basis: Basis) -> Scores:
        """The scores of one basis."""
        return self.as_stated if basis is Basis.AS_STATED else self.as_planned


@frozen
class FileScores:
    """Scores of one file: by source, of all its rows, and by regime (with ``all``)."""

    path: Path
    kind: RowKind
    sources: tuple[BothScores, ...]
    total: BothScores
    regimes: Mapping[str, BothScores]


def file_scores(judged: Judged) -> FileScores:
    """Score a file by source, in the order in which sources appear, in all, and by regime."""
    kind = judged.file.kind
    sources = defaultdict(list)
    for pair in judged.pairs:
        sources[pair[0].source].append(pair)
    return FileScores(
        path=judged.file.path,
        kind=kind,
        sources=tuple(both_scores(name, kind, pairs) for name, pairs in sources.items()),
        total=both_scores("total", kind, judged.pairs),
        regimes=regime_scores([judged], kind),
    )


def pairs_by_regime(
    files: Iterable[Judged], kind: RowKind = RowKind.THROUGHPUT
) -> dict[str, list[Pair]]:
    """Rows of one kind by the regimes that they belong to as they are stated, and ``all``.

    Collectives belong to no regime.
    """
    pairs = [pair for file in files if file.file.kind is kind for pair in file.pairs]
    known = [] if kind is RowKind.COLLECTIVES else pairs
    return {
        **{each.name: [pair for pair in known if each.holds(pair[0])] for each in REGIMES},
        "all": pairs,
    }


def regime_scores(
    files: Iterable[Judged], kind: RowKind = RowKind.THROUGHPUT
) -> dict[str, BothScores]:
    """Scores of every regime over all rows of one kind, and of ``all``."""
    found = pairs_by_regime(files, kind)
    return {name: both_scores(name, kind, pairs) for name, pairs in found.items()}


def both_scores(name: str, kind: RowKind, pairs: Sequence[Pair]) -> BothScores:
    """Score rows on both bases."""
    return BothScores(
        name=name,
        as_stated=scores(kind, [stated for stated, _ in pairs]),
        as_planned=scores(kind, [planned for _, planned in pairs]),
    )


def scores(kind: RowKind, outcomes: Sequence[RowOutcome]) -> Scores:
    """Score some rows of one kind."""
    times = error_scores([o.time for o in outcomes if o.time])
    memory = error_scores([o.memory for o in outcomes if o.memory])
    is_memory = kind in _MEMORY_KINDS
    return Scores(
        rows=len(outcomes),
        predicted=sum(not o.refused for o in outcomes),
        refused=dict(Counter(o.refused for o in outcomes if o.refused).most_common()),
        errors=memory if is_memory else times,
        memory=ErrorScores() if is_memory else memory,
        coverage=_coverage(outcomes),
        groups=tuple(job.scores for job in measured_jobs(outcomes))
        if kind is RowKind.THROUGHPUT
        else (),
        out_of_memory=_infeasible(o for o in outcomes if o.out_of_memory),
        ran=_infeasible(o for o in outcomes if o.ran),
    )


def _coverage(outcomes: Iterable[RowOutcome]) -> Coverage | None:
    off = [o.standardized_error for o in outcomes if o.standardized_error is not None]
    return coverage_of(off) if off else None


def _infeasible(outcomes: Iterable[RowOutcome]) -> tuple[int, int]:
    verdicts = [outcome.fits for outcome in outcomes if outcome.fits is not None]
    return len(verdicts), verdicts.count(False)


@frozen
class MeasuredJob:
    """A job that was measured in at least two layouts.

    A layout that was measured several times, or with settings that no column has, counts once, by
    its fastest run and its fastest prediction: who chooses a layout runs it at its best.

    Args:
        row: one of its runs.
        layouts: predicted and measured seconds, by the layouts' columns.
        candidates: each layout at its fastest prediction, with its fastest measured step.
    """

    row: RowOutcome
    layouts: Mapping[tuple[str, ...], tuple[float, float]]
    candidates: Sequence[tuple[Candidate, float]]

    @property
    def scores(self) -> RankScores:
        """How well its layouts are ranked."""
        return rank_scores(list(self.layouts.values()))


def measured_jobs(outcomes: Iterable[RowOutcome]) -> tuple[MeasuredJob, ...]:
    """The jobs that were measured in at least two layouts."""
    jobs: dict[tuple[str, ...], dict[tuple[str, ...], list[RowOutcome]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for each in outcomes:
        if each.time:
            jobs[each.group][each.layout].append(each)
    return tuple(_measured_job(layouts) for layouts in jobs.values() if len(layouts) > 1)


def _measured_job(layouts: Mapping[tuple[str, ...], Sequence[RowOutcome]]) -> MeasuredJob:
    times = {}
    candidates = []
    for layout, runs in layouts.items():
        predicted, measured = zip(*(each.time for each in runs if each.time), strict=True)
        times[layout] = min(predicted), min(measured)
        plans = [each.candidate for each in runs if each.candidate]
        if plans:
            fastest = min(plans, key=lambda plan: plan.solved.iteration)
            candidates.append((fastest, times[layout][1]))
    return MeasuredJob(row=next(iter(layouts.values()))[0], layouts=times, candidates=candidates)


def as_document(files: Sequence[Judged]) -> dict[str, object]:
    """For ``--json``: every file, and the regimes over all files of throughput."""
    return {
        "files": [
            {
                "file": str(file.path),
                "kind": str(file.kind),
                "sources": [_document(each) for each in file.sources],
                "total": _document(file.total),
                "regimes": _regimes(file.regimes),
            }
            for file in map(file_scores, files)
        ],
        "regimes": _regimes(regime_scores(files)),
        "certainty": {
            name: {str(basis): dataclasses.asdict(found) for basis, found in each.items()}
            for name, each in certainty_by_regime(files).items()
        },
        "memory_risk": {
            name: dataclasses.asdict(each) for name, each in risks_by_regime(files).items()
        },
        "regime_definitions": {each.name: each.definition for each in REGIMES},
    }


def certainty_by_regime(files: Iterable[Judged]) -> dict[str, dict[Basis, Certainty]]:
    """Intervals of all runs and choices among measured layouts, by regime and over all."""
    known: dict[tuple[int, ...], ChoiceScores] = {}
    return {
        name: {
            Basis.AS_STATED: _certainty([stated for stated, _ in pairs], known),
            Basis.AS_PLANNED: _certainty([planned for _, planned in pairs], known),
        }
        for name, pairs in pairs_by_regime(files).items()
    }


def _certainty(
    outcomes: Sequence[RowOutcome], known: dict[tuple[int, ...], ChoiceScores]
) -> Certainty:
    """Intervals and choices of some runs; ``known``, as most regimes share their jobs."""
    scored = []
    for job in measured_jobs(outcomes):
        key = tuple(id(candidate) for candidate, _ in job.candidates)
        if len(key) > 1:
            if key not in known:
                known[key] = choice_scores(job.candidates)
            scored.append(known[key])
    return Certainty(coverage=_coverage(outcomes), choice=choice_summary(scored))


def memory_tests(outcomes: Iterable[RowOutcome], *, stated: bool = True) -> list[RowOutcome]:
    """Runs with a predicted need and a known device, which test whether plans fit.

    A run that ran and does not say what it recomputed is predicted with a setting that fits, so
    that it tests nothing; ``stated=False`` takes such runs alone.
    """
    return [
        each
        for each in outcomes
        if each.needed_bytes is not None
        and each.device_bytes
        and each.risk is not None
        and (each.out_of_memory or states_recompute(each.row)) is stated
    ]


@frozen
class RiskBin:
    """Runs whose chance to run out of memory lies between two bounds; expected: its sum."""

    low: float
    high: float
    runs: int
    out_of_memory: int
    expected: float

    @property
    def mean_chance_pct(self) -> float:
        """Mean predicted chance."""
        return 100.0 * self.expected / self.runs

    @property
    def ran_out_pct(self) -> float:
        """Share of the runs that did run out."""
        return 100.0 * self.out_of_memory / self.runs


def risk_bin(data: Iterable[RowOutcome], low: float = 0.0, high: float = 1.0) -> RiskBin:
    """The runs of one range of chances, and how many of them did run out of memory."""
    pairs = [(each.risk or 0.0, each.out_of_memory) for each in data]
    inside = [pair for pair in pairs if low <= pair[0] < high or pair[0] == high == 1.0]
    return RiskBin(
        low=low,
        high=high,
        runs=len(inside),
        out_of_memory=sum(ran_out for _, ran_out in inside),
        expected=sum(chance for chance, _ in inside),
    )


def risks_by_regime(files: Iterable[Judged]) -> dict[str, RiskBin]:
    """How many runs were expected to run out of memory, and how many did.

    Regimes are of runs that say what they recomputed; what the others are predicted with is a
    guess, which they show to be wrong where they were expected to run out.
    """
    runs = {n: [o for o, _ in pairs] for n, pairs in pairs_by_regime(files).items()}
    risks = {name: risk_bin(memory_tests(found)) for name, found in runs.items()}
    risks["recompute not stated"] = risk_bin(memory_tests(runs["all"], stated=False))
    return {name: each for name, each in risks.items() if each.runs}


def _regimes(regimes: Mapping[str, BothScores]) -> dict[str, object]:
    return {each.name: _bases(regimes[each.name]) for each in REGIMES}


def _document(each: BothScores) -> dict[str, object]:
    stated = each.as_stated
    memory = dataclasses.asdict(stated.memory)
    return {
        "source": each.name,
        "rows": stated.rows,
        "predicted": stated.predicted,
        "refused": dict(stated.refused),
        **dataclasses.asdict(stated.errors),
        "groups": len(stated.groups),
        "spearman_mean": stated.spearman_mean,
        "regret_mean_pct": stated.regret_mean_pct,
        "regret_max_pct": stated.regret_max_pct,
        "memory": None if memory["mape_pct"] is None else memory,
        "out_of_memory": dict(zip(("rows", "infeasible"), stated.out_of_memory, strict=True)),
        "ran": dict(zip(("rows", "infeasible"), stated.ran, strict=True)),
        **_bases(each),
    }


def _bases(both: BothScores) -> dict[str, object]:
    """The figures of each basis; docs/accuracy.md says what each one counts."""
    return {
        str(basis): {
            "rows": each.rows,
            "predicted": each.predicted,
            "refused": each.rows - each.predicted,
            **dataclasses.asdict(each.errors),
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
        for basis in Basis
        for each in (both.on(basis),)
    }
