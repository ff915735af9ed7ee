"""Student's t distribution with a whole number of degrees of freedom, in closed form."""

from __future__ import annotations

import functools
import math
from statistics import NormalDist

#: Of a step's error; of 1, 1.25, 1.5, 1.75, 2 and 3 the one with which left-out runs are most
#: probable, scales fitted anew (``validation/fit_uncertainty``).
DEGREES_OF_FREEDOM = 2


def cumulative(t: float, degrees: int = DEGREES_OF_FREEDOM) -> float:
    """Chance of a value of at most ``t``.

    Source: Abramowitz and Stegun, 26.7.3 and 26.7.4.

    >>> cumulative(0.0), round(cumulative(2.919986), 4), round(cumulative(2.015048, 5), 4)
    (0.5, 0.95, 0.95)
    """
    if math.isinf(t):
        return 1.0 if t > 0 else 0.0
    if degrees == 2:
        return 0.5 + 0.5 * t / math.sqrt(2.0 + t * t)
    odd = degrees % 2
    sine, cosine = t / math.sqrt(degrees + t * t), math.sqrt(degrees / (degrees + t * t))
    term, total = (cosine if odd else 1.0), 0.0
    for number in range(1 + odd, degrees, 2):
        total += term
        term *= cosine * cosine * number / (number + 1)
    within = sine * total
    if odd:
        within = 2.0 / math.pi * (math.atan2(sine, cosine) + within)
    return 0.5 + 0.5 * within


@functools.lru_cache(maxsize=256)
def quantile(share: float, degrees: int = DEGREES_OF_FREEDOM) -> float:
    """The value that a share of all values is at most, above 0 and below 1.

    >>> round(quantile(0.95), 6), quantile(0.5), round(quantile(0.95, 5), 6)
    (2.919986, 0.0, 2.015048)
    """
    bound = (2.0 * share - 1.0) / math.sqrt(2.0 * share * (1.0 - share))
    if degrees == 2:
        return bound
    # More degrees, shorter tails: the value lies between 0 and that of two degrees.
    near, far = 0.0, bound
    for _ in range(60):
        middle = 0.5 * (near + far)
        if abs(cumulative(middle, degrees) - 0.5) < abs(share - 0.5):
            near = middle
        else:
            far = middle
    return 0.5 * (near + far)


def deviation(degrees: int = DEGREES_OF_FREEDOM) -> float:
    """What a standard deviation is in scales: as many runs lie within one of either."""
    return quantile(NormalDist().cdf(1.0), degrees)
