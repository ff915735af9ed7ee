"""What became of one row of measurements, and the regimes that rows are scored in.

Predictions err differently in different regimes. A run may belong to several of them,
or to none but ``dense`` or ``moe``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from nest_megatron.layout.zero import ZeroStage
from nest_megatron.plain import Name, frozen
from nest_megatron.planner.choice import Candidate
from nest_megatron.validation.finetuning import trains_adapters
from nest_megatron.validation.rows import Row, RowFile, number_or_zero, word

#: Columns that rows of one job share; they differ in how the job was laid out.
GROUP_COLUMNS = (
    *("source", "model", "layers", "hidden", "ffn", "heads", "task", "gpu", "n_gpus", "network"),
    *("seq", "gbs", "precision", "framework"),
)
_RELEASE = re.compile(r"\d+\.\d+")
#: Columns in which the layouts of one job differ; rows that agree in all of them are one layout.
LAYOUT_COLUMNS = (
    *("mbs", "ga", "tp", "pp", "vp", "cp", "ep", "etp", "fsdp", "zero", "seq_parallel"),
    "recompute",
)


class Basis(Name):
    """What a prediction takes for the settings of a job.

    * as stated: what the row says, or the recipe that is known to have produced it.
    * as planned: degrees, batch, precision, and recomputation and sharding where stated, as the row
      says; every other setting as the planner would assume or choose for the row's framework,
      release and GPU.
    """

    AS_STATED = "as_stated"
    AS_PLANNED = "as_planned"

    @property
    def words(self) -> str:
        """For people.

        >>> Basis.AS_PLANNED.words
        'as planned'
        """
        return self.value.replace("_", " ")


@frozen
class RowOutcome:
    """A row with its prediction, or with the reason why there is none.

    Args:
        predicted_s, measured_s: seconds of a step, or of a collective.
        predicted_bytes, measured_bytes: peak memory of the GPU that the source speaks of.
        needed_bytes: highest predicted peak of all GPUs, reserve and margin not counted.
        allocatable_bytes: what PyTorch's allocator can give out of a GPU's memory.
        device_bytes: memory of one GPU.
        risk: predicted chance that the run ends out of memory.
        fits: whether a plan like this would have been called feasible.
        out_of_memory: the run ended for want of memory.
        is_moe: the model has experts; ``None`` where it could not be read.
        has_scans: it has layers of a scan (Mamba-2, gated delta nets).
        zero: ZeRO stage that the job was taken to run with.
        candidate: the run as a plan that a search may choose, with the distribution of its step.
        refused: reason, "" if predicted.
        detail: what the refusal is about.
    """

    row: Row
    predicted_s: float | None = None
    measured_s: float | None = None
    predicted_bytes: int | None = None
    measured_bytes: int | None = None
    needed_bytes: int | None = None
    allocatable_bytes: int | None = None
    device_bytes: int | None = None
    risk: float | None = None
    fits: bool | None = None
    out_of_memory: bool = False
    is_moe: bool | None = None
    has_scans: bool = False
    zero: int | None = None
    candidate: Candidate | None = None
    refused: str = ""
    detail: str = ""
    assumptions: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        """Who published the row."""
        return self.row.get("source", "") or "(no source)"

    @property
    def time(self) -> tuple[float, float] | None:
        """Predicted and measured seconds, where both are known."""
        if self.predicted_s is None or self.measured_s is None:
            return None
        return self.predicted_s, self.measured_s

    @property
    def standardized_error(self) -> float | None:
        """Logarithm of measured over predicted time, over the scale of its error."""
        if self.time is None or self.candidate is None:
            return None
        predicted, measured = self.time
        return math.log(measured / predicted) / self.candidate.step.scale

    @property
    def memory(self) -> tuple[float, float] | None:
        """Predicted and measured bytes, where both are known."""
        if self.predicted_bytes is None or self.measured_bytes is None:
            return None
        return self.predicted_bytes, self.measured_bytes

    @property
    def ran(self) -> bool:
        """Whether the row is of a run that ran, and not an estimate, a blank or one that ended."""
        said = word(self.row, "outcome")
        return not self.out_of_memory and said in ("", "ok")

    @property
    def layout(self) -> tuple[str, ...]:
        """What tells layouts of one job apart."""
        return tuple(self.row.get(column, "").strip() for column in LAYOUT_COLUMNS)

    @property
    def group(self) -> tuple[str, ...]:
        """Rows of one group are layouts of one job, at one release of its framework.

        Where the framework's name has no release, the version of the page stands for it: what a
        page says a quarter later was measured with later code.
        """
        same = tuple(self.row.get(column, "") for column in GROUP_COLUMNS)
        is_released = _RELEASE.search(self.row.get("framework", "")) is not None
        return (*same, "" if is_released else self.row.get("commit", ""))


#: A row as it is stated, and as planned.
Pair = tuple[RowOutcome, RowOutcome]


@frozen
class Judged:
    """A file and what became of its rows, predicted on both bases, in the order of the file."""

    file: RowFile
    as_stated: Sequence[RowOutcome]
    as_planned: Sequence[RowOutcome]

    def on(self, basis: Basis) -> Sequence[RowOutcome]:
        """The outcomes of one basis."""
        return self.as_stated if basis is Basis.AS_STATED else self.as_planned

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """Each row on both bases."""
        return tuple(zip(self.as_stated, self.as_planned, strict=True))


#: Measured step below which launches and latencies weigh as much as the work, in seconds.
SMALL_STEP_S = 1.0
#: Tokens of a sequence from which attention and context parallelism decide the time.
LONG_SEQUENCE = 32_768
#: GPUs from which stragglers and the network's upper levels are felt.
LARGE_SCALE_GPUS = 1_024

_SFT = re.compile(r"sft|fine-?tun|dpo|kto|\brm\b", re.IGNORECASE)
_FSDP = re.compile(r"fsdp|zero[-_ ]?[23]", re.IGNORECASE)


class Regime(NamedTuple):
    """Runs that are scored together.

    Args:
        name: in ``--json``.
        definition: which rows belong, for people.
        reason: why they are scored apart.
        holds: whether a row belongs, as it is stated, predicted or refused.
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


