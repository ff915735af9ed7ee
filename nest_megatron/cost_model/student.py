"""Student's t distribution with two degrees of freedom, in closed form.

Errors of predictions have longer tails than a normal distribution: rows are misread, networks are
shared, a kernel falls back. With two degrees of freedom its quantiles are elementary.
"""

from __future__ import annotations

import math


def cumulative(t: float) -> float:
    """Chance of a value of at most ``t``.

    >>> cumulative(0.0), round(cumulative(2.919986), 4)
    (0.5, 0.95)
    """
    if math.isinf(t):
        return 1.0 if t > 0 else 0.0
    return 0.5 + 0.5 * t / math.sqrt(2.0 + t * t)


def quantile(share: float) -> float:
    """The value that a share of all values is at most.

    Args:
        share: above 0 and below 1.

    >>> round(quantile(0.95), 6), quantile(0.5)
    (2.919986, 0.0)
    """
    return (2.0 * share - 1.0) / math.sqrt(2.0 * share * (1.0 - share))
