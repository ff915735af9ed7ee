"""Tables of errors, goals and refusals in ``accuracy.md``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from nest_megatron.report.markdown import figure, table
from nest_megatron.validation.named_sets import Judged, Measure, NamedSet, scored_sets
from nest_megatron.validation.report import FileScores, Scores, file_scores

_ERRORS = (
    "source",
    "predicted",
    "refused",
    "MAPE %",
    "median %",
    "p90 %",
    "memory %",
    "jobs",
    "rank corr.",
    "regret %",
    "worst %",
)


def files_section(judged: Sequence[Judged]) -> str:
    """Which rows were read."""
    rows = [
        (
            f"`{file.path.name}`",
            str(file.kind),
            str(len(outcomes)),
            str(sum(not outcome.refused for outcome in outcomes)),
            str(len({outcome.source for outcome in outcomes})),
        )
        for file, outcomes in judged
    ]
    head = ("file", "kind", "rows", "predicted", "sources")
    return f"## Rows\n\n{table(head, rows, numeric=3)}"


def sets_section(judged: Sequence[Judged]) -> str:
    """Sets of rows beside their goals and what others reach."""
    rows = [row for each, found in scored_sets(judged) for row in _goals(each, found)]
    head = ("rows", "predicted", "what", "ours", "goal", "met", "others")
    return "\n\n".join(
        (
            "## Goals",
            "Others: Calculon with its own A100 file and these networks, on the whole collection "
            "that these files are a part of (its baseline_errors.csv); vTrain's, SimuMax's and the "
            "figure for Megatron's table 5 are their authors' own.",
            table(head, rows),
        )
    )


def _goals(each: NamedSet, found: Scores) -> Iterator[tuple[str, ...]]:
    for goal in each.goals:
        value = goal.measure.of(found)
        close = value is not None and abs(value - goal.value) < 0.05  # would be rounded to the goal
        digits = 2 if close or goal.measure is Measure.SPEARMAN else 1
        yield (
            each.name + (f" ({each.note})" if each.note else ""),
            f"{found.predicted} of {found.rows}",
            str(goal.measure),
            f"**{figure(value, digits)}**" if value is not None else "none",
            f"{'≥' if goal.measure is Measure.SPEARMAN else '≤'} {goal.value:g}",
            "yes" if value is not None and goal.measure.meets(value, goal.value) else "**no**",
            ", ".join(f"{who} {other:g}" for who, other in goal.others),
        )


def errors_section(judged: Sequence[Judged]) -> str:
    """Errors of each file by source."""
    parts = [
        "## Errors by source",
        "memory: mean size of the memory error, where rows have it. jobs: measured in two layouts "
        "or more. regret, worst: mean and largest over them.",
    ]
    for file, outcomes in judged:
        found = file_scores(file.path, file.kind, outcomes)
        parts += [f"### `{file.path.name}`", _errors_table(found)]
        parts += [text for text in (_verdicts(found.total),) if text]
    return "\n\n".join(parts)


def _errors_table(found: FileScores) -> str:
    together = () if len(found.sources) == 1 else (found.total,)
    return table(_ERRORS, [_cells(each) for each in (*found.sources, *together)], numeric=10)


def _cells(each: Scores) -> tuple[str, ...]:
    errors = each.errors
    return (
        each.source,
        f"{each.predicted} of {each.rows}",
        str(each.rows - each.predicted or ""),
        figure(errors.mape_pct if errors else None),
        figure(errors.median_signed_pct if errors else None, signed=True),
        figure(errors.p90_abs_pct if errors else None),
        figure(each.memory.mape_pct if each.memory else None),
        str(len(each.groups) or ""),
        figure(each.spearman_mean, 2),
        figure(each.regret_mean_pct),
        figure(each.regret_max_pct),
    )


def _verdicts(total: Scores) -> str:
    ended, caught = total.out_of_memory
    ran, wrong = total.ran
    texts = []
    if ended:
        texts.append(f"Of {ended} runs that ended out of memory, {caught} are called infeasible.")
    if ran:
        texts.append(f"Of {ran} runs that ran, {wrong} are called infeasible.")
    return " ".join(texts)


def refusals_section(judged: Sequence[Judged]) -> str:
    """Rows without a prediction, by reason."""
    reasons: Counter[tuple[str, str]] = Counter()
    for file, outcomes in judged:
        reasons.update((o.refused, str(file.kind)) for o in outcomes if o.refused)
    rows = [(reason, kind, str(count)) for (reason, kind), count in reasons.most_common()]
    return "\n\n".join(
        (
            "## Rows that are refused",
            "A row that says too little, or something that the model does not describe, is counted "
            "here and nowhere else. `--rows FILE` writes each with its reason.",
            table(("reason", "kind", "rows"), rows, numeric=1) if rows else "None.",
        )
    )
