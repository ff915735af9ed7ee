"""Flags and settings beside a command override what it says, and are written into it."""

from __future__ import annotations

import pytest

import nest_megatron
from nest_megatron.config.compose import compose
from nest_megatron.config.job import ReadCommand
from nest_megatron.config.launch import read_words
from nest_megatron.config.overrides import parse
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.megatron_lm.attach import LAUNCHER
from nest_megatron.integrations.plan_job import TypedCommand
from nest_megatron.integrations.typed_command import read_typed
from tests.cli.runs import run

COMMAND = (
    "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 4 --hidden-size 1024 "
    "--num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 "
    "--position-embedding-type rope --micro-batch-size 1 --global-batch-size 64 --bf16 "
    "--tokenizer-type HuggingFaceTokenizer --tokenizer-model some/tokenizer --own-flag 3"
)
VOCABULARY = "flags=--vocab-size=131072"


def read(*settings: str, command: str = COMMAND) -> ReadCommand:
    composed = compose(parse(["cluster=dgx_h100", *settings]))
    job, _ = read_typed(TypedCommand(text=command, version="0.16"), composed)
    assert job.command is not None
    return job.command


@pytest.mark.parametrize(
    "settings",
    [
        (VOCABULARY,),
        ("flags=--vocab-size 131072",),
        ("model.vocab_size=131072",),
        (VOCABULARY, "model.vocab_size=131072"),
        ("flags=--vocab-size 131072 --num-layers=4",),
    ],
)
def test_vocabulary_that_only_its_tokenizer_knows(settings: tuple[str, ...]) -> None:
    found = read(*settings)
    assert found.values["vocab_size"] == 131072
    assert found.argv[-1].removeprefix("--vocab-size=") == "131072"
    assert found.unknown == ("--own-flag", "3")
    assert found.notes[-1] == (
        "--vocab-size 131072 is set beside the command, which does not say it."
    )


def test_settings_of_one_flag_are_written_into_the_command() -> None:
    settings = ("train.global_batch_size=128", "train.micro_batch_size=2", "train.seq_length=2048")
    found = read(VOCABULARY, *settings)
    values = {"global_batch_size": 128, "micro_batch_size": 2, "seq_length": 2048}
    for name, value in (*values.items(), ("max_position_embeddings", 2048)):
        flag = f"--{name.replace('_', '-')}"
        assert found.argv.count(flag) == 1
        assert found.argv[found.argv.index(flag) + 1] == str(value)
        assert found.values[name] == value
    assert "--seq-length 2048 is set beside the command, which says 1024." in found.notes


def test_what_the_parser_refuses_is_replaced() -> None:
    command = f"{COMMAND} --optimizer ademamix"
    with pytest.raises(UserInputError, match=r"invalid choice: 'ademamix'.*replace it \(--set"):
        read(VOCABULARY, command=command)
    found = read("flags=--vocab-size=131072 --optimizer=adam", command=command)
    assert found.values["optimizer"] == "adam"
    assert "--optimizer adam is set beside the command, which says ademamix." in found.notes


@pytest.mark.parametrize(
    ("stated", "flags", "limit"),
    [
        ("8", "--tensor-model-parallel-size 2", "TP and CP start with 1"),
        ("1", "--use-megatron-fsdp --ckpt-format fsdp_dtensor", "FSDP starts with more than one"),
        ("1", "--tensor-model-parallel-size 2", ""),
        ("8", "", ""),
    ],
)
def test_connections_with_which_megatron_does_not_start(
    stated: str, flags: str, limit: str
) -> None:
    command = f"CUDA_DEVICE_MAX_CONNECTIONS={stated} {COMMAND} --use-distributed-optimizer {flags}"
    words = "--no-gradient-accumulation-fusion --vocab-size 32000"
    done = run("estimate", "cluster=dgx_h100", "--from", f"{command} {words}")
    assert (done.code, limit in done.err) == ((2, True) if limit else (0, True))
    if limit == "TP and CP start with 1":
        planned = run("plan", "cluster=dgx_h100", "--from", f"{command} {words}")
        assert "CUDA_DEVICE_MAX_CONNECTIONS  8 -> 1" in planned.out


