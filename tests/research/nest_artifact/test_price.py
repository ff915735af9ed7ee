"""Plans priced as the artifact prices them, and with its peculiarities off."""

from __future__ import annotations

import dataclasses
import json

import pytest

from nest_megatron.errors import UserInputError
from nest_megatron.research.nest_artifact.files import (
    named_baseline,
    read_placement,
    write_placement,
)
from nest_megatron.research.nest_artifact.price import (
    AS_ARTIFACT,
    SWITCHES,
    ArtifactRule,
    Instance,
    Stage,
    StagePlacement,
    price,
    rule_without,
    sync_time,
)
from nest_megatron.research.nest_artifact.search import ArtifactSolution, solve
from tests.research.nest_artifact.instances import DATA, recorded

NAMES = ("llama2_64", "bertlarge_128", "llama3_128")


def output_of(name: str) -> dict[str, object]:
    """What the artifact's solver answered."""
    text = (DATA / f"{name}.result.json").read_text(encoding="utf-8")
    found: dict[str, object] = json.loads(text)["output"]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_the_printed_time_is_matched_to_the_digit(name: str) -> None:
    instance = recorded(name)
    placement, given = read_placement(DATA / f"{name}.result.json", instance)
    assert (
        price(instance, placement).time_per_batch == given == output_of(name)["finalTimePerBatch"]
    )


@pytest.mark.parametrize("name", NAMES)
def test_printed_baselines_are_matched_to_the_digit(name: str) -> None:
    instance, results = recorded(name), output_of(name)["baselineResults"]
    assert isinstance(results, dict)
    for baseline, printed in results.items():
        if isinstance(printed, str):  # the artifact's solver crashes on it
            with pytest.raises(UserInputError):
                named_baseline(instance, baseline)
        else:
            assert price(instance, named_baseline(instance, baseline)).time_per_batch == printed


def test_a_stage_list_that_is_not_the_plan_that_was_costed() -> None:
    instance = recorded("llama3_128")
    placement, given = read_placement(DATA / "llama3_128.result.json", instance)
    listed = price(instance, placement, rule_without(["links_from_printed_placement"]))
    assert given is not None
    assert listed.time / given == pytest.approx(1.337, abs=1e-3)
    found = solve(instance)
    assert isinstance(found, ArtifactSolution)
    assert found.price.time == given


def test_under_one_rule_the_baseline_is_the_plan() -> None:
    instance = recorded("llama2_64")
    off = ("baselines_last_stage_first", "baseline_cuts_count_embedding")
    as_printed = price(instance, named_baseline(instance, "Manual"))
    same = rule_without(off)
    fair = price(instance, named_baseline(instance, "Manual", same), same)
    order = rule_without(off[:1])
    ordered = price(instance, named_baseline(instance, "Manual", order), order)
    best = output_of("llama2_64")["finalTimePerBatch"]
    assert isinstance(best, float)
    assert as_printed.time / best == pytest.approx(1.25, abs=1e-3)
    assert ordered.time == best
    assert [len(stage.node_ids) for stage in ordered.stages] == [4] * 7 + [5]
    assert [len(stage.node_ids) for stage in fair.stages] == [5] + [4] * 7
    assert [stage.position for stage in as_printed.stages] == list(range(1, 9))


def two_stages(instance: Instance) -> StagePlacement:
    n = len(instance.chains[1].layers)
    stages = (
        Stage(first=0, end=4, num_devices=1),
        Stage(first=4, end=n, num_devices=1),
    )
    return StagePlacement(stages=stages, data_parallel_size=32, tensor_model_parallel_size=1)


