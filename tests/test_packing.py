"""Packed jobs as plans: what packs fix of a layout, and what their lengths change of a step."""

from __future__ import annotations

from typing import Any

import pytest

from nest_megatron.config.compose import compose
from nest_megatron.config.overrides import parse
from nest_megatron.config.request import request_of
from nest_megatron.errors import UserInputError
from nest_megatron.integrations import nemo
from nest_megatron.integrations.plan_job import TypedCommand
from nest_megatron.integrations.typed_command import plan_command, read_request
from nest_megatron.layout import plan_file
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.planner import plan
from nest_megatron.report.words import sequence_words
from tests import catalogue
from tests.integrations.frameworks import nemo_recipe
from tests.integrations.test_finetuning import FineTuningDataModule, PackedSequenceSpecs

JOB = (
    "torchrun --nproc-per-node 8 --nnodes 2 {script} --num-layers 32 --hidden-size 8192 "
    "--num-attention-heads 64 --seq-length 8192 --max-position-embeddings 8192 --bf16 "
    "--vocab-size 128256 --tokenizer-type NullTokenizer --global-batch-size 64 "
)
#: Layers at the ends are no more than a pipeline rank has on average.
BF16_ENDS = "--fp8-format hybrid --fp8-recipe tensorwise --first-last-layers-bf16"
LENGTHS = ("train.sequence_length_mean=500", "train.sequence_length_std=600")


def asked(flags: str, *settings: str, version: str = "0.16") -> tuple[Any, Any]:
    composed = compose(parse(["cluster=dgx_h100", *settings]))
    text = JOB.format(script="pretrain_gpt.py") + flags
    return read_request(TypedCommand(text=text, version=version), composed)


def planned(*settings: str) -> ParallelPlan:
    own = ("model=llama3_8b", "cluster=dgx_h100", "cluster.num_gpus=64", "train.seq_length=16384")
    found = plan(request_of(compose(parse([*own, *settings])), choose_execution=True))
    assert isinstance(found, ParallelPlan)
    return found


def test_sft_of_0_16_takes_one_pack_a_micro_batch_and_no_deep_pipeline() -> None:
    job, request = asked("--sft")
    found = plan(request)
    assert isinstance(found, ParallelPlan)
    assert found.layout.micro_batch_size == 1
    chosen = [found.layout, *(other.layout for other in found.alternatives)]
    assert all(each.dims.pipeline_model_parallel_size <= 2 for each in chosen)
    assert all(each.dims.virtual_pipeline_model_parallel_size == 1 for each in chosen)
    assert any("attend across the sequences" in note for note in job.notes)
    with pytest.raises(UserInputError, match="a micro batch is one pack"):
        asked("--sft --micro-batch-size 2")


@pytest.mark.parametrize(
    ("flags", "version", "micro", "in_bf16"),
    [
        ("--sft", "0.20", None, 0),
        ("--sft --pipeline-model-parallel-size 4", "0.16", 1, 0),
        ("", "0.16", None, 0),
        (f"{BF16_ENDS} --num-layers-at-end-in-bf16 9", "0.16", None, 9),
        (BF16_ENDS, "0.20", None, 1),
        ("--first-last-layers-bf16 --num-layers-at-end-in-bf16 9", "0.20", None, 0),
    ],
)
def test_what_is_left_free(flags: str, version: str, micro: int | None, in_bf16: int) -> None:
    _, request = asked(flags, version=version)
    space = request.space
    assert space.fixed.get("micro_batch_size") == micro
    assert "pipeline_model_parallel_size" not in space.limits
    assert space.layers_in_bf16 == in_bf16


@pytest.mark.parametrize("typed", ["--pipeline-model-parallel-size 4", ""])
def test_layers_at_the_ends_in_bf16_are_of_one_pipeline_rank(typed: str) -> None:
    """32 layers on 4 ranks are 8 on each: 9 in bf16 are refused, however the size is said."""
    flags = f"{BF16_ENDS} --num-layers-at-start-in-bf16 9 --micro-batch-size 1 {typed}"
    text = JOB.format(script="pretrain_gpt.py") + flags
    settings = (
        "cluster=dgx_h100",
        *(() if typed else ("parallel.pipeline_model_parallel_size=4",)),
    )
    with pytest.raises(UserInputError, match="keeps 9 of the 32 layers at an end in bf16"):
        plan_command(TypedCommand(text=text, version="0.19"), compose(parse([*settings])))


def test_a_pipeline_that_is_freed_is_one_that_layers_in_bf16_allow() -> None:
    """What runs today is refused, so no plan keeps it; virtual stages that are typed limit none."""
    flags = f"{BF16_ENDS} --num-layers-at-start-in-bf16 16 --pipeline-model-parallel-size 4"
    virtual = "--num-virtual-stages-per-pipeline-rank 2 --micro-batch-size 1"
    text = JOB.format(script="pretrain_gpt.py") + f"{flags} {virtual}"
    typed = TypedCommand(text=text, version="0.19", free=("pipeline_model_parallel_size",))
    found = plan_command(typed, compose(parse(["cluster=dgx_h100"])))
    assert found.plan.layout.dims.pipeline_model_parallel_size == 2
    assert any("keeps 16 of the 32 layers" in note for note in found.request.notes)


def test_lengths_of_a_packed_job_shorten_its_attention() -> None:
    whole = planned("train.sequence_packing=true")
    packed = planned("train.sequence_packing=true", *LENGTHS)
    padded = planned(*LENGTHS)
    assert packed.predicted.iteration_time_s < 0.85 * whole.predicted.iteration_time_s
    assert packed.predicted.terms["stragglers"] > 0
    assert padded.predicted == whole.predicted
    assert "packed; a token attends within 1,204" in sequence_words(packed)
    rate = padded.predicted.tokens_per_s_per_gpu * 499.6 / 16384
    assert f"97 % is padding, {rate:,.0f} real tokens/s/GPU" in sequence_words(padded)
    assert plan_file.load(plan_file.dump(packed), "a plan").train == packed.train


def test_replicas_wait_for_the_one_with_most_attention() -> None:
    same = planned("train.sequence_packing=true", *LENGTHS, "cost.straggler_delay_s=0")
    equal = ("train.sequence_length_mean=1187", "train.sequence_length_std=0")
    even = planned("train.sequence_packing=true", *equal, "cost.straggler_delay_s=0")
    assert even.predicted.terms["stragglers"] == 0
    assert 0 < same.predicted.terms["stragglers"] < 0.02 * same.predicted.iteration_time_s


def test_a_recipe_that_packs_asks_for_lengths_and_takes_them() -> None:
    recipe = nemo_recipe(catalogue.model("llama3_8b"), num_nodes=1, batch=128)
    recipe.data = FineTuningDataModule(packed_sequence_specs=PackedSequenceSpecs(8192))
    recipe.data.tokenizer = type("Tokenizer", (), {"vocab_size": 128256})()
    model = recipe.model.config
    model.recompute_granularity, model.recompute_method = "full", "uniform"
    model.recompute_num_layers = 1
    settings = {"cluster": "dgx_h100", "keep": "all"}
    whole, _ = nemo.auto_recipe(recipe, overrides=("cluster.num_gpus=8",), **settings)
    packed, _ = nemo.auto_recipe(recipe, overrides=("cluster.num_gpus=8", *LENGTHS), **settings)
    assert packed.train.sequence_lengths is not None
    assert packed.predicted.iteration_time_s < whole.predicted.iteration_time_s
