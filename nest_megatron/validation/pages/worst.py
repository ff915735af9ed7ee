"""The worst rows and the memory margin in ``accuracy.md``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.report.markdown import table
from nest_megatron.units import GIB
from nest_megatron.validation.margin import (
    MarginPoint,
    MarginSample,
    best_margin,
    left_out,
    margin_curve,
    risk_bins,
    samples,
)
from nest_megatron.validation.outcome import Basis, Judged, RowOutcome
from nest_megatron.validation.report import risks_by_regime
from nest_megatron.validation.rows import RowKind, number_or_zero

NOT_EXPLAINED = "not explained"
#: Rows of runs, of memory and of collectives that are shown.
_MOST_TIMES, _MOST_OTHERS = 10, 5
#: Messages below this cost latency alone and are not what a step waits for.
_SMALL = 1_000_000

Pair = tuple[float, float]


def worst_section(judged: Sequence[Judged], reasons: Mapping[str, str]) -> str:
    """The rows farthest off, with the reasons that a person found."""
    times = ranked(_of(judged, RowKind.THROUGHPUT), lambda each: each.time)
    peaks = [*_of(judged, RowKind.MEMORY_PEAK), *_of(judged, RowKind.MEMORY_GOLDEN)]
    memory = ranked(peaks, lambda each: each.memory)
    large = [
        o for o in _of(judged, RowKind.COLLECTIVES) if number_or_zero(o.row, "size_bytes") >= _SMALL
    ]
    parts = ["## The worst rows", "By the factor between prediction, as planned, and measurement."]
    for title, rows, most, unit in (
        ("Step time", times, _MOST_TIMES, "s"),
        ("Memory", memory, _MOST_OTHERS, "GiB"),
        ("Collectives of 1 MB and more", ranked(large, lambda o: o.time), _MOST_OTHERS, "ms"),
    ):
        if rows:
            parts += [f"### {title}", worst_table(rows[:most], unit, reasons)]
    return "\n\n".join(parts)


def _of(
    judged: Iterable[Judged], kind: RowKind, basis: Basis = Basis.AS_PLANNED
) -> Iterator[RowOutcome]:
    return (each for file in judged if file.file.kind is kind for each in file.on(basis))


def ranked(
    outcomes: Iterable[RowOutcome], pair: Callable[[RowOutcome], Pair | None]
) -> list[tuple[RowOutcome, Pair]]:
    """Outcomes with their pairs, the farthest off first."""
    known = [(each, found) for each in outcomes if (found := pair(each))]
    return sorted(known, key=lambda item: -abs(math.log(item[1][0] / item[1][1])))


_SCALES = {"s": 1.0, "ms": 1e-3, "GiB": float(GIB)}


def worst_table(
    rows: Iterable[tuple[RowOutcome, Pair]], unit: str, reasons: Mapping[str, str]
) -> str:
    """Rows with prediction, measurement and reason.

    Args:
        unit: ``s``, ``ms`` or ``GiB``.
    """
    scale = _SCALES[unit]
    cells = [
        (
            each.row.get("row_id", ""),
            each.source,
            subject(each),
            f"{predicted / scale:.4g}",
            f"{measured / scale:.4g}",
            f"{100 * (predicted / measured - 1):+.0f}",
            " ".join(reasons.get(each.row.get("row_id", ""), NOT_EXPLAINED).split()),
        )
        for each, (predicted, measured) in rows
    ]
    head = ("row", "source", "what", f"predicted {unit}", f"measured {unit}", "error %", "reason")
    return table(head, cells)


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


def margin_section(judged: Sequence[Judged]) -> str:
    """What each memory margin would refuse, and the one that is taken."""
    settings = CostSettings()
    data = samples(_runs_once(judged), settings.memory_reserve_bytes)
    if not any(each.out_of_memory for each in data):
        return ""
    reserve = settings.memory_reserve_bytes / GIB
    return "\n\n".join(
        (
            "## The memory margin",
            f"A plan is called infeasible where its predicted peak and {reserve:g} GiB outside the "
            "allocator exceed the device's memory less a margin. A larger margin catches more of "
            "the runs that ended out of memory, and refuses more that ran; the default is "
            f"{100 * settings.memory_margin:g} %. Runs that do not say what they "
            "recomputed are left out (the fastest setting that fits is taken for them).",
            _margin_table(data, settings.memory_margin),
            "Chosen without a source, and judged on it:",
            _left_out_table(data),
            "The chance to run out that is predicted for these runs ([memory.md](memory.md)), and "
            "what became of them. Runs of one source stand or fall together, and runs that end are "
            "seldom published:",
            _risk_table(data),
            "By regime, of files of runs; the last row has the runs that are left out above:",
            _regime_risk_table(judged),
        )
    )


def _risk_table(data: Sequence[MarginSample]) -> str:
    rows = [
        (
            f"{100 * each.low:g} to {100 * each.high:g} %",
            str(each.runs),
            f"{each.expected:.1f}",
            str(each.out_of_memory),
        )
        for each in risk_bins(data)
    ]
    head = ("predicted chance", "runs", "expected to run out", "ran out")
    return table(head, rows, numeric=3)


def _regime_risk_table(judged: Sequence[Judged]) -> str:
    rows = [(name, *each.cells()) for name, each in risks_by_regime(judged).items()]
    head = ("runs", "", "mean chance %", "ran out %", "expected to run out", "ran out")
    return table(head, rows, numeric=5)


def _runs_once(judged: Sequence[Judged]) -> list[RowOutcome]:
    """Runs of the files of throughput, and those of peak memory that are in none of them."""
    runs = list(_of(judged, RowKind.THROUGHPUT, Basis.AS_STATED))
    known = {each.row.get("row_id", "") for each in runs}
    peaks = _of(judged, RowKind.MEMORY_PEAK, Basis.AS_STATED)
    return runs + [o for o in peaks if o.row.get("throughput_row", "") not in known]


def _margin_table(data: Sequence[MarginSample], taken: float) -> str:
    best = best_margin(data).margin
    rows = [
        (_mark(point, best, taken), *_counts(point))
        for point in margin_curve(data)
        if round(100 * point.margin) % 2 == 0 or point.margin in (best, taken)
    ]
    return table(("margin", "ran, refused", "out of memory, caught"), rows, numeric=2)


def _mark(point: MarginPoint, best: float, taken: float) -> str:
    marks = [
        text
        for text, margin in (
            ("catches most of those that refuse at most 1 % of what ran", best),
            ("the default", taken),
        )
        if math.isclose(point.margin, margin, abs_tol=1e-9)
    ]
    return f"{100 * point.margin:.0f} %" + (f" ({', '.join(marks)})" if marks else "")


def _counts(point: MarginPoint) -> tuple[str, str]:
    return (
        f"{point.ran_refused} of {point.ran}",
        f"{point.out_of_memory_refused} of {point.out_of_memory}",
    )


def _left_out_table(data: Sequence[MarginSample]) -> str:
    rows = [
        (each.source, f"{100 * each.point.margin:.0f} %", *_counts(each.point))
        for each in left_out(data)
    ]
    head = ("source left out", "margin", "ran, refused", "out of memory, caught")
    return table(head, rows, numeric=3)
