"""``calibrate``: fits to measured runs, what they found, and the files that they write."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from nest_megatron.errors import OK, UserInputError
from nest_megatron.report.console import say, show, show_json
from nest_megatron.report.tables import figure
from nest_megatron.validation.commands import titled_table
from nest_megatron.validation.machines import links
from nest_megatron.validation.models import ModelBook
from nest_megatron.validation.rows import RowFile, RowKind, read_rows
from tools.calibration.catalogue import Constants, catalogue_values, write_links_of
from tools.calibration.constants import (
    Evidence,
    Sample,
    by_name,
    cross_validate,
    evidence,
    fit_constants,
    samples_of,
    thinned,
)
from tools.calibration.link_samples import read_samples
from tools.calibration.links import LEAST_BYTES, CollectiveSample, LinkFit, fit_links
from tools.calibration.parameters import PARAMETERS
from tools.calibration.peaks import PeakFits, fit_peaks, peak_evidence
from tools.calibration.stragglers import StragglerFit, fit_stragglers, scalings_of
from tools.calibration.uncertainty import UncertaintyFit, fit_uncertainty

_LARGE = f"collective of {LEAST_BYTES / 1e6:g} MB or more has a measured time"

Fitted = Constants | UncertaintyFit | StragglerFit | PeakFits | LinkFit


def run_calibrate(paths: Sequence[Path], *, out: Path | None, validate: bool, as_json: bool) -> int:
    """Fit the cost model's constants, print how well they carry over, and write them."""
    files = [read_rows(path) for path in paths]
    book = ModelBook.load()
    samples = thinned(samples_of(files, book))
    collectives = [*_collectives(files)]
    if not samples and not collectives:
        raise _nothing_measured(paths, "row has a measured time")
    fits: list[Fitted] = [
        *_constants(samples, validate=validate),
        *_others(files, book),
        *(fit_links(links(), each, cross_validate=validate) for each in collectives),
    ]
    written = [] if out is None else [path for fit in fits for path in _write(out, fit)]
    if as_json:
        show_json({key: value for fit in fits for key, value in fit.document().items()})
        return OK
    for fit in fits:
        show(report_of(fit))
    for path in written:
        say(f"Wrote {path}.")
    return OK


def _nothing_measured(paths: Sequence[Path], what: str) -> UserInputError:
    return UserInputError(
        "measurements",
        ", ".join(map(str, paths)),
        limit=f"no {what} that the cost model can predict",
        fix="`nest-megatron validate` prints why rows are refused.",
    )


def _collectives(files: Sequence[RowFile]) -> Iterator[tuple[CollectiveSample, ...]]:
    """Samples of the collectives of each folder."""
    found = [file for file in files if file.kind is RowKind.COLLECTIVES]
    for folder in sorted({file.path.parent for file in found}):
        own = [file for file in found if file.path.parent == folder]
        samples = read_samples(folder, chain.from_iterable(file.rows for file in own))
        if not any(each.is_large for each in samples):
            raise _nothing_measured([file.path for file in own], _LARGE)
        yield samples


def _constants(samples: Sequence[Sample], *, validate: bool) -> Iterator[Fitted]:
    fit = fit_constants(samples, start=catalogue_values())
    unseen = {by: cross_validate(fit, by) for by in ("source", "model")} if validate else {}
    left_out = {by: by_name(each, by) for by, each in unseen.items()}
    known = evidence(fit) if validate else {}
    yield Constants(fit=fit, samples=samples, left_out=left_out, evidence=known)
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
    return write_links_of(out, fit) if isinstance(fit, LinkFit) else fit.write(out)


@functools.singledispatch
def report_of(fit: object) -> RenderableType:
    """What a fit found, and how well it carries over to what it has not seen."""
    raise TypeError(f"{type(fit).__name__} has no report")


