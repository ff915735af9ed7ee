"""Covariance matrices, and Student's t distribution with two degrees of freedom, in pure Python.

The cost model imports no numpy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import mul
from statistics import NormalDist

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


#: Of a step's error; of 1, 1.25, 1.5, 1.75, 2 and 3 the one with which left-out runs are most
#: probable, scales fitted again (``tools/calibration/uncertainty.py``).
DEGREES_OF_FREEDOM = 2


def cumulative(t: float) -> float:
    """Chance of a value of at most ``t``.

    Source: Abramowitz and Stegun, 26.7.4.

    >>> cumulative(0.0), round(cumulative(2.919986), 4)
    (0.5, 0.95)
    """
    if math.isinf(t):
        return 1.0 if t > 0 else 0.0
    return 0.5 + 0.5 * t / math.sqrt(2.0 + t * t)


def quantile(share: float) -> float:
    """The value that a share of all values is at most.

    >>> round(quantile(0.95), 6), quantile(0.5), quantile(1.0)
    (2.919986, 0.0, inf)
    """
    if share in (0.0, 1.0):
        return math.copysign(math.inf, share - 0.5)
    return (2.0 * share - 1.0) / math.sqrt(2.0 * share * (1.0 - share))


def deviation() -> float:
    """The value within which as many lie as within one standard deviation of a normal one."""
    return quantile(NormalDist().cdf(1.0))
