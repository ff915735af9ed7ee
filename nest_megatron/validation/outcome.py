"""What became of one row of measurements."""

from __future__ import annotations

from dataclasses import dataclass, field

from nest_megatron.validation.rows import Row

#: Columns that rows of one job share; they differ in how the job was laid out.
GROUP_COLUMNS = (
    "source",
    "model",
    "task",
    "gpu",
    "n_gpus",
    "network",
    "seq",
    "gbs",
    "precision",
    "framework",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOutcome:
    """A row with its prediction, or with the reason why there is none.

    Args:
        predicted_s, measured_s: seconds of a step, or of a collective.
        predicted_bytes, measured_bytes: peak memory of the GPU that the source speaks of.
        needed_bytes: predicted peak of the fullest GPU, reserve and margin not counted.
        device_bytes: memory of one GPU.
        fits: whether a plan like this would have been called feasible.
        out_of_memory: the run ended for want of memory.
        refused: reason, "" if predicted.
        detail: what the refusal is about.
    """

    row: Row
    predicted_s: float | None = None
    measured_s: float | None = None
    predicted_bytes: int | None = None
    measured_bytes: int | None = None
    needed_bytes: int | None = None
    device_bytes: int | None = None
    fits: bool | None = None
    out_of_memory: bool = False
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
    def memory(self) -> tuple[float, float] | None:
        """Predicted and measured bytes, where both are known."""
        if self.predicted_bytes is None or self.measured_bytes is None:
            return None
        return self.predicted_bytes, self.measured_bytes

    @property
    def group(self) -> tuple[str, ...]:
        """Rows of one group are layouts of one job."""
        return tuple(self.row.get(column, "") for column in GROUP_COLUMNS)
