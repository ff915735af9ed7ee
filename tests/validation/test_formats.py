"""Number formats as rows spell them."""

from __future__ import annotations

import pytest

from nest_megatron.cluster.records import Precision
from nest_megatron.validation.job import job_of
from nest_megatron.validation.models import ModelBook
from nest_megatron.validation.rows import RefusedRowError
from tests.validation.test_pipeline_runs import ROW
from tools.calibration.catalogue import updated

BOOK = ModelBook.load()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", Precision.BF16),
        ("bf16 (fp32 grad accum)", Precision.BF16),
        ("amp_fp8", Precision.FP8),
        ("MXFP8 (param gather)", Precision.FP8),
        ("TF32", Precision.FP32),
        ("fp32", Precision.FP32),
    ],
)
def test_formats_are_read(text: str, expected: Precision) -> None:
    assert job_of({**ROW, "precision": text}, BOOK).settings.precision is expected


def test_nvfp4_is_read() -> None:
    row = {**ROW, "gpu": "GB200", "gpus_per_node": "4", "precision": "NVFP4"}
    assert job_of(row, BOOK).settings.precision is Precision.NVFP4


def test_nvfp4_needs_a_gpu_that_has_it() -> None:
    with pytest.raises(RefusedRowError, match="lacks the number format: nvfp4"):
        job_of({**ROW, "precision": "NVFP4"}, BOOK)


def test_a_format_that_is_not_modelled_is_named() -> None:
    with pytest.raises(RefusedRowError, match="number format is not modelled: int8"):
        job_of({**ROW, "precision": "int8"}, BOOK)
    with pytest.raises(RefusedRowError, match="number format is not modelled: MXFP4"):
        job_of({**ROW, "precision": "MXFP4"}, BOOK)


def test_a_fit_keeps_the_rate_of_nvfp4_to_fp8() -> None:
    text = "gemm_efficiency: {bf16: 0.6, fp8: 0.5, nvfp4: 0.4}\n"
    found = updated(text, "b200", {"b200.gemm_efficiency.fp8": 0.6})
    assert "{bf16: 0.6, fp8: 0.6, nvfp4: 0.48}" in found
