"""``validate``: predicts measured rows, and prints how well, as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from nest_megatron.documents import csv_text
from nest_megatron.errors import OK
from nest_megatron.files import write_text
from nest_megatron.packages import import_from_checkout, require_checkout
from nest_megatron.report.charts import check_matplotlib
from nest_megatron.report.console import say_written, show_or_json
from nest_megatron.report.tables import EdgelessTable, figure, figure_columns, name_columns
from nest_megatron.validation.assess import Assessor
from nest_megatron.validation.models import ModelBook
from nest_megatron.validation.outcome import REGIMES, Basis, Judged, RowOutcome
from nest_megatron.validation.report import (
    BothScores,
    Scores,
    as_document,
    certainty_by_regime,
    file_scores,
    regime_scores,
    risks_by_regime,
)
from nest_megatron.validation.rows import RowFile, RowKind, read_rows
from nest_megatron.validation.scores import NOISE, Certainty


def run_validate(
    paths: Sequence[Path],
    *,
    models: Sequence[Path],
    rows: Path | None,
    docs: Path | None,
    left_out: bool,
    force: bool | None,
    as_json: bool,
) -> int:
    """Predict the rows of some files and print how well.

    Args:
        left_out: predict each row by constants that were fitted without its source.
        force: write pages over files that nest-megatron has not written.
    """
    if docs is not None:
        require_checkout("tools.accuracy.page", "--docs")
        check_matplotlib("--docs")
        page = import_from_checkout("tools.accuracy.page", "--docs")
    files = [read_rows(path) for path in paths]
    book = ModelBook.load(models)
    judged = _judged(files, book, left_out=left_out)
    show_or_json(lambda: as_document(judged), lambda: [validation_report(judged)], as_json=as_json)
    written = []
    if docs is not None:
        runs = [file for file in files if file.kind is RowKind.THROUGHPUT]
        unseen = _judged(runs, book, left_out=True)
        written += page.write_accuracy(docs, judged, unseen, force=force)
    if rows is not None:
        write_text(rows, csv_text([_csv_row(e.file, *pair) for e in judged for pair in e.pairs]))
        written.append(rows)
    if not as_json:
        say_written(*written)
    return OK


def _judged(files: Sequence[RowFile], book: ModelBook, *, left_out: bool) -> list[Judged]:
    constants = None
    if left_out:
        constants = import_from_checkout(
            "tools.calibration.parameters", "--left-out"
        ).shipped_left_out()
    assessor = Assessor(book, left_out=constants)
    return [assessor.judge(file) for file in files]


def _csv_row(file: RowFile, stated: RowOutcome, planned: RowOutcome) -> dict[str, object]:
    row = stated.row
    return {
        "file": file.path.name,
        **{name: row.get(name, "") for name in ("row_id", "source", "model", "gpu", "n_gpus")},
        "predicted_s": _number(stated.predicted_s),
        "measured_s": _number(stated.measured_s),
        "error_pct": _error(stated.time),
        "predicted_bytes": stated.predicted_bytes,
        "measured_bytes": stated.measured_bytes,
        "memory_error_pct": _error(stated.memory),
        "fits": _flag(stated.fits),
        "outcome": row.get("outcome", ""),
        "refused": stated.refused,
        "detail": stated.detail,
        "assumptions": "; ".join(stated.assumptions),
        "planned_s": _number(planned.predicted_s),
        "planned_error_pct": _error(planned.time),
        "planned_bytes": planned.predicted_bytes,
        "planned_fits": _flag(planned.fits),
        "planned_assumptions": "; ".join(planned.assumptions),
    }


def _flag(value: bool | None) -> str:
    return "" if value is None else str(value).lower()


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _error(pair: tuple[float, float] | None) -> str:
    return "" if pair is None else f"{100 * (pair[0] / pair[1] - 1):.2f}"


_HEADS = ("rows", "MAPE", "med", "p90", "mem", "regret", "pairs", "ran", "OOM")
_CHOICE_HEADS = ("in 50 %", "in 90 %", "jobs", "nominal", "default", "list", "holds", "sure")
_RISK_HEADS = ("runs", "mean chance %", "ran out %", "expected", "ran out")
_LONGEST = 16
#: Rows that stand out.
_ALL = ("total", "all")
#: What leads: a plan is made without knowing what its settings will be.
_ORDER = (Basis.AS_PLANNED, Basis.AS_STATED)
_LEGEND = f"""
as planned: degrees, batch and precision as the row says (and recomputation and
sharding where it states them), every other setting as the planner would assume
or choose. as stated: with all that the row says, or the recipe behind it.
rows: predicted of all; --rows FILE has each, and why others are refused.
MAPE, med, p90, mem: errors in per cent of what was measured (mean size, median
with sign, 90th percentile; mean size for memory).
regret: of jobs in several layouts, by how many per cent our choice was slower
than the best layout (mean, and largest). pairs: per cent of the pairs of
layouts of one job, measured more than {100 * NOISE:g} % apart, in the right order.
ran: runs that ran and are called infeasible. OOM: out of memory, and caught.
in 50 %, in 90 %: per cent of runs inside these intervals. nominal, default:
regret of the fastest prediction and of the planner's default choice. list,
holds: layouts on a shortlist, and per cent of jobs whose fastest is on it.
sure: per cent of pairs with a chance of 9 in 10 that were measured so."""


def validation_report(judged: Sequence[Judged]) -> RenderableType:
    """Two tables for each file, then the regimes of all runs."""
    parts: list[RenderableType] = []
    for file in map(file_scores, judged):
        parts.append(Text(f"\n{file.path} ({file.kind})", style="bold"))
        rows = (*file.sources, file.total)
        if file.kind is RowKind.COLLECTIVES:
            parts.append(_scored("source", rows, Basis.AS_STATED))
        else:
            parts += _on_both("source", rows)
        parts += [
            Text(f"  refused {count:4d}: {reason}")
            for reason, count in file.total.as_stated.refused.items()
        ]
    regimes = regime_scores(judged)
    if regimes["all"].as_stated.rows:
        parts.append(Text("\nRegimes of all runs (throughput)", style="bold"))
        parts += _on_both("regime", [regimes[each.name] for each in REGIMES])
        parts.append(Text())
        parts += [Text(f"  {each.name}: {each.definition}", style="dim") for each in REGIMES]
        parts += _certainty_and_risk(judged)
    parts.append(Text(_LEGEND, style="dim"))
    return Group(*parts)


def _on_both(head: str, rows: Sequence[BothScores]) -> Iterator[RenderableType]:
    for basis in _ORDER:
        yield Text(f"\n{basis.words}", style="italic")
        yield _scored(head, rows, basis)


def _certainty_and_risk(judged: Sequence[Judged]) -> Iterator[RenderableType]:
    yield Text("\nIntervals and choices, all runs (throughput)", style="bold")
    found = certainty_by_regime(judged)
    for basis in _ORDER:
        yield Text(f"\n{basis.words}", style="italic")
        rows = ((name, *_certainty_cells(each[basis])) for name, each in found.items())
        yield titled_table("regime", *_CHOICE_HEADS, rows=rows, max_width=_LONGEST)
    yield Text("\nOut of memory, runs that state what they recompute, as stated", style="bold")
    risks = (
        (
            name,
            each.runs,
            *map(figure, (each.mean_chance_pct, each.ran_out_pct, each.expected)),
            each.out_of_memory,
        )
        for name, each in risks_by_regime(judged).items()
    )
    yield titled_table("regime", *_RISK_HEADS, rows=risks, max_width=_LONGEST)


def _scored(head: str, rows: Iterable[BothScores], basis: Basis) -> Table:
    cells = ((each.name, *_cells(each.on(basis))) for each in rows)
    return titled_table(head, *_HEADS, rows=cells, max_width=_LONGEST)


def _certainty_cells(each: Certainty) -> tuple[str, ...]:
    covered, choice = each.coverage, each.choice
    return (
        figure(covered.within_50_pct if covered else None, 0),
        figure(covered.within_90_pct if covered else None, 0),
        str(choice.jobs) if choice else "",
        figure(choice.nominal_regret_pct if choice else None),
        figure(choice.default_regret_pct if choice else None),
        figure(choice.shortlist_size if choice else None),
        figure(choice.shortlist_holds_pct if choice else None, 0),
        figure(choice.sure_right_pct if choice else None, 0),
    )


def _cells(each: Scores) -> tuple[str, ...]:
    errors = each.errors
    regret = f"{figure(each.regret_mean_pct)} {figure(each.regret_max_pct, 0)}"
    return (
        f"{each.predicted}/{each.rows}",
        figure(errors.mape_pct),
        figure(errors.median_signed_pct, signed=True),
        figure(errors.p90_abs_pct),
        figure(each.memory.mape_pct),
        regret if each.groups else "",
        figure(each.pairs_in_order_pct, 0),
        _share(each.ran),
        _share(each.out_of_memory),
    )


def _share(counts: tuple[int, int]) -> str:
    return f"{counts[1]}/{counts[0]}" if counts[0] else ""


def titled_table(head: str, *titles: str, rows: Iterable[Sequence[object]], **narrow: Any) -> Table:
    """Rows of a name and figures; with options of the name column, figures stand close together."""
    padding = (0, 1, 0, 0) if narrow else (0, 1)
    columns = (*name_columns(head, **narrow), *figure_columns(*titles))
    table = EdgelessTable(*columns, padding=padding)
    for name, *cells in rows:
        table.add_row(str(name), *map(str, cells), style="bold" if name in _ALL else "")
    return table
