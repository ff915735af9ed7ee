"""Training jobs as Megatron's parser leaves them, without Megatron."""

from __future__ import annotations

import math
from argparse import Namespace
from typing import Any

import pytest

from nest_megatron.config.cluster_detection import JobCluster, find_cluster
from nest_megatron.config.job import Job
from nest_megatron.config.overrides import Setting
from nest_megatron.integrations.megatron_lm import planning as arguments
from nest_megatron.integrations.megatron_lm.parser import read_command
from nest_megatron.integrations.megatron_lm.planning import (
    LaunchPlan,
    decide,
    read_running_job,
)
from nest_megatron.integrations.megatron_lm.write import model_argv
from nest_megatron.model.spec import TransformerSpec
from tests.contract.hand_models import null_tokenizer

TRAINING = ["--bf16", "--micro-batch-size", "1", "--lr", "1e-4", "--train-iters", "10"]


def job_argv(spec: TransformerSpec, *words: str) -> list[str]:
    """A user's flags for a model, and more words; a later flag wins."""
    return [*model_argv(spec), *null_tokenizer(spec), *TRAINING, *words]


def namespace(argv: list[str], version: str = "0.16", world_size: int = 64) -> Namespace:
    """Megatron's Namespace after its parser, before its validation."""
    command = read_command(["pretrain_gpt.py", *argv], version)
    assert not command.unknown, command.unknown
    args = command.namespace()
    args.rank, args.world_size = 0, world_size
    return args


def pad_like_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer builder that only does what is asked of it: the padded size.

    Source: ``megatron.training.tokenizer.tokenizer._vocab_size_with_padding``.
    """

    def build(args: Any) -> None:
        multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
        rows = args.vocab_size + (args.tokenizer_type == "NullTokenizer")
        args.padded_vocab_size = math.ceil(rows / multiple) * multiple

    monkeypatch.setattr(arguments, "_build_tokenizer", lambda: build)


def running(args: Namespace, argv: list[str], version: str = "0.16") -> Job:
    return read_running_job(args, {}, ("pretrain_gpt.py", argv), version)


def place(cluster: str = "dgx_h100", world_size: int = 64) -> JobCluster:
    named = [Setting(key="cluster", value=cluster)]
    return find_cluster(named, world_size, {}, dry_run=False)


def decided(
    argv: list[str],
    *free: str,
    version: str = "0.16",
    world_size: int = 64,
    cluster: str = "dgx_h100",
) -> tuple[Namespace, Job, LaunchPlan]:
    """A job from its flags to the decision."""
    args = namespace(argv, version, world_size)
    job = running(args, argv, version)
    where = place(cluster, world_size)
    return args, job, decide(job, where, free=free, alternative=0)
