"""Megatron's own training, and the record that it leaves: a slow rank, one without memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from nest_megatron.history import store
from nest_megatron.history.records import Outcome, RunRecord
from tests.megatron_lm.training import DENSE, HOME, ON_CPU, TRAINING, Trained, run, torchrun

pytestmark = [
    pytest.mark.megatron_lm,
    pytest.mark.skipif(not HOME, reason="MEGATRON_LM_HOME is not set to a Megatron-LM checkout"),
]


def train(folder: Path, *words: str, steps: int = 6, fault: str = "") -> tuple[Trained, RunRecord]:
    """Two replicas of a small model, and the only record of its history."""
    training = [*TRAINING, "--train-iters", str(steps + 2)]
    nest = ["+nest=auto", "nest.cluster=dgx_h100", f"nest.watch={steps}", *words]
    runs = folder / "runs.jsonl"
    variables = {store.VARIABLE: str(runs), "NEST_TEST_FAULT": fault}
    trained = run(torchrun(2), [*DENSE, *training, *ON_CPU, *nest], **variables)
    (record,) = store.read(runs)
    return trained, record


def test_a_slow_rank_is_named_in_figures_of_its_own(tmp_path: Path) -> None:
    page = tmp_path / "nest.prom"
    trained, record = train(tmp_path, f"nest.watch.prometheus={page}", fault="slow:1")
    assert trained.code == 0, trained.out[-3000:]
    assert record.outcome is Outcome.FINISHED
    assert record.measured is not None
    assert len(record.measured.step_times_s) == 6
    first, second = record.measured.busy_s
    assert first is not None
    assert second is not None
    assert second - first > 2.0  # four micro batches, each a second longer
    (warning,) = (each for each in record.warnings if "than those of replicas" in each)
    assert warning.startswith("rank 1 (")
    assert f"nest: warning: {warning}" in trained.out
    assert f'plan="{record.plan}"' in page.read_text()
    assert 'nest_rank_busy_seconds{run="' in page.read_text()


def test_a_rank_without_memory_is_what_ended_the_job(tmp_path: Path) -> None:
    trained, record = train(tmp_path, fault="out_of_memory:1")
    assert trained.code == 1
    assert record.outcome is Outcome.OUT_OF_MEMORY
    assert record.error is not None
    assert record.error.startswith("rank 1 (")
    assert record.error.endswith(
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    )
    assert record.measured is None
