"""Random commands: a job that Megatron starts as it is typed is planned, whatever it states."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nest_megatron.config.compose import compose
from nest_megatron.config.overrides import parse
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.megatron_lm.attach import LAUNCHER
from nest_megatron.integrations.plan_job import TypedCommand
from nest_megatron.integrations.typed_command import estimate_command, plan_command
from nest_megatron.layout.rulebook.facts import RELEASES
from nest_megatron.model.execution import Execution
from nest_megatron.report.failure import NothingFitsError
from tests.integrations.legal_commands import command_of, random_flags

NODE = ["cluster=dgx_h100", "cluster.num_gpus=8"]
NOMINAL = ["search.tie_percent=0", "search.num_alternatives=0"]
#: What a plan chooses beside degrees, and the flags that state it under another name.
CHOSEN = {field.name for field in dataclasses.fields(Execution) if field.init} | {
    "recompute_granularity",
    "recompute_modules",
    "recompute_num_layers",
}
ALSO = {
    "--recompute-activations": ("recompute_granularity", "recompute_modules"),
    "--recompute-granularity": ("recompute_modules",),
    "--enable-cuda-graph": ("cuda_graph_impl",),
}


def is_legal(command: str, version: str) -> bool:
    try:
        estimate_command(TypedCommand(text=command, version=version), compose(parse(NODE)))
    except UserInputError:
        return False
    return True


def named_but_not_typed(error: UserInputError, flags: Mapping[str, Sequence[str]]) -> set[str]:
    """Choices of a plan that an error is about, though no flag states them."""
    typed = {flag.removeprefix("--").replace("-", "_") for flag in flags}
    typed.update(name for flag in flags for name in ALSO.get(flag, ()))
    named = set(re.findall(r"(\w+) = ", str(error).replace("-", "_")))
    return named & CHOSEN - typed


def refusal(command: str, version: str) -> UserInputError | None:
    """Why there is no plan; ``None`` for a plan, and for one that does not fit."""
    try:
        plan_command(TypedCommand(text=command, version=version), compose(parse([*NODE, *NOMINAL])))
    except NothingFitsError:
        return None
    except UserInputError as error:
        return error
    return None


def require_planned(flags: Mapping[str, Sequence[str]], version: str) -> None:
    error = refusal(command_of(flags), version)
    if error is not None:
        assert not named_but_not_typed(error, flags), error
        assert not is_legal(command_of(flags), version), error


def check_some_command(data: st.DataObject) -> None:
    flags = random_flags(lambda options: data.draw(st.sampled_from(options)))
    version = data.draw(st.sampled_from(RELEASES))
    require_planned(flags, version)


@settings(max_examples=40)
@given(st.data())
def test_no_plan_ends_with_a_rule_about_what_nobody_typed(data: st.DataObject) -> None:
    check_some_command(data)


@pytest.mark.slow
@settings(max_examples=3000)
@given(st.data())
def test_no_plan_of_thousands_does(data: st.DataObject) -> None:
    check_some_command(data)


BASE: dict[str, Sequence[str]] = {
    "--num-layers": ["24"],
    "--hidden-size": ["1024"],
    "--num-attention-heads": ["16"],
    "--seq-length": ["1024"],
    "--max-position-embeddings": ["1024"],
    "--micro-batch-size": ["4"],
    "--global-batch-size": ["64"],
    "--lr": ["1e-5"],
    "--train-iters": ["10"],
    "--bf16": [],
    "--vocab-size": ["50257"],
    "--tokenizer-type": ["NullTokenizer"],
    "--mock-data": [],
}


@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.parametrize(
    "stated",
    [
        {"--recompute-activations": []},
        {"--recompute-granularity": ["selective"]},
        {"--recompute-granularity": ["selective"], "--recompute-modules": ["mlp"]},
        {
            "--recompute-granularity": ["full"],
            "--recompute-method": ["uniform"],
            "--recompute-num-layers": ["4"],
            "--pipeline-model-parallel-size": ["2"],
        },
    ],
)
def test_what_is_recomputed_goes_with_what_a_plan_adds(
    stated: dict[str, Sequence[str]], version: str
) -> None:
    flags = {**BASE, **stated}
    assert is_legal(command_of(flags), version)
    require_planned(flags, version)


ROUNDS = {
    **BASE,
    "--pipeline-model-parallel-size": ["4"],
    "--num-layers-per-virtual-pipeline-stage": ["2"],
    "--micro-batch-size": ["4"],
    "--global-batch-size": ["40"],
    "--hidden-dropout": ["0"],
}


@pytest.mark.parametrize(("group", "batch"), [("5", "40"), ("10", "80"), ("4", "32")])
def test_a_typed_round_of_virtual_stages_stays(group: str, batch: str) -> None:
    """NVIDIA's own gpt3_mcore_te_tp1_pp4_vp1_tunable_overlap: 5 micro batches, rounds of 5."""
    flag = "--microbatch-group-size-per-virtual-pipeline-stage"
    flags = {**ROUNDS, "--global-batch-size": [batch], flag: [group]}
    command = command_of(flags)
    assert is_legal(command, "0.16")
    found = plan_command(
        TypedCommand(text=command, version="0.16"), compose(parse([*NODE, *NOMINAL]))
    ).plan
    assert found.arguments["virtual_pipeline_model_parallel_size"] == 3
    argv = found.launch[LAUNCHER].argv
    assert argv[argv.index(flag) + 1] == group


