"""Which rows belong to which regime."""

from __future__ import annotations

import pytest

from nest_megatron.validation.outcome import REGIMES, RowOutcome

DENSE = {"model": "Llama 3.1 8B", "framework": "NeMo 24.09", "precision": "BF16", "n_gpus": "8"}


def regimes(is_moe: bool | None = False, zero: int | None = 1, **cells: str) -> set[str]:
    row = {**DENSE, **cells}
    measured = float(row.get("iter_time_s") or 9.0)
    each = RowOutcome(row=row, is_moe=is_moe, zero=zero, measured_s=measured)
    return {regime.name for regime in REGIMES if regime.holds(each)} - {"dense"}


def test_every_regime_is_defined_once_with_a_reason() -> None:
    assert len({each.name for each in REGIMES}) == len(REGIMES)
    assert all(each.definition and each.reason for each in REGIMES)


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ({}, set()),
        ({"precision": "MXFP8"}, {"fp8"}),
        ({"precision": "NVFP4"}, set()),
        ({"model": "Llama 2 70B LoRA", "task": "sft"}, {"lora"}),
        ({"task": "finetune"}, {"sft"}),
        ({"task": "pretrain (truncated model)"}, set()),
        ({"seq": "32768"}, {"long_context"}),
        ({"seq": "16,384"}, set()),
        ({"iter_time_s": "0.99"}, {"small_step"}),
        ({"n_gpus": "1024"}, {"large_scale"}),
        ({"n_gpus": "many"}, set()),
    ],
)
def test_rows_belong_by_what_they_say(cells: dict[str, str], expected: set[str]) -> None:
    assert regimes(**cells) == expected


def test_models_and_sharding_are_taken_as_read() -> None:
    assert regimes(is_moe=True) == {"moe"}
    assert regimes(zero=2) == {"fsdp"}
    assert regimes(zero=1, fsdp="8") == set()


def test_a_refused_row_belongs_by_its_columns() -> None:
    assert regimes(None, None, ep="8", framework="NeMo AutoModel FSDP2") == {"moe", "fsdp"}
    assert regimes(None, None, ep="1", fsdp="0") == set()
