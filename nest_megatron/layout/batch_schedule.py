"""A global batch that grows during a run: its sizes, and how long each lasts.

Megatron checks a size when the run comes to it, hours after the start; a plan is legal at every
size from the beginning. Sources: ``RampupBatchsizeNumMicroBatchesCalculator`` (core_v0.16.1) and
``StepBatchsizeNumMicroBatchesCalculator`` (0.20) of ``megatron/core/num_microbatches_calculator``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from nest_megatron.cluster.records import Precision
from nest_megatron.errors import UserInputError
from nest_megatron.model.sequence_lengths import SequenceLengths
from nest_megatron.plain import added, frozen
from nest_megatron.units import Seconds

RAMPUP, STEPS = "rampup_batch_size", "step_batch_size_schedule"
_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@frozen
class BatchPart:
    """A part of a run with one batch size.

    Args:
        samples: sequences that it trains on; ``None`` for the last part of a run whose length is
            not known.
    """

    global_batch_size: int
    samples: int | None = None


@frozen
class BatchSchedule:
    """The parts of a run, first to last.

    Args:
        rampup_batch_size, step_batch_size_schedule: what states it, as Megatron takes them.
        global_batch_size: the job's, at which its ramp ends; a short run does not come to it.
    """

    parts: tuple[BatchPart, ...]
    rampup_batch_size: tuple[int, ...] | None = added(None)
    step_batch_size_schedule: str | None = added(None)
    global_batch_size: int | None = added(None)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Every batch size of the run, in its order."""
        return tuple(part.global_batch_size for part in self.parts)

    @property
    def batch_unit(self) -> int:
        """What every size is a multiple of."""
        return math.gcd(*self.sizes)

    @property
    def last(self) -> int:
        """The size at its end, which the job states."""
        return self.global_batch_size or self.sizes[-1]

    @property
    def longest(self) -> int:
        """The size that most samples of the run are trained with; the later of two alike."""
        lengths = [part.samples or math.inf for part in self.parts]
        return max(zip(lengths, itertools.count(), self.sizes, strict=False))[2]

    def words(self) -> str:
        """The sizes in a few words."""
        sizes = list(map(str, self.sizes))
        return ", ".join(sizes if len(sizes) <= 6 else [*sizes[:2], "...", sizes[-1]])


@frozen
class TrainChoice:
    """The sequences and the number format.

    Args:
        batch_schedule: how the batch grows; a layout has the size of most samples.
        sequence_lengths: of the data, where they are known.
    """

    seq_length: int
    precision: Precision
    batch_schedule: BatchSchedule | None = added(None)
    sequence_lengths: SequenceLengths | None = added(None)


@frozen
class PredictedBatch:
    """A part of a run under a plan; ``steps`` is ``None`` where the run's length is not known."""

    global_batch_size: int
    steps: int | None
    iteration_time_s: Seconds
    tokens_per_s_per_gpu: float
    peak_memory_bytes: int


def read_schedule(
    values: Callable[[str], Any],
    *,
    last: int | None,
    seq_length: int,
    samples: int | None = None,
    iterations: int | None = None,
    name: Callable[[str], str] = str,
) -> BatchSchedule | None:
    """The schedule that a job states, ``None`` if its batch stays as it is.

    Args:
        values: of ``rampup_batch_size`` and ``step_batch_size_schedule``, by name.
        last: the job's global batch size.
        samples, iterations: length of the run, where it is known.
        name: how the user writes a name, for errors.

    Raises:
        UserInputError: for what Megatron's calculators would refuse.
    """
    growth, steps = values(RAMPUP), values(STEPS)
    if growth and steps:
        raise UserInputError(
            name(RAMPUP), growth, f"{name(STEPS)} is given as well", "Give one of the two."
        )
    if not (growth or steps):
        return None
    for length, value in (("train_samples", samples), ("train_iters", iterations)):
        if value is not None and value < 0:
            raise UserInputError(
                name(length),
                value,
                "it is at least 1",
                "Give the length of the run, or leave it out.",
            )
    parts = _ramp(growth, last, name) if growth else _steps(steps, seq_length, name(STEPS))
    return BatchSchedule(
        parts=tuple(_until(parts, samples or None, iterations or None)),
        rampup_batch_size=tuple(map(int, growth)) if growth else None,
        step_batch_size_schedule=steps,
        global_batch_size=last if growth else None,
    )