@pytest.mark.parametrize(("flag", "is_of_model"), [("--moe-top-k 2", True), ("--log-dir x", False)])
def test_no_run_is_like_a_model_that_an_unknown_flag_may_change(
    flag: str, is_of_model: bool
) -> None:
    command = f"{COMMAND} --vocab-size 32000 {flag}"
    found = nest_megatron.estimate_command(command, cluster="dgx_h100").record
    assert any("of the model is not priced" in note for note in found.notes) is is_of_model
    assert (found.uncertainty.runs == 0) is is_of_model


def test_fields_of_the_model_are_its_flags() -> None:
    found = read(VOCABULARY, "model.num_layers=8", "model.ffn_hidden_size=2048")
    assert (found.values["num_layers"], found.values["ffn_hidden_size"]) == (8, 2048)
    found = read(VOCABULARY, "model.qk_layernorm=true")
    assert found.values["qk_layernorm"] is True
    assert found.argv[-1] == "--qk-layernorm"


def test_a_padded_vocabulary_gives_way_to_another_one() -> None:
    found = read(VOCABULARY, command=f"{COMMAND} --padded-vocab-size 50304")
    assert found.values["padded_vocab_size"] is None
    assert "--padded-vocab-size 50304 of the command is left out." in found.notes


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("flags=--vocab-sizes=4",), "--vocab-size"),
        (("flags=vocab-size=4",), "--set '--vocab-size 131072'"),
        (("flags=train.seq_length=4",), "settings, key=value, need no --set"),
        ((VOCABULARY, "model.vocab_size=5"), "--vocab-size=131072 is set, too"),
        (("flags=--vocab-size 4 --vocab-size 5",), "--vocab-size 4 is set, too"),
        (("flags=--seq-length 512", "train.seq_length=2048"), "--seq-length 512 is set, too"),
        (
            ("flags=--tensor-model-parallel-size=4", "parallel.tensor_model_parallel_size=2"),
            "--tensor-model-parallel-size=4 is set, too",
        ),
        (
            (VOCABULARY, "model.swiglu_limit=3"),
            "model.swiglu_limit = '3': no flag of Megatron-LM says it",
        ),
        (
            (VOCABULARY, "model.qk_layernorm=false"),
            "model.qk_layernorm = 'false': a command says it by the absence of a flag",
        ),
        (
            (VOCABULARY, "model.add_bias_linear=False"),
            "model.add_bias_linear = 'False': a command says it by the absence",
        ),
        ((VOCABULARY, "model.num_query_groups=4"), "Give its flags, with those that they need"),
        (("flags=--vocab-size",), "expected one argument"),
        ((VOCABULARY, "train.fp8_recipe=mxfp8"), "the command computes in 16 bits"),
    ],
)
def test_what_is_no_flag_and_two_values_of_one_are_refused(
    settings: tuple[str, ...], words: str
) -> None:
    with pytest.raises(UserInputError) as raised:
        read(*settings)
    assert words in str(raised.value)


def test_flags_need_a_command() -> None:
    with pytest.raises(UserInputError, match="no command of Megatron-LM is there"):
        nest_megatron.plan(model="llama3_8b", cluster="dgx_h100", flags="--vocab-size=8")
    done = run("plan", "model.vocab_size=8", "cluster=dgx_h100")
    assert done.code == 2
    assert "no model is given that has --vocab-size 8" in done.err
    with pytest.raises(UserInputError, match="training job's own"):
        read_words(["+nest=auto", "nest.flags=--vocab-size=8"])


def test_the_launch_has_them_in_all_ways_to_ask() -> None:
    flags = ["--vocab-size=131072", "--num-layers", "2"]
    found = nest_megatron.estimate_command(COMMAND, cluster="dgx_h100", flags=flags)
    argv = found.record.launch[LAUNCHER].argv
    assert "--vocab-size=131072" in argv
    assert found.model.num_layers == 2
    words = ("cluster=dgx_h100", "--set", "--vocab-size=131072", "--set", "--num-layers 2")
    done = run("estimate", "--from", COMMAND, *words)
    assert done.code == 0
    assert "--num-layers 2 is set beside the command, which says 4." in done.out
