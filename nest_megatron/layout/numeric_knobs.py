"""Choices of Megatron that change numbers: a plan never makes them, but says what they would gain.

``docs/knobs.md`` shows the table; a test keeps it true.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, field, replace

from nest_megatron.cluster.records import Precision
from nest_megatron.layout.cuda_graphs import Flags
from nest_megatron.layout.zero import ZeroStage

HOPPER = r"G?H\d"
BLACKWELL = r"G?B\d"
INSTINCT = r"MI3\d"
#: Scales for whole tensors, in published runs (``rulebook.devices`` has what else runs where).
_WHOLE_TENSOR = "|".join((HOPPER, BLACKWELL, INSTINCT))


@dataclass(frozen=True, slots=True)
class NumericKnob:
    """A choice that changes numbers: never made, but priced.

    Args:
        values: ``flags`` by Megatron's names, as ``cost_model/execution_flags.py`` reads them.
        family: of those of one family only the best is offered.
        precisions: number formats of jobs that it goes with.
        precision: the number format that GEMMs then have; ``None`` is the job's own.
        devices: pattern of the accelerators' names on which Transformer Engine has it.
        of_sharded_optimizer, of_adam, of_experts: what a job must have.
        instead_of: switches that say the contrary, which are off with it.
    """

    flags: str
    changes: str
    family: str
    _: KW_ONLY
    values: Flags = field(default_factory=dict)
    precisions: tuple[Precision, ...] = (Precision.BF16, Precision.FP8, Precision.NVFP4)
    precision: Precision | None = None
    devices: str = ""
    of_sharded_optimizer: bool = False
    of_adam: bool = False
    of_experts: bool = False
    instead_of: tuple[str, ...] = ()

    def is_for(
        self, flags: Flags, precision: Precision, accelerator: str, *, has_experts: bool
    ) -> bool:
        """Whether a job with these flags could make the choice, and has not."""
        adam = str(flags.get("optimizer") or "adam") == "adam"
        changes = self.precision not in (None, precision)
        is_new = changes or any(flags.get(name) != value for name, value in self.values.items())
        return (
            is_new
            and precision in self.precisions
            and re.match(self.devices, accelerator, re.IGNORECASE) is not None
            and (adam or not self.of_adam)
            and (has_experts or not self.of_experts)
            and not refused_together(flags, [self])
        )

    def zero_stages(self, stages: Iterable[ZeroStage]) -> tuple[ZeroStage, ...]:
        """Those of some ZeRO stages that it goes with: FSDP has flags for widths of its own."""
        least = ZeroStage.OPTIMIZER if self.of_sharded_optimizer else ZeroStage.NONE
        return tuple(
            zero for zero in stages if zero >= least and not (zero.is_fsdp and not self.precision)
        )


def refused_together(flags: Flags, knobs: Iterable[NumericKnob]) -> bool:
    """Whether Megatron refuses some choices together, or with a job's flags.

    An offloaded optimizer takes fp8 weights of delayed scaling alone (0.16.1 args:1195).
    """
    made = dict(flags)
    for knob in knobs:
        made |= knob.values
    is_delayed = (made.get("fp8_recipe") or "delayed") == "delayed"
    return not is_delayed and all(map(made.get, ("optimizer_cpu_offload", "fp8_param_gather")))


def _moments(width: str) -> NumericKnob:
    """Adam's moments in a width; its other states stay as they are."""
    values = {"exp_avg_dtype": width, "exp_avg_sq_dtype": width}
    return NumericKnob(
        f"--use-precision-aware-optimizer --exp-avg-dtype {width} --exp-avg-sq-dtype {width}",
        f"Adam keeps its moments in {width}",
        f"moments in {width}",
        values={"use_precision_aware_optimizer": True, **values},
        of_sharded_optimizer=True,
        of_adam=True,
    )


def _fp8(number_format: str, recipe: str, devices: str, how: str) -> NumericKnob:
    """GEMMs of layers in fp8, of a 16-bit job or of one with another recipe."""
    return NumericKnob(
        f"--fp8-format {number_format} --fp8-recipe {recipe}",
        f"GEMMs of layers run in fp8, {how}",
        "format",
        values={"fp8_recipe": recipe},
        precisions=(Precision.BF16, Precision.FP8),
        precision=Precision.FP8,
        devices=devices,
    )


_GRADIENTS = NumericKnob(
    "--grad-reduce-in-bf16",
    "gradients are summed over replicas and micro batches in bf16",
    "gradients",
    values={"grad_reduce_in_bf16": True},
    instead_of=("accumulate_allreduce_grads_in_fp32",),
)
_MOMENTS = (_moments("bf16"), _moments("fp8"))
_TENSORWISE = _fp8("hybrid", "tensorwise", _WHOLE_TENSOR, "with one scale for each tensor")
_FP8_WEIGHTS = NumericKnob(
    "--fp8-param-gather",
    "weights are kept and gathered in fp8 alone",
    "weights",
    values={"fp8_param_gather": True},
    precisions=(Precision.FP8,),
    of_sharded_optimizer=True,
)

NUMERIC_KNOBS = (
    _GRADIENTS,
    *_MOMENTS,
    _TENSORWISE,
    _fp8("e4m3", "blockwise", HOPPER, "with a scale for each block of 128 elements"),
    _fp8("e4m3", "mxfp8", BLACKWELL, "with a scale for each 32 elements"),
    NumericKnob(
        "--fp4-format e2m1 --fp4-recipe nvfp4",
        "GEMMs of layers run in four bits, in place of any fp8",
        "format",
        values={"fp8_recipe": None},
        precisions=(Precision.BF16, Precision.FP8),
        precision=Precision.NVFP4,
        devices=BLACKWELL,
    ),
    _FP8_WEIGHTS,
    NumericKnob(
        "--moe-expert-capacity-factor 1.0",
        "an expert drops the tokens that exceed its share",
        "capacity",
        values={"moe_expert_capacity_factor": 1.0},
        of_experts=True,
    ),
    # No Transformer Engine's cross entropy: Megatron-LM 0.20 refuses it as unstable
    # (``validate_args``).
)

_HOST_OPTIMIZER = NumericKnob(
    "--optimizer-cpu-offload --use-precision-aware-optimizer",
    "Adam runs on the host, where its states are",
    "states on the host",
    values={"optimizer_cpu_offload": True, "use_precision_aware_optimizer": True},
    of_sharded_optimizer=True,
    of_adam=True,
)
_FP8_AND_ITS_WEIGHTS = replace(
    _TENSORWISE,
    flags=f"{_TENSORWISE.flags} {_FP8_WEIGHTS.flags}",
    values={**_TENSORWISE.values, **_FP8_WEIGHTS.values},
    precisions=(Precision.BF16,),
    of_sharded_optimizer=True,
)
#: What is tried where nothing fits, singly and together: at most one of each line.
MEMORY_KNOBS: tuple[tuple[NumericKnob, ...], ...] = (
    (_HOST_OPTIMIZER, *_MOMENTS),
    (_GRADIENTS,),
    (_FP8_WEIGHTS, _FP8_AND_ITS_WEIGHTS),
)
