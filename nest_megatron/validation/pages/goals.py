"""The goals of the whole, and the rows behind each figure that misses its goal."""

from __future__ import annotations

import functools
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from nest_megatron.report.markdown import figure, table
from nest_megatron.units import GIB
from nest_megatron.validation.outcome import LAYOUT_COLUMNS, Judged, RowOutcome
from nest_megatron.validation.pages.reference import collectives_by_cluster, unseen_collectives_pct
from nest_megatron.validation.pages.regimes import all_runs
from nest_megatron.validation.pages.worst import ranked, subject, worst_table
from nest_megatron.validation.regimes import REGIMES, RegimeName
from nest_megatron.validation.report import MeasuredJob, Scores, measured_jobs, regime_scores
from nest_megatron.validation.rows import RowKind
from nest_megatron.validation.scores import NOISE, error_scores

Pair = tuple[float, float]
#: Rows, sources, jobs and pairs that are shown for a figure that misses its goal.
_MOST = 5
#: Share of the rows that the tail of the errors is.
_TAIL = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reached:
    """One figure beside its goal.

    Args:
        least: larger is better.
        behind: what makes the figure, for a figure that misses its goal.
    """

    what: str
    value: float | None
    goal: float
    behind: Callable[[], Iterable[str]]
    least: bool = False

    @property
    def is_met(self) -> bool:
        if self.value is None:
            return False
        return self.value >= self.goal if self.least else self.value <= self.goal

    @property
    def limit(self) -> str:
        return f"{'≥' if self.least else '≤'} {self.goal:g}"

    def cells(self) -> tuple[str, ...]:
        value = "none" if self.value is None else f"**{self.value:.1f}**"
        return self.what, value, self.limit, "yes" if self.is_met else "**no**"

    def miss(self, reason: str) -> str:
        head = (
            f"#### {self.what[0].upper()}{self.what[1:]}: {figure(self.value)}, goal {self.limit}"
        )
        return "\n\n".join((head, *((reason,) if reason else ()), *self.behind()))


def goals_section(
    judged: Sequence[Judged], reasons: Mapping[str, str], goals: Mapping[str, str]
) -> str:
    """Every goal, and for each one that is missed the rows and jobs behind the figure.

    Args:
        reasons: why a row is far off, by its ``row_id``.
        goals: what a person found of a goal that is missed, by the goal's name in the table.
    """
    if not any(file.file.kind is RowKind.THROUGHPUT for file in judged):
        return ""
    reached = list(_reached(judged, reasons))
    head = ("as planned", "ours", "goal", "met")
    parts = ["### Goals", table(head, (each.cells() for each in reached), numeric=3)]
    missed = [each for each in reached if each.value is not None and not each.is_met]
    if missed:
        parts += [
            "### What lies behind the goals that are missed",
            *(each.miss(" ".join(goals.get(each.what, "").split())) for each in missed),
        ]
    return "\n\n".join(parts)


def _reached(judged: Sequence[Judged], reasons: Mapping[str, str]) -> Iterator[_Reached]:
    regimes = regime_scores(RowKind.THROUGHPUT, judged)
    of = {each.name: _planned(judged, each.holds) for each in REGIMES}
    both = all_runs(judged)
    every = _planned(judged, lambda _: True)
    dense, moe = (("dense", RegimeName.DENSE, 1, 85, 7), ("experts", RegimeName.MOE, 4, 75, 12))
    for name, scores, rows, goal in (
        *((name, regimes[key], of[key], error) for name, key, *_, error in (dense, moe)),
        ("all", both, every, 9),
    ):
        yield _Reached(
            what=f"error of time, {name}, %",
            value=_mape(scores.as_planned),
            goal=goal,
            behind=functools.partial(_errors_behind, rows, goal, _mape(scores.as_stated), reasons),
        )
    yield from _verdicts(both.as_planned, every, reasons)
    yield from _memory_and_collectives(judged, reasons)
    for name, key, regret, pairs, _ in (dense, moe):
        jobs = measured_jobs(of[key])
        yield _Reached(
            what=f"regret, {name}, %",
            value=regimes[key].as_planned.regret_mean_pct,
            goal=regret,
            behind=functools.partial(_regret_behind, jobs),
        )
        yield _Reached(
            what=f"pairs in order, {name}, %",
            value=regimes[key].as_planned.pairs_in_order_pct,
            goal=pairs,
            least=True,
            behind=functools.partial(_pairs_behind, jobs),
        )


def _mape(found: Scores) -> float | None:
    return found.errors.mape_pct if found.errors else None


def _planned(judged: Iterable[Judged], holds: Callable[[RowOutcome], bool]) -> list[RowOutcome]:
    """Runs as planned, of which something holds as they are stated."""
    return [
        planned
        for file in judged
        if file.file.kind is RowKind.THROUGHPUT
        for stated, planned in zip(file.as_stated, file.as_planned, strict=True)
        if holds(stated)
    ]


