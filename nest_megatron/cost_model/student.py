"""Student's t distribution with four degrees of freedom and with two, in closed form.

Errors of predictions have longer tails than a normal distribution: rows are misread, networks are
shared, a kernel falls back. With two and with four degrees of freedom its quantiles are elementary.
"""

from __future__ import annotations

import math

#: Degrees of freedom of predicted memory.
DEGREES_OF_FREEDOM = 4


def cumulative(t: float) -> float:
    """Chance of a value of at most ``t``.

    >>> cumulative(0.0), round(cumulative(2.131847), 4)
    (0.5, 0.95)
    """
    if math.isinf(t):
        return 1.0 if t > 0 else 0.0
    x = t / math.sqrt(t * t + DEGREES_OF_FREEDOM)
    return 0.5 + 0.25 * x * (3.0 - x * x)


def quantile(share: float) -> float:
    """The value that a share of all values is at most.

    Args:
        share: above 0 and below 1.

    >>> round(quantile(0.95), 6), quantile(0.5)
    (2.131847, 0.0)
    """
    spread = 4.0 * share * (1.0 - share)
    root = math.sqrt(spread)
    ratio = math.cos(math.acos(root) / 3.0) / root
    return math.copysign(2.0 * math.sqrt(max(0.0, ratio - 1.0)), share - 0.5)


def quantile_of_two(share: float) -> float:
    """``quantile`` with two degrees of freedom.

    >>> round(quantile_of_two(0.95), 6), quantile_of_two(0.5)
    (2.919986, 0.0)
    """
    return (2.0 * share - 1.0) / math.sqrt(2.0 * share * (1.0 - share))
