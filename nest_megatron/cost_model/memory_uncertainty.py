"""How far predicted peaks of memory are off, and the chance that a plan runs out.

The logarithm of a measured peak over its prediction lies above and below its median by halves of
Student's t distribution, each with a scale of its own: what the formula lacks (buffers, caches) and
what it counts although the job has it not are different mistakes. They are fitted to public peaks,
every source weighing alike, since the next job is a new source rather than another run of an old
one (``validation/fit_memory.py``, ``hydra_configs/calibration/memory.yaml``). Apart are jobs that
gather weights or gradients (ZeRO-2 and 3, FSDP): what is whole of them at a time depends on the
framework's buffers and streams.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from nest_megatron.cost_model.student import cumulative, quantile
from nest_megatron.parallel.zero import ZeroStage
from nest_megatron.units import Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakError:
    """Error of predicted peaks: ``log(measured / predicted)``.

    Args:
        median: above 0 where predictions are too small.
        above, below: scales of Student's t distribution on either side of it, for a source that was
            not fitted.
        runs, sources: that were fitted.
    """

    median: float
    above: float
    below: float
    runs: int
    sources: int

    def at_most(self, error: float) -> float:
        """Chance of an error of at most this."""
        scale = self.above if error > self.median else self.below
        return cumulative((error - self.median) / scale)

    def quantile(self, share: float) -> float:
        """The error that a share of all errors is at most."""
        return self.median + (self.above if share > 0.5 else self.below) * quantile(share)


#: Written by ``nest-megatron calibrate`` into ``calibration/memory.yaml``, and repeated here.
REPLICATED = PeakError(median=0.015, above=0.025, below=0.053, runs=556, sources=5)
SHARDED = PeakError(median=0.051, above=0.163, below=0.136, runs=50, sources=9)


def peak_error(zero: ZeroStage) -> PeakError:
    """The error of the peaks of jobs with such a ZeRO stage."""
    return SHARDED if zero >= ZeroStage.GRADIENTS else REPLICATED


def out_of_memory_probability(peak_bytes: float, limit_bytes: float, error: PeakError) -> float:
    """Chance that a job needs more than there is.

    Args:
        peak_bytes: predicted, of the fullest GPU.
        limit_bytes: what can be given out (``device_memory.allocatable_bytes``).

    >>> round(out_of_memory_probability(70e9, 75e9, REPLICATED), 3)
    0.048
    >>> round(out_of_memory_probability(74e9, 75e9, REPLICATED), 2)
    0.51
    """
    if peak_bytes <= 0:
        return 0.0
    if limit_bytes <= 0:
        return 1.0
    return 1.0 - error.at_most(math.log(limit_bytes / peak_bytes))


def peak_interval(peak_bytes: float, error: PeakError, share: float = 0.9) -> tuple[Bytes, Bytes]:
    """Between which bytes that share of measured peaks lies.

    >>> [round(x / 1e9) for x in peak_interval(60e9, REPLICATED)]
    [54, 64]
    """
    low, high = (math.exp(error.quantile(0.5 + side * share / 2)) for side in (-1, 1))
    return round(peak_bytes * low), round(peak_bytes * high)


def headroom_for(probability: float, error: PeakError) -> float:
    """Share of what can be given out that a plan leaves free to run out no more often.

    >>> round(headroom_for(0.05, REPLICATED), 2)
    0.07
    """
    return 1.0 - math.exp(-error.quantile(1.0 - probability))
