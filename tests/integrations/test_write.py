"""Plans in Megatron's own flags."""

from __future__ import annotations

import dataclasses

import pytest

from nest_megatron.cluster.records import Precision
from nest_megatron.errors import UnplannableModelError
from nest_megatron.integrations.fields import FIELDS
from nest_megatron.integrations.megatron_lm.layout_arguments import ROLES
from nest_megatron.integrations.megatron_lm.parser import known_flags, read_command
from nest_megatron.integrations.megatron_lm.read import read_job
from nest_megatron.integrations.megatron_lm.write import (
    environment,
    model_argv,
    parallel_argv,
    pattern_text,
)
from nest_megatron.layout.execution_rules import execution_arguments
from nest_megatron.layout.rulebook import check
from nest_megatron.layout.rulebook.facts import RELEASES
from nest_megatron.layout.rulebook.options import ACTIVATION_FLAGS
from nest_megatron.layout.stage_layout import StagePartition
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.model.spec import DELTA_NET_SIZES, LATENT_SIZES, MAMBA_SIZES
from tests.contract import hand_models
from tests.contract.hand_models import DEEPSEEK, LLAMA
from tests.integrations.requests import SOUND, dims, request

#: Arguments that every release has a word for, if it allows the choice at all.
WANTED = ("moe_permute_fusion", "moe_router_fusion", "tp_comm_overlap", "offload_modules")


@pytest.mark.parametrize("name", SOUND)
def test_what_a_release_accepts_it_has_flags_for(name: str) -> None:
    for version in RELEASES:
        sound = dataclasses.replace(SOUND[name], version=version)
        if any(check(sound)):
            assert version < "0.19"
            continue
        argv = [*model_argv(sound.spec, version=version), *parallel_argv(sound)]
        assert {token for token in argv if token.startswith("--")} <= known_flags(version)
        read = read_command(argv, version)
        assert not read.unknown
        stated = execution_arguments(sound.execution, version)
        wanted = {name for name, value in stated.items() if value and name in WANTED}
        assert wanted <= read.explicit


@pytest.mark.parametrize("name", SOUND)
def test_a_written_plan_is_read_back(name: str) -> None:
    sound = SOUND[name]
    script = "pretrain_bert.py" if sound.spec is hand_models.BERT else "pretrain_gpt.py"
    argv = [script, *model_argv(sound.spec), *parallel_argv(sound)]
    job = read_job(read_command(argv))
    spec = job.spec
    assert spec.hidden_size == sound.spec.hidden_size
    assert job.precision is sound.precision
    assert job.fixed["tensor_model_parallel_size"] == sound.dims.tensor_model_parallel_size
    assert job.micro_batch_size == sound.micro_batch_size
    assert (job.zero or ZeroStage.NONE) is sound.zero
    assert job.recompute is None or job.recompute == sound.recompute


def test_a_layout_is_written_where_megatron_would_make_other_stages() -> None:
    layout, virtual = "--pipeline-model-parallel-layout", "--num-virtual-stages-per-pipeline-rank"
    without = request(DEEPSEEK, dims(pp=4, dp=8, ep=8), partition=None)
    with pytest.raises(AssertionError):
        parallel_argv(without)
    even = parallel_argv(request(grid=dims(pp=2)))
    assert not {layout, virtual}.intersection(even)
    interleaved = parallel_argv(request(grid=dims(pp=2, vpp=4)))
    assert interleaved[interleaved.index(virtual) + 1] == "4"
    assert layout not in interleaved
    halves = StagePartition(boundaries=(0, 31, 82), pipeline_model_parallel_size=2)
    uneven = parallel_argv(request(grid=dims(pp=2), partition=halves))
    assert uneven[uneven.index(layout) + 1] == "Et*30|t*50L"
    assert virtual not in uneven


def test_fsdp_comes_with_the_options_that_it_needs() -> None:
    argv = parallel_argv(request(grid=dims(dp=4), zero=ZeroStage.GRADIENTS))
    for flag in ("--use-megatron-fsdp", "--use-distributed-optimizer", "fsdp_dtensor"):
        assert flag in argv
    assert argv[argv.index("--data-parallel-sharding-strategy") + 1] == "optim_grads"


def fsdp(version: str = "0.16", **fields: object) -> list[str]:
    sharded = request(grid=dims(dp=4), zero=ZeroStage.WEIGHTS)
    return parallel_argv(dataclasses.replace(sharded, version=version, **fields))


@pytest.mark.parametrize("version", RELEASES)
def test_fsdp_has_what_it_needs_to_start(version: str) -> None:
    argv = fsdp(version)
    assert "--init-model-with-meta-device" in argv
    assert "--no-gradient-accumulation-fusion" in argv
    assert {word for word in argv if word.startswith("--")} <= known_flags(version)


def test_fsdp_keeps_the_width_of_gradients() -> None:
    flag = "--megatron-fsdp-main-grads-dtype"
    argv = fsdp("0.20")
    assert argv[argv.index(flag) + 1] == "fp32"
    assert flag not in fsdp("0.16")
    assert flag not in fsdp("0.20", gradient_bytes=2)
    assert flag not in fsdp("0.20", precision=Precision.FP32)
    assert flag not in parallel_argv(request(zero=ZeroStage.OPTIMIZER, version="0.20"))


def test_learned_positions_are_not_made_on_the_meta_device() -> None:
    learned = dataclasses.replace(LLAMA, position_embedding_type="learned_absolute")
    assert "--init-model-with-meta-device" not in fsdp(spec=learned)


def test_precisions() -> None:
    assert "--fp8-format" in parallel_argv(request(precision=Precision.FP8))
    assert "--fp16" in parallel_argv(request(precision=Precision.FP16))


def test_environment() -> None:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    assert environment(request(grid=dims(tp=2))) == {name: "1"}
    assert environment(request(grid=dims(cp=2))) == {name: "1"}
    assert environment(request(grid=dims(tp=2)), device_architecture=10) == {}
    assert environment(request()) == {}
    assert environment(request(grid=dims(tp=2), zero=ZeroStage.WEIGHTS)) == {name: None}


def test_activations_without_a_flag_are_refused() -> None:
    with pytest.raises(UnplannableModelError):
        model_argv(dataclasses.replace(LLAMA, activation="gelu"))


def test_patterns() -> None:
    assert pattern_text((1, 0, 0, 1)) == "([1]*1+[0]*2+[1]*1)"
    flag = ["--moe-layer-freq", pattern_text(DEEPSEEK.moe_layer_pattern)]
    read = read_command(flag)
    assert tuple(read.values["moe_layer_freq"]) == DEEPSEEK.moe_layer_pattern


def test_tables_of_names_have_those_of_the_model() -> None:
    parts = {part: tuple(names.split()) for part, names in ROLES["of_model"].items()}
    assert parts["state space"] == MAMBA_SIZES
    assert parts["gated delta nets"] == DELTA_NET_SIZES
    assert parts["latent sizes"] == LATENT_SIZES
    switches = set(filter(None, ACTIVATION_FLAGS.values()))
    assert switches <= set(parts["norms, activations and dropout"])
    assert set(LATENT_SIZES) <= set(FIELDS["model"]["planned"].split())
