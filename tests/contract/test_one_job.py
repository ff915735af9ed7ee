"""Every reader makes the same record of a job, with the same defaults of a model."""

from __future__ import annotations

import dataclasses

import pytest

from nest_megatron.config.catalogue import read_cluster
from nest_megatron.config.compose import compose
from nest_megatron.config.job import Job
from nest_megatron.config.overrides import parse
from nest_megatron.config.request import catalogue_job
from nest_megatron.integrations.megatron_bridge import read_recipe as read_bridge
from nest_megatron.integrations.megatron_lm.parser import read_command
from nest_megatron.integrations.megatron_lm.planning import job_request
from nest_megatron.integrations.megatron_lm.read import job_from_values, read_job
from nest_megatron.integrations.megatron_lm.write import model_argv
from nest_megatron.integrations.nemo import read_recipe as read_nemo
from nest_megatron.integrations.plan_job import TypedCommand
from nest_megatron.integrations.typed_command import read_request
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.planner import Request
from tests import catalogue
from tests.integrations.frameworks import bridge_config, nemo_recipe
from tools.golden import shape_of_test

LLAMA = catalogue.model("llama3_8b")
#: Fields that say where a shape comes from, not what it is.
_ORIGIN = {"name": "", "source": "", "vocab_size": 1, "vocab_is_padded": False}
#: Fields that not every framework's stand-in has.
_NOT_STATED = {"max_position_embeddings": None, "num_query_groups": None, "rotary_base": 1}


def command(spec: TransformerSpec) -> Job:
    argv = ["torchrun", "--nproc-per-node", "8", "--nnodes", "8", "pretrain_gpt.py"]
    argv += [*model_argv(spec), "--tokenizer-type", "NullTokenizer", "--bf16"]
    return read_job(read_command([*argv, "--micro-batch-size", "1", "--global-batch-size", "512"]))


def jobs(spec: TransformerSpec) -> dict[str, Job]:
    words = [f"model={spec.name}", "cluster=dgx_h100"]
    return {
        "catalogue": catalogue_job(compose(parse(words))),
        "command": command(spec),
        "NeMo": read_nemo(nemo_recipe(spec), vocab_size=spec.vocab_size),
        "Megatron-Bridge": read_bridge(
            bridge_config(spec), vocab_size=spec.vocab_size, environment={}
        ),
    }


@pytest.mark.parametrize("name", ["llama3_8b", "mixtral_8x7b"])
def test_readers_of_one_model_agree_on_its_shape(name: str) -> None:
    found = jobs(catalogue.model(name))
    assert {type(job) for job in found.values()} == {Job}
    shapes = {who: dataclasses.replace(job.spec, **_ORIGIN) for who, job in found.items()}
    shapes = {who: dataclasses.replace(spec, **_NOT_STATED) for who, spec in shapes.items()}
    for who, shape in shapes.items():
        assert shape == shapes["command"], who


def test_what_is_not_said_is_megatrons_default_for_commands_and_measured_rows() -> None:
    sizes = {"num_layers": 12, "hidden_size": 512, "num_attention_heads": 8, "seq_length": 1024}
    read = job_from_values({**sizes, "vocab_size": 50_257}, explicit=()).spec
    row = {"family": "gpt", "layers": "12", "hidden": "512", "heads": "8", "seq": "1024"}
    measured = shape_of_test(row).spec
    fields = {"max_position_embeddings": None}
    assert dataclasses.replace(read, **_ORIGIN, **fields) == dataclasses.replace(
        measured, **_ORIGIN, **fields
    )


def test_every_job_becomes_the_planners_request_in_one_way() -> None:
    composed = compose(parse(["cluster=dgx_h100", "cluster.num_gpus=64"]))
    cluster = read_cluster(composed)
    for who, job in jobs(LLAMA).items():
        request = job_request(job, cluster, composed)
        assert isinstance(request, Request), who
        assert request.global_batch_size == 512
        assert request.notes[: len(job.notes)] == job.notes


def test_a_command_keeps_what_it_was_read_from() -> None:
    composed = compose(parse(["cluster=dgx_h100"]))
    text = "torchrun --nproc-per-node 8 pretrain_gpt.py " + " ".join(model_argv(LLAMA))
    job, request = read_request(
        TypedCommand(text=f"{text} --bf16", free=("all",), version="0.16"), composed
    )
    assert job.command is not None
    assert job.command.script == "pretrain_gpt.py"
    assert (job.free, job.free_option) == (("all",), "--free")
    assert request.spec == job.spec
