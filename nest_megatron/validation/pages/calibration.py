"""A calibration as tables for a terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from nest_megatron.report.tables import EdgelessTable, figure_columns, name_columns
from nest_megatron.validation.calibrate import Fit, HeldOut
from nest_megatron.validation.calibration import PARAMETERS
from nest_megatron.validation.fit_collectives import LinkFit
from nest_megatron.validation.fit_memory import PeakFit
from nest_megatron.validation.fit_stragglers import StragglerFit
from nest_megatron.validation.fit_uncertainty import UncertaintyFit


def calibration_report(fit: Fit, left_out: Mapping[str, Sequence[HeldOut]]) -> RenderableType:
    """Constants, errors by source, and how well they carry over to what was left out."""
    parts: list[RenderableType] = [_constants(fit), _errors(fit)]
    for by, held in left_out.items():
        parts += [Text(f"\nLeft out by {by}", style="bold"), _held_out(by, held)]
    return Group(*parts)


def links_report(fit: LinkFit) -> RenderableType:
    """Errors of collectives of 1 MB and more by cluster, fitted, and by a fit without it."""
    table = _table("collectives from 1 MB", "rows", "MAPE %", "left out %")
    for name, errors in {**fit.by_cluster(), "all": fit.overall()}.items():
        unseen = "" if math.isnan(errors.left_out) else f"{100 * errors.left_out:.1f}"
        table.add_row(name, str(errors.rows), f"{100 * errors.fitted:.1f}", unseen)
    return table


def stragglers_report(fit: StragglerFit) -> RenderableType:
    """What ranks are late, and by how much the runs of weak scalings deviate, model by model."""
    table = _table(f"weak scalings, delay {fit.delay_s:g} s", "without %", "unseen %")
    for model, (without, unseen) in fit.left_out_pct.items():
        table.add_row(model, f"{without:.2f}", f"{unseen:.2f}")
    table.add_row("all, fitted", f"{fit.without_pct:.2f}", f"{fit.with_pct:.2f}")
    return table


def uncertainty_report(fit: UncertaintyFit) -> RenderableType:
    """How far off predictions are, and how many runs of a source left out lie in the intervals."""
    scales = _table("error of", "scale %")
    for name, scale in fit.scales.mechanisms.items():
        scales.add_row(name, f"{100 * scale:.1f}")
    for kind, found in (("job", fit.scales.job), ("layout", fit.scales.layout)):
        for name, scale in found.items():
            scales.add_row(f"{kind}, {name}", f"{100 * scale:.1f}")
    table = _table("runs, source left out", "rows", "in 50 %", "in 90 %")
    for name, each in {**fit.coverage, "sources, mean": fit.coverage_of_sources}.items():
        inside = (f"{share:.0f} %" for share in (each.within_50_pct, each.within_90_pct))
        table.add_row(name, str(each.runs), *inside)
    return Group(scales, table)


def peaks_report(fits: Mapping[str, PeakFit]) -> RenderableType:
    """Errors of predicted peaks, and how they hold on sources left out."""
    errors, held = ("too low by %", "up %", "down %"), ("in 50 %", "in 90 %")
    runs = ("ran or ran out", "ran out", "expected")
    table = _table("peaks of memory", "measured", "sources", *errors, *held, *runs)
    for name, fit in fits.items():
        error, inside = fit.error, fit.by_source_pct
        ran, ran_out = fit.total("ran"), fit.total("ran_out")
        table.add_row(
            name,
            str(fit.total("measured")),
            str(len(fit.evidence)),
            *(f"{100 * each:.1f}" for each in (error.median, error.above, error.below)),
            *(f"{inside[share]:.0f} %" for share in (50, 90)),
            *(str(ran + ran_out), str(ran_out), f"{fit.expected_to_run_out:.1f}"),
        )
    return table


def _table(name: str, *figures: str) -> Table:
    return EdgelessTable(*name_columns(name), *figure_columns(*figures))


def _constants(fit: Fit) -> Table:
    table = _table("constant", "fitted", "prior", "bounds")
    for p in PARAMETERS:
        if p.key in fit.values:
            bounds = f"{p.low:.3g} to {p.high:.3g}"
            table.add_row(p.key, f"{fit.values[p.key]:.4g}", f"{p.prior:.3g}", bounds)
    return table


def _errors(fit: Fit) -> Table:
    table = _table("source", "rows", "MAPE %")
    for source, errors in fit.errors.items():
        table.add_row(source, str(len(errors)), f"{fit.mape_pct(source):.1f}")
    table.add_row("all", str(sum(map(len, fit.errors.values()))), f"{fit.mape_pct():.1f}")
    return table


def _held_out(by: str, held: Sequence[HeldOut]) -> Table:
    table = _table(by, "rows", "seen %", "unseen %")
    for each in held:
        table.add_row(each.name, str(each.rows), f"{each.seen_pct:.1f}", f"{each.unseen_pct:.1f}")
    return table
