"""Megatron's own training under a policy that has every launch written down."""

from __future__ import annotations

from pathlib import Path

import pytest

from nest_megatron.config.policy import VARIABLE
from nest_megatron.history import store
from nest_megatron.history.records import Outcome
from tests.megatron_lm.training import DENSE, HOME, ON_CPU, TRAINING, Trained, run, torchrun

pytestmark = [
    pytest.mark.megatron_lm,
    pytest.mark.skipif(not HOME, reason="MEGATRON_LM_HOME is not set to a Megatron-LM checkout"),
]


def train(folder: Path, audit: Path, *words: str) -> Trained:
    """Two replicas of a small model."""
    policy = folder / "policy.yaml"
    policy.write_text(f"audit:\n  file: {audit}\n  required: true\n")
    nest = ["+nest=auto", "nest.cluster=dgx_h100", "nest.free=[micro_batch_size]", *words]
    variables = {VARIABLE: str(policy), store.VARIABLE: str(folder / "runs.jsonl")}
    return run(torchrun(2), [*DENSE, *TRAINING, *ON_CPU, *nest], **variables)


@pytest.mark.parametrize("watched", [2, pytest.param(0, marks=pytest.mark.slow)])
def test_a_launch_is_written_down_to_its_end(tmp_path: Path, watched: int) -> None:
    audit = tmp_path / "audit.jsonl"
    trained = train(tmp_path, audit, f"nest.watch={watched}")
    assert trained.code == 0, trained.out[-3000:]
    (record,) = store.read(audit)
    assert record.outcome is Outcome.FINISHED
    assert (record.measured is None) == (watched == 0)
    assert len(record.hosts) == 2
    assert record.launch is not None
    assert record.launch.mode == "auto"
    assert record.launch.signer is None
    assert {each.name for each in record.launch.changes} >= {"--micro-batch-size"}
    assert len(audit.read_text().splitlines()) == (3 if watched else 2)


def test_no_rank_trains_where_a_required_audit_cannot_be_written(tmp_path: Path) -> None:
    trained = train(tmp_path, tmp_path / "gone" / "audit.jsonl")
    assert trained.code != 0
    assert "audit.required" in trained.out
    assert "No such file or directory" in trained.out
    assert not trained.losses


def test_a_refused_launch_is_written_down_once(tmp_path: Path) -> None:
    audit, policy = tmp_path / "audit.jsonl", tmp_path / "policy.yaml"
    policy.write_text(f"audit:\n  file: {audit}\nlaunch:\n  pinned_only: true\n")
    nest = ["+nest=auto", "nest.cluster=dgx_h100"]
    words = [*DENSE, *TRAINING, *ON_CPU, *nest]
    trained = run(torchrun(2), words, **{VARIABLE: str(policy)})
    assert trained.code != 0
    assert not trained.losses
    runs, (refused,) = store.read_audit(audit)
    assert not runs
    assert (refused.rule, refused.num_ranks) == ("launch.pinned_only", 2)
