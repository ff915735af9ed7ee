"""What a record of a run says, and what several lines of one run say together."""

from __future__ import annotations

import dataclasses

import pytest

from nest_megatron.api import plan
from nest_megatron.history.records import Measured, Outcome, cluster_key, job_key
from nest_megatron.layout import plan_file
from nest_megatron.plain import from_plain, to_plain
from tests.history.runs import MEASURED, run_record


def test_the_first_steps_do_not_count() -> None:
    assert MEASURED.counted_s == (2.0, 2.2, 2.1, 2.3)
    assert MEASURED.step_s == pytest.approx(2.15)
    assert MEASURED.spread == pytest.approx(0.15 / 2.15)
    assert run_record().error_percent == pytest.approx(7.5)


def test_one_step_has_no_spread() -> None:
    one = Measured(step_times_s=(2.0,), warm_up=0, busy_s=(None,), peak_memory_bytes=(None,))
    assert (one.step_s, one.spread) == (2.0, 0.0)


def test_a_record_survives_being_written() -> None:
    record = run_record()
    assert from_plain(type(record), to_plain(record)) == record


@pytest.mark.parametrize("failure", [Outcome.OUT_OF_MEMORY, Outcome.FAILED, Outcome.KILLED])
def test_the_first_failure_counts_and_steps_are_kept(failure: Outcome) -> None:
    started = run_record(outcome=Outcome.STARTED, measured=None, end=None)
    failed = run_record(outcome=failure, measured=None, error="rank 3: it broke")
    others = run_record(outcome=Outcome.FAILED, measured=None, error="rank 0: connection closed")
    together = started.followed_by(run_record()).followed_by(failed).followed_by(others)
    assert together == dataclasses.replace(failed, measured=MEASURED)


def test_two_layouts_of_a_job_have_the_same_key() -> None:
    job = {"model": "llama3_8b", "cluster": "dgx_h100", "num_gpus": 8, "global_batch_size": 128}
    one, other = plan(**job).record, plan(**job, tensor_model_parallel_size=8).record
    assert plan_file.checksum(one) != plan_file.checksum(other)
    assert (job_key(one), cluster_key(one)) == (job_key(other), cluster_key(other))
    renamed = dataclasses.replace(one, model=dataclasses.replace(one.model, source="elsewhere"))
    assert job_key(renamed) == job_key(one)
