"""What the cost model expects of a layout, and where its ranks lie."""

from __future__ import annotations

from collections.abc import Mapping

from nest_megatron.layout.layout import Layout
from nest_megatron.layout.objective import Uncertainty
from nest_megatron.layout.price import Price
from nest_megatron.plain import added, frozen_record
from nest_megatron.units import Bytes, Seconds


@frozen_record
class Placement:
    """Where ranks lie.

    Args:
        stage_ranks: first and last global rank of each pipeline rank (of its first replica, where
            the rank order spreads a pipeline rank over the cluster).
        group_levels: outermost network level that each kind of group crosses.
        rank_permutation: global rank that each launched rank takes; ``None`` leaves them as the
            launcher gives them out, as long as it keeps each host's together.
    """

    stage_ranks: tuple[tuple[int, ...], ...]
    group_levels: Mapping[str, str]
    rank_permutation: tuple[int, ...] | None = None


@frozen_record
class StageEstimate:
    """One pipeline rank; passes are those of all its chunks for one micro batch.

    ``layers`` is a short text of what each of its virtual stages holds, ``memory_bytes`` bytes by
    term, at its peak.
    """

    layers: tuple[str, ...]
    forward_s: Seconds
    backward_s: Seconds
    busy_share: float
    parameters: int
    memory_bytes: Mapping[str, Bytes]

    @property
    def peak_memory_bytes(self) -> Bytes:
        """All terms together."""
        return sum(self.memory_bytes.values())


@frozen_record
class Estimate:
    """The prediction for a layout.

    ``terms`` are seconds by what they go into, work and waiting of ``critical_rank``, the pipeline
    rank that is busy longest; they add up to ``iteration_time_s``.
    """

    iteration_time_s: Seconds
    tokens_per_s_per_gpu: float
    model_tflops_per_gpu: float
    mfu: float
    terms: Mapping[str, Seconds]
    critical_rank: int
    peak_memory_bytes: Bytes
    capacity_bytes: Bytes
    fits: bool
    binding_constraint: str
    stages: tuple[StageEstimate, ...]


@frozen_record
class PricedLayout:
    """A layout of a job with its estimate, and what it costs.

    Args:
        not_modelled: flags of the job whose effect on memory is not known.
    """

    layout: Layout
    predicted: Estimate
    uncertainty: Uncertainty
    price: Price | None
    not_modelled: tuple[str, ...]


@frozen_record
class Alternative:
    """A runner-up: another layout at its best, and how much slower it is.

    Args:
        slower_percent: below 0 for one that is predicted to be faster than the plan.
        chance_slower: that it is slower than the plan.
    """

    layout: Layout
    iteration_time_s: Seconds
    slower_percent: float
    uncertainty: Uncertainty | None = added(None)
    peak_memory_bytes: Bytes | None = added(None)
    chance_slower: float | None = added(None)
