"""The simulator's order of work is what megatron-core's own schedule functions execute."""

from __future__ import annotations

import pytest

from nest_megatron.cost_model.schedule import pass_at
from tests.contract.megatron_schedule import recorded_order

SHAPES = [
    (1, 1, 3),
    (2, 1, 1),
    (2, 1, 5),
    (4, 1, 2),
    (4, 1, 4),
    (4, 1, 9),
    (8, 1, 16),
    (2, 2, 2),
    (2, 2, 8),
    (2, 5, 6),
    (4, 2, 4),
    (4, 2, 8),
    (4, 3, 16),
    (8, 2, 8),
    (8, 3, 16),
]


@pytest.mark.parametrize(("p", "v", "m"), SHAPES)
def test_order_is_megatrons(p: int, v: int, m: int) -> None:
    for rank in range(p):
        ours = [
            ("F" if op.is_forward else "B", op.chunk // p, op.microbatch)
            for op in (pass_at(p, v, m, rank, place) for place in range(2 * m * v))
        ]
        assert ours == [tuple(step) for step in recorded_order(p, v, m, rank)]
