"""Predictions of published measurements stay as good as they are.

``thresholds.yaml`` says how good, set by set; ``make.py`` writes it anew.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from nest_megatron.validation.assess import Assessor
from nest_megatron.validation.models import ModelBook
from nest_megatron.validation.outcome import Basis
from nest_megatron.validation.report import certainty_by_regime
from nest_megatron.validation.rows import read_rows
from nest_megatron.validation.scores import rank_scores
from tests.published.sets import DATA, FILES, HERE, is_met, judged, refused, scored, values
from tools.accuracy.named_sets import SETS
from tools.accuracy.page import reference

THRESHOLDS = yaml.safe_load((HERE / "thresholds.yaml").read_text(encoding="utf-8"))
SET_THRESHOLDS = THRESHOLDS["sets"]
CASES = [(key, name) for key, limits in SET_THRESHOLDS.items() for name in limits]


@pytest.mark.parametrize(("key", "name"), CASES, ids=[f"{key}-{name}" for key, name in CASES])
def test_accuracy_does_not_rot(key: str, name: str) -> None:
    value = values(*scored()[key])[name]
    limit = SET_THRESHOLDS[key][name]
    assert is_met(name, value, limit), f"{name} of {key}: {value:.3f}, threshold {limit}"


def test_every_set_has_thresholds() -> None:
    assert {each.key for each in SETS} == set(SET_THRESHOLDS)


def test_thresholds_lie_within_the_goals_that_are_met() -> None:
    for key, (found, scores) in scored().items():
        for goal in found.goals:
            name = goal.measure.name.lower()
            if is_met(name, values(found, scores)[name], goal.value):
                assert is_met(name, SET_THRESHOLDS[key][name], goal.value), (key, name)


def test_a_run_counts_once_among_those_of_its_source() -> None:
    """Of a source at most 120 runs are fitted, whose devices may have constants in two groups."""
    sources = reference()["fitted_sources"]
    assert isinstance(sources, list)
    counts = {name: rows for name, rows, *_ in sources}
    assert 100 < max(counts.values()) <= 120


def test_no_more_rows_are_refused() -> None:
    assert refused().keys() == THRESHOLDS["refused"].keys()
    for name, count in refused().items():
        assert count <= THRESHOLDS["refused"][name], name


def test_intervals_hold_as_many_runs_as_they_say() -> None:
    """These constants have seen the rows, so that more of them lie inside than of unseen ones."""
    found = certainty_by_regime(judged())["all"][Basis.AS_STATED]
    assert found.coverage is not None
    assert found.coverage.runs > 200
    assert 45 <= found.coverage.within_50_pct <= 72
    assert 85 <= found.coverage.within_90_pct <= 99
    assert found.choice is not None
    assert found.choice.shortlist_holds_pct >= 90
    assert found.choice.shortlist_size <= 4
    assert found.choice.sure_right_pct is not None
    assert found.choice.sure_right_pct >= 95


@pytest.mark.parametrize("name", FILES)
def test_rows_say_where_they_come_from(name: str) -> None:
    rows = next(each.file.rows for each in judged() if each.file.path.name == name)
    for row in rows:
        assert row["source"], row
        assert row["repo"] or row["path"], row["row_id"]


def test_the_stored_files_are_those_that_are_read() -> None:
    assert {path.name for path in Path(DATA).glob("*.csv")} == set(FILES)


@pytest.mark.parametrize(
    ("dispatchers", "rows", "least"),
    [(("AlltoAll",), 8, 0.8), (("AlltoAll", "DeepEP"), 9, 0.55)],
    ids=["alltoall", "all"],
)
def test_layouts_of_an_expert_model_are_in_order(
    dispatchers: tuple[str, ...], rows: int, least: float
) -> None:
    """Nine of Qwen3-235B on 256 H800, none of them fitted; by time of a sequence.

    The one whose tokens DeepEP brings to other nodes is predicted a quarter too fast, so that all
    together miss the goal of 0.8. The others' errors lie between -14 and 12 %; five of them were
    measured within 9 % of each other.
    """
    file = read_rows(HERE / "expert_layouts.csv")
    outcomes = list(Assessor(ModelBook.load()).outcomes(file, Basis.AS_STATED))
    assert not any(each.refused for each in outcomes)
    pairs = [
        (each.predicted_s / float(row["gbs"]), each.measured_s / float(row["gbs"]))
        for each, row in zip(outcomes, file.rows, strict=True)
        if each.predicted_s and each.measured_s and row["ambiguity"].split()[-1] in dispatchers
    ]
    correlation = rank_scores(pairs).spearman
    assert len(pairs) == rows
    assert correlation is not None
    assert correlation >= least
