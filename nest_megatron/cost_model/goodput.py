"""The share of time that a job which fails now and then spends on steps that it keeps.

Failures come at a constant rate. A segment of ``t`` seconds of steps and ``c`` of a checkpoint is
repeated until no failure hits it, and each failure costs a restart of ``r`` seconds, which may fail
as well. With a mean time between failures ``m`` it takes
``m * exp(r / m) * (exp((t + c) / m) - 1)`` on average.

Source: Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, Future
Generation Computer Systems 22 (2006), equations 13 and 37; Young (1974) for its first term.
"""

from __future__ import annotations

import math

from nest_megatron.errors import UserInputError
from nest_megatron.layout.plan import Goodput
from nest_megatron.plain import frozen
from nest_megatron.units import Seconds

#: Exponents beyond this leave nothing of a float.
_MOST = 700.0


@frozen
class Reliability:
    """How often a job fails, and what it does about it.

    Args:
        mtbf_hours: mean time between failures that end the job, of one GPU with its share of host
            and network.
        checkpoint_s: time for which a checkpoint stops training.
        restart_s: from a failure to the first new step.
        save_interval: steps from one checkpoint to the next; ``None`` takes the best.
    """

    mtbf_hours: float
    checkpoint_s: Seconds = 60.0
    restart_s: Seconds = 600.0
    save_interval: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.mtbf_hours < math.inf:
            raise _wrong("mtbf_hours", self.mtbf_hours, "it must be above 0 and finite", "50000")
        for name in ("checkpoint_s", "restart_s"):
            value = getattr(self, name)
            if not 0.0 <= value < math.inf:
                raise _wrong(name, value, "it is at least 0 and finite", "60")
        if self.save_interval is not None and self.save_interval < 1:
            raise _wrong("save_interval", self.save_interval, "it is at least 1 step", "500")


def _wrong(name: str, value: float, limit: str, example: str) -> UserInputError:
    key = f"reliability.{name}"
    return UserInputError(key, value, limit, f"For example {key}={example}.")


def goodput(reliability: Reliability, step_s: Seconds, num_gpus: int) -> Goodput:
    """What failures and checkpoints leave of a job's time.

    >>> llama3 = Reliability(mtbf_hours=50_700, checkpoint_s=30, restart_s=600)
    >>> found = goodput(llama3, step_s=20.0, num_gpus=16_384)
    >>> round(found.mtbf_s / 3600, 1), found.save_interval, round(found.share, 3)
    (3.1, 40, 0.88)
    """
    mtbf_s = 3600 * reliability.mtbf_hours / num_gpus
    steps = reliability.save_interval
    if steps is None:
        best = best_interval(reliability.checkpoint_s, mtbf_s) / step_s
        around = {max(1, math.floor(best)), max(1, math.ceil(best))}
        steps = max(sorted(around), key=lambda n: _share(reliability, n * step_s, mtbf_s))
    return Goodput(
        share=_share(reliability, steps * step_s, mtbf_s),
        mtbf_s=mtbf_s,
        save_interval=steps,
        checkpoint_s=reliability.checkpoint_s,
        restart_s=reliability.restart_s,
    )


def best_interval(checkpoint_s: Seconds, mtbf_s: Seconds) -> Seconds:
    """Time of steps between checkpoints that loses least.

    >>> round(best_interval(60.0, 36_000.0))
    2039
    """
    ratio = checkpoint_s / (2 * mtbf_s)
    if ratio >= 1:
        return mtbf_s
    first = math.sqrt(2 * checkpoint_s * mtbf_s)
    return first * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint_s


def _share(reliability: Reliability, work_s: Seconds, mtbf_s: Seconds) -> float:
    tries = (work_s + reliability.checkpoint_s) / mtbf_s
    restarts = reliability.restart_s / mtbf_s
    if tries + restarts > _MOST:
        return 0.0
    return work_s / (mtbf_s * math.exp(restarts) * math.expm1(tries))
