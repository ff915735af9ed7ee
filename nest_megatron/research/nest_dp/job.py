"""What is asked for: a model on a cluster, and what the recurrence may choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nest_megatron.cluster.records import Cluster
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.errors import UserInputError
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.names import Name
from nest_megatron.profile.lookup import LayerTimes
from nest_megatron.research.nest_dp.links import Topology
from nest_megatron.research.nest_dp.memory import MemoryRule, Optimizer
from nest_megatron.research.nest_dp.records import Schedule


class RecomputeChoice(Name):
    """Whether stages compute their forward pass again."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class Division(Name):
    """Whether replicas must divide devices and micro batches."""

    EXACTLY = "exactly"
    LOOSELY = "loosely"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResearchChoices:
    """What may be chosen, and by which rules.

    Args:
        zero: stages that do not fit may take more devices, over which ZeRO divides their states.
        strategy_per_stage: stages of one pipeline may differ in their degrees; otherwise all have
            the same ones.
        optimizer: of the paper's memory rule.
        flash_attention: ``False`` counts what unfused attention takes and keeps.
        fixed, limits: degrees held at a value or below one, by name.
    """

    schedule: Schedule = Schedule.ONE_F_ONE_B
    recompute: RecomputeChoice = RecomputeChoice.AUTO
    zero: bool = True
    strategy_per_stage: bool = False
    memory: MemoryRule = MemoryRule.OURS
    optimizer: Optimizer = Optimizer.ADAM
    divide: Division = Division.EXACTLY
    topology: Topology = Topology.LEVELS
    flash_attention: bool = True
    fixed: Mapping[str, int] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)

    @property
    def recomputes(self) -> tuple[bool, ...]:
        """Settings to try, without recomputation first."""
        return {
            RecomputeChoice.AUTO: (False, True),
            RecomputeChoice.ON: (True,),
            RecomputeChoice.OFF: (False,),
        }[self.recompute]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResearchJob:
    """A job for the recurrence.

    Args:
        global_batch_size: sequences of one optimizer step.
        times: measured times of the model's layers, if any.

    Raises:
        UserInputError: for a batch below 1.
    """

    spec: TransformerSpec
    cluster: Cluster
    settings: CostSettings
    global_batch_size: int
    choices: ResearchChoices = ResearchChoices()
    times: LayerTimes | None = None

    def __post_init__(self) -> None:
        if self.global_batch_size < 1:
            raise UserInputError(
                "train.global_batch_size",
                value=self.global_batch_size,
                limit="it must be at least 1",
                fix="Give the sequences of one step.",
            )
