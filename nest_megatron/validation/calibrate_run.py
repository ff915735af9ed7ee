"""``calibrate``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from nest_megatron.errors import OK, UserInputError
from nest_megatron.report.console import say, show, show_json
from nest_megatron.validation.calibrate import (
    Fit,
    HeldOut,
    Sample,
    by_name,
    cross_validate,
    fit_constants,
    thinned,
)
from nest_megatron.validation.calibration import PARAMETERS
from nest_megatron.validation.calibration_files import catalogue_values, write_calibration
from nest_megatron.validation.fit_collectives import Errors, LinkFit, fit_links
from nest_megatron.validation.fit_memory import PeakFit, fit_peaks, peak_evidence, write_peaks
from nest_megatron.validation.fit_samples import read_samples
from nest_megatron.validation.fit_stragglers import (
    StragglerFit,
    fit_stragglers,
    scalings_of,
    write_stragglers,
)
from nest_megatron.validation.fit_uncertainty import (
    UncertaintyFit,
    fit_uncertainty,
    write_uncertainty,
)
from nest_megatron.validation.left_out import write_left_out_constants
from nest_megatron.validation.links import links
from nest_megatron.validation.links_file import write_clusters, write_left_out, write_links
from nest_megatron.validation.models import ModelBook
from nest_megatron.validation.rows import RowFile, RowKind, read_rows
from nest_megatron.validation.samples import samples_of


def run_calibrate(paths: Sequence[Path], *, out: Path | None, validate: bool, as_json: bool) -> int:
    """Fit the cost model's constants, print how well they carry over, and write them."""
    files = [read_rows(path) for path in paths]
    folders = {file.path.parent for file in files if file.kind is RowKind.COLLECTIVES}
    samples = thinned(samples_of(files, ModelBook.load()))
    if not samples and not folders:
        raise UserInputError(
            "measurements",
            value=[str(path) for path in paths],
            limit="no row has a measured time that the cost model can predict",
            fix="`nest-megatron validate` prints why rows are refused.",
        )
    found = [fit_links(links(), read_samples(f), cross_validate=validate) for f in sorted(folders)]
    fit = fit_constants(samples, PARAMETERS, start=catalogue_values())
    left_out: dict[str, list[HeldOut]] = {}
    errors: UncertaintyFit | None = None
    for by in ("source", "model") if validate else ():
        unseen = cross_validate(fit, by)
        left_out[by] = by_name(unseen, by)
        if by == "source" and unseen:
            errors = fit_uncertainty(unseen)
    scalings = scalings_of(files, ModelBook.load())
    late = fit_stragglers(scalings) if scalings else None
    peaks = _fitted_peaks(files)
    written = [] if out is None else _write(out, fit, samples, left_out, found)
    if out is not None and late is not None:
        written.append(out / "calibration" / "stragglers.yaml")
        write_stragglers(written[-1], late)
    if out is not None and errors is not None:
        written += _write_errors(out / "calibration", fit, errors)
    if out is not None and peaks:
        written.append(out / "calibration" / "memory.yaml")
        write_peaks(written[-1], peaks)
    if as_json:
        document = {**_document(fit, samples, left_out), **_collectives(found), **_peaks(peaks)}
        document |= {} if errors is None else {"uncertainty": _uncertainty(errors)}
        show_json(document | ({} if late is None else {"stragglers": _stragglers(late)}))
        return OK
    from nest_megatron.validation.pages.calibration import (
        calibration_report,
        links_report,
        peaks_report,
        stragglers_report,
        uncertainty_report,
    )

    if samples:
        show(calibration_report(fit, left_out))
    if late is not None:
        show(stragglers_report(late))
    if errors is not None:
        show(uncertainty_report(errors))
    if peaks:
        show(peaks_report(peaks))
    for each in found:
        show(links_report(each))
    for path in written:
        say(f"Wrote {path}.")
    return OK


