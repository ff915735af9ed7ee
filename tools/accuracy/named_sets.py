"""Sets of rows with a goal, and what other predictors reach on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from nest_megatron.plain import Name
from nest_megatron.report.tables import figure
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
    """What is to be reached, and what others reached on the same rows."""

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


def _goal(measure: Measure, value: float, **others: float) -> Goal:
    return Goal(measure=measure, value=value, others=tuple(others.items()))


def _set(
    key: str,
    name: str,
    holds: Callable[[Row], bool],
    *goals: Goal,
    kind: RowKind = RowKind.THROUGHPUT,
    note: str = "",
) -> NamedSet:
    return NamedSet(key=key, name=name, kind=kind, holds=holds, goals=goals, note=note)


_ERROR, _REGRET = Measure.ERROR, Measure.REGRET
#: Calculon and vTrain on the same rows: shared figures of ``baseline_errors.csv`` and their papers.
SETS: tuple[NamedSet, ...] = (
    _set(
        "vtrain_many_nodes",
        "vTrain, several nodes (64 GPUs and more)",
        lambda row: _VTRAIN(row) and number_or_zero(row, "n_gpus") >= 64,
        _goal(_ERROR, 8, Calculon=19.6, vTrain=14.7),
        _goal(_REGRET, 1, Calculon=1.3),
    ),
    _set(
        "vtrain_one_node",
        "vTrain, one node (2 to 8 GPUs)",
        lambda row: _VTRAIN(row) and number_or_zero(row, "n_gpus") <= 8,
        _goal(_ERROR, 8, Calculon=38.9, vTrain=8.4),
        _goal(_REGRET, 3, Calculon=10.0),
    ),
    _set(
        "bloom_search",
        "the search for BLOOM's layout (384 A100)",
        lambda row: _BLOOM(row) and number_or_zero(row, "n_gpus") == 384,
        _goal(_ERROR, 12, Calculon=32.6),
        _goal(_REGRET, 3, Calculon=7.7),
        _goal(Measure.SPEARMAN, 0.7, Calculon=0.11),
    ),
    _set(
        "megatron_papers",
        "Megatron's papers",
        _PAPERS,
        _goal(_ERROR, 5),
        note="two tables of arXiv:2104.04473 and one of arXiv:2205.05198",
    ),
    _set(
        "megatron_papers_own",
        "Megatron's papers without DeepSpeed's ZeRO-3 runs",
        lambda row: _PAPERS(row) and not row["framework"].startswith("DeepSpeed"),
        _goal(_ERROR, 5),
    ),
    _set(
        "korthikanti",
        "table 5 of arXiv:2205.05198 alone",
        _source("korthikanti-table5"),
        _goal(_ERROR, 5, **{"Calculon, all eight": 3.65}),
    ),
    _set(
        "nvidia_dense_bf16", "NVIDIA, dense models in bf16 on H100", _dense_bf16, _goal(_ERROR, 8)
    ),
    _set("nvidia_moe_fp8", "NVIDIA, experts or fp8, H100 to GB300", _moe_or_fp8, _goal(_ERROR, 15)),
    _set(
        "simumax_b200",
        "SimuMax's eight B200",
        _source("simumax-b200-real"),
        _goal(_ERROR, 5, SimuMax=5.6),
        _goal(Measure.MEMORY, 3, SimuMax=0.46),
        note="SimuMax measured its kernels on the same machine",
    ),
    _set(
        "golden_memory",
        "memory in Megatron-LM's functional tests",
        lambda _: True,
        _goal(Measure.MEMORY, 5),
        kind=RowKind.MEMORY_GOLDEN,
    ),
    _set(
        "collectives",
        "collectives of 1 MB and more",
        lambda row: number_or_zero(row, "size_bytes") >= 1_000_000,
        _goal(_ERROR, 15),
        kind=RowKind.COLLECTIVES,
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
