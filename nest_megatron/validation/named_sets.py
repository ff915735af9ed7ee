"""Sets of rows with a goal, and what other predictors reach on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from nest_megatron.names import Name
from nest_megatron.report.markdown import figure
from nest_megatron.validation.outcome import Judged
from nest_megatron.validation.report import BothScores, Scores, both_scores
from nest_megatron.validation.rows import Row, RowKind, number_or_zero


class Measure(Name):
    """What a goal is about."""

    ERROR = "error of time, %"
    REGRET = "regret, %"
    SPEARMAN = "rank correlation"
    MEMORY = "error of memory, %"

    def of(self, found: Scores) -> float | None:
        """Its value: mean absolute error, mean regret, mean rank correlation."""
        if self is Measure.REGRET:
            return found.regret_mean_pct
        if self is Measure.SPEARMAN:
            return found.spearman_mean
        in_memory = found.memory.mape_pct if self is Measure.MEMORY else None
        return found.errors.mape_pct if in_memory is None else in_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What is to be reached.

    Args:
        others: who else was scored on these rows, with the value.
    """

    measure: Measure
    value: float
    others: tuple[tuple[str, float], ...] = ()

    @property
    def limit(self) -> str:
        """The goal in a table; only a rank correlation is better when larger."""
        return f"{'≥' if self.measure is Measure.SPEARMAN else '≤'} {self.value:g}"

    @property
    def others_text(self) -> str:
        """Who else was scored, in a table."""
        return ", ".join(f"{who} {other:g}" for who, other in self.others)

    def is_met(self, found: Scores) -> bool:
        """Whether some scores are as good as the goal."""
        value = self.measure.of(found)
        if value is None:
            return False
        return value >= self.value if self.measure is Measure.SPEARMAN else value <= self.value

    def reached(self, found: Scores) -> str:
        """What some scores reach, with the digits that tell it from the goal."""
        value = self.measure.of(found)
        if value is None:
            return "none"
        close = abs(value - self.value) < 0.05  # would be rounded to the goal
        return figure(value, 2 if close or self.measure is Measure.SPEARMAN else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedSet:
    """Rows that belong together.

    Args:
        key: for files.
        name: for people.
        kind: kind of file that they are taken from.
        holds: whether a row belongs.
        note: what a reader must know of the rows.
    """

    key: str
    name: str
    kind: RowKind
    holds: Callable[[Row], bool]
    goals: tuple[Goal, ...]
    note: str = ""


def _source(*names: str) -> Callable[[Row], bool]:
    return lambda row: row.get("source", "") in names


_NVIDIA = _source(
    "nvidia-megatron-bridge-perf",
    "nvidia-dgxc-benchmarking",
    "nvidia-nemo-docs-24.07",
    "nvidia-nemo-longseq",
)
_VTRAIN = _source("vtrain-ground-truth")
_PAPERS = _source("megatron-sc21-table1", "megatron-sc21-table2", "korthikanti-table5")
_BLOOM = _source("bigscience-bloom-prequel")
_BLACKWELL_OR_HOPPER = ("H100", "H200", "B200", "B300", "GB200", "GB300")


def _dense_bf16(row: Row) -> bool:
    sixteen = row.get("precision", "").upper().startswith("BF16")
    dense = number_or_zero(row, "ep") <= 1
    return _NVIDIA(row) and sixteen and dense and row["gpu"].startswith("H100")


def _moe_or_fp8(row: Row) -> bool:
    eight = "FP8" in row.get("precision", "").upper()
    known = row.get("gpu", "").startswith(_BLACKWELL_OR_HOPPER)
    return _NVIDIA(row) and known and (eight or number_or_zero(row, "ep") > 1)


_TIME, _GOLDEN = RowKind.THROUGHPUT, RowKind.MEMORY_GOLDEN
#: Calculon and vTrain on the same rows: shared figures of ``baseline_errors.csv`` and their papers.
SETS: tuple[NamedSet, ...] = (
    NamedSet(
        key="vtrain_many_nodes",
        name="vTrain, several nodes (64 GPUs and more)",
        kind=_TIME,
        holds=lambda row: _VTRAIN(row) and number_or_zero(row, "n_gpus") >= 64,
        goals=(
            Goal(measure=Measure.ERROR, value=8, others=(("Calculon", 19.6), ("vTrain", 14.7))),
            Goal(measure=Measure.REGRET, value=1, others=(("Calculon", 1.3),)),
        ),
    ),
    NamedSet(
        key="vtrain_one_node",
        name="vTrain, one node (2 to 8 GPUs)",
        kind=_TIME,
        holds=lambda row: _VTRAIN(row) and number_or_zero(row, "n_gpus") <= 8,
        goals=(
            Goal(measure=Measure.ERROR, value=8, others=(("Calculon", 38.9), ("vTrain", 8.4))),
            Goal(measure=Measure.REGRET, value=3, others=(("Calculon", 10.0),)),
        ),
    ),
    NamedSet(
        key="bloom_search",
        name="the search for BLOOM's layout (384 A100)",
        kind=_TIME,
        holds=lambda row: _BLOOM(row) and number_or_zero(row, "n_gpus") == 384,
        goals=(
            Goal(measure=Measure.ERROR, value=12, others=(("Calculon", 32.6),)),
            Goal(measure=Measure.REGRET, value=3, others=(("Calculon", 7.7),)),
            Goal(measure=Measure.SPEARMAN, value=0.7, others=(("Calculon", 0.11),)),
        ),
    ),
    NamedSet(
        key="megatron_papers",
        name="Megatron's papers",
        kind=_TIME,
        holds=_PAPERS,
        goals=(Goal(measure=Measure.ERROR, value=5),),
        note="two tables of arXiv:2104.04473 and one of arXiv:2205.05198",
    ),
    NamedSet(
        key="megatron_papers_own",
        name="Megatron's papers without DeepSpeed's ZeRO-3 runs",
        kind=_TIME,
        holds=lambda row: _PAPERS(row) and not row["framework"].startswith("DeepSpeed"),
        goals=(Goal(measure=Measure.ERROR, value=5),),
    ),
    NamedSet(
        key="korthikanti",
        name="table 5 of arXiv:2205.05198 alone",
        kind=_TIME,
        holds=_source("korthikanti-table5"),
        goals=(Goal(measure=Measure.ERROR, value=5, others=(("Calculon, all eight", 3.65),)),),
    ),
    NamedSet(
        key="nvidia_dense_bf16",
        name="NVIDIA, dense models in bf16 on H100",
        kind=_TIME,
        holds=_dense_bf16,
        goals=(Goal(measure=Measure.ERROR, value=8),),
    ),
    NamedSet(
        key="nvidia_moe_fp8",
        name="NVIDIA, experts or fp8, H100 to GB300",
        kind=_TIME,
        holds=_moe_or_fp8,
        goals=(Goal(measure=Measure.ERROR, value=15),),
    ),
    NamedSet(
        key="simumax_b200",
        name="SimuMax's eight B200",
        kind=_TIME,
        holds=_source("simumax-b200-real"),
        goals=(
            Goal(measure=Measure.ERROR, value=5, others=(("SimuMax", 5.6),)),
            Goal(measure=Measure.MEMORY, value=3, others=(("SimuMax", 0.46),)),
        ),
        note="SimuMax measured its kernels on the same machine",
    ),
    NamedSet(
        key="golden_memory",
        name="memory in Megatron-LM's functional tests",
        kind=_GOLDEN,
        holds=lambda _: True,
        goals=(Goal(measure=Measure.MEMORY, value=5),),
    ),
    NamedSet(
        key="collectives",
        name="collectives of 1 MB and more",
        kind=RowKind.COLLECTIVES,
        holds=lambda row: number_or_zero(row, "size_bytes") >= 1_000_000,
        goals=(Goal(measure=Measure.ERROR, value=15),),
    ),
)


def scored_sets(judged: Iterable[Judged]) -> Iterator[tuple[NamedSet, BothScores]]:
    """Every set that has rows in some files, with its scores."""
    files = list(judged)
    for each in SETS:
        pairs = [
            pair
            for file in files
            if file.file.kind is each.kind
            for pair in file.pairs
            if each.holds(pair[0].row)
        ]
        if pairs:
            yield each, both_scores(each.key, each.kind, pairs)