def _ramp(
    growth: Sequence[Any], last: int | None, name: Callable[[str], str]
) -> tuple[BatchPart, ...]:
    """``START INCREMENT SAMPLES``: as many samples at each size below the last."""
    what = name(RAMPUP)

    def refuse(limit: str, fix: str) -> UserInputError:
        return UserInputError(what, list(growth), limit, fix)

    try:
        start, step, samples = map(int, growth)
    except (TypeError, ValueError):
        raise refuse(
            "it is START INCREMENT SAMPLES, three whole numbers", "For example 16 16 1000000."
        ) from None
    if last is None:
        raise refuse(f"it ends at {name('global_batch_size')}, which is not given", "Give it.")
    if min(start, step, samples) < 1:
        raise refuse("each is at least 1", "Correct it.")
    if last <= start or (last - start) % step:
        raise refuse(
            f"the batch does not grow from {start} in steps of {step} to {last}",
            "Change one of the three sizes.",
        )
    count = (last - start) // step
    ends = [samples * k // count for k in range(count + 1)]
    parts = zip(range(start, last, step), itertools.pairwise(ends), strict=True)
    below = (BatchPart(global_batch_size=n, samples=stop - begin) for n, (begin, stop) in parts)
    return (*below, BatchPart(global_batch_size=last))


def _steps(text: str, seq_length: int, what: str) -> tuple[BatchPart, ...]:
    """``TOKENS:SIZE TOKENS:SIZE ...``, tokens from which on a size holds, with K, M, B or T."""
    rows = [entry.partition(":") for entry in str(text).replace(",", " ").split()]
    try:
        found = sorted((_number(at) // seq_length, _number(size)) for at, _, size in rows)
    except (OverflowError, ValueError):
        raise UserInputError(
            what, text, "it is TOKENS:SIZE TOKENS:SIZE ...", 'For example "0:768 250B:1536".'
        ) from None
    starts, sizes = [at for at, _ in found], [size for _, size in found]
    rises = all(begin < end for begin, end in itertools.pairwise(starts))
    if not found or starts[0] != 0 or not rises or min(sizes) < 1:
        raise UserInputError(
            what,
            text,
            f"thresholds begin at 0 and rise, in sequences of {seq_length} tokens: {starts}",
            "Correct them; sizes are at least 1.",
        )
    lengths = (end - begin for begin, end in itertools.pairwise(starts))
    return tuple(
        BatchPart(global_batch_size=size, samples=length)
        for size, length in itertools.zip_longest(sizes, lengths)
    )


def _number(text: str) -> int:
    text = text.strip().upper()
    factor = _SUFFIXES.get(text[-1:], 1)
    return int(float(text.rstrip("".join(_SUFFIXES)) if factor > 1 else text) * factor)


def _until(
    parts: Iterable[BatchPart], samples: int | None, iterations: int | None
) -> Iterator[BatchPart]:
    """The parts of a run as far as it goes; a part is rounded up to whole steps."""
    for part in parts:
        size, length = part.global_batch_size, part.samples
        left = samples if iterations is None else iterations * size
        if left is not None and left <= 0:
            return
        if left is not None and (length is None or length >= left):
            yield BatchPart(global_batch_size=size, samples=left)
            return
        if length == 0:
            continue
        yield part
        if length is not None:
            samples = None if samples is None else samples - length
            iterations = None if iterations is None else iterations - -(-length // size)