def _verdicts(
    every: Scores, rows: Sequence[RowOutcome], reasons: Mapping[str, str]
) -> Iterator[_Reached]:
    ran, wrong = every.ran
    refused = [each for each in rows if each.ran and each.fits is False]
    yield _Reached(
        what="runs that ran, called infeasible, %",
        value=_percent(wrong, ran),
        goal=2,
        behind=lambda: ("Called infeasible:", _peaks_table(refused, reasons)),
    )
    ended, caught = every.out_of_memory
    missed = [each for each in rows if each.out_of_memory and each.fits]
    yield _Reached(
        what="runs out of memory, caught, %",
        value=_percent(caught, ended),
        goal=60,
        least=True,
        behind=lambda: (
            f"Of {ended} runs {len(missed)} are predicted to fit. The peak is the highest of "
            "all GPUs, without what lies outside the allocator:",
            _peaks_table(missed, reasons),
        ),
    )


def _peaks_table(rows: Iterable[RowOutcome], reasons: Mapping[str, str]) -> str:
    """Predicted peaks beside the memory of the device."""
    cells = [
        (
            each.row.get("row_id", ""),
            each.source,
            subject(each),
            f"{each.needed_bytes / GIB:.1f} of {each.device_bytes / GIB:.1f}",
            _reason(each, reasons),
        )
        for each in rows
        if each.needed_bytes is not None and each.device_bytes is not None
    ]
    return table(("row", "source", "what", "predicted peak, GiB of the GPU's", "reason"), cells)


def _reason(each: RowOutcome, reasons: Mapping[str, str]) -> str:
    return " ".join(reasons.get(each.row.get("row_id", ""), "not explained").split())


def _memory_and_collectives(
    judged: Sequence[Judged], reasons: Mapping[str, str]
) -> Iterator[_Reached]:
    peaks = ranked(_megatron_peaks(judged), lambda each: each.memory)
    errors = error_scores([pair for _, pair in peaks])
    yield _Reached(
        what="error of memory, runs of Megatron, %",
        value=errors.mape_pct if errors else None,
        goal=4,
        behind=lambda: ("The rows farthest off:", worst_table(peaks[:_MOST], "GiB", reasons)),
    )
    yield _Reached(
        what="collectives of 1 MB and more, clusters left out of the fit, %",
        value=unseen_collectives_pct(),
        goal=20,
        behind=lambda: (
            "The clusters, each by a fit to the others:",
            table(("cluster", "rows", "error %", "unseen %"), collectives_by_cluster(), numeric=3),
        ),
    )


#: Frameworks that run megatron-core, by their names in rows.
_MEGATRON = re.compile(r"megatron(?!-?deepspeed)|nemo(?!.*automodel)", re.IGNORECASE)


def _megatron_peaks(judged: Iterable[Judged]) -> Iterator[RowOutcome]:
    """Rows of peaks that runs of Megatron and its functional tests print."""
    return (
        each
        for file in judged
        for each in file.as_planned
        if file.file.kind is RowKind.MEMORY_GOLDEN
        or (
            file.file.kind is RowKind.MEMORY_PEAK
            and _MEGATRON.search(each.row.get("framework", ""))
        )
    )


def _percent(part: int, whole: int) -> float | None:
    return 100.0 * part / whole if whole else None


def _errors_behind(
    rows: Sequence[RowOutcome], goal: float, stated_pct: float | None, reasons: Mapping[str, str]
) -> Iterator[str]:
    """The tail, the sources that lift the mean above the goal, and the rows farthest off."""
    known = [(each, _size_pct(pair)) for each in rows if (pair := each.time)]
    sizes = sorted((size for _, size in known), reverse=True)
    tail = max(1, round(_TAIL * len(sizes)))
    rest = sizes[tail:] or [0.0]
    yield (
        f"The {tail} of {len(sizes)} rows that are farthest off (by {sizes[tail - 1]:.0f} % and "
        f"more) add {sum(sizes[:tail]) / len(sizes):.1f} points; the mean of the others is "
        f"{sum(rest) / len(rest):.1f} %. With the settings that rows or recipes state it is "
        f"{figure(stated_pct)} % in all. The sources that lift it above the goal, in points of "
        "the mean:"
    )
    yield table(("source", "rows", "error %", "lifts by"), _lifts(known, goal), numeric=3)
    yield "The rows farthest off:"
    yield worst_table(ranked(rows, lambda each: each.time)[:_MOST], "s", reasons)


def _size_pct(pair: Pair) -> float:
    return 100.0 * abs(pair[0] / pair[1] - 1.0)


