"""``validate``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nest_megatron.documents import csv_text
from nest_megatron.errors import OK
from nest_megatron.files import write_text
from nest_megatron.report.charts import check_matplotlib
from nest_megatron.report.console import say, show, show_json
from nest_megatron.validation.assess import Assessor
from nest_megatron.validation.calibration import shipped_left_out
from nest_megatron.validation.models import ModelBook
from nest_megatron.validation.outcome import Judged, RowOutcome
from nest_megatron.validation.report import as_document
from nest_megatron.validation.rows import RowFile, RowKind, read_rows


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
        check_matplotlib("--docs")
    files = [read_rows(path) for path in paths]
    book = ModelBook.load(models)
    judged = _judged(files, book, left_out=left_out)
    unseen: Sequence[Judged] = ()
    if docs is not None:
        runs = [file for file in files if file.kind is RowKind.THROUGHPUT]
        unseen = _judged(runs, book, left_out=True)
    written = []
    if docs is not None:
        from nest_megatron.validation.pages.accuracy import write_accuracy

        written += write_accuracy(docs, judged, unseen, force=force)
    if rows is not None:
        write_text(rows, _rows_text(judged))
        written.append(rows)
    if as_json:
        show_json(as_document(judged))
        return OK
    from nest_megatron.validation.pages.terminal import validation_report

    show(validation_report(judged))
    for path in written:
        say(f"Wrote {path}.")
    return OK


def _judged(files: Sequence[RowFile], book: ModelBook, *, left_out: bool) -> list[Judged]:
    assessor = Assessor(book, left_out=shipped_left_out() if left_out else None)
    return [assessor.judge(file) for file in files]


def _rows_text(judged: Sequence[Judged]) -> str:
    return csv_text([_cells(each.file, *pair) for each in judged for pair in each.pairs])


def _cells(file: RowFile, stated: RowOutcome, planned: RowOutcome) -> dict[str, object]:
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