@report_of.register
def _constants_report(fit: Constants) -> RenderableType:
    if not fit.samples:
        return Group()
    values, errors = fit.fit.values, fit.fit.errors
    parts: list[RenderableType] = [
        titled_table(
            *("constant", "fitted", "prior", "bounds", "rows", "loses %"),
            rows=(
                (
                    p.key,
                    f"{values[p.key]:.4g}",
                    f"{p.prior:.3g}",
                    f"{p.low:.3g} to {p.high:.3g}",
                    *_evidence_cells(fit.evidence.get(p.key)),
                )
                for p in PARAMETERS
                if p.key in values
            ),
        ),
        titled_table(
            *("source", "rows", "MAPE %"),
            rows=[
                *(
                    (name, len(each), figure(fit.fit.mape_pct(name)))
                    for name, each in errors.items()
                ),
                ("all", sum(map(len, errors.values())), figure(fit.fit.mape_pct())),
            ],
        ),
    ]
    for by, unseen in fit.left_out.items():
        rows = ((h.name, h.rows, figure(h.seen_pct), figure(h.unseen_pct)) for h in unseen)
        table = titled_table(by, "rows", "seen %", "unseen %", rows=rows)
        parts += [Text(f"\nLeft out by {by}", style="bold"), table]
    return Group(*parts)


def _evidence_cells(known: Evidence | None) -> tuple[str, str]:
    return ("", "") if known is None else (f"{known.rows}", figure(known.loses_pct, 2))


@report_of.register
def _links_report(fit: LinkFit) -> RenderableType:
    rows = (
        (
            name,
            errors.rows,
            figure(100 * errors.fitted),
            "" if math.isnan(errors.left_out) else figure(100 * errors.left_out),
        )
        for name, errors in {**fit.by("cluster"), "all": fit.overall()}.items()
    )
    return titled_table("collectives from 1 MB", "rows", "MAPE %", "left out %", rows=rows)


@report_of.register
def _stragglers_report(fit: StragglerFit) -> RenderableType:
    deviations = {**fit.left_out_pct, "all, fitted": (fit.without_pct, fit.with_pct)}
    rows = ((name, *(figure(each, 2) for each in pair)) for name, pair in deviations.items())
    head = f"weak scalings, delay {fit.delay_s:g} s"
    return titled_table(head, "without %", "unseen %", rows=rows)


@report_of.register
def _uncertainty_report(fit: UncertaintyFit) -> RenderableType:
    scales = {
        **fit.scales.mechanisms,
        **{f"job, {name}": scale for name, scale in fit.scales.job.items()},
        **{f"layout, {name}": scale for name, scale in fit.scales.layout.items()},
    }
    coverage = {**fit.coverage, "sources, mean": fit.coverage_of_sources}
    return Group(
        titled_table(
            "error of", "scale %", rows=((n, figure(100 * scale)) for n, scale in scales.items())
        ),
        titled_table(
            *("runs, source left out", "rows", "in 50 %", "in 90 %"),
            rows=(
                (name, each.runs, f"{each.within_50_pct:.0f} %", f"{each.within_90_pct:.0f} %")
                for name, each in coverage.items()
            ),
        ),
    )


@report_of.register
def _peaks_report(found: PeakFits) -> RenderableType:
    errors, inside = ("too low by %", "up %", "down %"), ("in 50 %", "in 90 %")
    runs = ("ran or ran out", "ran out", "expected")
    rows = (
        (
            name,
            fit.total("measured"),
            len(fit.evidence),
            *(figure(100 * e) for e in (fit.error.median, fit.error.above, fit.error.below)),
            *(f"{fit.by_source_pct[share]:.0f} %" for share in (50, 90)),
            fit.total("ran") + fit.total("ran_out"),
            fit.total("ran_out"),
            figure(fit.expected_to_run_out),
        )
        for name, fit in found.fits.items()
    )
    return titled_table(
        "peaks of memory", "measured", "sources", *errors, *inside, *runs, rows=rows
    )
