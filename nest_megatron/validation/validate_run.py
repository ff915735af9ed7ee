"""``validate``."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

from nest_megatron.errors import OK
from nest_megatron.files import write_text
from nest_megatron.report.console import say, show, show_json
from nest_megatron.validation.assess import Assessor
from nest_megatron.validation.calibration import shipped_left_out
from nest_megatron.validation.models import ModelBook
from nest_megatron.validation.outcome import Judged, RowOutcome
from nest_megatron.validation.report import as_document
from nest_megatron.validation.rows import RowFile, RowKind, read_rows

_COLUMNS = (
    "file",
    "row_id",
    "source",
    "model",
    "gpu",
    "n_gpus",
    "predicted_s",
    "measured_s",
    "error_pct",
    "predicted_bytes",
    "measured_bytes",
    "memory_error_pct",
    "fits",
    "outcome",
    "refused",
    "detail",
    "assumptions",
    "planned_s",
    "planned_error_pct",
    "planned_bytes",
    "planned_fits",
    "planned_assumptions",
)


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
    files = [read_rows(path) for path in paths]
    book = ModelBook.load(models)
    judged = _judged(files, book, left_out=left_out)
    unseen: Sequence[Judged] = ()
    if docs is not None:
        runs = [file for file in files if file.kind is RowKind.THROUGHPUT]
        unseen = _judged(runs, book, left_out=True)
    written = [*_write_docs(docs, judged, unseen, force=force), *_write_rows(rows, judged)]
    if as_json:
        show_json(as_document(judged))
        return OK
    from nest_megatron.validation.pages.tables import validation_report

    show(validation_report(judged))
    for path in written:
        say(f"Wrote {path}.")
    return OK


def _judged(files: Sequence[RowFile], book: ModelBook, *, left_out: bool) -> list[Judged]:
    assessor = Assessor(book, left_out=shipped_left_out() if left_out else None)
    return [assessor.judge(file) for file in files]


def _write_docs(
    folder: Path | None,
    judged: Sequence[Judged],
    unseen: Sequence[Judged],
    *,
    force: bool | None,
) -> list[Path]:
    if folder is None:
        return []
    from nest_megatron.validation.pages.accuracy import write_accuracy

    return write_accuracy(folder, judged, unseen, force=force)


def _write_rows(path: Path | None, judged: Sequence[Judged]) -> list[Path]:
    if path is None:
        return []
    write_text(path, _rows_text(judged))
    return [path]


def _rows_text(judged: Sequence[Judged]) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for each in judged:
        pairs = zip(each.as_stated, each.as_planned, strict=True)
        writer.writerows(_cells(each.file, *pair) for pair in pairs)
    return stream.getvalue()


def _cells(file: RowFile, outcome: RowOutcome, planned: RowOutcome) -> Iterator[object]:
    row = outcome.row
    yield file.path.name
    yield from (row.get(column, "") for column in ("row_id", "source", "model", "gpu", "n_gpus"))
    yield from (_number(outcome.predicted_s), _number(outcome.measured_s), _error(outcome.time))
    yield from (outcome.predicted_bytes, outcome.measured_bytes, _error(outcome.memory))
    yield _flag(outcome.fits)
    yield row.get("outcome", "")
    yield from (outcome.refused, outcome.detail, "; ".join(outcome.assumptions))
    yield from (_number(planned.predicted_s), _error(planned.time), planned.predicted_bytes)
    yield from (_flag(planned.fits), "; ".join(planned.assumptions))


def _flag(value: bool | None) -> str:
    return "" if value is None else str(value).lower()


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _error(pair: tuple[float, float] | None) -> str:
    return "" if pair is None else f"{100 * (pair[0] / pair[1] - 1):.2f}"