def _write(
    out: Path,
    fit: Fit,
    samples: Sequence[Sample],
    left_out: Mapping[str, Sequence[HeldOut]],
    found: Sequence[LinkFit],
) -> list[Path]:
    written = write_calibration(out, fit, samples, left_out) if samples else []
    for each in found:
        path = out / "calibration" / "links.yaml"
        write_links(path, each)
        written += [path, *write_clusters(out / "cluster", each.links)]
        if not math.isnan(each.overall().left_out):
            written.append(out / "calibration" / "collectives.yaml")
            write_left_out(written[-1], each)
    return written


def _fitted_peaks(files: Sequence[RowFile]) -> dict[str, PeakFit]:
    """Errors of peaks, where tables of peaks are among the files and no group has one source."""
    if not any(file.kind in (RowKind.MEMORY_PEAK, RowKind.MEMORY_GOLDEN) for file in files):
        return {}
    evidence = peak_evidence(files, ModelBook.load())
    if any(sum(bool(each.measured) for each in own.values()) < 2 for own in evidence.values()):
        return {}
    return {name: fit_peaks(own) for name, own in evidence.items()}


def _write_errors(folder: Path, fit: Fit, errors: UncertaintyFit) -> list[Path]:
    """Write how far off predictions are, and the constants of fits without each source."""
    write_uncertainty(folder / "uncertainty.yaml", errors)
    write_left_out_constants(folder / "left_out.yaml", fit)
    return [folder / "uncertainty.yaml", folder / "left_out.yaml"]


def _uncertainty(fit: UncertaintyFit) -> dict[str, object]:
    return {
        "scales": dataclasses.asdict(fit.scales),
        "coverage": {name: dataclasses.asdict(each) for name, each in fit.coverage.items()},
    }


def _collectives(found: Sequence[LinkFit]) -> dict[str, dict[str, object]]:
    """Errors of messages of 1 MB and more, fitted, and by a fit without their cluster."""
    return {
        "collectives": {
            name: _errors(errors) for each in found for name, errors in each.by_source().items()
        },
        "collectives_by_cluster": {
            name: _errors(errors) for each in found for name, errors in each.by_cluster().items()
        },
        "collectives_overall": {
            key: v for each in found for key, v in _errors(each.overall()).items()
        },
    }


def _stragglers(fit: StragglerFit) -> dict[str, object]:
    return {
        "straggler_delay_s": fit.delay_s,
        "rows": dict(fit.rows),
        "without_pct": fit.without_pct,
        "with_pct": fit.with_pct,
        "left_out_pct": {model: list(pair) for model, pair in fit.left_out_pct.items()},
    }


def _peaks(fits: Mapping[str, PeakFit]) -> dict[str, object]:
    if not fits:
        return {}
    return {
        "peaks": {
            name: {
                "median": fit.error.median,
                "above": fit.error.above,
                "below": fit.error.below,
                **{kind: fit.total(kind) for kind in ("measured", "ran", "ran_out")},
                "expected_to_run_out": fit.expected_to_run_out,
                "coverage_by_source_pct": dict(fit.by_source_pct),
                "coverage_by_row_pct": dict(fit.by_row_pct),
            }
            for name, fit in fits.items()
        }
    }


def _errors(errors: Errors) -> dict[str, float | None]:
    left_out = None if math.isnan(errors.left_out) else errors.left_out
    return {"rows": errors.rows, "error": errors.fitted, "left_out": left_out}


def _document(
    fit: Fit, samples: Sequence[Sample], left_out: Mapping[str, Sequence[HeldOut]]
) -> dict[str, object]:
    return {
        "rows": len(samples),
        "values": dict(fit.values),
        "mape_pct": {source: fit.mape_pct(source) for source in fit.errors},
        "left_out": {
            by: [
                {
                    "name": each.name,
                    "rows": each.rows,
                    "seen_pct": each.seen_pct,
                    "unseen_pct": each.unseen_pct,
                }
                for each in held
            ]
            for by, held in left_out.items()
        },
    }
