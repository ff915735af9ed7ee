"""Number formats as rows spell them."""

from __future__ import annotations

import pytest

from nest_megatron.cluster.records import Precision
from nest_megatron.validation.job import job_of
from nest_megatron.validation.models import ModelBook
from nest_megatron.validation.refusal import RefusedRowError
from tests.validation.test_pipeline_runs import ROW

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


def test_a_format_that_is_not_modelled_is_named() -> None:
    with pytest.raises(RefusedRowError, match="number format is not modelled: int8"):
        job_of({**ROW, "precision": "int8"}, BOOK)
