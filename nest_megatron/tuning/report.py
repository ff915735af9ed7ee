"""What a tuning did and found, for people and for programs."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nest_megatron.cost_model.mechanisms import Mechanism
from nest_megatron.cost_model.uncertainty import DEVIATION
from nest_megatron.plain import frozen, to_plain
from nest_megatron.planner.choice import Candidate
from nest_megatron.report.tables import (
    FittingTable,
    figure_columns,
    heading,
    indented,
    word_columns,
)
from nest_megatron.report.words import narrow_words
from nest_megatron.tuning.selection import Known, NextRun, candidate_words, chosen
from nest_megatron.tuning.session import State, Trial
from nest_megatron.tuning.tuner import Tuned, outcome_words
from nest_megatron.units import Seconds, counted, format_duration, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

#: A mechanism is reported where its error is known better by this share, or has moved by this share
#: of its standard deviation.
_BETTER, _MOVED = 0.05, 0.25


@frozen
class Lesson:
    """What runs say of a mechanism's price.

    Args:
        percent: by how much it takes longer than predicted.
        low_percent, high_percent: the same, a standard deviation less and more.
        left: standard deviation, as a share of what it was before.
    """

    mechanism: Mechanism
    percent: float
    low_percent: float
    high_percent: float
    left: float


def lessons(known: Known) -> list[Lesson]:
    """The mechanisms of which the runs say something, the best known first."""
    if not known.steps_s:
        return []
    posterior, scales = known.posterior, known.ranked.candidates[0].step.scales.mechanisms
    ran = [each for each in known.ranked.candidates if each.solved in known.steps_s]
    found = []
    for mechanism in sorted({name for each in ran for name in each.step.shares}):
        mean, deviation = posterior.mechanism(mechanism)
        before = DEVIATION * scales[mechanism]
        if abs(mean) >= _MOVED * deviation or deviation < (1 - _BETTER) * before:
            found.append(
                Lesson(
                    mechanism=mechanism,
                    percent=100 * math.expm1(mean),
                    low_percent=100 * math.expm1(mean - deviation),
                    high_percent=100 * math.expm1(mean + deviation),
                    left=deviation / before,
                )
            )
    return sorted(found, key=lambda lesson: lesson.left)


def lost_percent(known: Known, taken: Candidate) -> float | None:
    """How much slower the plan without runs is than the one taken; ``None`` if it does not run."""
    first = known.ranked.candidates[0].solved
    now = {each.solved: each for each in known.candidates()}
    if first not in now:
        return None
    step_s = {each: known.steps_s.get(each, now[each].step.median_s) for each in now}
    return 100 * (step_s[first] / step_s[taken.solved] - 1)


def plan_words(known: Known, runs: Sequence[NextRun], budget: int, timeout_s: Seconds) -> str:
    """How long it all takes, before it starts."""
    seconds = sum(run.seconds for run in runs)
    longest = max((run.seconds for run in runs), default=0.0) * budget
    gpus = known.ranked.model.cluster.num_gpus
    start = "as timed" if known.starts_s else "assumed until the first run is timed"
    return (
        f"At most {counted(budget, 'run')} of {known.iterations + 1} steps on {gpus} GPUs: about "
        f"{_cost(seconds, gpus)} if each measures what is predicted, {_cost(longest, gpus)} for "
        f"the whole budget, with {format_duration(known.start_s)} to start each ({start}). No run "
        f"takes longer than {format_duration(timeout_s)}."
    )


def _cost(seconds: Seconds, gpus: int) -> str:
    return f"{format_duration(seconds)} ({gpus * seconds / 3600:.2g} GPU-hours)"


def dry_run_document(known: Known, runs: Sequence[NextRun], stop: str) -> Mapping[str, Any]:
    """What ``--dry-run --json`` prints."""
    seconds = sum(run.seconds for run in runs)
    return {
        "runs": [
            {
                "layout": candidate_words(run.candidate),
                "predicted_s": run.candidate.step.median_s,
                "gain_percent": 100 * run.gain,
                "seconds": run.seconds,
            }
            for run in runs
        ],
        "seconds": seconds,
        "gpu_hours": known.ranked.model.cluster.num_gpus * seconds / 3600,
        "stop": stop,
    }


def runs_table(runs: Sequence[NextRun]) -> RenderableType:
    """The runs that are expected."""
    figures = figure_columns("Step", "Gain", "Time")
    table = FittingTable("Run", *figures, *word_columns("Layout"))
    for number, run in enumerate(runs, 1):
        gain = f"{100 * run.gain:.2f} %" if number > 1 else "-"
        step, time = format_seconds(run.candidate.step.median_s), format_duration(run.seconds)
        table.add_row(str(number), step, gain, time, candidate_words(run.candidate))
    return table


def tuned_report(tuned: Tuned, trials: Sequence[Trial], plan: Path | None) -> Iterator[Any]:
    """Everything that is reported at the end."""
    known, taken = tuned.known, chosen(tuned.known)
    yield from (heading("Runs"), _trials_table(trials), "")
    yield indented(f"The runs end because {tuned.stop}.")
    yield from _lessons_report(known)
    yield heading("The plan")
    if taken is None or plan is None:
        yield indented("No plan ran, and none is chosen.")
        return
    yield indented(taken_words(known, taken))
    yield indented(_lost_words(known, taken))
    yield indented(
        f"Written to {plan}; `nest-megatron explain {shlex.quote(str(plan))}` prints its "
        f"command, and `nest-megatron pin {shlex.quote(str(plan))}` freezes it for +nest=pinned."
    )


def _trials_table(trials: Sequence[Trial]) -> RenderableType:
    table = FittingTable(
        "Run",
        *figure_columns("Predicted", "Measured", "Error"),
        *word_columns("Layout", "Outcome"),
    )
    for trial in trials:
        measured = error = ""
        if (step_s := trial.step_s) is not None:
            measured = format_seconds(step_s)
            error = f"{100 * (step_s / trial.predicted_s - 1):+.1f} %"
        table.add_row(
            str(trial.number),
            format_seconds(trial.predicted_s),
            measured,
            error,
            trial.layout,
            "measured" if trial.state is State.MEASURED else outcome_words(trial),
        )
    return table


def _lessons_report(known: Known) -> Iterator[Any]:
    found = lessons(known)
    if not known.steps_s:
        return
    yield from ("", heading("What was learnt"))
    yield indented(_off_words(known))
    if not found:
        return
    yield indented("How much longer than predicted each mechanism takes:")
    heads = ("Longer by", "Two of three chances", "Unsure left")
    table = FittingTable("Mechanism", *figure_columns(*heads))
    for each in found:
        name = each.mechanism.value.replace("_", " ")
        between = f"{each.low_percent:+.0f} to {each.high_percent:+.0f} %"
        table.add_row(name, f"{each.percent:+.0f} %", between, f"{100 * each.left:.0f} %")
    yield table
    yield ""


def _off_words(known: Known) -> str:
    """How far all runs were off: what they have in common is learnt of the job, not of a part."""
    errors = [
        100 * (step_s / known.predicted[plan].median_s - 1)
        for plan, step_s in known.steps_s.items()
    ]
    if len(errors) == 1:
        return f"Measured over predicted step: {errors[0]:+.1f} %."
    return f"Measured over predicted steps: {min(errors):+.1f} % to {max(errors):+.1f} %."


def taken_words(known: Known, taken: Candidate) -> str:
    """The plan that is taken, with its measured step or the one that is expected."""
    layout = candidate_words(taken)
    if taken.solved in known.steps_s:
        return f"{layout}: measured {format_seconds(known.steps_s[taken.solved])} a step."
    low_s, high_s = taken.step.interval(0.9)
    narrow = narrow_words(taken.step.own_runs)
    return (
        f"{layout}: it has not run; {format_seconds(taken.step.median_s)} a step is expected, "
        f"between {format_seconds(low_s)} and {format_seconds(high_s)} with a chance of 90 %"
        f"{narrow and f', {narrow}'}."
    )


def _lost_words(known: Known, taken: Candidate) -> str:
    first, lost = known.ranked.candidates[0], lost_percent(known, taken)
    if first.solved == taken.solved:
        return "It is the plan that would have been launched without runs."
    if lost is None:
        return "The plan that would have been launched without runs does not run."
    how = "measured" if {first.solved, taken.solved} <= known.steps_s.keys() else "expected"
    return f"The plan that would have been launched without runs is {lost:.1f} % slower ({how})."


def tuned_document(
    tuned: Tuned, trials: Sequence[Trial], plan: Path | None, folder: Path
) -> Mapping[str, Any]:
    """What ``--json`` prints."""
    known, taken = tuned.known, chosen(tuned.known)
    return {
        "folder": str(folder),
        "stop": tuned.stop,
        "plan": None if plan is None else str(plan),
        "chosen": None if taken is None else _candidate_document(known, taken),
        "without_runs": _candidate_document(known, known.ranked.candidates[0]),
        "without_runs_slower_percent": None if taken is None else lost_percent(known, taken),
        "learned": to_plain(lessons(known)),
        "runs": to_plain(list(trials)),
    }


def _candidate_document(known: Known, candidate: Candidate) -> Mapping[str, Any]:
    now = {each.solved: each.step for each in known.candidates()}.get(candidate.solved)
    return {
        "layout": candidate_words(candidate),
        "predicted_s": known.predicted[candidate.solved].median_s,
        "expected_s": None if now is None else now.median_s,
        "measured_s": known.steps_s.get(candidate.solved),
    }
