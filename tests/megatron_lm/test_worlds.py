"""One process plays ranks of worlds of 64 and 1,024: Megatron's own script takes the plans.

``--fake-process-group`` makes every group and moves no data, so one process builds what a rank of a
large job would build. Full shapes are built on the meta device; a step is trained with the widths
made small, and layers, layout and degrees as planned.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from nest_megatron.integrations.megatron_lm.attach import LAUNCHER
from nest_megatron.integrations.megatron_lm.write import model_argv
from nest_megatron.layout import plan_file
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.rank_order import GroupKind, group_of_rank
from tests import catalogue
from tests.contract.hand_models import null_tokenizer
from tests.megatron_lm.training import HOME, ON_CPU, Trained, alone, run

pytestmark = [
    pytest.mark.megatron_lm,
    pytest.mark.skipif(not HOME, reason="MEGATRON_LM_HOME is not set to a Megatron-LM checkout"),
]

ONE_STEP = ["--train-iters", "1", "--lr", "1e-4", "--min-lr", "1e-5", "--mock-data", "--bf16"]
ONE_STEP += ["--eval-interval", "1000", "--eval-iters", "0", "--lr-decay-iters", "1"]
ONE_STEP += ["--fake-process-group", "--rerun-mode", "disabled", "--log-interval", "1"]
ONE_STEP += ["--no-check-for-nan-in-loss-and-grad"]


@dataclass(frozen=True)
class World:
    model: str
    size: int
    batch: int
    words: tuple[str, ...] = ()


WORLDS = {
    "llama3_70b on 64": World("llama3_70b", 64, 256),
    "llama3_70b on 64, 4 stages": World(
        "llama3_70b", 64, 256, ("nest.parallel.pipeline_model_parallel_size=4",)
    ),
    "llama3_70b on 1024": World("llama3_70b", 1024, 4096),
    "mixtral_8x7b on 64": World("mixtral_8x7b", 64, 256),
    "mixtral_8x7b on 1024, 4 stages": World(
        "mixtral_8x7b", 1024, 4096, ("nest.parallel.pipeline_model_parallel_size=4",)
    ),
    "deepseek_v3 on 1024": World("deepseek_v3", 1024, 8192),
}
EVERY_WORLD = pytest.mark.parametrize("name", WORLDS)


def play(world: World, rank: int, words: list[str], **more: str) -> Trained:
    """Be one rank of a world."""
    place = {"RANK": str(rank), "WORLD_SIZE": str(world.size), "LOCAL_RANK": str(rank % 8)}
    return run([], words, **place, **alone(), **more)


def planned(world: World, rank: int, path: Path) -> Trained:
    """The full model, as far as it is built."""
    spec = catalogue.model(world.model)
    words = [*model_argv(spec), *null_tokenizer(spec), *ONE_STEP, *ON_CPU]
    words += ["--micro-batch-size", "1", "--global-batch-size", str(world.batch)]
    words += ["+nest=auto", "nest.cluster=dgx_h100", "nest.free=all", f"nest.out={path}"]
    return play(world, rank, [*words, *world.words], NEST_TEST_BUILD="meta")


def ranks_of(plan: ParallelPlan) -> list[int]:
    """The first rank, one of the middle of the pipeline, and the last."""
    last = plan.layout.num_gpus - 1
    middle = plan.placement.stage_ranks[len(plan.placement.stage_ranks) // 2][0]
    return sorted({0, middle, last})


@cache
def plan_of(name: str, folder: Path) -> ParallelPlan:
    """A world's plan, from rank 0's launch; its model is as planned."""
    path = folder / f"{name.replace(' ', '_')}.yaml"
    built = planned(WORLDS[name], 0, path)
    assert built.code == 0, built.out[-3000:]
    plan = plan_file.read(path)
    compare(plan, 0, built)
    return plan


def compare(plan: ParallelPlan, rank: int, built: Trained) -> None:
    """What Megatron built on a rank against what the plan charges to its stage."""
    said = re.search(r"^NEST_BUILT (.*)$", built.out, re.MULTILINE)
    assert said, built.out[-3000:]
    chunks = json.loads(said.group(1))
    pipeline = group_of_rank(plan.layout.dims, GroupKind.PP, rank)
    stage = plan.predicted.stages[pipeline.index(rank)]
    assert sum(chunk["parameters"] for chunk in chunks) == stage.parameters
    assert len(chunks) == (plan.arguments["virtual_pipeline_model_parallel_size"] or 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("worlds")


@EVERY_WORLD
def test_full_shapes_are_built_as_planned(name: str, folder: Path) -> None:
    plan = plan_of(name, folder)
    for rank in ranks_of(plan)[1:]:
        path = folder / f"again-{rank}.yaml"
        compare(plan, rank, planned(WORLDS[name], rank, path))
        assert plan_file.read(path).layout == plan.layout


#: Widths that all planned degrees still divide.
NARROW = {
    "--hidden-size": "256",
    "--ffn-hidden-size": "512",
    "--num-attention-heads": "16",
    "--num-query-groups": "8",
    "--kv-channels": "16",
    "--moe-ffn-hidden-size": "64",
    "--moe-shared-expert-intermediate-size": "64",
    "--q-lora-rank": "32",
    "--kv-lora-rank": "32",
    "--qk-head-dim": "16",
    "--qk-pos-emb-head-dim": "16",
    "--v-head-dim": "16",
    "--seq-length": "256",
    "--max-position-embeddings": "256",
    "--vocab-size": "1023",
    # a fake group fills no buffer, and only this dispatcher needs no counts from other ranks
    "--moe-token-dispatcher-type": "allgather",
}


def narrowed(plan: ParallelPlan) -> list[str]:
    """The plan's own flags with small widths, and as few micro batches as its schedule takes."""
    words = list(plan.launch[LAUNCHER].argv)
    for at, word in enumerate(words[:-1]):
        words[at + 1] = NARROW.get(word, words[at + 1])
    for flag in ("--padded-vocab-size",):
        if flag in words:
            del words[words.index(flag) : words.index(flag) + 2]
    dims = plan.layout.dims
    batch = plan.layout.micro_batch_size * dims.data_parallel_size
    words[words.index("--global-batch-size") + 1] = str(batch * dims.pipeline_model_parallel_size)
    return words


@EVERY_WORLD
def test_a_step_is_trained_in_the_planned_layout(name: str, folder: Path) -> None:
    plan = plan_of(name, folder)
    if plan.layout.uses_megatron_fsdp:
        pytest.skip("Megatron-FSDP compares the shards of all ranks; test_fsdp trains it")
    sends_two_sizes = (plan.arguments["pipeline_model_parallel_layout"] or "").endswith("m|L")
    for rank in ranks_of(plan)[: -1 if sends_two_sizes else None]:
        environment = plan.launch[LAUNCHER].environment
        more = {key: value for key, value in environment.items() if value is not None}
        trained = play(WORLDS[name], rank, narrowed(plan), **more)
        assert trained.code == 0, trained.out[-3000:]
        assert rank or "[after training is done]" in trained.out  # said on rank 0
