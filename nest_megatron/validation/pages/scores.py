"""Tables of errors, goals and refusals in ``accuracy.md``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from nest_megatron.report.markdown import figure, table
from nest_megatron.validation.named_sets import Goal, Measure, NamedSet, scored_sets
from nest_megatron.validation.outcome import Basis, Judged
from nest_megatron.validation.pages.regimes import regimes_table
from nest_megatron.validation.report import BothScores, FileScores, Scores, file_scores
from nest_megatron.validation.rows import RowKind

_ERRORS = (
    "source",
    "predicted",
    "refused",
    "MAPE %",
    "as stated %",
    "median %",
    "p90 %",
    "memory %",
    "jobs",
    "rank corr.",
    "pairs %",
    "regret %",
    "worst %",
)


def files_section(judged: Sequence[Judged]) -> str:
    """Which rows were read."""
    rows = [
        (
            f"`{each.file.path.name}`",
            str(each.file.kind),
            str(len(each.as_stated)),
            str(sum(not outcome.refused for outcome in each.as_stated)),
            str(len({outcome.source for outcome in each.as_stated})),
        )
        for each in judged
    ]
    head = ("file", "kind", "rows", "predicted", "sources")
    return f"## Rows\n\n{table(head, rows, numeric=3)}"


def sets_section(judged: Sequence[Judged]) -> str:
    """Sets of rows beside what others reach."""
    rows = [row for each, found in scored_sets(judged) for row in _goals(each, found)]
    head = ("rows", "predicted", "what", "as planned", "as stated", "goal", "met", "others")
    return "\n\n".join(
        (
            "## Sets of rows that others have predicted",
            "Met: as planned. Others: Calculon with its own A100 file and these networks, on the "
            "whole collection that these files are a part of (its baseline_errors.csv); vTrain's, "
            "SimuMax's and the figure for Megatron's table 5 are their authors' own.",
            table(head, rows),
        )
    )


def sets_table(judged: Sequence[Judged]) -> str:
    """The same, short, for the README."""
    rows = [
        (
            each.name,
            str(goal.measure),
            *(goal_value(found.on(basis), goal) for basis in (Basis.AS_PLANNED, Basis.AS_STATED)),
            _others(goal),
        )
        for each, found in scored_sets(judged)
        for goal in each.goals
        if goal.others
    ]
    return table(("rows", "what", "as planned", "as stated", "others"), rows)


def goal_value(found: Scores, goal: Goal) -> str:
    """What is reached of a goal, with the digits that tell it from the goal."""
    value = goal.measure.of(found)
    if value is None:
        return "none"
    close = abs(value - goal.value) < 0.05  # would be rounded to the goal
    return figure(value, 2 if close or goal.measure is Measure.SPEARMAN else 1)


def _goals(each: NamedSet, found: BothScores) -> Iterator[tuple[str, ...]]:
    for goal in each.goals:
        value = goal.measure.of(found.as_planned)
        yield (
            each.name + (f" ({each.note})" if each.note else ""),
            f"{found.as_planned.predicted} of {found.as_planned.rows}",
            str(goal.measure),
            f"**{goal_value(found.as_planned, goal)}**",
            goal_value(found.as_stated, goal),
            f"{'≥' if goal.measure is Measure.SPEARMAN else '≤'} {goal.value:g}",
            "yes" if value is not None and goal.measure.meets(value, goal.value) else "**no**",
            _others(goal),
        )


def _others(goal: Goal) -> str:
    return ", ".join(f"{who} {other:g}" for who, other in goal.others)


def errors_section(judged: Sequence[Judged]) -> str:
    """Errors of each file by source and by regime."""
    parts = [
        "## Errors by source",
        "As planned, but for the column that says otherwise. memory: mean size of the memory "
        "error, where rows have it. jobs: measured in two layouts or more. pairs: of two layouts "
        "of one job, the faster one predicted to be faster. regret, worst: mean and largest over "
        f"the jobs.{_unscored_peaks(judged)}",
    ]
    for each in judged:
        found = file_scores(each)
        parts += [f"### `{each.file.path.name}`", _errors_table(found)]
        parts += [text for text in map(_verdicts, Basis, (found.total,) * 2) if text]
        if found.kind is RowKind.THROUGHPUT:
            parts.append(regimes_table(found.regimes))
    return "\n\n".join(parts)


def _unscored_peaks(judged: Sequence[Judged]) -> str:
    """How many measured peaks are in no score, because they follow from a choice of ours."""
    peaks = [
        outcome
        for each in judged
        if each.file.kind is RowKind.THROUGHPUT
        for outcome in each.as_planned
        if outcome.measured_bytes is not None
    ]
    left_out = sum(outcome.predicted_bytes is None for outcome in peaks)
    if not left_out:
        return ""
    return (
        f" Of {len(peaks)} peaks in the files of runs, {left_out} are in no score of memory: their "
        "rows leave out the micro batch or the recomputation, so that a prediction would choose "
        "what fits."
    )


def _errors_table(found: FileScores) -> str:
    together = () if len(found.sources) == 1 else (found.total,)
    return table(_ERRORS, [_cells(each) for each in (*found.sources, *together)], numeric=12)


def _cells(both: BothScores) -> tuple[str, ...]:
    each, stated = both.as_planned, both.as_stated.errors
    errors = each.errors
    return (
        both.name,
        f"{each.predicted} of {each.rows}",
        str(each.rows - each.predicted or ""),
        figure(errors.mape_pct if errors else None),
        figure(stated.mape_pct if stated else None),
        figure(errors.median_signed_pct if errors else None, signed=True),
        figure(errors.p90_abs_pct if errors else None),
        figure(each.memory.mape_pct if each.memory else None),
        str(len(each.groups) or ""),
        figure(each.spearman_mean, 2),
        figure(each.pairs_in_order_pct, 0),
        figure(each.regret_mean_pct),
        figure(each.regret_max_pct),
    )


def _verdicts(basis: Basis, both: BothScores) -> str:
    ended, caught = both.on(basis).out_of_memory
    ran, wrong = both.on(basis).ran
    texts = []
    if ended:
        texts.append(f"of {ended} runs that ended out of memory, {caught} are called infeasible")
    if ran:
        texts.append(f"of {ran} runs that ran, {wrong} are called infeasible")
    return f"{basis.words.capitalize()}: {'; '.join(texts)}." if texts else ""


def refusals_section(judged: Sequence[Judged]) -> str:
    """Rows without a prediction, by reason."""
    reasons: Counter[tuple[str, str]] = Counter()
    for each in judged:
        reasons.update((o.refused, str(each.file.kind)) for o in each.as_stated if o.refused)
    rows = [(reason, kind, str(count)) for (reason, kind), count in reasons.most_common()]
    return "\n\n".join(
        (
            "## Rows that are refused",
            "A row that says too little, or something that the model does not support, is counted "
            "here and nowhere else. `--rows FILE` writes each with its reason.",
            table(("reason", "kind", "rows"), rows, numeric=1) if rows else "None.",
        )
    )
