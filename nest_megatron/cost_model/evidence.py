"""Measured runs like a plan: how many were predicted, how far off, and what that is worth."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nest_megatron.cluster.records import Precision
from nest_megatron.cost_model.features import Feature
from nest_megatron.names import Name

#: Runs from which a prediction may be called certain, and under which it is not; per cent off.
_MANY, _FEW = 20, 5
_NEAR_PCT, _FAR_PCT = 10.0, 20.0
#: Features in which a run has to equal a plan to be like it; others it may have beside.
_KINDS = frozenset(
    {
        Feature.EXPERTS,
        Feature.FP8,
        Feature.LORA,
        Feature.FSDP,
        Feature.SMALL_STEP,
        Feature.OTHER_FRAMEWORK,
        Feature.LEGACY,
        Feature.OTHER_DEVICE,
    }
)


class Level(Name):
    """How far a prediction can be trusted."""

    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Measured runs with the same features.

    Args:
        error_pct: mean absolute error of their predictions by a fit without their source.
    """

    features: frozenset[Feature]
    runs: int
    error_pct: float

    @classmethod
    def from_plain(cls, cell: Mapping[str, Any]) -> Runs:
        """From an entry of ``calibration/uncertainty.yaml``."""
        features = frozenset(map(Feature, cell["features"]))
        return cls(features=features, runs=cell["runs"], error_pct=cell["error_pct"])


#: All runs that the scales were fitted to.
Evidence = tuple[Runs, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Confidence:
    """How far a prediction can be trusted, and why.

    Args:
        kind: the plan's features, in words.
        runs: measured runs that have them.
        error_pct: mean absolute error of their predictions; 0 without runs.
    """

    level: Level
    kind: str
    runs: int
    error_pct: float

    @property
    def basis(self) -> str:
        """What the prediction was tested on.

        >>> Confidence(level=Level.HIGH, kind="dense bf16", runs=64, error_pct=6.2).basis
        'dense bf16, tested on 64 runs like it'
        """
        if not self.runs:
            return f"{self.kind}, tested on no run like it"
        return f"{self.kind}, tested on {self.runs} {'run' if self.runs == 1 else 'runs'} like it"

    @property
    def reason(self) -> str:
        """Level and reason.

        >>> Confidence(level=Level.LOW, kind="experts bf16", runs=3, error_pct=40.0).reason
        'low: experts bf16, 3 runs like it, 40 % off'
        """
        if not self.runs:
            return f"{self.level}: {self.kind}, no run like it"
        runs = f"{self.runs} {'run' if self.runs == 1 else 'runs'} like it"
        return f"{self.level}: {self.kind}, {runs}, {self.error_pct:.0f} % off"


def confidence_of(
    evidence: Evidence, features: frozenset[Feature], precision: Precision
) -> Confidence:
    """What the runs that have all features of a plan are worth."""
    like = runs_like(evidence, features)
    runs = sum(each.runs for each in like)
    error = math.fsum(each.runs * each.error_pct for each in like) / runs if runs else 0.0
    return Confidence(
        level=_level(runs, error), kind=_kind(features, precision), runs=runs, error_pct=error
    )


def runs_like(evidence: Evidence, features: frozenset[Feature]) -> Sequence[Runs]:
    """Runs that have all features of a plan, and none that makes them another kind of run."""
    return [
        each
        for each in evidence
        if features <= each.features and features & _KINDS == each.features & _KINDS
    ]


def _level(runs: int, error_pct: float) -> Level:
    if runs < _FEW or error_pct > _FAR_PCT:
        return Level.LOW
    return Level.HIGH if runs >= _MANY and error_pct <= _NEAR_PCT else Level.MEDIUM


def _kind(features: frozenset[Feature], precision: Precision) -> str:
    """A plan's kind in words.

    >>> _kind(frozenset({Feature.EXPERTS, Feature.CONTEXT}), Precision.BF16)
    'experts bf16, CP'
    """
    model = "experts" if Feature.EXPERTS in features else "dense"
    others = [f.words for f in Feature if f in features - {Feature.EXPERTS, Feature.FP8}]
    return ", ".join([f"{model} {precision}", *others])
