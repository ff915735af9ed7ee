"""Every recorded instance, where the whole folder is there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nest_megatron.research.nest_artifact.files import named_baseline, read_instance, read_placement
from nest_megatron.research.nest_artifact.price import price, rule_without
from nest_megatron.research.nest_artifact.search import ArtifactSolution, solve
from tests.research.nest_artifact.instances import FOLDER

INPUTS = sorted(path for path in FOLDER.rglob("*.json") if not path.stem.endswith(".result"))

pytestmark = pytest.mark.skipif(not INPUTS, reason=f"{FOLDER} is not there")


@pytest.mark.parametrize("path", INPUTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_recorded_results(path: Path) -> None:
    instance, result = read_instance(path), path.with_name(f"{path.stem}.result.json")
    placement, given = read_placement(result, instance)
    assert price(instance, placement).time_per_batch == given
    listed = price(instance, placement, rule_without(["links_from_printed_placement"]))
    found = solve(instance)
    assert isinstance(found, ArtifactSolution)
    assert given is not None
    assert found.price.time <= min(given, listed.time)
    printed = json.loads(result.read_text(encoding="utf-8"))["output"]["baselineResults"] or {}
    for name, time in printed.items():
        if not isinstance(time, str):  # where the artifact's solver did not crash
            assert price(instance, named_baseline(instance, name)).time_per_batch == time
