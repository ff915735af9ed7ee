"""Least squares for a handful of numbers between bounds, in plain Python.

Levenberg and Marquardt's steps, forward differences, and bounds by clamping: enough for the dozen
figures of a network level, so that reading a benchmark needs no SciPy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Misses = Callable[[Sequence[float]], list[float]]

_ROUNDS = 200
_STEP = 1e-5
#: A round that gains less than this share of the sum of squares is the last one.
_ENOUGH = 1e-9
_MOST_DAMPING = 1e12


def minimize(
    misses: Misses, start: Sequence[float], low: Sequence[float], high: Sequence[float]
) -> list[float]:
    """The values between the bounds at which the sum of squares of the misses is least.

    Args:
        misses: for values of the parameters, as many misses each time.
        start: where to begin; a local minimum near it is found.

    >>> [round(x, 6) for x in minimize(lambda v: [v[0] - 3, v[1] + 1], [0, 0], [-2, 0], [2.0, 5])]
    [2.0, 0.0]
    """
    values = _clamped(start, low, high)
    found = misses(values)
    damping = 1e-3
    for _ in range(_ROUNDS):
        rows = jacobian(misses, values, found, high)
        before = _squares(found)
        while damping < _MOST_DAMPING:
            step = _step(rows, found, values, low, high, damping)
            tried = _clamped([v + s for v, s in zip(values, step, strict=True)], low, high)
            new = misses(tried)
            if _squares(new) < before:
                values, found, damping = tried, new, max(damping / 5, 1e-9)
                break
            damping *= 4
        if before - _squares(found) <= _ENOUGH * before:
            break
    return values


def jacobian(
    misses: Misses, values: Sequence[float], found: Sequence[float], high: Sequence[float]
) -> list[list[float]]:
    """Change of each miss with each parameter: one row a parameter.

    Args:
        found: the misses at these values.
        high: upper bounds; there the difference is taken downwards.
    """
    rows: list[list[float]] = []
    for at, value in enumerate(values):
        step = _STEP if value + _STEP <= high[at] else -_STEP
        moved = misses([*values[:at], value + step, *values[at + 1 :]])
        rows.append([(new - old) / step for new, old in zip(moved, found, strict=True)])
    return rows


def _step(
    rows: Sequence[Sequence[float]],
    found: Sequence[float],
    values: Sequence[float],
    low: Sequence[float],
    high: Sequence[float],
    damping: float,
) -> list[float]:
    """One damped step; parameters that push against a bound stay."""
    slopes = [_dot(row, found) for row in rows]
    free = [
        at
        for at, slope in enumerate(slopes)
        if not (values[at] <= low[at] and slope > 0) and not (values[at] >= high[at] and slope < 0)
    ]
    matrix = [[_dot(rows[i], rows[j]) for j in free] for i in free]
    for at in range(len(free)):
        matrix[at][at] += damping * (matrix[at][at] + 1e-12)
    solved = _solve(matrix, [-slopes[i] for i in free])
    step = [0.0] * len(rows)
    for at, change in zip(free, solved, strict=True):
        step[at] = change
    return step


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gauss's elimination with pivoting; the matrix is positive definite by its damping."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for at in range(size):
        pivot = max(range(at, size), key=lambda i: abs(rows[i][at]))
        rows[at], rows[pivot] = rows[pivot], rows[at]
        for below in rows[at + 1 :]:
            factor = below[at] / rows[at][at]
            for column in range(at, size + 1):
                below[column] -= factor * rows[at][column]
    solved = [0.0] * size
    for at in reversed(range(size)):
        known = sum(rows[at][j] * solved[j] for j in range(at + 1, size))
        solved[at] = (rows[at][size] - known) / rows[at][at]
    return solved


def _clamped(values: Sequence[float], low: Sequence[float], high: Sequence[float]) -> list[float]:
    return [min(max(v, a), b) for v, a, b in zip(values, low, high, strict=True)]


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


def _squares(values: Sequence[float]) -> float:
    return _dot(values, values)
