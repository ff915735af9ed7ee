"""Covariance matrices in pure Python: the cost model imports no numpy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul

#: Added to variances, so that plans that are alike leave a matrix that has a root.
JITTER = 1e-10

Matrix = Sequence[Sequence[float]]


def cholesky(matrix: Matrix) -> list[list[float]]:
    """Cholesky's lower triangular root; each row ends on the diagonal."""
    root: list[list[float]] = []
    for i, values in enumerate(matrix):
        row: list[float] = []
        for j in range(i):
            known = math.fsum(a * b for a, b in zip(row, root[j], strict=False))
            row.append((values[j] - known) / root[j][j])
        known = math.fsum(a * a for a in row)
        row.append(math.sqrt(max(JITTER, values[i] - known)))
        root.append(row)
    return root


def solve_lower(root: Matrix, values: Sequence[float]) -> tuple[float, ...]:
    """The vector that a lower triangular root makes some values of."""
    found: list[float] = []
    for row, value in zip(root, values, strict=True):
        found.append((value - math.fsum(map(mul, row, found))) / row[-1])
    return tuple(found)
