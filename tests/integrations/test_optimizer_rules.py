"""Flags of the optimizer that Megatron refuses without its precision-aware optimizer."""

from __future__ import annotations

import pytest

from nest_megatron.errors import UserInputError
from nest_megatron.integrations.megatron_lm.parser import read_command
from nest_megatron.integrations.megatron_lm.read import read_job
from nest_megatron.integrations.megatron_lm.search_space import for_optimizer
from nest_megatron.layout.zero import ZeroStage
from tests import catalogue
from tests.integrations.test_sharding import job
from tests.launch.jobs import job_argv, namespace, running

AWARE = "--use-distributed-optimizer --use-precision-aware-optimizer"


@pytest.mark.parametrize("version", ["0.16", "0.20"])
@pytest.mark.parametrize(
    "flag",
    [
        "--optimizer-cpu-offload",
        "--main-grads-dtype bf16",
        "--main-params-dtype fp16",
        "--exp-avg-dtype bf16",
        "--exp-avg-sq-dtype fp8",
    ],
)
def test_a_flag_of_the_precision_aware_optimizer_is_refused_without_it(
    flag: str, version: str
) -> None:
    name = flag.split(maxsplit=1)[0]
    with pytest.raises(UserInputError, match=f"{name} = .*--use-precision-aware-optimizer"):
        read_job(read_command(job(f"--use-distributed-optimizer {flag}"), version))
    read_job(read_command(job(f"{AWARE} {flag}"), version))


def test_what_is_single_precision_needs_no_other_flag() -> None:
    read_job(read_command(job("--main-grads-dtype fp32 --exp-avg-dtype fp32")))


def test_a_launch_is_refused_before_its_tokenizer_is_built() -> None:
    argv = job_argv(catalogue.model("llama3_8b"), "--optimizer-cpu-offload")
    with pytest.raises(UserInputError, match="--optimizer-cpu-offload = True"):
        running(namespace(argv), argv)


@pytest.mark.parametrize(
    "flags",
    ["--bf16 --fp8-format hybrid --fp8-param-gather", "--use-precision-aware-optimizer"],
)
def test_a_flag_that_divides_states_keeps_them_divided(flags: str) -> None:
    read = read_job(read_command(job(f"--use-distributed-optimizer {flags}")))
    every = (ZeroStage.NONE, ZeroStage.OPTIMIZER)
    assert for_optimizer(every, read) == (ZeroStage.OPTIMIZER,)
    with pytest.raises(UserInputError, match="refuses it without --use-distributed-optimizer"):
        for_optimizer((ZeroStage.NONE,), read)


def test_other_jobs_may_keep_states_whole() -> None:
    read = read_job(read_command(job("--use-distributed-optimizer")))
    assert for_optimizer((ZeroStage.NONE,), read) == (ZeroStage.NONE,)


@pytest.mark.parametrize("version", ["0.16", "0.20"])
def test_fp8_weights_are_offloaded_with_delayed_scaling_alone(version: str) -> None:
    flags = f"{AWARE} --optimizer-cpu-offload --bf16 --fp8-format hybrid --fp8-param-gather"
    with pytest.raises(UserInputError, match="--fp8-recipe = 'tensorwise'"):
        read_job(read_command(job(f"{flags} --fp8-recipe tensorwise"), version))
    read_job(read_command(job(f"{flags} --fp8-recipe delayed"), version))
