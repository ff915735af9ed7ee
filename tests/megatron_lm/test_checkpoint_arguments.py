"""Megatron's own ``load_args_from_checkpoint`` takes what we take, from the same files.

Set ``MEGATRON_LM_HOME`` to a Megatron-LM checkout (core_v0.16.1 or main at 0.20).
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nest_megatron.config.compose import compose
from nest_megatron.config.overrides import parse
from nest_megatron.integrations.megatron_lm.changed_command import with_checkpoint_arguments
from nest_megatron.integrations.megatron_lm.parser import read_argv
from nest_megatron.integrations.plan_job import TypedCommand
from nest_megatron.integrations.typed_command import read_request
from tests.megatron_lm.ask import checkout_version
from tests.megatron_lm.training import DENSE, HOME, ON_CPU, TRAINING, alone, run

pytestmark = [
    pytest.mark.megatron_lm,
    pytest.mark.skipif(not HOME, reason="MEGATRON_LM_HOME is not set to a Megatron-LM checkout"),
]

#: Parses its words, saves what other words parse to, and prints what Megatron makes of both.
_MEGATRON = """
import io, json, sys, os, contextlib
sys.path.insert(0, os.environ["MEGATRON_LM_HOME"])
folder, saved, asked, kind = json.loads(sys.stdin.read())
import torch, typing, typing_extensions
typing.override = typing_extensions.override  # Megatron 0.20 wants Python 3.12
from megatron.training.arguments import parse_args
from megatron.training.checkpointing import load_args_from_checkpoint
def parsed(words):
    sys.argv = ["pretrain_gpt.py", *words]
    return parse_args()
with contextlib.redirect_stdout(io.StringIO()):
    state = {"args": parsed(saved), "checkpoint_version": 3.0, "iteration": 7}
    state["args"].padded_vocab_size = 50432
    place = os.path.join(folder, "iter_0000007", "mp_rank_00" if kind == "torch" else "")
    os.makedirs(place, exist_ok=True)
    name = "model_optim_rng.pt" if kind == "torch" else "common.pt"
    torch.save(state, os.path.join(place, name))
    if kind == "torch_dist":
        with open(os.path.join(place, "metadata.json"), "w") as stream:
            json.dump({"sharded_backend": kind, "sharded_backend_version": 1,
                       "common_backend": "torch", "common_backend_version": 1}, stream)
    with open(os.path.join(folder, "latest_checkpointed_iteration.txt"), "w") as stream:
        stream.write("7")
    args = parsed(asked)
    before = dict(vars(args))
    load_args_from_checkpoint(args)
    found = {n: v for n, v in vars(args).items() if n not in before or before[n] != v}
print(json.dumps(found, default=str))
"""
_SAVED = (
    "--num-layers 12 --hidden-size 768 --ffn-hidden-size 2048 --num-attention-heads 12 "
    "--seq-length 1024 --max-position-embeddings 2048 --group-query-attention --num-query-groups 4 "
    "--swiglu --untie-embeddings-and-output-weights --disable-bias-linear --normalization RMSNorm "
    "--position-embedding-type rope --rotary-base 500000 --micro-batch-size 2 --bf16 "
    "--tensor-model-parallel-size 2 --hidden-dropout 0.0 "
)
_EXPERTS = (
    "--num-experts 8 --moe-ffn-hidden-size 512 --moe-router-topk 4 --moe-grouped-gemm "
    "--expert-model-parallel-size 4 --moe-token-dispatcher-type alltoall"
)
_JOBS = {
    "dense": (_SAVED, "--micro-batch-size 1"),
    "own words": (_SAVED, "--num-layers 6 --num-query-groups 2 --hidden-dropout 0.3"),
    "experts": (_SAVED + _EXPERTS, "--micro-batch-size 1"),
    "degrees": (_SAVED + _EXPERTS, "--use-mp-args-from-checkpoint-args"),
}


def megatron(folder: Path, saved: str, asked: str, kind: str) -> dict[str, Any]:
    given = json.dumps([str(folder), saved.split(), asked.split(), kind])
    done = subprocess.run(
        [sys.executable, "-c", _MEGATRON],
        input=given,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "RANK": "0", "WORLD_SIZE": "8"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("kind", ["torch_dist", "torch"])
@pytest.mark.parametrize("name", _JOBS)
def test_the_arguments_are_those_that_megatron_takes(tmp_path: Path, name: str, kind: str) -> None:
    saved, asked = _JOBS[name]
    asked = f"--use-checkpoint-args --load {tmp_path} {asked}"
    theirs = megatron(tmp_path, saved, asked, kind)
    command = read_argv("pretrain_gpt.py", asked.split(), checkout_version())
    ours = with_checkpoint_arguments(command).values
    changed = {name: value for name, value in ours.items() if command.values.get(name) != value}
    for switch in ("use_checkpoint_args", "use_mp_args_from_checkpoint_args"):
        changed.pop(switch, None)
    assert changed["normalization"] == "RMSNorm"
    # sizes that it derives anew, and what no flag of that release sets
    theirs = {name: value for name, value in theirs.items() if name in command.values}
    assert json.loads(json.dumps(changed)) == theirs


def test_a_job_is_planned_from_its_checkpoint_before_it_and_inside_it(tmp_path: Path) -> None:
    """Megatron trains and saves; the job that goes on says nothing of the model."""
    plain = [*ON_CPU, *TRAINING]
    first = run([], [*plain, *DENSE, "--save", str(tmp_path), "--save-interval", "3"], **alone())
    assert first.code == 0, first.out[-2000:]
    words = [*plain, "--use-checkpoint-args", "--load", str(tmp_path)]
    words += ["--micro-batch-size", "1", "--global-batch-size", "8", "--train-iters", "6"]
    cluster = ["cluster=dgx_h100", "cluster.num_gpus=8"]
    nest = ["+nest=auto", "nest.dry_run=true", *(f"nest.{word}" for word in cluster)]
    inside = run([], [*words, *nest], **alone())
    assert inside.code == 0, inside.out[-2000:]
    assert "Megatron's own validation accepts this" in inside.out
    text = f"torchrun --nproc-per-node 8 pretrain_gpt.py {shlex.join(words)}"
    request = read_request(
        TypedCommand(text=text, version=checkout_version()), compose(parse(cluster))
    )[1]
    assert (request.spec.num_layers, request.spec.hidden_size) == (8, 64)
