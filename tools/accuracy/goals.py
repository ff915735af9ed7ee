"""The goals of the whole, the rows behind each figure that misses its goal, and the worst rows."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nest_megatron.catalogue_files import catalogue_entry
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.validation.outcome import LAYOUT_COLUMNS, Basis, Judged, RowOutcome
from nest_megatron.validation.report import (
    BothScores,
    MeasuredJob,
    measured_jobs,
    memory_tests,
    pairs_by_regime,
)
from nest_megatron.validation.rows import RowKind, number_or_zero
from nest_megatron.validation.scores import NOISE, error_scores
from tools.accuracy.margin import best_margin, left_out, margin_curve, margin_samples, risk_bins

#: Rows of runs, of memory and of collectives that are shown.
_MOST_TIMES, _MOST_OTHERS = 10, 5
#: Messages below this cost latency alone and are not what a step waits for.
_SMALL = 1_000_000

Figures = tuple[float, float]


def worst_rows(
    judged: Sequence[Judged],
) -> Iterator[tuple[str, str, Sequence[tuple[RowOutcome, Figures]]]]:
    """Title, unit and the rows farthest off, of time, memory and collectives."""
    kinds = {kind: _outcomes(judged, kind) for kind in RowKind}
    times = ranked(kinds[RowKind.THROUGHPUT], lambda each: each.time)
    yield "Step time", "s", times[:_MOST_TIMES]
    peaks = [*kinds[RowKind.MEMORY_PEAK], *kinds[RowKind.MEMORY_GOLDEN]]
    yield "Memory", "GiB", ranked(peaks, lambda each: each.memory)[:_MOST_OTHERS]
    calls = kinds[RowKind.COLLECTIVES]
    large = [each for each in calls if number_or_zero(each.row, "size_bytes") >= _SMALL]
    yield "Collectives of 1 MB and more", "ms", ranked(large, lambda o: o.time)[:_MOST_OTHERS]


def ranked(
    outcomes: Iterable[RowOutcome], pair: Callable[[RowOutcome], Figures | None]
) -> list[tuple[RowOutcome, Figures]]:
    """Outcomes with predicted and measured figures, the farthest off first."""
    known = [(each, found) for each in outcomes if (found := pair(each))]
    return sorted(known, key=lambda item: -abs(math.log(item[1][0] / item[1][1])))


def subject(each: RowOutcome) -> str:
    """What a row is about: model and GPUs, or a collective."""
    row = each.row
    if "collective" in row:
        size = number_or_zero(row, "size_bytes") / 2**20
        return f"{row['collective']}, {row['n_ranks']} {row['gpu']}, {size:.4g} MiB"
    name = row.get("model") or row.get("test_case", "")
    return ", ".join(
        text for text in (name, f"{row.get('n_gpus') or '?'} {row.get('gpu')}") if text
    )


def margin_figures(judged: Sequence[Judged]) -> Mapping[str, object]:
    """What each memory margin would refuse; empty where no run ended for want of memory."""
    settings = CostSettings()
    runs = memory_tests(_runs_once(judged))
    data = margin_samples(runs, settings.memory_reserve_bytes)
    if not any(each.out_of_memory for each in data):
        return {}
    named = {
        "catches most of those that refuse at most 1 % of what ran": best_margin(data).margin,
        "the default": settings.memory_margin,
    }
    curve = [
        (point, [text for text, margin in named.items() if math.isclose(point.margin, margin)])
        for point in margin_curve(data)
        if round(100 * point.margin) % 2 == 0 or point.margin in named.values()
    ]
    return {"curve": curve, "left_out": left_out(data), "bins": risk_bins(runs)}


def _runs_once(judged: Sequence[Judged]) -> list[RowOutcome]:
    runs = _outcomes(judged, RowKind.THROUGHPUT, Basis.AS_STATED)
    known = {each.row.get("row_id", "") for each in runs}
    peaks = _outcomes(judged, RowKind.MEMORY_PEAK, Basis.AS_STATED)
    return runs + [o for o in peaks if o.row.get("throughput_row", "") not in known]


def _outcomes(
    judged: Iterable[Judged], kind: RowKind, basis: Basis = Basis.AS_PLANNED
) -> list[RowOutcome]:
    return [each for file in judged if file.file.kind is kind for each in file.on(basis)]


#: Rows, sources, jobs and pairs that are shown for a figure that misses its goal.
_MOST = 5
#: Share of the rows that the tail of the errors is.
_TAIL = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """One figure beside its goal.

    Args:
        least: larger is better.
        kind: how ``templates/goals.md.j2`` tells what is behind the figure.
        behind: what makes the figure, for a figure that misses its goal.
    """

    what: str
    value: float | None
    goal: float
    kind: str
    behind: Callable[[], Mapping[str, Any]] = dict
    least: bool = False

    @property
    def is_met(self) -> bool:
        """Whether there is a figure, and it is as good as its goal."""
        if self.value is None:
            return False
        return self.value >= self.goal if self.least else self.value <= self.goal

    @property
    def limit(self) -> str:
        """The goal in a table."""
        return f"{'≥' if self.least else '≤'} {self.goal:g}"


def goals_reached(judged: Sequence[Judged], regimes: Mapping[str, BothScores]) -> Iterator[Reached]:
    """Every goal as planned; ``regimes`` has the scores of all files of throughput."""
    pairs = pairs_by_regime(judged)
    rows = {name: [planned for _, planned in own] for name, own in pairs.items()}
    for name, key, goal in (("dense", "dense", 7), ("experts", "moe", 12), ("all", "all", 9)):
        both = regimes[key]
        yield Reached(
            what=f"error of time, {name}, %",
            value=both.as_planned.errors.mape_pct,
            goal=goal,
            kind="errors",
            behind=functools.partial(_errors, rows[key], goal, both.as_stated.errors.mape_pct),
        )
    yield from _verdicts(regimes["all"], rows["all"])
    yield from _memory_and_collectives(judged)
    for name, key, regret, in_order in (("dense", "dense", 1, 85), ("experts", "moe", 4, 75)):
        jobs, planned = measured_jobs(rows[key]), regimes[key].as_planned
        yield Reached(
            what=f"regret, {name}, %",
            value=planned.regret_mean_pct,
            goal=regret,
            kind="regret",
            behind=functools.partial(_regret, jobs),
        )
        yield Reached(
            what=f"pairs in order, {name}, %",
            value=planned.pairs_in_order_pct,
            goal=in_order,
            kind="pairs",
            least=True,
            behind=functools.partial(_wrong_pairs, jobs),
        )


def _verdicts(both: BothScores, rows: Sequence[RowOutcome]) -> Iterator[Reached]:
    ran, wrong = both.as_planned.ran
    refused = [each for each in rows if each.ran and each.fits is False]
    yield Reached(
        what="runs that ran, called infeasible, %",
        value=100.0 * wrong / ran if ran else None,
        goal=2,
        kind="refused",
        behind=lambda: {"rows": refused},
    )
    ended, caught = both.as_planned.out_of_memory
    missed = [each for each in rows if each.out_of_memory and each.fits]
    yield Reached(
        what="runs out of memory, caught, %",
        value=100.0 * caught / ended if ended else None,
        goal=60,
        kind="out of memory",
        least=True,
        behind=lambda: {"ended": ended, "rows": missed},
    )


def _memory_and_collectives(judged: Sequence[Judged]) -> Iterator[Reached]:
    peaks = ranked(_megatron_peaks(judged), lambda each: each.memory)
    yield Reached(
        what="error of memory, runs of Megatron, %",
        value=error_scores([pair for _, pair in peaks]).mape_pct,
        goal=4,
        kind="memory",
        behind=lambda: {"rows": peaks[:_MOST]},
    )
    yield Reached(
        what="collectives of 1 MB and more, clusters left out of the fit, %",
        value=_unseen_collectives_pct(),
        goal=20,
        kind="collectives",
    )


def _unseen_collectives_pct() -> float | None:
    """Mean error of the collectives of clusters that the fit has not seen, each row the same."""
    entries = catalogue_entry("calibration", "collectives").values()
    known = [entry for entry in entries if entry.get("left_out_pct")]
    rows = sum(entry["rows"] for entry in known)
    return sum(entry["rows"] * entry["left_out_pct"] for entry in known) / rows if rows else None


#: Frameworks that run megatron-core, by their names in rows.
_MEGATRON = re.compile(r"megatron(?!-?deepspeed)|nemo(?!.*automodel)", re.IGNORECASE)


def _megatron_peaks(judged: Iterable[Judged]) -> Iterator[RowOutcome]:
    for file in judged:
        if file.file.kind is RowKind.MEMORY_GOLDEN:
            yield from file.as_planned
        elif file.file.kind is RowKind.MEMORY_PEAK:
            peaks = file.as_planned
            yield from (o for o in peaks if _MEGATRON.search(o.row.get("framework", "")))


def _errors(
    rows: Sequence[RowOutcome], goal: float, stated_pct: float | None
) -> Mapping[str, object]:
    """The tail, the sources that lift the mean above the goal, and the rows farthest off."""
    sizes: dict[str, list[float]] = defaultdict(list)
    for each in rows:
        if each.time:
            sizes[each.source].append(100.0 * abs(each.time[0] / each.time[1] - 1.0))
    every = sorted(itertools.chain.from_iterable(sizes.values()), reverse=True)
    tail = max(1, round(_TAIL * len(every)))
    rest = every[tail:] or [0.0]
    lifts = sorted(
        (
            (name, len(own), sum(own) / len(own), sum(size - goal for size in own) / len(every))
            for name, own in sizes.items()
        ),
        key=lambda item: -item[-1],
    )
    return {
        "number": len(every),
        "tail": tail,
        "least": every[tail - 1],
        "points": sum(every[:tail]) / len(every),
        "rest": sum(rest) / len(rest),
        "stated": stated_pct,
        "lifts": [each for each in lifts[:_MOST] if each[-1] > 0],
        "rows": ranked(rows, lambda each: each.time)[:_MOST],
    }


def _regret(jobs: Sequence[MeasuredJob]) -> Mapping[str, object]:
    alike: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    losing = sorted(
        (job for job in jobs if job.scores.regret_pct), key=lambda job: -job.scores.regret_pct
    )
    for job in losing:
        chosen, best = (min(job.layouts.items(), key=lambda item: item[1][i]) for i in (0, 1))
        lost = {"job": job, "chosen": chosen[1], "best": best[1]}
        same = (job.row.source, *_difference(chosen[0], best[0]))
        alike[same].append({**lost, "regret_pct": job.scores.regret_pct})
    groups = sorted(alike.items(), key=lambda item: -sum(each["regret_pct"] for each in item[1]))
    return {"jobs": len(jobs), "losing": len(losing), "groups": groups[:_MOST]}


def _wrong_pairs(jobs: Sequence[MeasuredJob]) -> Mapping[str, object]:
    """The pairs whose order is predicted wrongly, those that differ most first."""
    wrong = [
        (slow[1][1] / fast[1][1], job, fast, slow)
        for job in jobs
        for fast, slow in _pairs(job)
        if fast[1][0] >= slow[1][0]
    ]
    wrong.sort(key=lambda item: -item[0])
    worst = []
    for apart, job, fast, slow in wrong[:_MOST]:
        faster, slower = _difference(fast[0], slow[0])
        layouts = {"faster": faster, "slower": slower, "fast": fast[1], "slow": slow[1]}
        worst.append({"job": job, "apart": apart, **layouts})
    return {
        "jobs": len(jobs),
        "pairs": sum(job.scores.pairs for job in jobs),
        "wrong": len(wrong),
        "wrong_jobs": len({id(job) for _, job, *_ in wrong}),
        "worst": worst,
    }


def _pairs(job: MeasuredJob) -> Iterator[tuple[tuple[tuple[str, ...], Figures], ...]]:
    """Pairs of layouts that are no tie by measurement, the faster first."""
    for pair in itertools.combinations(job.layouts.items(), 2):
        fast, slow = sorted(pair, key=lambda item: item[1][1])
        if slow[1][1] > (1 + NOISE) * fast[1][1]:
            yield fast, slow


def _difference(one: Sequence[str], other: Sequence[str]) -> tuple[str, str]:
    """The columns in which two layouts differ, as each has them."""
    apart = [
        (f"{column} {a or '-'}", f"{column} {b or '-'}")
        for column, a, b in zip(LAYOUT_COLUMNS, one, other, strict=True)
        if a != b
    ]
    first, second = zip(*apart, strict=True) if apart else ((), ())
    return " ".join(first), " ".join(second)
