"""``plan --from`` and the checkpoint that the command loads: a plan keeps what it needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.runs import Run, run
from tests.integrations.test_checkpoint import torch_dist

JOB = (
    "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 12 --hidden-size 512"
    " --num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024 --vocab-size 50304"
    " --train-iters 10 --lr 1e-4 --mock-data --micro-batch-size 4 --global-batch-size 64 --bf16"
)


def plan(flags: str, free: str = "all", *words: str) -> Run:
    size = ("cluster=dgx_h100", "cluster.num_gpus=8", "search.num_alternatives=0")
    return run("plan", "--from", f"{JOB} {flags}", "--free", free, *words, *size)


@pytest.mark.parametrize(
    "flags",
    [
        "--load {} --ckpt-format torch_dist",
        "--load {}",
        "--load {} --ckpt-step 7",
        "--pretrained-checkpoint {} --finetune",
    ],
)
@pytest.mark.parametrize("is_here", [True, False])
def test_a_plan_can_load_what_the_command_loads(tmp_path: Path, flags: str, is_here: bool) -> None:
    folder = tmp_path / "ckpt"
    if is_here:
        torch_dist(folder, "dp", numel=1)
    found = plan(flags.format(folder), "all", "--json")
    assert found.code == 0, found.err
    document = found.json()
    assert document["layout"]["sharding"] == "ddp"
    assert not document.get("offers")
    (launch,) = document["launch"].values()
    assert "fsdp_dtensor" not in launch["argv"]
    told = "as was found there" if is_here else "there is no such folder on this host"
    assert [note for note in document["notes"] if "torch_dist" in note and told in note]


def test_a_folder_without_a_checkpoint_fixes_nothing(tmp_path: Path) -> None:
    document = plan(f"--load {tmp_path}", "all", "--json").json()
    alone = plan("", "all", "--json").json()
    assert document["search"]["space"] == alone["search"]["space"]
    assert document["layout"] == alone["layout"]


def test_a_kept_sharding_that_cannot_load_the_checkpoint_is_refused(tmp_path: Path) -> None:
    torch_dist(tmp_path / "ckpt", "dp")
    flags = f"--use-megatron-fsdp --ckpt-format fsdp_dtensor --load {tmp_path / 'ckpt'}"
    found = plan(flags, "recompute")
    assert found.code == 2
    assert "--use-megatron-fsdp" in found.err
