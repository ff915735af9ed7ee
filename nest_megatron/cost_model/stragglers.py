"""What a step waits for the slowest of its replicas.

Ranks that do the same work do not end at the same time: clocks follow power and temperature, hosts
run other processes, switches are shared. What a rank is late grows as a random walk does: after
``t`` seconds its standard deviation is ``delay_s * sqrt(t)``, and that of a replica of ``p`` stages
``delay_s * sqrt(p * t)``. Once a step, where gradients are reduced, every replica waits for the
slowest. What the ranks of one host wait for each other is in the efficiencies that are fitted to
measured layers, so replicas count by the hosts that they lie on. ``delay_s`` is fitted to published
weak scalings (``tools/calibration/stragglers.py``, ``hydra_configs/calibration/stragglers.yaml``).
"""

from __future__ import annotations

import functools
import math
from statistics import NormalDist

from nest_megatron.units import Seconds

_BLOM = 0.375


def straggler_wait(delay_s: float, work_s: Seconds, num_stages: int, num_hosts: int) -> Seconds:
    """What a step of ``work_s`` waits for the slowest replica, beyond a mean one.

    ``num_hosts`` are those over which the ranks lie that reduce a gradient.

    >>> straggler_wait(0.02, 10.0, 1, 1)
    0.0
    >>> round(straggler_wait(0.02, 10.0, 1, 8), 3), round(straggler_wait(0.02, 10.0, 4, 512), 3)
    (0.091, 0.383)
    """
    return delay_s * math.sqrt(num_stages * work_s) * slowest(num_hosts)


@functools.lru_cache(maxsize=1 << 12)
def slowest(num_hosts: int) -> float:
    """Expected largest of so many standard normal draws.

    Source: Blom, Statistical Estimates and Transformed Beta-Variables (1958).

    >>> slowest(1), round(slowest(8), 2), round(slowest(1000), 2)
    (0.0, 1.43, 3.23)
    """
    share = (num_hosts - _BLOM) / (num_hosts - 2 * _BLOM + 1)
    return NormalDist().inv_cdf(share) if num_hosts > 1 else 0.0