def _is_sft(each: RowOutcome) -> bool:
    return _SFT.search(each.row.get("task", "")) is not None and not trains_adapters(each.row)


def _is_fsdp(each: RowOutcome) -> bool:
    if each.zero is not None:
        return each.zero >= ZeroStage.GRADIENTS
    named = _FSDP.search(each.row.get("framework", "")) is not None
    said = word(each.row, "fsdp") not in ("", "0", "1", "/", "no")
    return named or said or _number(each, "zero") >= ZeroStage.GRADIENTS


REGIMES: tuple[Regime, ...] = (
    Regime(
        "dense",
        "models without experts",
        "GEMMs of large matrices decide their time",
        lambda each: not _is_moe(each),
    ),
    Regime(
        "moe",
        "models with experts; of a model that is not known, EP above 1",
        "the token all-to-all and small grouped GEMMs decide their time",
        _is_moe,
    ),
    Regime(
        "fp8",
        "precision holds fp8 (also MXFP8); neither fp4 nor 16 bits",
        "casts, copies of the weights, and GEMMs that no longer fill the GPU",
        lambda each: "fp8" in each.row.get("precision", "").lower(),
    ),
    Regime(
        "hybrid",
        "models with Mamba or gated-delta-net layers",
        "kernels of scans, which are measured nowhere by themselves",
        lambda each: each.has_scans,
    ),
    Regime(
        "lora",
        "task or model names LoRA or PEFT",
        "most weights are frozen: no gradients, no states, a cheaper backward pass",
        lambda each: trains_adapters(each.row),
    ),
    Regime(
        "sft",
        "task names SFT, fine-tuning, DPO, KTO or RM, and no LoRA",
        "packed sequences, small batches, other sequence lengths than pre-training",
        _is_sft,
    ),
    Regime(
        "long_context",
        f"sequences of {LONG_SEQUENCE:,} tokens and more",
        "attention and context parallelism decide the time, activations the memory",
        lambda each: _number(each, "seq") >= LONG_SEQUENCE,
    ),
    Regime(
        "fsdp",
        "ZeRO-2 or ZeRO-3, FSDP2 or Megatron-FSDP, stated or the framework's default",
        "weights are gathered in every pass, in reach of nothing that hides them",
        _is_fsdp,
    ),
    Regime(
        "small_step",
        f"a measured step under {SMALL_STEP_S:g} s",
        "launches, CPU overhead and latencies weigh as much as the work",
        lambda each: 0 < (each.measured_s or _number(each, "iter_time_s")) < SMALL_STEP_S,
    ),
    Regime(
        "large_scale",
        f"{LARGE_SCALE_GPUS:,} GPUs and more",
        "stragglers, jitter and the upper levels of the network",
        lambda each: _number(each, "n_gpus") >= LARGE_SCALE_GPUS,
    ),
)
