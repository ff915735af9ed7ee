"""What runs today beside a plan: both priced, and what each change brings."""

from __future__ import annotations

from nest_megatron.layout.estimate import PricedLayout
from nest_megatron.layout.objective import SURE
from nest_megatron.plain import frozen_record
from nest_megatron.units import Bytes, Seconds


@frozen_record
class Difference:
    """By how much a layout's step is longer than another's of the same job.

    Args:
        seconds: of the predicted steps.
        percent: of the other's median step; 9 of 10 runs of both differ by ``low_percent`` to
            ``high_percent``. Errors that both predictions share are not in that interval.
        chance_faster: that it is the faster one of the two.
    """

    seconds: Seconds
    percent: float
    low_percent: float
    high_percent: float
    chance_faster: float

    @property
    def is_sure(self) -> bool:
        """Whether predictions tell which of the two is the faster one."""
        return max(self.chance_faster, 1.0 - self.chance_faster) >= SURE


@frozen_record
class ChoiceChange:
    """One choice by Megatron's name, or by a recipe's field, with what it was and is."""

    name: str
    before: str
    after: str


@frozen_record
class LayoutChange:
    """Choices that are changed together, and what that does.

    Args:
        rule: of Megatron, for which one choice is not changed by itself; empty for none.
        step_s: the predicted step with it; ``None`` where Megatron refuses the layout.
        difference: to the layout that it changes.
    """

    choices: tuple[ChoiceChange, ...]
    rule: str = ""
    step_s: Seconds | None = None
    difference: Difference | None = None
    peak_memory_bytes: Bytes | None = None
    fits: bool | None = None


@frozen_record
class Changes:
    """From one layout to another.

    Args:
        alone: each choice by itself, from the first layout.
        in_order: one after another, every layout between legal; the last is the second layout, so
            the differences add up to the whole one.
        whole: the difference of the two.
    """

    alone: tuple[LayoutChange, ...]
    in_order: tuple[LayoutChange, ...]
    whole: Difference


@frozen_record
class BeforeAfter:
    """A job as it runs today beside its plan.

    Args:
        before: what runs today, priced; ``None`` where it does not start.
        refused: why it does not.
        changes: what each change brings; ``None`` without ``before``.
        needs: what has to be done for them, one sentence each.
    """

    before: PricedLayout | None
    refused: str = ""
    changes: Changes | None = None
    needs: tuple[str, ...] = ()
