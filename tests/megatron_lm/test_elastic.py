"""Megatron's own training goes on, from its checkpoint, with another number of ranks.

Set ``MEGATRON_LM_HOME`` to a Megatron-LM checkout (core_v0.16.1 or main at 0.20).
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.cli.runs import run as command
from tests.megatron_lm.training import (
    DENSE,
    HOME,
    ON_CPU,
    TRAINING,
    Trained,
    alone,
    run,
    torchrun,
)

pytestmark = [
    pytest.mark.megatron_lm,
    pytest.mark.skipif(not HOME, reason="MEGATRON_LM_HOME is not set to a Megatron-LM checkout"),
]

#: Hosts of one GPU, so that the number of ranks is that of nodes.
NODES = ("cluster=dgx_h100", "cluster.gpus_per_host=1")
SIX_STEPS = ["--train-iters", "6", "--lr-decay-iters", "6", "--save-interval", "3"]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pinned plans for one node and for two, with every degree free."""
    path = tmp_path_factory.mktemp("table") / "table.yaml"
    job = " ".join(["pretrain_gpt.py", *DENSE, *TRAINING, *ON_CPU])
    words = ("--from", job, "--free", "all", *NODES, "parallel.zero_stage=0")
    done = command("plan", *words, "--for-nodes", "1..2", f"out={path}")
    assert done.code == 0, done.err
    assert command("pin", str(path)).code == 0
    return path


def train(ranks: int, *words: str) -> Trained:
    arguments = [*DENSE, *TRAINING, *ON_CPU, *SIX_STEPS, *words]
    return run([], arguments, **alone()) if ranks == 1 else run(torchrun(ranks), arguments)


def test_a_restart_with_another_number_of_ranks_takes_its_plan_and_goes_on(
    tmp_path: Path, table: Path
) -> None:
    nest = ["+nest=pinned", f"nest.plan={table}", "nest.on_mismatch=nearest"]
    saved = tmp_path / "saved"
    first = train(2, *nest, "--exit-interval", "3", "--save", str(saved))
    assert first.code == 0, first.out[-3000:]
    assert first.parameters.keys() == {(0, 0), (0, 1)}  # two pipeline ranks
    second = train(1, *nest, "--load", str(saved))
    assert second.code == 0, second.out[-3000:]
    assert second.parameters.keys() == {(0, 0)}
    whole = train(1)
    assert [*first.losses, *second.losses] == pytest.approx(whole.losses, abs=0.02)
    assert len(whole.losses) == 6


@pytest.mark.skipif(
    find_spec("transformer_engine") is not None or find_spec("apex") is not None,
    reason="Transformer Engine and Apex have an Adam whose state can be loaded",
)
def test_megatron_loads_no_distributed_optimizer_into_torch_s_own_adam(tmp_path: Path) -> None:
    """docs/launching.md: Megatron asks a state for its steps that has made none."""
    words = ("--use-distributed-optimizer", "--exit-interval", "3")
    first = train(1, *words, "--save", str(tmp_path))
    assert first.code == 0, first.out[-3000:]
    second = train(1, *words, "--load", str(tmp_path))
    assert second.code == 1
    assert "assert len(steps) == 1" in second.out
