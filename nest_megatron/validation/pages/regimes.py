"""Regimes, as planned beside as stated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from nest_megatron.report.markdown import figure, table
from nest_megatron.validation.outcome import Judged
from nest_megatron.validation.regimes import REGIMES, RegimeName
from nest_megatron.validation.report import BothScores, Scores, both_scores, regime_scores
from nest_megatron.validation.rows import RowKind
from nest_megatron.validation.scores import NOISE

_HEAD = (
    "runs",
    "predicted",
    "error %",
    "as stated %",
    "median %",
    "p90 %",
    "ran, called infeasible",
    "out of memory, caught",
    "jobs",
    "regret %",
    "worst %",
    "pairs in order %",
)


#: What each figure of a basis counts in ``--json``.
_KEYS = (
    ("`rows`", "all rows; `predicted` and `refused` add up to them"),
    ("`mape_pct`, `median_signed_pct`, `p90_abs_pct`", "errors of time; of memory in its files"),
    (
        "`coverage_50_pct`, `coverage_90_pct`",
        "of rows with a time, those inside the interval that is predicted to hold 50 and 90 %",
    ),
    ("`ran`", "predicted rows of runs that ran, whatever they leave out"),
    ("`ran_called_infeasible`", "those of them that are predicted not to fit"),
    ("`oom`, `oom_caught`", "predicted rows of runs out of memory; those predicted not to fit"),
    ("`groups`", "jobs that were measured in at least two layouts"),
    ("`regret_mean_pct`, `regret_max_pct`", "over these jobs"),
    ("`pairs_in_order_pct`", "of all pairs of layouts of one job, `null` without one"),
)


def regimes_section(judged: Sequence[Judged]) -> str:
    """What leads the page: every regime of all runs, the worst first."""
    regimes = regime_scores(RowKind.THROUGHPUT, judged)
    if not any(each.as_stated.rows for each in regimes.values()):
        return ""
    defined = [(str(each.name), each.definition, each.reason) for each in REGIMES]
    return "\n\n".join(
        (
            "## As planned, by regime",
            "A prediction **as planned** takes degrees, batch and precision from the row (and "
            "recomputation and sharding where it states them) and every other setting as the "
            "planner would assume or choose it for the row's framework, release and GPU. Where a "
            "row leaves out its recomputation, a run that ran is called infeasible only if none "
            "that the planner may choose makes it fit; one that ran out of memory chose nothing. "
            "**As stated** also takes the settings of the row, or of the recipe behind it "
            "(`row_settings.csv` beside the file). Rows of all files of runs; the worst first.",
            regimes_table(regimes, all_runs(judged)),
            "Regimes overlap. Which rows belong:",
            table(("regime", "rows", "why apart"), defined),
            "pairs in order: of two layouts of one job whose measured times differ by more than "
            f"{100 * NOISE:g} % (less is noise), the share of which the faster is predicted to be "
            "faster; predictions that are equal count as wrong. A layout measured several times "
            "counts once, by its fastest run. ran: runs that ran and are predicted, also those "
            "that do not state their recomputation.",
            "In `--json` every source, every file's total and every regime (of a file in `files`, "
            "of all runs in `regimes`) holds `as_planned` and `as_stated`, each with",
            table(("key", "what it counts"), _KEYS),
            "What a source or total holds beside them is as stated. `certainty` holds, by regime "
            "and over all, what [intervals and choices](#intervals-and-choices) come to; "
            "`memory_risk` the chance to run out of memory beside what became of the runs.",
        )
    )


def all_runs(judged: Iterable[Judged]) -> BothScores:
    """Every row of the files of throughput."""
    files = [each for each in judged if each.file.kind is RowKind.THROUGHPUT]
    return both_scores("all", RowKind.THROUGHPUT, files, lambda _: True)


def regimes_table(
    regimes: Mapping[RegimeName, BothScores], together: BothScores | None = None
) -> str:
    """Regimes that have predictions, the worst first, and all rows together."""
    known = [each for each in regimes.values() if each.as_planned.errors]
    known.sort(key=lambda each: -_error(each.as_planned))
    rows = [_cells(each) for each in (*known, *((together,) if together else ()))]
    return table(_HEAD, rows, numeric=len(_HEAD) - 1)


def _error(found: Scores) -> float:
    return found.errors.mape_pct if found.errors else 0.0


def _cells(both: BothScores) -> tuple[str, ...]:
    each, stated = both.as_planned, both.as_stated.errors
    return (
        both.name,
        f"{each.predicted} of {each.rows}",
        f"**{_error(each):.1f}**",
        figure(stated.mape_pct if stated else None),
        figure(each.errors.median_signed_pct if each.errors else None, signed=True),
        figure(each.errors.p90_abs_pct if each.errors else None),
        _share(each.ran),
        _share(each.out_of_memory),
        str(len(each.groups) or ""),
        figure(each.regret_mean_pct),
        figure(each.regret_max_pct),
        figure(each.pairs_in_order_pct, 0),
    )


def _share(counts: tuple[int, int]) -> str:
    return f"{counts[1]} of {counts[0]}" if counts[0] else ""
