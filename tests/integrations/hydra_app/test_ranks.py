"""Several ranks of one Hydra application."""

from __future__ import annotations

import dataclasses
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from nest_megatron.integrations.hydra import plans as ranks
from nest_megatron.integrations.hydra.plans import Plans
from nest_megatron.integrations.megatron_lm.rendezvous import NoAgreementError
from tests.cli.runs import environment
from tests.integrations.hydra_app.apps import AUTO, MAIN, make_app
from tests.integrations.hydra_app.test_plans import composed

torch = pytest.importorskip("torch")


def test_a_rank_with_another_plan_stops() -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    store = torch.distributed.TCPStore("localhost", port, is_master=True, wait_for_workers=False)
    variables = {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
    }
    mine = Plans().of(composed()).plan
    other = Plans().of(composed(model__micro_batch_size=1)).plan
    for rank in "01":
        assert ranks.require_same_plan(mine, "job", {**variables, "RANK": rank})
    with pytest.raises(NoAgreementError, match=r"micro_batch_size: .* on rank 0 .*; 1 on rank 1 "):
        ranks.require_same_plan(other, "job", {**variables, "RANK": "1"})
    later = dataclasses.replace(mine, search=dataclasses.replace(mine.search, seconds=9.0))
    assert ranks.require_same_plan(later, "job", {**variables, "RANK": "1"})
    assert ranks.require_same_plan(other, "another job", {**variables, "RANK": "1"})
    assert not ranks.require_same_plan(other, "job", {"WORLD_SIZE": "2", "RANK": "1"})
    del store


@pytest.mark.slow
def test_ranks_under_torchrun_train_with_one_plan(tmp_path: Path) -> None:
    script = make_app(tmp_path, main=MAIN)
    words = ("trainer.devices=2", "trainer.num_nodes=1", "model.num_layers=2", *AUTO)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = subprocess.run(
        [*torchrun, str(script), *words, "hydra.run.dir=here"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    trained = [line for line in done.stdout.splitlines() if line.startswith("TRAINS")]
    assert len(trained) == 2
    assert len(set(trained)) == 1
    assert done.stdout.count("nest: this job runs as") == 1


@pytest.mark.slow
def test_a_rank_with_another_configuration_stops_all(tmp_path: Path) -> None:
    """It has the same plan, and would train with another learning rate beside the others."""
    main = MAIN.replace("import hydra", "import os, sys, hydra", 1).replace(
        "    main()",
        """    if os.environ["RANK"] == "1":
        sys.argv.append("model.optim.lr=0.5")
    main()""",
    )
    script = make_app(tmp_path, main=main)
    words = ("trainer.devices=2", "trainer.num_nodes=1", "model.num_layers=2", *AUTO)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = subprocess.run(
        [*torchrun, str(script), *words, "hydra.run.dir=here"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment(),
        check=False,
    )
    assert done.returncode != 0
    assert done.stdout.count("TRAINS") <= 1  # ranks do not block, so rank 0 may be on its way
    assert "model.optim.lr" in done.stderr
    assert "0.5 on rank 1" in done.stderr
