"""Scores of predictions, and what a calibration found, as tables for a terminal."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

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
from nest_megatron.validation.outcome import REGIMES, Basis, Judged
from nest_megatron.validation.report import (
    BothScores,
    Scores,
    certainty_by_regime,
    file_scores,
    regime_scores,
    risks_by_regime,
)
from nest_megatron.validation.rows import RowKind
from nest_megatron.validation.scores import NOISE, Certainty

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
rows: predicted of all. MAPE, med, p90, mem: errors in per cent of what was
measured (mean size, median with sign, 90th percentile; mean size for memory).
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
        yield _table("regime", *_CHOICE_HEADS, rows=rows, max_width=_LONGEST)
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
    yield _table("regime", *_RISK_HEADS, rows=risks, max_width=_LONGEST)


def _scored(head: str, rows: Iterable[BothScores], basis: Basis) -> Table:
    cells = ((each.name, *_cells(each.on(basis))) for each in rows)
    return _table(head, *_HEADS, rows=cells, max_width=_LONGEST)


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
    for by, unseen in fit.left_out.items():
        rows = ((h.name, h.rows, figure(h.seen_pct), figure(h.unseen_pct)) for h in unseen)
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


def _table(head: str, *titles: str, rows: Iterable[Sequence[object]], **narrow: Any) -> Table:
    """Rows of a name and figures; with options of the name column, figures stand close together."""
    padding = (0, 1, 0, 0) if narrow else (0, 1)
    columns = (*name_columns(head, **narrow), *figure_columns(*titles))
    table = EdgelessTable(*columns, padding=padding)
    for name, *cells in rows:
        table.add_row(str(name), *map(str, cells), style="bold" if name in _ALL else "")
    return table
