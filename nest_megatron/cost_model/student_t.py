"""Student's t distribution with two degrees of freedom, in closed form."""

from __future__ import annotations

import math
from statistics import NormalDist

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
