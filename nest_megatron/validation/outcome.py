"""What became of one row of measurements."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from nest_megatron.names import Name
from nest_megatron.planner.choice import Candidate
from nest_megatron.validation.rows import Row, RowFile

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


@dataclass(frozen=True, slots=True, kw_only=True)
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
    zero: int | None = None
    candidate: Candidate | None = None
    refused: str = ""
    detail: str = ""
    assumptions: tuple[str, ...] = field(default=())

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
        said = self.row.get("outcome", "").strip().lower()
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A file and what became of its rows, predicted both ways, in the order of the file."""

    file: RowFile
    as_stated: Sequence[RowOutcome]
    as_planned: Sequence[RowOutcome]

    def on(self, basis: Basis) -> Sequence[RowOutcome]:
        """The outcomes of one way."""
        return self.as_stated if basis is Basis.AS_STATED else self.as_planned

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """Each row both ways."""
        return tuple(zip(self.as_stated, self.as_planned, strict=True))
