"""Commands taken apart without Megatron."""

from __future__ import annotations

import pytest

from nest_megatron.errors import UnplannableModelError, UserInputError
from nest_megatron.integrations.megatron_lm.parser import (
    known_flags,
    load_arguments,
    newest_flags,
    read_command,
)
from nest_megatron.layout.rulebook.facts import RELEASES
from tests.integrations import commands

FLAGS = "--num-layers 4 --bf16"


@pytest.mark.parametrize(
    ("command", "script", "world"),
    [
        (f"python pretrain_gpt.py {FLAGS}", "pretrain_gpt.py", None),
        (f"A=1 B='x y' python -u /x/pretrain_gpt.py {FLAGS}", "/x/pretrain_gpt.py", None),
        (f"WORLD_SIZE=16 RANK=3 python pretrain_gpt.py {FLAGS}", "pretrain_gpt.py", 16),
        (f"torchrun --nproc-per-node 8 --nnodes 4 pretrain_gpt.py {FLAGS}", "pretrain_gpt.py", 32),
        (f"torchrun --nproc_per_node=8 pretrain_gpt.py {FLAGS}", "pretrain_gpt.py", 8),
        (f"torchrun --nproc-per-node gpu pretrain_gpt.py {FLAGS}", "pretrain_gpt.py", None),
        (f"torchrun --nnodes 1:4 --nproc-per-node 8 a.py {FLAGS}", "a.py", 32),
        (f"torchrun --nnodes 4:4 --nproc-per-node 8 a.py {FLAGS}", "a.py", 32),
        (f"torchrun --nnodes 1:$MAX --nproc-per-node 8 a.py {FLAGS}", "a.py", None),
        (f"torchrun --nnodes ${{N}}0 --nproc-per-node 8 a.py {FLAGS}", "a.py", None),
        (f"torchrun --nnodes=`count` --nproc-per-node 8 a.py {FLAGS}", "a.py", None),
        (f"srun --nodes=2-4 --ntasks-per-node=8 python a.py {FLAGS}", "a.py", 32),
        (f"srun -N 2-10:2 --ntasks-per-node=8 python a.py {FLAGS}", "a.py", 80),
        (f"torchrun --nproc-per-node 8 -m my.train {FLAGS}", "my.train", 8),
        (f"python -m torch.distributed.run --nproc-per-node 2 a.py {FLAGS}", "a.py", 2),
        (f"srun -N 4 --ntasks-per-node=8 python a.py {FLAGS}", "a.py", 32),
        (f"srun -n 64 python a.py {FLAGS}", "a.py", 64),
        (f"srun -l bash -c 'X=1 python -u a.py {FLAGS}'", "a.py", None),
        (f"srun -N 4 torchrun --nnodes 4 --nproc-per-node 8 a.py {FLAGS}", "a.py", 32),
        (FLAGS, "", None),
    ],
)
def test_launchers(command: str, script: str, world: int | None) -> None:
    read = read_command(command)
    assert (read.script, read.ranks.num_ranks) == (script, world)
    assert read.argv == ("--num-layers", "4", "--bf16")
    assert read.explicit == {"num_layers", "bf16"}
    assert read.values["num_layers"] == 4
    assert read.values["tensor_model_parallel_size"] == 1


def test_environment_and_continuation_lines() -> None:
    read = read_command("A=1 srun bash -c 'B=2 python a.py \\\n --bf16 # a comment\n'")
    assert dict(read.environment) == {"A": "1", "B": "2"}
    assert read.argv == ("--bf16",)


def test_tokens_instead_of_a_string() -> None:
    assert read_command(["python", "a b.py", "--save", "/a b"]).values["save"] == "/a b"


def test_own_flags_pass_through_untouched_and_typos_are_named() -> None:
    read = read_command(
        "python a.py --my-flag 3 --tensor-model-paralel-size 2 --num_layers 3 --bf16 -x --y=4"
    )
    assert read.unknown == (
        *("--my-flag", "3", "--tensor-model-paralel-size", "2", "--num_layers", "3", "-x", "--y=4"),
    )
    assert any("--tensor-model-parallel-size?" in note for note in read.notes)
    assert any("--num-layers?" in note for note in read.notes)
    assert any("--my-flag; it is passed on" in note for note in read.notes)


def test_a_word_that_a_flag_lacks_is_not_the_next_flag() -> None:
    with pytest.raises(UserInputError, match="tokenizer-model: expected one argument"):
        read_command("python a.py --tokenizer-model --bf16")
    read = read_command("python a.py --tokenizer-model --bf16", replaced="--tokenizer-model=/t")
    assert read.values["bf16"]


def test_another_word_is_no_typo() -> None:
    flags = "--no-query-key-layer-scaling --patch-size 14 --use-mpi"
    assert "Did you mean" not in " ".join(read_command(f"python a.py {flags}").notes)


def test_tokenizers_of_a_fork_are_passed_on_and_other_choices_are_not() -> None:
    for words in ("--tokenizer-type MyTokenizer", "--tokenizer-type=MyTokenizer"):
        read = read_command(f"python a.py {words} --bf16")
        assert read.values["tokenizer_type"] == "MyTokenizer"
        assert read.notes == (
            "Megatron 0.19 has no --tokenizer-type MyTokenizer; it is passed on as it is.",
        )
    assert not read_command("python a.py --tokenizer-type NullTokenizer").notes
    with pytest.raises(UserInputError, match="invalid choice: 'mine'"):
        read_command("python a.py --moe-token-dispatcher-type mine")


