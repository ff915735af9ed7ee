"""Tokens of the sequences of a data set, as far as the time of a step depends on them.

Attention of a packed sequence is causal inside each of the sequences that it holds: its work is the
sum of their squares, half of it, and not the square of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import NormalDist

from nest_megatron.errors import UserInputError
from nest_megatron.plain import frozen

#: Quantiles that stand for a distribution of which mean and deviation are known.
_QUANTILES = 4000


@frozen
class SequenceLengths:
    """Moments of the lengths, of sequences as they are trained on.

    Args:
        mean: tokens of a sequence.
        attended: tokens of the sequence that a token stands in, on average over tokens: the mean
            square of the lengths over their mean.
        attention_deviation: relative standard deviation of attention's work on a pack, times the
            square root of the tokens of the pack.
        packed: several sequences stand in one; otherwise each is filled up with padding.
        source: where they come from.
    """

    mean: float
    attended: float
    attention_deviation: float
    packed: bool
    source: str

    def real_share(self, seq_length: int) -> float:
        """Share of the tokens that is no padding; what a pack leaves empty is not known."""
        return 1.0 if self.packed else self.mean / seq_length


def lengths_from_counts(
    counts: Mapping[int, float], longest: int, *, packed: bool, source: str
) -> SequenceLengths:
    """Moments of lengths that occur so often; longer ones are cut to ``longest``.

    A pack is filled one sequence after the other until it is full: a renewal process, whose rewards
    are the squares (variance of the rewards, Asmussen, Applied Probability and Queues, VI.3).

    Raises:
        UserInputError: if a length or a count is none.
    """
    total = math.fsum(counts.values())
    if not counts or min(counts) < 1 or not 0 < total < math.inf or min(counts.values()) < 0:
        raise UserInputError(
            "train.sequence_lengths",
            source,
            "it has lengths of at least 1 token, with counts",
            "Correct it.",
        )
    rows = [(min(length, longest), count / total) for length, count in counts.items()]
    mean, square = (math.fsum(share * length**k for length, share in rows) for k in (1, 2))
    attended = square / mean
    variance = math.fsum(share * (length**2 - attended * length) ** 2 for length, share in rows)
    return SequenceLengths(
        mean=mean,
        attended=attended,
        attention_deviation=math.sqrt(variance * mean) / square,
        packed=packed,
        source=source,
    )


def lengths_from_moments(
    mean: float, deviation: float, longest: int, *, packed: bool
) -> SequenceLengths:
    """Lengths of which mean and standard deviation are known, taken to be log-normal.

    Raises:
        UserInputError: for a mean below 1 or above ``longest``, or a deviation below 0.
    """
    for name, value, low, high in (
        ("mean", mean, 1.0, float(longest)),
        ("std", deviation, 0.0, math.inf),
    ):
        if not (low <= value <= high and value < math.inf):
            raise UserInputError(
                f"train.sequence_length_{name}",
                value,
                f"it must lie between {low:g} and {high:g} tokens",
                "Give it in tokens.",
            )
    spread = math.log(1 + (deviation / mean) ** 2)
    normal = NormalDist(math.log(mean) - spread / 2, math.sqrt(spread) or 1e-9)
    shares = ((k + 0.5) / _QUANTILES for k in range(_QUANTILES))
    counts: dict[int, float] = {}
    for share in shares:
        length = max(1, round(math.exp(normal.inv_cdf(share))))
        counts[length] = counts.get(length, 0) + 1
    source = f"log-normal, mean {mean:g}, standard deviation {deviation:g}"
    return lengths_from_counts(counts, longest, packed=packed, source=source)
