"""The stored rows, and what a test asks of them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

from nest_megatron.validation.assess import Assessor
from nest_megatron.validation.models import ModelBook
from nest_megatron.validation.outcome import Judged
from nest_megatron.validation.report import BothScores
from nest_megatron.validation.rows import read_rows
from tools.accuracy.named_sets import Measure, NamedSet, scored_sets

HERE = Path(__file__).parent
DATA = HERE / "data"
FILES = (
    "throughput.csv",
    "throughput_vtrain_a100.csv",
    "memory_peak.csv",
    "memory_megatron_golden.csv",
    "comm_collectives.csv",
)


@functools.cache
def judged() -> tuple[Judged, ...]:
    """Every stored row with its prediction."""
    assessor = Assessor(ModelBook.load())
    return tuple(assessor.judge(read_rows(DATA / name)) for name in FILES)


@functools.cache
def scored() -> Mapping[str, tuple[NamedSet, BothScores]]:
    """Scores of the named sets, by key."""
    return {each.key: (each, scores) for each, scores in scored_sets(judged())}


def refused() -> dict[str, int]:
    """Rows without a prediction, by file."""
    return {each.file.path.name: sum(bool(o.refused) for o in each.as_stated) for each in judged()}


def values(found: NamedSet, scores: BothScores) -> dict[str, float]:
    """What is held to a threshold: the measures of a set's goals, as planned, and its refusals."""
    planned = scores.as_planned
    measured = {goal.measure: goal.measure.of(planned) for goal in found.goals}
    named = {
        measure.name.lower(): value for measure, value in measured.items() if value is not None
    }
    return {**named, "refused": float(planned.rows - planned.predicted)}


def is_met(name: str, value: float, threshold: float) -> bool:
    """Whether a value is no worse than its threshold."""
    return value >= threshold if name == Measure.SPEARMAN.name.lower() else value <= threshold
