"""A rewritten command parses to the plan, and touches nothing else."""

from __future__ import annotations

import functools

import pytest

from nest_megatron.cluster.records import cluster_from_mapping
from nest_megatron.config.compose import compose
from nest_megatron.config.overrides import parse
from nest_megatron.integrations.megatron_lm.attach import LAUNCHER, rewrite_command, with_command
from nest_megatron.integrations.megatron_lm.layout_arguments import (
    PARALLEL_ARGUMENTS,
    partition_of_values,
)
from nest_megatron.integrations.megatron_lm.parser import read_command
from nest_megatron.integrations.megatron_lm.read import read_job
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.stage_layout import uniform_partition
from nest_megatron.planner import Request, plan
from tests.integrations.commands import GPT3_175B, LLAMA3_8B, MIXTRAL

COMMANDS = {"llama": LLAMA3_8B, "mixtral": MIXTRAL, "gpt3": GPT3_175B}
INCOMPATIBLE = {
    "global_batch_size",
    "ckpt_format",
    "moe_token_dispatcher_type",
    "moe_grouped_gemm",
    "init_model_with_meta_device",
    "gradient_accumulation_fusion",
}


@functools.cache
def found_for(text: str) -> ParallelPlan:
    command = read_command(text)
    job = read_job(command)
    spec = job.spec
    cluster = compose(parse(["cluster=dgx_h100"])).cluster
    assert cluster is not None
    assert job.global_batch_size is not None
    found = plan(
        Request(
            spec=spec,
            cluster=cluster_from_mapping(cluster, num_gpus=job.num_gpus),
            global_batch_size=job.global_batch_size,
        )
    )
    assert isinstance(found, ParallelPlan)
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_a_rewritten_command_reads_back_as_the_plan(name: str) -> None:
    command = read_command(COMMANDS[name])
    found = found_for(COMMANDS[name])
    argv = with_command(found, command)[0].launch[LAUNCHER].argv
    values = read_command([command.script, *argv]).values
    chosen = found.arguments
    assert values["tensor_model_parallel_size"] == chosen["tensor_model_parallel_size"]
    assert values["pipeline_model_parallel_size"] == chosen["pipeline_model_parallel_size"]
    assert values["context_parallel_size"] == chosen["context_parallel_size"]
    pp = chosen["pipeline_model_parallel_size"]
    stages = partition_of_values(found.model, values, pp) or uniform_partition(found.model, pp, 1)
    assert stages == found.layout.partition
    assert values["micro_batch_size"] == found.layout.micro_batch_size
    assert values["sequence_parallel"] == chosen["sequence_parallel"]
    assert values["use_distributed_optimizer"] == chosen["use_distributed_optimizer"]


@pytest.mark.parametrize("name", COMMANDS)
def test_everything_else_stays(name: str) -> None:
    command = read_command(COMMANDS[name])
    argv = rewrite_command(found_for(COMMANDS[name]), command).argv
    again = read_command([command.script, *argv])
    ours = INCOMPATIBLE.union(PARALLEL_ARGUMENTS)
    for key, value in command.values.items():
        assert key in ours or again.values[key] == value, key
    assert again.unknown == command.unknown


@pytest.mark.parametrize("name", COMMANDS)
def test_a_second_rewrite_changes_nothing(name: str) -> None:
    command = read_command(COMMANDS[name])
    found = found_for(COMMANDS[name])
    once = rewrite_command(found, command)
    again = rewrite_command(found, read_command([command.script, *once.argv]))
    assert (again.argv, again.changes) == (once.argv, ())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_change_has_a_flag_and_a_reason(name: str) -> None:
    changes = rewrite_command(found_for(COMMANDS[name]), read_command(COMMANDS[name])).changes
    assert changes
    for change in changes:
        assert change.field.startswith("--")
        assert change.before != change.after
        assert change.reason
