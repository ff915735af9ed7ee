"""A batch that grows: its sizes as Megatron steps through them, and what a plan says of each."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from nest_megatron.api.jobs import estimate_job
from nest_megatron.config.compose import compose
from nest_megatron.config.overrides import parse
from nest_megatron.config.request import request_of
from nest_megatron.cost_model.estimate import estimate
from nest_megatron.errors import UserInputError
from nest_megatron.integrations import megatron_bridge, nemo
from nest_megatron.integrations import megatron_bridge as config
from nest_megatron.integrations.megatron_lm.attach import (
    LAUNCHER,
    rewrite_command,
    with_command,
    with_launch,
)
from nest_megatron.integrations.megatron_lm.parser import read_command
from nest_megatron.integrations.plan_job import TypedCommand
from nest_megatron.integrations.typed_command import read_request
from nest_megatron.layout import plan_file
from nest_megatron.layout.batch_schedule import BatchSchedule, read_schedule
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.rulebook import require_launchable
from nest_megatron.layout.rulebook.facts import LaunchRequest
from nest_megatron.planner import Ranked, plan, ranked
from nest_megatron.report.words import schedule_words
from tests import catalogue
from tests.integrations.frameworks import bridge_config, nemo_recipe

STEPS = "0:192 2M:384 40M:768"


def schedule(**stated: Any) -> BatchSchedule:
    run = {name: stated.pop(name) for name in ("last", "samples", "iterations") if name in stated}
    found = read_schedule(stated.get, **{"last": None, **run}, seq_length=1000)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("stated", "sizes", "samples", "longest"),
    [
        ({"rampup_batch_size": [8, 8, 100], "last": 24}, (8, 16, 24), (50, 50, None), 24),
        (
            {"rampup_batch_size": [8, 8, 100], "last": 24, "samples": 120},
            (8, 16, 24),
            (50, 50, 20),
            16,
        ),
        ({"rampup_batch_size": [8, 8, 100], "last": 24, "samples": 60}, (8, 16), (50, 10), 8),
        ({"rampup_batch_size": [8, 8, 100], "last": 24, "iterations": 9}, (8, 16), (50, 32), 8),
        ({"step_batch_size_schedule": STEPS}, (192, 384, 768), (2000, 38_000, None), 768),
        ({"step_batch_size_schedule": "0:8", "samples": 0}, (8,), (None,), 8),
        (
            {"step_batch_size_schedule": STEPS.replace(" ", ","), "samples": 50_000},
            (192, 384, 768),
            (2000, 38_000, 10_000),
            384,
        ),
    ],
)
def test_parts_of_a_run(
    stated: dict[str, Any], sizes: tuple[int, ...], samples: tuple[int | None, ...], longest: int
) -> None:
    found = schedule(**stated)
    assert found.sizes == sizes
    assert tuple(part.samples for part in found.parts) == samples
    assert found.longest == longest
    assert found.last == (stated.get("last") or sizes[-1])
    assert all(size % found.batch_unit == 0 for size in sizes)


@pytest.mark.parametrize(
    ("stated", "limit"),
    [
        ({"rampup_batch_size": [8, 8, 100], "last": 28}, "does not grow from 8 in steps of 8"),
        ({"rampup_batch_size": [8, 8, 100], "last": 8}, "does not grow"),
        ({"rampup_batch_size": [8, 8, 100]}, "which is not given"),
        ({"rampup_batch_size": [8, 0, 100], "last": 24}, "at least 1"),
        ({"rampup_batch_size": [8, 8], "last": 24}, "three whole numbers"),
        ({"rampup_batch_size": [8, 8, 100], "last": 24, "samples": -1}, "it is at least 1"),
        ({"step_batch_size_schedule": "1B:8 2B:16"}, "begin at 0"),
        ({"step_batch_size_schedule": "0:8 1K:16 1K:24"}, "rise"),
        ({"step_batch_size_schedule": "0:8 many:16"}, "TOKENS:SIZE"),
        ({"step_batch_size_schedule": "0:8", "rampup_batch_size": [1, 1, 1]}, "as well"),
    ],
)
def test_what_megatron_refuses_is_refused(stated: dict[str, Any], limit: str) -> None:
    with pytest.raises(UserInputError, match=limit):
        schedule(**stated)


JOB = (
    "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 16 --hidden-size 4096 "
    "--num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 --bf16 "
    "--vocab-size 50257 --tokenizer-type NullTokenizer --train-samples 4000000 "
)
GROWING = {
    "0.16": ("--global-batch-size 64 --rampup-batch-size 4 12 1000000", (4, 16, 28, 40, 52, 64)),
    "0.20": ("--step-batch-size-schedule '0:4 4B:28 12B:64'", (4, 28, 64)),
}
FIXED = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 4 "


def planned(version: str) -> ParallelPlan:
    composed = compose(parse(["cluster=dgx_h100"]))
    flags = FIXED + GROWING[version][0]
    job, request = read_request(TypedCommand(text=JOB + flags, version=version), composed)
    assert not job.capturable
    found = plan(request)
    assert isinstance(found, ParallelPlan)
    assert job.command is not None
    found, _ = with_command(found, job.command, kept=("pipeline_model_parallel_size",))
    assert request.batch_schedule is not None
    assert request.space.batch_unit == 4
    return found


@pytest.mark.parametrize("version", GROWING)
def test_a_plan_is_legal_at_every_size_and_changes_none(version: str) -> None:
    found, sizes = planned(version), GROWING[version][1]
    grid = found.layout
    for size in sizes:
        count, rest = divmod(size, grid.micro_batch_size * grid.dims.data_parallel_size)
        assert rest == 0
        assert count % 2 == 0  # whole rounds of two pipeline ranks
    command = read_command(JOB + FIXED + GROWING[version][0], version)
    written = set(rewrite_command(found, command, ("pipeline_model_parallel_size",)).values)
    assert written.isdisjoint({"rampup_batch_size", "step_batch_size_schedule"})
    assert ("global_batch_size" in written) == (version == "0.16")
    again = read_command(["pretrain_gpt.py", *found.launch[LAUNCHER].argv], version).values
    typed = read_command(JOB + GROWING[version][0], version).values
    for name in ("global_batch_size", "rampup_batch_size", "step_batch_size_schedule"):
        assert again.get(name) == typed.get(name)


def test_a_plan_for_one_size_is_not_taken_for_all() -> None:
    found = planned("0.16")
    grid = dataclasses.replace(found.layout, micro_batch_size=4)
    request = LaunchRequest.of(
        found.model,
        grid,
        partition=found.layout.partition,
        batch_schedule=found.train.batch_schedule,
    )
    require_launchable(dataclasses.replace(request, batch_schedule=None))
    with pytest.raises(UserInputError, match=r"4, 16, 28, 40, 52, 64.*at every size"):
        require_launchable(request)


def test_the_step_at_each_size_is_that_of_the_same_layout() -> None:
    found = planned("0.16")
    assert [batch.global_batch_size for batch in found.batches] == list(GROWING["0.16"][1])
    assert found.layout.global_batch_size == 64
    assert found.batches[-1].iteration_time_s == found.predicted.iteration_time_s
    steps = Counter({batch.global_batch_size: batch.steps or 0 for batch in found.batches})
    assert steps[4] == 200_000 // 4
    assert steps[64] == -(-3_000_000 // 64)
    text = schedule_words(found.batches)
    assert text.startswith("step at each size 4: ")
    assert f"{sum(steps.values()):,} steps in" in text
    assert plan_file.load(plan_file.dump(found), "a plan").batches == found.batches


CATALOGUE = ("model=llama3_8b", "cluster=dgx_h100", "cluster.num_gpus=16")
RAMP = "train.rampup_batch_size=[32,32,100000]"


@pytest.mark.parametrize(
    ("settings", "flags"),
    [
        (
            (RAMP, "train.global_batch_size=128", "target=megatron_lm_0.17"),
            ["--global-batch-size", "128", "--rampup-batch-size", "32", "32", "100000"],
        ),
        (
            ("train.step_batch_size_schedule='0:32 1B:128'", "target=megatron_lm_0.20"),
            ["--step-batch-size-schedule", "0:32 1B:128"],
        ),
    ],
)
def test_settings_say_how_the_batch_of_a_catalogue_model_grows(
    settings: tuple[str, ...], flags: list[str]
) -> None:
    request = request_of(compose(parse([*CATALOGUE, *settings])), choose_execution=True)
    found = plan(request)
    assert isinstance(found, ParallelPlan)
    argv = list(with_launch(found).launch[LAUNCHER].argv)
    start = argv.index(flags[0])
    assert argv[start : start + len(flags)] == flags
    assert ("--global-batch-size" in argv) == ("--global-batch-size" in flags)
    grid = found.layout
    assert 32 % (grid.micro_batch_size * grid.dims.data_parallel_size) == 0
    largest = dataclasses.replace(grid, global_batch_size=128)
    assert estimate(request.cost_model(), largest.with_stages(found.layout.partition)).fits


def test_what_is_tuned_is_searched_as_what_is_planned() -> None:
    """The batch that lasts longest fills no pipeline; the largest does not fit with its plan."""
    pipeline = ("pipeline_model_parallel_size=8", "virtual_pipeline_model_parallel_size=1")
    settings = (
        *("model=llama3_8b", "cluster=dgx_h100", "cluster.num_gpus=8", "target=megatron_lm_0.17"),
        *("train.global_batch_size=64", "train.rampup_batch_size=[2,62,1000000]"),
        *("train.train_samples=1000100", "memory.margin=0.5"),
        *(f"parallel.{each}" for each in pipeline),
    )
    request = request_of(compose(parse(settings)), choose_execution=True)
    assert request.global_batch_size == 2
    found, tuned = plan(request), ranked(request, None)
    assert isinstance(found, ParallelPlan)
    assert isinstance(tuned, Ranked)
    assert found.layout.global_batch_size == tuned.request.global_batch_size == 64
    assert tuned.candidates[0].solved.layout == found.layout


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ((RAMP,), "does not take it"),
        (("train.step_batch_size_schedule='0:32'", "target=megatron_lm_0.17"), "does not take it"),
        ((RAMP, "target=megatron_lm_0.17"), "train.global_batch_size, which is not given"),
    ],
)
def test_settings_that_a_target_does_not_have(settings: tuple[str, ...], limit: str) -> None:
    with pytest.raises(UserInputError, match=limit):
        request_of(compose(parse([*CATALOGUE, *settings])), choose_execution=True)


def test_0_20_takes_no_notice_of_a_ramp() -> None:
    composed = compose(parse(["cluster=dgx_h100"]))
    job, request = read_request(
        TypedCommand(text=JOB + GROWING["0.16"][0], version="0.20"), composed
    )
    assert job.batch_schedule is None
    assert request.space.batch_unit is None
    assert any("ignores --rampup-batch-size" in note for note in job.notes)


def _nemo(growth: list[int] | None) -> tuple[Any, Any]:
    recipe = nemo_recipe(catalogue.model("llama3_8b"), num_nodes=2, batch=128)
    recipe.data.rampup_batch_size, recipe.trainer.max_steps = growth, 20_000
    return recipe, nemo


def _bridge(growth: list[int] | None) -> tuple[Any, Any]:
    cfg = bridge_config(catalogue.model("llama3_8b"), batch=128)
    cfg.train.rampup_batch_size, cfg.train.train_iters = growth, 20_000
    return cfg, megatron_bridge


@pytest.mark.parametrize("make", [_nemo, _bridge])
def test_a_recipe_whose_batch_grows(
    make: Callable[[list[int] | None], tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "installed_name", lambda _: "megatron_bridge_0.4")
    growing, framework = make([8, 24, 100_000])
    settings = {"cluster": "dgx_h100", "overrides": ["cluster.num_gpus=16"]}
    found, _ = framework.auto_recipe(growing, **settings)
    assert found.train.batch_schedule.sizes == (8, 32, 56, 80, 104, 128)
    grid = found.layout
    assert 8 % (grid.micro_batch_size * grid.dims.data_parallel_size) == 0
    same, _ = make([8, 24, 100_000])
    framework.apply_plan(same, found)
    other, _ = make([4, 4, 100_000])
    with pytest.raises(UserInputError, match="the plan was made for 8, 32"):
        framework.apply_plan(other, found)


@pytest.mark.parametrize("make", [_nemo, _bridge])
def test_a_recipe_that_ends_before_its_batch_has_grown_keeps_it(
    make: Callable[[list[int] | None], tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "installed_name", lambda _: "megatron_bridge_0.4")
    short, framework = make([8, 24, 10_000_000])
    settings = {"cluster": "dgx_h100", "overrides": ["cluster.num_gpus=8"]}
    if make is _nemo:
        short.trainer.num_nodes = 1
    found, changes = framework.auto_recipe(short, **settings)
    assert found.train.batch_schedule.sizes == (8,)
    assert found.final_batch_size == 128
    assert not [each for each in changes if each.field.endswith("global_batch_size")]


def test_a_command_that_ends_before_its_batch_has_grown_keeps_it() -> None:
    """With a batch of 4 that grows from 4 Megatron divides by no steps, and trains another job."""
    words = JOB.replace("4000000", "400") + GROWING["0.16"][0]
    composed = compose(parse(["cluster=dgx_h100", "search.num_alternatives=0"]))
    job, request = read_request(TypedCommand(text=words, version="0.16"), composed)
    found = plan(request)
    assert isinstance(found, ParallelPlan)
    assert job.command is not None
    _, rewrite = with_command(found, job.command)
    assert "--global-batch-size" not in [each.field for each in rewrite.changes]


def test_an_estimate_is_checked_and_priced_at_each_size() -> None:
    settings = (*CATALOGUE, RAMP, "train.global_batch_size=128", "target=megatron_lm_0.17")
    layout = ("parallel.tensor_model_parallel_size=2", "train.micro_batch_size=4")
    found = estimate_job(compose(parse([*settings, *layout])))
    assert [batch.global_batch_size for batch in found.record.batches] == [32, 64, 96, 128]
    too_large = ("parallel.tensor_model_parallel_size=1", "train.micro_batch_size=4")
    with pytest.raises(UserInputError, match="at every size"):
        estimate_job(compose(parse([*settings, *too_large])))
