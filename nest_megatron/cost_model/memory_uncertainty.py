"""How far predicted peaks of memory are off, and the chance that a plan runs out.

The logarithm of a measured peak over its prediction lies above and below its median by halves of
Student's t distribution with two degrees of freedom (``student``), each with a scale of its own:
what the formula lacks (buffers, caches) and what it counts although the job has it not are
different mistakes. They are fitted to public peaks and to the public runs that ran or ran out,
every source weighing alike, since the next job is a new source rather than another run of an old
one (``validation/fit_memory.py``, ``hydra_configs/calibration/memory.yaml``). Apart are jobs that
gather weights or gradients (ZeRO-2 and 3, FSDP): what is whole of them at a time depends on the
framework's buffers and streams.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import yaml

from nest_megatron.catalogue_files import catalogue_root
from nest_megatron.cost_model.student import cumulative, quantile
from nest_megatron.documents import LOADER
from nest_megatron.parallel.zero import ZeroStage


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakError:
    """Error of predicted peaks: ``log(measured / predicted)``.

    Args:
        median: above 0 where predictions are too small.
        above, below: scales of Student's t distribution on either side of it, for a source that was
            not fitted.
    """

    median: float
    above: float
    below: float

    def at_most(self, error: float) -> float:
        """Chance of an error of at most this."""
        scale = self.above if error > self.median else self.below
        return cumulative((error - self.median) / scale)

    def quantile(self, share: float) -> float:
        """The error that a share of all errors is at most."""
        return self.median + (self.above if share > 0.5 else self.below) * quantile(share)


@functools.cache
def shipped_peak_errors() -> Mapping[str, PeakError]:
    """The catalogue's (``calibration/memory.yaml``): ``replicated`` and ``sharded``."""
    path = catalogue_root().joinpath("calibration", "memory.yaml")
    fits = yaml.load(path.read_text(encoding="utf-8"), Loader=LOADER)
    return {
        name: PeakError(**{key: fit[key] for key in ("median", "above", "below")})
        for name, fit in fits.items()
    }


def peak_error(zero: ZeroStage) -> PeakError:
    """The error of the peaks of jobs with such a ZeRO stage."""
    return shipped_peak_errors()["sharded" if zero >= ZeroStage.GRADIENTS else "replicated"]


def out_of_memory_probability(peak_bytes: float, limit_bytes: float, error: PeakError) -> float:
    """Chance that a job needs more than there is.

    Args:
        peak_bytes: predicted, the highest of all GPUs.
        limit_bytes: what can be given out (``device_memory.allocatable_bytes``).

    >>> round(out_of_memory_probability(70e9, 75e9, peak_error(ZeroStage.OPTIMIZER)), 3)
    0.055
    >>> round(out_of_memory_probability(74e9, 75e9, peak_error(ZeroStage.OPTIMIZER)), 2)
    0.46
    """
    if peak_bytes <= 0:
        return 0.0
    if limit_bytes <= 0:
        return 1.0
    return 1.0 - error.at_most(math.log(limit_bytes / peak_bytes))


def headroom_for(probability: float, error: PeakError) -> float:
    """Share of what can be given out that a plan leaves free to run out no more often.

    >>> round(headroom_for(0.05, peak_error(ZeroStage.OPTIMIZER)), 2)
    0.07
    """
    return 1.0 - math.exp(-error.quantile(1.0 - probability))
