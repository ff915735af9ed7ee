"""Whatever stands in a row, it is predicted or refused with a reason, and soon."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from nest_megatron.validation.assess import Assessor
from nest_megatron.validation.models import ModelBook
from nest_megatron.validation.outcome import Basis
from nest_megatron.validation.rows import RowFile, read_rows

DATA = Path(__file__).parents[1] / "published" / "data"
FILES = [
    "throughput.csv",
    "memory_peak.csv",
    "memory_megatron_golden.csv",
    "comm_collectives.csv",
]
MISPRINTS = (
    *("", "0", "1", "2", "3", "7", "16", "1024", "-1", "1.5", "100000000", "1e400", "nan", "inf"),
    *("abc", "12,5", "8x7b", "None", "true", '"', "full", "selective (foo)", "fp4", "fp8", "int8"),
    *("GPT-7B", "Llama 3 8B", "H100", "MI300X", "TPUv5", "[0]*3", "Et|tL", "NVLink + 3x"),
)


@pytest.mark.parametrize("name", FILES)
def test_misprints_are_refused_or_predicted(name: str) -> None:
    file, rng = read_rows(DATA / name), random.Random(7)
    rows = []
    for row in rng.choices(file.rows, k=250):
        changed = dict(row)
        for column in rng.sample(sorted(changed), rng.randint(1, 6)):
            changed[column] = rng.choice(MISPRINTS)
        rows.append(changed)
    wrong = RowFile(path=file.path, kind=file.kind, rows=tuple(rows))
    outcomes = list(Assessor(ModelBook.load()).outcomes(wrong, Basis.AS_PLANNED))
    assert len(outcomes) == len(rows)
    for outcome in outcomes:
        assert outcome.refused or outcome.predicted_s or outcome.needed_bytes
        if outcome.refused:
            assert not any(character.isdigit() for character in outcome.refused)
            assert outcome.time is None
            assert outcome.memory is None


@pytest.mark.parametrize("column", ["seq", "layers", "hidden", "heads", "ffn", "vocab", "kv_heads"])
@pytest.mark.parametrize("text", ["abc", "-4096", "nan", "8192 or 4096", "1.5", "4,5", "4,0960"])
def test_a_size_that_cannot_be_read_is_not_taken_as_absent(column: str, text: str) -> None:
    file = read_rows(DATA / "throughput.csv")
    row = {**file.rows[0], "model": "Llama 3.1 8B", column: text}
    wrong = RowFile(path=file.path, kind=file.kind, rows=(row,))
    (outcome,) = Assessor(ModelBook.load()).outcomes(wrong, Basis.AS_PLANNED)
    assert outcome.refused == "a number cannot be read"
    assert outcome.detail == f"{column} = {text!r}"


def test_a_figure_that_no_run_has_had_is_named() -> None:
    file = read_rows(DATA / "throughput.csv")
    wrong = RowFile(path=file.path, kind=file.kind, rows=({**file.rows[0], "layers": "100000000"},))
    (outcome,) = Assessor(ModelBook.load()).outcomes(wrong, Basis.AS_PLANNED)
    assert outcome.refused == "a number is too large"
    assert outcome.detail == "layers = '100000000'"