def test_rounds_that_leave_a_small_one_are_refused() -> None:
    flag = "--microbatch-group-size-per-virtual-pipeline-stage"
    error = refusal(command_of({**ROUNDS, "--global-batch-size": ["48"], flag: ["5"]}), "0.16")
    assert "rounds of 5 micro batches" in str(error)


#: What Megatron-LM's examples/gptoss/02_train.sh (core_v0.16.1 and main) launches with mock data.
GPT_OSS = """
torchrun --nproc_per_node 8 pretrain_gpt.py --no-masked-softmax-fusion
--transformer-impl transformer_engine --disable-bias-linear --untie-embeddings-and-output-weights
--no-rope-fusion --normalization RMSNorm --num-layers 12 --hidden-size 512 --ffn-hidden-size 2048
--num-attention-heads 64 --group-query-attention --num-query-groups 8 --seq-length 8192
--max-position-embeddings 8192 --use-mcore-models --rotary-percent 1.0
--position-embedding-type rope --rotary-base 10000 --no-bias-gelu-fusion --no-bias-dropout-fusion
--quick-geglu --glu-linear-offset 1.0 --softmax-type learnable --window-attn-skip-freq 2
--activation-func-clamp-value 7.0 --window-size 127,0 --enable-gpt-oss --num-experts 4
--moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3
--moe-grouped-gemm --moe-token-dispatcher-type alltoall --overlap-param-gather
--overlap-grad-reduce --moe-ffn-hidden-size 2048 --moe-router-dtype fp32 --moe-z-loss-coeff 1e-3
--moe-permute-fusion --mock-data --tokenizer-type NullTokenizer --vocab-size 128256
--micro-batch-size 1 --global-batch-size 128 --lr 1.0e-5 --train-samples 1953125000 --bf16
--use-flash-attn --attention-softmax-in-fp32 --accumulate-allreduce-grads-in-fp32
--recompute-activations --tensor-model-parallel-size 1 --pipeline-model-parallel-size 8
--expert-model-parallel-size 1 --sequence-parallel --context-parallel-size 1
--use-distributed-optimizer --fp8-format hybrid --fp8-param-gather --fp8-amax-compute-algo max
--fp8-amax-history-len 1024
"""


@pytest.mark.parametrize("version", RELEASES)
def test_nvidias_script_of_gpt_oss_is_planned(version: str) -> None:
    assert refusal(" ".join(GPT_OSS.split()), version) is None
