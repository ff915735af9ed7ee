"""``calibrate``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from nest_megatron.errors import OK, UserInputError
from nest_megatron.report.console import say, show, show_json
from nest_megatron.validation.calibrate import (
    by_name,
    cross_validate,
    fit_constants,
)
from nest_megatron.validation.calibration_files import Constants, catalogue_values
from nest_megatron.validation.fit_collectives import LinkFit, fit_links
from nest_megatron.validation.fit_memory import PeakFits, fit_peaks, peak_evidence
from nest_megatron.validation.fit_samples import read_samples
from nest_megatron.validation.fit_stragglers import StragglerFit, fit_stragglers, scalings_of
from nest_megatron.validation.fit_uncertainty import UncertaintyFit, fit_uncertainty
from nest_megatron.validation.links import links
from nest_megatron.validation.links_file import write_fit
from nest_megatron.validation.models import ModelBook
from nest_megatron.validation.rows import RowFile, RowKind, read_rows
from nest_megatron.validation.samples import Sample, samples_of, thinned

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
            value=[str(path) for path in paths],
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
    from nest_megatron.validation.pages.calibration import report_of

    for fit in fits:
        show(report_of(fit))
    for path in written:
        say(f"Wrote {path}.")
    return OK


def _constants(samples: Sequence[Sample], *, validate: bool) -> Iterator[Fitted]:
    """The cost model's constants, and how far off runs are that they were not fitted to."""
    fit = fit_constants(samples, start=catalogue_values())
    unseen = {by: cross_validate(fit, by) for by in ("source", "model")} if validate else {}
    left_out = {by: by_name(each, by) for by, each in unseen.items()}
    yield Constants(fit=fit, samples=samples, left_out=left_out)
    if unseen and unseen["source"]:
        yield fit_uncertainty(unseen["source"])


def _others(files: Sequence[RowFile], book: ModelBook) -> Iterator[Fitted]:
    """The delay of ranks, and errors of peaks where no group of them has one source alone."""
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
