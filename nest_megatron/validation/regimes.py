"""Kinds of runs that are scored apart, because predictions are wrong in different ways there.

A run may belong to several regimes, or to none but ``dense`` or ``moe``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from nest_megatron.parallel.zero import ZeroStage
from nest_megatron.validation.outcome import RowOutcome
from nest_megatron.validation.rows import number_or_zero

#: Measured step below which launches and latencies weigh as much as the work, in seconds.
SMALL_STEP_S = 1.0
#: Tokens of a sequence from which attention and context parallelism decide the time.
LONG_SEQUENCE = 32_768
#: GPUs from which stragglers and the network's upper levels are felt.
LARGE_SCALE_GPUS = 1_024

_LORA = re.compile(r"lora|peft", re.IGNORECASE)
_SFT = re.compile(r"sft|fine-?tun|dpo|kto|\brm\b", re.IGNORECASE)
_FSDP = re.compile(r"fsdp|zero[-_ ]?[23]", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """Runs that are scored together.

    Args:
        name: in ``--json``.
        definition: which rows belong, for people.
        reason: why they are scored apart.
        holds: whether a row belongs; asked of the row as it is stated, predicted or refused.
    """

    name: str
    definition: str
    reason: str
    holds: Callable[[RowOutcome], bool]


def _number(each: RowOutcome, column: str) -> float:
    return number_or_zero(each.row, column)


def _is_moe(each: RowOutcome) -> bool:
    if each.is_moe is not None:
        return each.is_moe
    return _number(each, "ep") > 1 or _number(each, "experts") > 1


def _is_lora(each: RowOutcome) -> bool:
    return _LORA.search(f"{each.row.get('task', '')} {each.row.get('model', '')}") is not None


def _is_sft(each: RowOutcome) -> bool:
    return _SFT.search(each.row.get("task", "")) is not None and not _is_lora(each)


def _is_fsdp(each: RowOutcome) -> bool:
    if each.zero is not None:
        return each.zero >= ZeroStage.GRADIENTS
    named = _FSDP.search(each.row.get("framework", "")) is not None
    said = each.row.get("fsdp", "").strip().lower() not in ("", "0", "1", "/", "no")
    return named or said or _number(each, "zero") >= ZeroStage.GRADIENTS


def _step_s(each: RowOutcome) -> float:
    return each.measured_s or _number(each, "iter_time_s")


REGIMES: tuple[Regime, ...] = (
    Regime(
        name="dense",
        definition="models without experts",
        reason="GEMMs of large matrices decide their time",
        holds=lambda each: not _is_moe(each),
    ),
    Regime(
        name="moe",
        definition="models with experts; of a model that is not known, EP above 1",
        reason="the token all-to-all and small grouped GEMMs decide their time",
        holds=_is_moe,
    ),
    Regime(
        name="fp8",
        definition="precision holds fp8 (also MXFP8); neither fp4 nor 16 bits",
        reason="casts, copies of the weights, and GEMMs that no longer fill the GPU",
        holds=lambda each: "fp8" in each.row.get("precision", "").lower(),
    ),
    Regime(
        name="lora",
        definition="task or model names LoRA or PEFT",
        reason="most weights are frozen: no gradients, no states, a cheaper backward pass",
        holds=_is_lora,
    ),
    Regime(
        name="sft",
        definition="task names SFT, fine-tuning, DPO, KTO or RM, and no LoRA",
        reason="packed sequences, small batches, other sequence lengths than pre-training",
        holds=_is_sft,
    ),
    Regime(
        name="long_context",
        definition=f"sequences of {LONG_SEQUENCE:,} tokens and more",
        reason="attention and context parallelism decide the time, activations the memory",
        holds=lambda each: _number(each, "seq") >= LONG_SEQUENCE,
    ),
    Regime(
        name="fsdp",
        definition="ZeRO-2 or ZeRO-3, FSDP2 or Megatron-FSDP, stated or the framework's default",
        reason="weights are gathered in every pass, in reach of nothing that hides them",
        holds=_is_fsdp,
    ),
    Regime(
        name="small_step",
        definition=f"a measured step under {SMALL_STEP_S:g} s",
        reason="launches, CPU overhead and latencies weigh as much as the work",
        holds=lambda each: 0 < _step_s(each) < SMALL_STEP_S,
    ),
    Regime(
        name="large_scale",
        definition=f"{LARGE_SCALE_GPUS:,} GPUs and more",
        reason="stragglers, jitter and the upper levels of the network",
        holds=lambda each: _number(each, "n_gpus") >= LARGE_SCALE_GPUS,
    ),
)
