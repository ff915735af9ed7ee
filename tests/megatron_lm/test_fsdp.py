"""A plan through Megatron-FSDP trains, and with the numbers of the job that it was made for.

On gloo, with the meta device. gloo lacks NCCL's product with a factor, so gradients are scaled
before they are reduced (``--no-gradient-reduce-div-fusion``); nothing else is asked of Megatron-LM
beyond what every other job here needs.
"""

from __future__ import annotations

import re
from functools import cache

import pytest

from tests.megatron_lm.ask import checkout_version
from tests.megatron_lm.training import (
    DENSE,
    EXPERTS,
    HOME,
    ON_CPU,
    TRAINING,
    Trained,
    run,
    torchrun,
)

pytestmark = [
    pytest.mark.megatron_lm,
    pytest.mark.skipif(not HOME, reason="MEGATRON_LM_HOME is not set to a Megatron-LM checkout"),
    # param_and_grad_buffer.py:2895 scales gbuf.data and reduces bucket.data; NCCL's factor does not
    pytest.mark.skipif(
        bool(HOME) and checkout_version() == "0.15",
        reason="Megatron-FSDP of 0.15 scales another buffer than the one that it reduces",
    ),
]

#: Initial weights are drawn where they stay, so that both ways draw the same.
ON_DEVICE = [word for word in ON_CPU if word != "--use-cpu-initialization"]
ON_DEVICE += ["--no-gradient-reduce-div-fusion"]
ROTARY = ["--position-embedding-type", "rope"]
NEST = ["+nest=auto", "nest.cluster=dgx_h100"]


def norms(trained: Trained) -> list[float]:
    return [float(text) for text in re.findall(r"grad norm: (\S+)", trained.out)]


@cache
def as_it_is() -> Trained:
    """The job by itself: two replicas under ``DistributedDataParallel``."""
    own = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
    return run(torchrun(2), [*DENSE, *ROTARY, *TRAINING, *ON_DEVICE, *own])


def through_fsdp(stage: int, job: list[str], *words: str) -> Trained:
    free = ["nest.free=[use_megatron_fsdp]", f"nest.parallel.zero_stage={stage}"]
    return run(torchrun(2), [*job, *TRAINING, *ON_DEVICE, *words, *NEST, *free])


@pytest.mark.parametrize("stage", [2, 3])
def test_it_trains_with_the_same_numbers(stage: int) -> None:
    trained = through_fsdp(stage, [*DENSE, *ROTARY])
    assert trained.code == 0, trained.out[-3000:]
    assert "--init-model-with-meta-device" in trained.out
    assert trained.losses == pytest.approx(as_it_is().losses, rel=1e-6)
    assert norms(trained) == pytest.approx(norms(as_it_is()), rel=1e-3)


def test_it_trains_with_experts_and_recomputation() -> None:
    again = ["--recompute-granularity", "full", "--recompute-method", "uniform"]
    again += ["--recompute-num-layers", "1", "--expert-model-parallel-size", "2"]
    trained = through_fsdp(3, [*EXPERTS, *ROTARY], *again)
    assert trained.code == 0, trained.out[-3000:]
    assert len(trained.losses) == 3
    assert trained.losses[-1] < trained.losses[0]


def test_initialization_on_the_host_is_taken_back() -> None:
    """With it, the embedding lies on the meta device and has no way to be filled."""
    trained = through_fsdp(3, [*DENSE, *ROTARY], "--use-cpu-initialization")
    assert trained.code == 0, trained.out[-3000:]
    assert "--use-cpu-initialization" in trained.out
    assert trained.losses == pytest.approx(as_it_is().losses, rel=1e-6)