def test_jobs_of_megatron_deepspeed_are_refused_as_such() -> None:
    words = "--deepspeed --deepspeed_config a.json --checkpoint-activations --normalization rmsnorm"
    with pytest.raises(UnplannableModelError, match="Megatron-DeepSpeed has stages"):
        read_command(f"deepspeed pretrain_gpt.py {words}")


def test_flags_of_the_other_release_are_named() -> None:
    read = read_command("python a.py --cuda-graph-modules attn", "0.16")
    assert read.notes == ("--cuda-graph-modules belongs to Megatron 0.20, not to 0.16.",)


def test_our_own_tokens_leave_the_arguments() -> None:
    read = read_command("python a.py --bf16 +nest=auto nest.free=[tp] ++nest.x=1")
    assert read.argv == ("--bf16",)
    assert not read.unknown


@pytest.mark.parametrize(
    ("flags", "dest", "value"),
    [
        ("--moe-layer-freq ([0]*3+[1]*2)*2", "moe_layer_freq", [0, 0, 0, 1, 1] * 2),
        ("--moe-layer-freq 2", "moe_layer_freq", 2),
        ("--window-size 127,0", "window_size", (127, 0)),
        ("--recompute-modules core_attn mlp", "recompute_modules", ["core_attn", "mlp"]),
        ("--disable-bias-linear", "add_bias_linear", False),
        ("--no-rl-partial-rollouts", "rl_partial_rollouts", False),
        ("--rampup-batch-size 1 2 3", "rampup_batch_size", [1, 2, 3]),
        ("--attention-backend flash", "attention_backend", "flash"),
    ],
)
def test_values(flags: str, dest: str, value: object) -> None:
    assert read_command(flags).values[dest] == value


@pytest.mark.parametrize(
    "command",
    [
        "python a.py --num-layers four",
        "python a.py --normalization Batch",
        "python a.py --moe-layer-freq [1]*99999999",
        "python a.py --moe-layer-freq __import__('os')",
        "torchrun ${ARGS[@]} pretrain_gpt.py ${MODEL_ARGS[@]}",
        "python 'a.py",
        "make train",
    ],
)
def test_refused(command: str) -> None:
    with pytest.raises(UserInputError):
        read_command(command)


def test_unknown_release() -> None:
    with pytest.raises(UserInputError, match=r"Known|Did you mean"):
        read_command(FLAGS, "0.1")


@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.parametrize(
    "command", [commands.LLAMA3_8B, commands.MIXTRAL, commands.GPT3_175B, commands.BERT_340M]
)
def test_megatrons_own_examples_have_no_unknown_flag(command: str, version: str) -> None:
    read = read_command(command, version)
    assert not read.unknown
    assert not read.notes


@pytest.mark.parametrize("version", RELEASES)
def test_recorded_arguments_are_complete(version: str) -> None:
    arguments = load_arguments(version)
    assert len(arguments) > 560
    assert len({flag for a in arguments for flag in a.flags}) >= len(arguments)


def test_a_row_of_the_table_is_of_its_releases_alone() -> None:
    for version in RELEASES:
        held = {name for argument in load_arguments(version) for name in argument.flags}
        assert ("--hybrid-layer-pattern" in held) == (version >= "0.17")
        assert ("--cuda-graph-modules" in held) == (version >= "0.18")
        assert ("--hybrid-attention-ratio" in held) == (version <= "0.16")


def test_the_first_release_that_has_all_flags_is_named() -> None:
    assert not newest_flags(known_flags(RELEASES[0]))
    said = newest_flags(["--hybrid-layer-pattern", "--moe-paged-stash", "--bf16"])
    assert said == "No release of Megatron-LM before 0.18 has --moe-paged-stash."
    assert not newest_flags(["--moe-paged-stash"], given=["--moe-paged-stash"])


@pytest.mark.parametrize("wrapper", ["numactl -m 0,1 -N 0", "docker run -m 512g image"])
def test_an_option_of_a_wrapper_is_no_module(wrapper: str) -> None:
    command = read_command(f"{wrapper} torchrun --nproc-per-node 8 pretrain_gpt.py --bf16")
    assert command.script == "pretrain_gpt.py"
    assert command.ranks.num_ranks == 8


def test_lines_of_a_pasted_command_may_end_as_on_windows() -> None:
    command = read_command("torchrun --nproc-per-node 8 \\\r\n pretrain_gpt.py \\\r\n --bf16\r\n")
    assert (command.argv, command.unknown) == (("--bf16",), ())


def test_a_word_that_no_flag_takes_is_named() -> None:
    """Megatron's parser ends at it; values of a flag of another script are passed on."""
    command = read_command("pretrain_gpt.py --bf16 true --mine 3 4 --swiglu", "0.19")
    assert command.notes == (
        "Megatron 0.19 ends at true, a word that --bf16 does not take.",
        "Megatron 0.19 has no flag --mine; it is passed on as it is.",
    )
