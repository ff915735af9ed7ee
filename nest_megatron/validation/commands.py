"""``validate`` and ``calibrate``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from nest_megatron.documents import csv_text
from nest_megatron.errors import OK, UserInputError
from nest_megatron.files import write_text
from nest_megatron.report.console import say, show, show_json
from nest_megatron.validation.assess import Assessor
from nest_megatron.validation.calibrate import (
    Sample,
    by_name,
    cross_validate,
    fit_constants,
    samples_of,
    thinned,
)
from nest_megatron.validation.calibration import shipped_left_out
from nest_megatron.validation.calibration_files import Constants, catalogue_values
from nest_megatron.validation.calibration_store import links
from nest_megatron.validation.fit_collectives import LinkFit, fit_links
from nest_megatron.validation.fit_memory import PeakFits, fit_peaks, peak_evidence
from nest_megatron.validation.fit_samples import read_samples
from nest_megatron.validation.fit_stragglers import StragglerFit, fit_stragglers, scalings_of
from nest_megatron.validation.fit_uncertainty import UncertaintyFit, fit_uncertainty
from nest_megatron.validation.links_file import write_fit
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


Fitted = Constants | UncertaintyFit | StragglerFit | PeakFits | LinkFit


def run_calibrate(paths: Sequence[Path], *, out: Path | None, validate: bool, as_json: bool) -> int:
    """Fit the cost model's constants, print how well they carry over, and write them."""
    files = [read_rows(path) for path in paths]
    folders = {file.path.parent for file in files if file.kind is RowKind.COLLECTIVES}
    book = ModelBook.load()
    samples = thinned(samples_of(files, book))
    if not samples and not folders:
        raise UserInputError(
            "measurements",
            [str(path) for path in paths],
            limit="no row has a measured time that the cost model can predict",
            fix="`nest-megatron validate` prints why rows are refused.",
        )
    fits: list[Fitted] = [
        *_constants(samples, validate=validate),
        *_others(files, book),
        *(
            fit_links(links(), read_samples(each), cross_validate=validate)
            for each in sorted(folders)
        ),
    ]
    written = [] if out is None else [path for fit in fits for path in _write(out, fit)]
    if as_json:
        show_json({key: value for fit in fits for key, value in fit.document().items()})
        return OK
    from nest_megatron.validation.pages.terminal import report_of

    for fit in fits:
        show(report_of(fit))
    for path in written:
        say(f"Wrote {path}.")
    return OK


def _constants(samples: Sequence[Sample], *, validate: bool) -> Iterator[Fitted]:
    fit = fit_constants(samples, start=catalogue_values())
    unseen = {by: cross_validate(fit, by) for by in ("source", "model")} if validate else {}
    left_out = {by: by_name(each, by) for by, each in unseen.items()}
    yield Constants(fit=fit, samples=samples, left_out=left_out)
    if unseen and unseen["source"]:
        yield fit_uncertainty(unseen["source"])


def _others(files: Sequence[RowFile], book: ModelBook) -> Iterator[Fitted]:
    scalings = scalings_of(files, book)
    if scalings:
        yield fit_stragglers(scalings)
    if any(file.kind in (RowKind.MEMORY_PEAK, RowKind.MEMORY_GOLDEN) for file in files):
        evidence = peak_evidence(files, book)
        sources = [sum(bool(each.measured) for each in own.values()) for own in evidence.values()]
        if min(sources) > 1:
            yield PeakFits({name: fit_peaks(own) for name, own in evidence.items()})


def _write(out: Path, fit: Fitted) -> Iterator[Path]:
    return write_fit(out, fit) if isinstance(fit, LinkFit) else fit.write(out)
