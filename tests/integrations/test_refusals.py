"""What is said of a command that Megatron refuses: its rule, and the flags that fix it."""

from __future__ import annotations

import pytest

from nest_megatron.config.compose import compose
from nest_megatron.config.overrides import parse
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.plan_job import TypedCommand
from nest_megatron.integrations.typed_command import estimate_command
from tests.integrations.legal_commands import command_of
from tests.integrations.test_legal_commands import BASE, NODE, is_legal, refusal

HYBRID = {
    "--num-layers": ["10"],
    "--hybrid-override-pattern": ["M*-M*-M*-M"],
    "--is-hybrid-model": [],
    "--spec": ["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"],
    "--mamba-num-heads": ["64"],
}
ENDS = "--decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 3"


def hybrid(**flags: list[str]) -> str:
    typed = {f"--{name.replace('_', '-')}": words for name, words in flags.items()}
    return command_of({**BASE, **HYBRID, **typed}).replace("pretrain_gpt", "pretrain_mamba")


def said(command: str) -> str:
    error = refusal(command, "0.16")
    assert isinstance(error, UserInputError)
    return str(error)


def test_heads_of_mamba_layers_are_a_multiple_of_their_groups() -> None:
    words = said(hybrid(mamba_num_heads=["2"]))
    assert "mamba_num_heads = 2: it must be a multiple of the 8 groups" in words
    assert "Use --mamba-num-groups 2" in words


def test_uneven_stages_of_a_hybrid_model_have_flags() -> None:
    four = ["4"]
    assert ENDS in said(hybrid(pipeline_model_parallel_size=four))
    ends = {
        "decoder_first_pipeline_num_layers": ["3"],
        "decoder_last_pipeline_num_layers": ["3"],
    }
    command = hybrid(pipeline_model_parallel_size=four, **ends)
    assert is_legal(command, "0.16")
    assert refusal(command, "0.16") is None


@pytest.mark.parametrize(
    ("flags", "fix"),
    [
        ({}, "--decoder-first-pipeline-num-layers 7 --decoder-last-pipeline-num-layers 7"),
        (
            {"--decoder-first-pipeline-num-layers": ["5"]},
            "--decoder-first-pipeline-num-layers 7 --decoder-last-pipeline-num-layers 7",
        ),
        ({"--account-for-loss-in-pipeline-split": []}, "--pipeline-model-parallel-layout in"),
    ],
)
def test_uneven_stages_of_a_dense_model_have_flags(flags: dict[str, list[str]], fix: str) -> None:
    typed = {**BASE, "--num-layers": ["30"], "--pipeline-model-parallel-size": ["4"], **flags}
    assert fix in as_typed(command_of(typed))


def test_local_layers_have_no_context_parallelism() -> None:
    typed = {**BASE, "--context-parallel-size": ["2"], "--transformer-impl": ["local"]}
    for words in (said(command_of(typed)), as_typed(command_of(typed))):
        assert "(--transformer-impl local) have no context parallelism" in words
        assert "search.max" not in words


def as_typed(command: str) -> str:
    with pytest.raises(UserInputError) as caught:
        estimate_command(TypedCommand(text=command, version="0.16"), compose(parse(NODE)))
    return str(caught.value)
