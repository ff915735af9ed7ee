"""Run Megatron-LM's own ``pretrain_gpt.py``, unmodified, on this machine."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import nest_megatron

HOME = os.environ.get("MEGATRON_LM_HOME", "")
SHIM = Path(__file__).with_name("cpu")
PACKAGE_ROOT = Path(nest_megatron.__file__).resolve().parents[1]

#: What a machine without a GPU needs; the model, the batch and the layout are each test's own.
ON_CPU = shlex.split(
    "--transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion "
    "--no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion --no-rope-fusion "
    "--no-bias-dropout-fusion --distributed-backend gloo --use-cpu-initialization"
)
TRAINING = shlex.split(
    "--train-iters 3 --lr 1e-3 --min-lr 1e-4 --lr-decay-iters 3 --mock-data --bf16 "
    "--tokenizer-type NullTokenizer --vocab-size 127 --eval-interval 1000 --eval-iters 0 "
    "--log-interval 1 --hidden-dropout 0 --attention-dropout 0"
)
DENSE = shlex.split(
    "--num-layers 8 --hidden-size 64 --num-attention-heads 8 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 8"
)
EXPERTS = DENSE + shlex.split(
    "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall "
    "--disable-bias-linear --swiglu"
)


@dataclass(frozen=True)
class Trained:
    """How a training job ended.

    Args:
        parameters: printed by Megatron for each (tensor, pipeline) rank.
    """

    code: int
    out: str

    @property
    def losses(self) -> list[float]:
        """The loss of each step."""
        return [float(text) for text in re.findall(r"lm loss: (\S+) \|", self.out)]

    @property
    def parameters(self) -> dict[tuple[int, int], int]:
        """Parameters that Megatron built, by (tensor, pipeline) rank."""
        pattern = r"model parallel rank \((\d+),(?: 0,)? (\d+)\): (\d+)"  # 0.20 prints three ranks
        return {(int(t), int(p)): int(n) for t, p, n in re.findall(pattern, self.out)}


def environment(*, shim: bool = True, **more: str) -> dict[str, str]:
    """Variables of a training process."""
    paths = [HOME, *([str(SHIM)] if shim else []), str(PACKAGE_ROOT)]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    plain = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {
        **plain,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONWARNINGS": "ignore",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "120",
        **more,
    }


def run(launcher: list[str], words: list[str], *, timeout: float = 300, **more: str) -> Trained:
    """Launch ``pretrain_gpt.py`` and wait for its end."""
    done = subprocess.run(
        [sys.executable, *launcher, "pretrain_gpt.py", *words],
        cwd=HOME,
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=timeout,
    )
    return Trained(done.returncode, done.stdout)


def torchrun(processes: int) -> list[str]:
    """``torchrun`` on this host, on a port that is free."""
    options = ["--standalone", "--nproc-per-node", str(processes)]
    return ["-m", "torch.distributed.run", *options]


def alone() -> dict[str, str]:
    """Where a single process is, which torchrun tells its own."""
    return {"MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}


def free_port() -> str:
    """A port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return str(probe.getsockname()[1])
