"""The worst rows and the memory margin in ``accuracy.md``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.validation.margin import (
    best_margin,
    left_out,
    margin_curve,
    risk_bins,
    samples,
)
from nest_megatron.validation.outcome import Basis, Judged, RowOutcome
from nest_megatron.validation.rows import RowKind, number_or_zero

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
    data = samples(_runs_once(judged), settings.memory_reserve_bytes)
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
    return {"curve": curve, "left_out": left_out(data), "bins": risk_bins(data)}


def _runs_once(judged: Sequence[Judged]) -> list[RowOutcome]:
    """Runs of the files of throughput, and those of peak memory that are in none of them."""
    runs = _outcomes(judged, RowKind.THROUGHPUT, Basis.AS_STATED)
    known = {each.row.get("row_id", "") for each in runs}
    peaks = _outcomes(judged, RowKind.MEMORY_PEAK, Basis.AS_STATED)
    return runs + [o for o in peaks if o.row.get("throughput_row", "") not in known]


def _outcomes(
    judged: Iterable[Judged], kind: RowKind, basis: Basis = Basis.AS_PLANNED
) -> list[RowOutcome]:
    return [each for file in judged if file.file.kind is kind for each in file.on(basis)]