def _lifts(known: Sequence[tuple[RowOutcome, float]], goal: float) -> list[tuple[str, ...]]:
    """Sources by what their rows' errors beyond the goal add to the mean of all rows."""
    found: dict[str, list[float]] = defaultdict(list)
    for each, size in known:
        found[each.source].append(size)
    lifts = {name: sum(size - goal for size in sizes) for name, sizes in found.items()}
    return [
        (
            name,
            str(len(found[name])),
            figure(sum(found[name]) / len(found[name])),
            figure(lifts[name] / len(known), 2, signed=True),
        )
        for name in sorted(lifts, key=lambda name: -lifts[name])[:_MOST]
        if lifts[name] > 0
    ]


def _regret_behind(jobs: Sequence[MeasuredJob]) -> Iterator[str]:
    """The jobs in which the layout that we would choose lost, by what the layouts differ in."""
    losing = [job for job in jobs if job.scores.regret_pct]
    yield (
        f"In {len(jobs) - len(losing)} of {len(jobs)} jobs the layout that is predicted to be the "
        "fastest ran as fast as any. The others by what the two layouts differ in, with what they "
        "add to the mean in points, and the job that loses most (seconds: measured, predicted in "
        "brackets):"
    )
    alike: dict[tuple[str, str, str], list[MeasuredJob]] = defaultdict(list)
    for job in losing:
        alike[job.row.source, *_difference(*_chosen_and_best(job))].append(job)
    groups = sorted(alike.items(), key=lambda item: -_regret_sum(item[1]))[:_MOST]
    head = (
        "source",
        "chosen",
        "fastest",
        "jobs",
        "adds",
        "worst job",
        "s",
        "fastest, s",
        "worst %",
    )
    yield table(
        head,
        [
            (*same, str(len(group)), figure(_regret_sum(group) / len(jobs), 2), *_worst_job(group))
            for same, group in groups
        ],
    )


def _regret_sum(jobs: Iterable[MeasuredJob]) -> float:
    return sum(job.scores.regret_pct for job in jobs)


def _chosen_and_best(job: MeasuredJob) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The layouts that are predicted and measured to be the fastest."""
    chosen = min(job.layouts, key=lambda layout: job.layouts[layout][0])
    return chosen, min(job.layouts, key=lambda layout: job.layouts[layout][1])


def _worst_job(jobs: Iterable[MeasuredJob]) -> tuple[str, ...]:
    worst = max(jobs, key=lambda job: job.scores.regret_pct)
    chosen, best = _chosen_and_best(worst)
    seconds = (_seconds(worst.layouts[layout]) for layout in (chosen, best))
    return _job(worst), *seconds, figure(worst.scores.regret_pct)


def _pairs_behind(jobs: Sequence[MeasuredJob]) -> Iterator[str]:
    """The pairs whose order is predicted wrongly, those that differ most first."""
    wrong = sorted(
        (
            (slow[1][1] / fast[1][1], job, fast, slow)
            for job in jobs
            for fast, slow in _pairs(job)
            if fast[1][0] >= slow[1][0]
        ),
        key=lambda item: -item[0],
    )
    pairs = sum(job.scores.pairs for job in jobs)
    of = len({id(job) for _, job, *_ in wrong})
    yield (
        f"{len(wrong)} of {pairs} pairs, in {of} of {len(jobs)} jobs, are predicted in the wrong "
        "order. Those whose times differ most (seconds: measured, predicted in brackets):"
    )
    head = ("source", "job", "faster", "s", "slower", "s", "measured apart %")
    yield table(
        head,
        [
            (
                job.row.source,
                _job(job),
                *itertools.chain.from_iterable(
                    zip(
                        _difference(fast[0], slow[0]),
                        (_seconds(fast[1]), _seconds(slow[1])),
                        strict=True,
                    )
                ),
                figure(100 * (apart - 1)),
            )
            for apart, job, fast, slow in wrong[:_MOST]
        ],
    )


def _pairs(job: MeasuredJob) -> Iterator[tuple[tuple[tuple[str, ...], Pair], ...]]:
    """Pairs of layouts that are no tie by measurement, the faster first."""
    for pair in itertools.combinations(job.layouts.items(), 2):
        fast, slow = sorted(pair, key=lambda item: item[1][1])
        if slow[1][1] > (1 + NOISE) * fast[1][1]:
            yield fast, slow


def _job(job: MeasuredJob) -> str:
    row = job.row.row
    parts = (("gbs", "batch"), ("seq", "sequence"), ("precision", ""))
    said = (f"{word} {row[column]}".strip() for column, word in parts if row.get(column))
    return ", ".join((subject(job.row), *said))


def _difference(one: Sequence[str], other: Sequence[str]) -> tuple[str, str]:
    """The columns in which two layouts differ, as each has them."""
    apart = [i for i, cells in enumerate(zip(one, other, strict=True)) if len(set(cells)) > 1]
    return _columns(one, apart), _columns(other, apart)


def _columns(layout: Sequence[str], which: Iterable[int]) -> str:
    return " ".join(f"{LAYOUT_COLUMNS[i]} {layout[i] or '-'}" for i in which)


def _seconds(pair: Pair) -> str:
    return f"{pair[1]:.4g} ({pair[0]:.4g})"
