"""Covariance matrices in pure Python: the cost model imports no numpy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import mul

#: Added to variances, so that plans that are alike leave a matrix that has a root.
JITTER = 1e-10

Matrix = Sequence[Sequence[float]]


def dot(one: Iterable[float], other: Iterable[float]) -> float:
    """The sum of products, rounded once; of two lengths the shorter one counts."""
    return math.fsum(map(mul, one, other))


def cholesky(matrix: Matrix) -> list[list[float]]:
    """Cholesky's lower triangular root; each row ends on the diagonal."""
    root: list[list[float]] = []
    for i, values in enumerate(matrix):
        row: list[float] = []
        for j in range(i):
            row.append((values[j] - dot(row, root[j])) / root[j][j])
        row.append(math.sqrt(max(JITTER, values[i] - dot(row, row))))
        root.append(row)
    return root


def solve_lower(root: Matrix, values: Sequence[float]) -> tuple[float, ...]:
    """The vector that a lower triangular root makes some values of."""
    found: list[float] = []
    for row, value in zip(root, values, strict=True):
        found.append((value - dot(row, found)) / row[-1])
    return tuple(found)
