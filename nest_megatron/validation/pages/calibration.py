"""A calibration as tables for a terminal."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from nest_megatron.report.markdown import figure
from nest_megatron.report.tables import EdgelessTable, figure_columns, name_columns
from nest_megatron.validation.calibration import PARAMETERS
from nest_megatron.validation.calibration_files import Constants
from nest_megatron.validation.fit_collectives import LinkFit
from nest_megatron.validation.fit_memory import PeakFits
from nest_megatron.validation.fit_stragglers import StragglerFit
from nest_megatron.validation.fit_uncertainty import UncertaintyFit


@functools.singledispatch
def report_of(fit: object) -> RenderableType:
    """What a fit found, and how well it carries over to what it has not seen."""
    raise TypeError(f"{type(fit).__name__} has no report")


@report_of.register
def _constants(fit: Constants) -> RenderableType:
    if not fit.samples:
        return Group()
    values, errors = fit.fit.values, fit.fit.errors
    parts: list[RenderableType] = [
        _table(
            *("constant", "fitted", "prior", "bounds"),
            rows=(
                (p.key, f"{values[p.key]:.4g}", f"{p.prior:.3g}", f"{p.low:.3g} to {p.high:.3g}")
                for p in PARAMETERS
                if p.key in values
            ),
        ),
        _table(
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
    for by, held in fit.left_out.items():
        rows = ((h.name, h.rows, figure(h.seen_pct), figure(h.unseen_pct)) for h in held)
        table = _table(by, "rows", "seen %", "unseen %", rows=rows)
        parts += [Text(f"\nLeft out by {by}", style="bold"), table]
    return Group(*parts)


@report_of.register
def _links(fit: LinkFit) -> RenderableType:
    rows = (
        (
            name,
            errors.rows,
            figure(100 * errors.fitted),
            "" if math.isnan(errors.left_out) else figure(100 * errors.left_out),
        )
        for name, errors in {**fit.by("cluster"), "all": fit.overall()}.items()
    )
    return _table("collectives from 1 MB", "rows", "MAPE %", "left out %", rows=rows)


@report_of.register
def _stragglers(fit: StragglerFit) -> RenderableType:
    deviations = {**fit.left_out_pct, "all, fitted": (fit.without_pct, fit.with_pct)}
    rows = ((name, *(figure(each, 2) for each in pair)) for name, pair in deviations.items())
    head = f"weak scalings, delay {fit.delay_s:g} s"
    return _table(head, "without %", "unseen %", rows=rows)


@report_of.register
def _uncertainty(fit: UncertaintyFit) -> RenderableType:
    scales = {
        **fit.scales.mechanisms,
        **{f"job, {name}": scale for name, scale in fit.scales.job.items()},
        **{f"layout, {name}": scale for name, scale in fit.scales.layout.items()},
    }
    coverage = {**fit.coverage, "sources, mean": fit.coverage_of_sources}
    return Group(
        _table(
            "error of", "scale %", rows=((n, figure(100 * scale)) for n, scale in scales.items())
        ),
        _table(
            *("runs, source left out", "rows", "in 50 %", "in 90 %"),
            rows=(
                (name, each.runs, f"{each.within_50_pct:.0f} %", f"{each.within_90_pct:.0f} %")
                for name, each in coverage.items()
            ),
        ),
    )


@report_of.register
def _peaks(found: PeakFits) -> RenderableType:
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
    return _table("peaks of memory", "measured", "sources", *errors, *inside, *runs, rows=rows)


def _table(name: str, *figures: str, rows: Iterable[Sequence[object]]) -> Table:
    table = EdgelessTable(*name_columns(name), *figure_columns(*figures))
    for row in rows:
        table.add_row(*map(str, row))
    return table
