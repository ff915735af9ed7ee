"""Times from rates, by the operations that each source counts."""

from __future__ import annotations

import pytest

from nest_megatron.validation.rows import (
    RefusedRowError,
    StepWork,
    counts_whole_attention,
    measured_time,
    require_consistent,
    require_fixed_sequences,
    require_measurement,
)

#: Half of the operations are the causal half of attention, a tenth is the head.
WORK = StepWork(
    sequences=1,
    seq_length=1,
    model_flops=1e15,
    attention_flops=5e14,
    head_flops=1e14,
    num_gpus=1,
    peak_flops_per_s=1e15,
)


@pytest.mark.parametrize(
    ("framework", "date", "whole"),
    [
        ("NeMo24.03.01.framework", "2025-05-09", True),
        ("NeMo25.04.rc2", "2025-05-09", True),
        ("NeMo 25.09", "2025-10-01", False),
        ("NeMo Framework", "2024-03-01", True),
        ("NeMo AutoModel (FSDP2, TE, DeepEP)", "2025-08-01", False),
        ("Megatron-Bridge/MCore 26.08 NeMo Container", "2026-08-11", False),
        ("Megatron-Core r0.8.0", "2024-07-15", True),
        ("Megatron-LM dev", "2026-08-11", False),
        ("Composer FSDP (DEFAULT)", "2024-04-22", True),
        ("nanotron v0.5", "2025-02-13", True),
        ("torchtitan", "", False),
    ],
)
def test_the_square_of_attention_is_counted_as_the_framework_counts_it(
    framework: str, date: str, whole: bool
) -> None:
    row = {"framework": framework, "date": date}
    assert counts_whole_attention(row) is whole
    rate = {**row, "tflops_per_gpu": "1000"}
    assert measured_time(rate, WORK) == pytest.approx(1.5 if whole else 1.0)
    share = {**row, "mfu_pct": "100"}
    assert measured_time(share, WORK) == pytest.approx(1.5 if whole else 1.0)


def test_recomputation_leaves_out_the_head() -> None:
    row = {"framework": "torchtitan", "tflops_per_gpu": "1000", "tflops_kind": "hardware"}
    assert measured_time(row, WORK) == pytest.approx(1.0 + 0.9 / 3)


def test_a_printed_time_stands() -> None:
    row = {"framework": "NeMo 24.07", "iter_time_s": "3", "tflops_per_gpu": "1000"}
    assert measured_time(row, WORK) == 3.0


def test_a_time_that_no_device_reaches_is_refused() -> None:
    require_consistent({"iter_time_s": "1.05"}, WORK)
    with pytest.raises(RefusedRowError, match="faster than the device's peak"):
        require_consistent({"iter_time_s": "0.95"}, WORK)


def test_updates_of_reinforcement_learning_need_a_length() -> None:
    require_fixed_sequences({"task": "rl-update", "seq": "8192"})
    require_fixed_sequences({"task": "pretrain"})
    with pytest.raises(RefusedRowError, match="sequence length not stated"):
        require_fixed_sequences({"task": "rl-update", "seq": ""})


def test_a_time_that_its_authors_disown_is_refused() -> None:
    require_measurement({"ambiguity": "tuned performance run"})
    with pytest.raises(RefusedRowError, match="sanity check"):
        require_measurement({"ambiguity": "support run: timing is a sanity check"})
    with pytest.raises(RefusedRowError, match="under a profiler"):
        require_measurement({"ambiguity": "deterministic, nsys attached, v4"})
    require_measurement({"ambiguity": "deterministic, no nsys, repeat v4"})
    with pytest.raises(RefusedRowError, match="less power"):
        require_measurement({"ambiguity": "power-limited B200; model not named in this table"})