@pytest.mark.parametrize("name", [s for s in SWITCHES if not s.startswith("baseline")])
def test_each_switch_changes_a_price(name: str) -> None:
    if name == "links_from_printed_placement":
        instance = recorded("llama3_128")
        placement, _ = read_placement(DATA / "llama3_128.result.json", instance)
    else:
        instance = dataclasses.replace(recorded("llama2_64"), memory_bytes=1e12)
        slow = dataclasses.replace(
            instance.network, bandwidths=(1e9, 1e6, 1e7), fan_outs=(1, 4, 16)
        )
        instance = dataclasses.replace(instance, network=slow)
        far = (0,) * 4 + (63,) * 29
        placement = dataclasses.replace(two_stages(instance), printed_devices=far)
    assert price(instance, placement) != price(instance, placement, rule_without([name]))


def test_the_formula_by_hand() -> None:
    instance = dataclasses.replace(recorded("llama2_64"), memory_bytes=1e12)
    found = price(instance, two_stages(instance))
    embedding, layer = instance.chains[1].layers[:2]
    over = 33554432 / 966367641600 + 1e-4
    first = embedding.forward + 3 * layer.forward + 2 * (embedding.backward + 3 * layer.backward)
    last = over + 29 * (layer.forward + layer.backward)
    assert found.stages[0].time == pytest.approx(first)
    assert found.stages[1].time == pytest.approx(last)
    weights = embedding.weight_bytes + 3 * layer.weight_bytes
    assert found.sync == sync_time(instance, AS_ARTIFACT, 32, 2, weights)
    assert found.time == found.slowest_stage * (128 + 1) + found.sync
    held = 2 * weights + embedding.activation_bytes + 3 * layer.activation_bytes
    assert found.stages[0].memory_bytes == held  # nothing comes in, so nothing is stashed


def test_the_sum_over_replicas_by_hand() -> None:
    instance = recorded("llama2_64")
    x = [0.0001 + 8e9 / 966367641600, 0.0002 + 8e9 / 107374182400, 0.0003 + 8e9 / 429496729600]
    inner = x[0] + 0.0001 + 4e9 / 966367641600
    assert sync_time(instance, AS_ARTIFACT, 1, 8, 8e9) == 0
    assert sync_time(instance, AS_ARTIFACT, 4, 1, 8e9) == pytest.approx(inner)
    assert sync_time(instance, AS_ARTIFACT, 4, 8, 8e9) == pytest.approx(inner + 2 * x[1])
    twice = 2 * (inner + 2 * x[1]) + 2 * x[2]
    assert sync_time(instance, AS_ARTIFACT, 4, 16, 8e9) == pytest.approx(twice)
    once = rule_without(["sync_counts_lower_levels_again"])
    assert sync_time(instance, once, 4, 16, 8e9) == pytest.approx(inner + 2 * x[1] + 2 * x[2])


def test_refusals_are_named() -> None:
    instance = recorded("llama2_64")
    n = len(instance.chains[1].layers)
    whole = Stage(first=0, end=n, num_devices=1)
    placement = StagePlacement(stages=(whole,), data_parallel_size=65, tensor_model_parallel_size=1)
    found = price(dataclasses.replace(instance, context_parallel_size=2), placement)
    assert found.time_per_batch is None
    text = " ".join(found.refusals)
    assert "65 devices, and there are 64" in text
    assert "65 replicas" in text
    assert "has 1 devices and needs 2" in text
    assert "lacks" in text


def test_all_turns_everything_off() -> None:
    assert rule_without(["all"]) == ArtifactRule(**dict.fromkeys(SWITCHES, False))
    with pytest.raises(UserInputError, match="sync_first_stage_only"):
        rule_without(["sync_first_stage"])


def test_a_plan_written_is_read_again(tmp_path) -> None:  # type: ignore[no-untyped-def]
    instance = recorded("mixtral_64")
    found = solve(instance)
    assert isinstance(found, ArtifactSolution)
    write_placement(tmp_path / "plan.json", instance, found.placement, found.price.time)
    read, given = read_placement(tmp_path / "plan.json", instance)
    assert read == found.placement
    assert given == found.price.time
