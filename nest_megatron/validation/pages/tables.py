"""Scores of predictions as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from nest_megatron.report.tables import EdgelessTable, figure_columns, name_columns
from nest_megatron.validation.judging import Certainty
from nest_megatron.validation.outcome import Basis, Judged
from nest_megatron.validation.regimes import REGIMES, RegimeName
from nest_megatron.validation.report import (
    BothScores,
    FileScores,
    Scores,
    certainty_by_regime,
    file_scores,
    regime_scores,
    risks_by_regime,
)
from nest_megatron.validation.rows import RowKind
from nest_megatron.validation.scores import NOISE, ErrorScores

_HEADS = ("rows", "MAPE", "med", "p90", "mem", "regret", "pairs", "ran", "OOM")
_LONGEST = 16
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
        parts += _file_tables(file)
        parts += [
            Text(f"  refused {count:4d}: {reason}")
            for reason, count in file.total.as_stated.refused.items()
        ]
    regimes = regime_scores(RowKind.THROUGHPUT, judged)
    if any(each.as_stated.rows for each in regimes.values()):
        parts += _regime_tables(regimes)
        parts += _certainty_tables(judged)
        parts += _risk_table(judged)
    parts.append(Text(_LEGEND, style="dim"))
    return Group(*parts)


def _file_tables(file: FileScores) -> Iterable[RenderableType]:
    if file.kind is RowKind.COLLECTIVES:
        yield _table("source", (*file.sources, file.total), Basis.AS_STATED)
        return
    for basis in _ORDER:
        yield Text(f"\n{basis.words}", style="italic")
        yield _table("source", (*file.sources, file.total), basis)


def _regime_tables(regimes: Mapping[RegimeName, BothScores]) -> Iterable[RenderableType]:
    yield Text("\nRegimes of all runs (throughput)", style="bold")
    for basis in _ORDER:
        yield Text(f"\n{basis.words}", style="italic")
        yield _table("regime", tuple(regimes.values()), basis)
    yield Text()
    for each in REGIMES:
        yield Text(f"  {each.name}: {each.definition}", style="dim")


def _certainty_tables(judged: Sequence[Judged]) -> Iterable[RenderableType]:
    """Whether intervals hold, and what choosing by them comes to."""
    yield Text("\nIntervals and choices, all runs (throughput)", style="bold")
    found = certainty_by_regime(judged)
    for basis in _ORDER:
        yield Text(f"\n{basis.words}", style="italic")
        table = _empty_table("regime", _CHOICE_HEADS)
        for name, each in found.items():
            style = "bold" if name == "all" else ""
            table.add_row(name, *_certainty_cells(each[basis]), style=style)
        yield table


_RISK_HEADS = ("runs", "mean chance %", "ran out %", "expected", "ran out")


def _risk_table(judged: Sequence[Judged]) -> Iterable[RenderableType]:
    """The chance to run out of memory beside what became of the runs."""
    yield Text("\nOut of memory, runs that state what they recompute, as stated", style="bold")
    table = _empty_table("regime", _RISK_HEADS)
    for name, each in risks_by_regime(judged).items():
        table.add_row(name, *each.cells(), style="bold" if name == "all" else "")
    yield table


_CHOICE_HEADS = ("in 50 %", "in 90 %", "jobs", "nominal", "default", "list", "holds", "sure")


def _certainty_cells(each: Certainty) -> tuple[str, ...]:
    covered, choice = each.coverage, each.choice
    shares = (covered.within_50_pct, covered.within_90_pct) if covered else ()
    inside = tuple(f"{share:.0f}" for share in shares) or ("", "")
    if choice is None:
        return (*inside, *("",) * 6)
    return (
        *inside,
        str(choice.jobs),
        f"{choice.nominal_regret_pct:.1f}",
        f"{choice.default_regret_pct:.1f}",
        f"{choice.shortlist_size:.1f}",
        f"{choice.shortlist_holds_pct:.0f}",
        "" if choice.sure_right_pct is None else f"{choice.sure_right_pct:.0f}",
    )


def _table(head: str, rows: Sequence[BothScores], basis: Basis) -> Table:
    table = _empty_table(head, _HEADS)
    for each in rows:
        style = "bold" if each.name == "total" else ""
        table.add_row(each.name, *_cells(each.on(basis)), style=style)
    return table


def _empty_table(head: str, titles: Sequence[str]) -> Table:
    columns = (*name_columns(head, max_width=_LONGEST), *figure_columns(*titles))
    return EdgelessTable(*columns, padding=(0, 1, 0, 0))


def _cells(each: Scores) -> tuple[str, ...]:
    return (
        f"{each.predicted}/{each.rows}",
        *_error_cells(each.errors),
        f"{each.memory.mape_pct:.1f}" if each.memory else "",
        _regret(each),
        "" if each.pairs_in_order_pct is None else f"{each.pairs_in_order_pct:.0f}",
        _share(each.ran),
        _share(each.out_of_memory),
    )


def _error_cells(errors: ErrorScores | None) -> tuple[str, str, str]:
    if errors is None:
        return "", "", ""
    return (
        f"{errors.mape_pct:.1f}",
        f"{errors.median_signed_pct:+.1f}",
        f"{errors.p90_abs_pct:.1f}",
    )


def _regret(each: Scores) -> str:
    if each.regret_mean_pct is None or each.regret_max_pct is None:
        return ""
    return f"{each.regret_mean_pct:.1f} {each.regret_max_pct:.0f}"


def _share(counts: tuple[int, int]) -> str:
    return f"{counts[1]}/{counts[0]}" if counts[0] else ""
