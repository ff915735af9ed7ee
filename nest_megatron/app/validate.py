"""``validate``."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

from nest_megatron.app import OK
from nest_megatron.app.output import say, show, show_json
from nest_megatron.files import write_text
from nest_megatron.validation.assess import Assessor
from nest_megatron.validation.models import ModelBook
from nest_megatron.validation.named_sets import Judged
from nest_megatron.validation.outcome import RowOutcome
from nest_megatron.validation.report import as_document, file_scores
from nest_megatron.validation.rows import RowFile, read_rows

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
)


def run_validate(
    paths: Sequence[Path],
    *,
    models: Sequence[Path],
    rows: Path | None,
    docs: Path | None,
    as_json: bool,
) -> int:
    """Predict the rows of some files and print how well."""
    files = [read_rows(path) for path in paths]
    assessor = Assessor(ModelBook.load(models))
    judged = [(file, tuple(assessor.outcomes(file))) for file in files]
    written = [*_write_docs(docs, judged), *_write_rows(rows, judged)]
    scores = [file_scores(file.path, file.kind, outcomes) for file, outcomes in judged]
    if as_json:
        show_json({"files": [as_document(file) for file in scores]})
        return OK
    from nest_megatron.report.validation_tables import validation_report

    show(validation_report(scores))
    for path in written:
        say(f"Wrote {path}.")
    return OK


def _write_docs(folder: Path | None, judged: Sequence[Judged]) -> list[Path]:
    if folder is None:
        return []
    from nest_megatron.app.command_kinds import forced
    from nest_megatron.report.accuracy import write_accuracy

    return write_accuracy(folder, judged, force=forced())


def _write_rows(path: Path | None, judged: Sequence[Judged]) -> list[Path]:
    if path is None:
        return []
    write_text(path, _rows_text(judged))
    return [path]


def _rows_text(judged: Sequence[Judged]) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for file, outcomes in judged:
        writer.writerows(_cells(file, outcome) for outcome in outcomes)
    return stream.getvalue()


def _cells(file: RowFile, outcome: RowOutcome) -> Iterator[object]:
    row = outcome.row
    yield file.path.name
    yield from (row.get(column, "") for column in ("row_id", "source", "model", "gpu", "n_gpus"))
    yield from (_number(outcome.predicted_s), _number(outcome.measured_s), _error(outcome.time))
    yield from (outcome.predicted_bytes, outcome.measured_bytes, _error(outcome.memory))
    yield "" if outcome.fits is None else str(outcome.fits).lower()
    yield row.get("outcome", "")
    yield from (outcome.refused, outcome.detail, "; ".join(outcome.assumptions))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _error(pair: tuple[float, float] | None) -> str:
    return "" if pair is None else f"{100 * (pair[0] / pair[1] - 1):.2f}"
