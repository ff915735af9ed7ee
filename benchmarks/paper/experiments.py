"""Figures 5 to 7 and Tables 2, 4 and 7 of the paper, of planners that are given."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from benchmarks.paper import published
from benchmarks.paper.published import PaperJob, over
from nest_megatron.units import Seconds, format_seconds

#: The models of the paper, in its order.
MODELS = ("bert_large", "llama2_7b", "llama3_70b", "mixtral_8x7b", "gpt3_175b")
FAT_TREE, SPINE_LEAF = "tpuv4_fat_tree", "h100_spine_leaf"
_BASE, _OURS = "manual", "nest"
_ON_FAT_TREE = (_BASE, "mcmc", "alpa_e", "phaze", _OURS)
_TABLE2_GPUS, _TABLE4_GPUS = 512, 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerResult:
    """What one planner's plan for a job costs on the shared cost model; ``None``: it found none.

    Args:
        layout: its degrees, or why there is no plan.
        seconds: that its search took.
        worst_term: the term in which it loses most against ours; empty for ours.
    """

    iteration_time_s: Seconds | None
    layout: str
    seconds: Seconds
    worst_term: str = ""
    optimal: bool = False


#: Plans a job by each of some planners; which jobs to run.
Runner = Callable[[PaperJob, Sequence[str]], Mapping[str, PlannerResult]]
Keep = Callable[[PaperJob], bool]
#: Plans a model in Table 7's memory: for each optimizer its name, and in words the plan without
#: and with ZeRO, or why there is none.
ZeroRunner = Callable[[str], Iterable[tuple[str, str, str]]]
_Outcomes = Mapping[PaperJob, Mapping[str, PlannerResult]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureRow:
    """One planner on one job, throughputs over the figure's base; ``None``: no plan or figure."""

    job: PaperJob
    planner: str
    ours: float | None
    artifact: float | None
    paper: float | None
    outcome: PlannerResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Geometric-mean throughput of our plan over a baseline's.

    Args:
        ours: over the jobs for which both have a plan, ``jobs`` of them.
        only_ours: jobs for which the baseline has none.
        least: the smallest gain of a job.
        artifact: of the artifact's own plan on its recorded instances, by how the baseline is
            priced: ``as_shipped``, by ``one_rule``, with its ``best_cuts``.
        worst_terms: how often each term is the one in which the baseline loses most.
    """

    planner: str
    jobs: int
    only_ours: int
    ours: float | None
    least: float | None
    artifact: Mapping[str, float]
    instances: int
    paper: float | None
    worst_terms: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """An experiment as run here, beside what was printed.

    Args:
        head: names of the columns of ``cells``; the last three are ours, the artifact's, the
            paper's.
        rows: what a figure draws; empty for a table.
    """

    name: str
    title: str
    head: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]
    rows: tuple[FigureRow, ...] = ()
    gains: tuple[Gain, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Figure:
    """Which jobs a figure shows, and by which planners.

    Args:
        same_size: throughputs are relative to Manual on as many GPUs, else on the fewest.
    """

    title: str
    cluster: str = FAT_TREE
    planners: tuple[str, ...] = _ON_FAT_TREE
    models: tuple[str, ...] = MODELS
    num_gpus: tuple[int, ...] = (64, 128, 256, 512, 1024)
    micro_batch_sizes: tuple[int | None, ...] = (None,)
    same_size: bool = False

    def jobs(self) -> Iterator[PaperJob]:
        """In the order of the figure."""
        for model, gpus, size in product(self.models, self.num_gpus, self.micro_batch_sizes):
            yield PaperJob(model=model, cluster=self.cluster, num_gpus=gpus, micro_batch_size=size)


FIGURES = {
    "figure5": _Figure(
        title="Figure 5: throughput on the fat tree, relative to Manual at the smallest size it "
        "runs at"
    ),
    "figure6": _Figure(
        title="Figure 6: throughput by micro batch on 256 devices of the fat tree, relative to "
        "Manual at the smallest it runs at",
        models=("bert_large", "llama2_7b", "llama3_70b"),
        num_gpus=(256,),
        micro_batch_sizes=(1, 2, 4, 8),
    ),
    "figure7": _Figure(
        title="Figure 7: throughput on the H100 spine-leaf cluster, relative to Manual on as many "
        "GPUs",
        cluster=SPINE_LEAF,
        planners=(_BASE, "mcmc", "mist", "phaze", _OURS),
        same_size=True,
    ),
}


def figure(name: str, run: Runner, keep: Keep = lambda job: True) -> Report:
    """The throughput of each planner over the jobs of a figure that are to run."""
    wanted = FIGURES[name]
    outcomes = {job: run(job, wanted.planners) for job in filter(keep, wanted.jobs())}
    rows = tuple(_rows(name, outcomes))
    return Report(
        name=name,
        title=wanted.title,
        head=("model", "GPUs", "micro batch", "planner", "layout", "ours", "artifact", "paper"),
        cells=tuple(map(_cells, rows)),
        rows=rows,
        gains=tuple(_gain(planner, wanted.cluster, outcomes) for planner in wanted.planners[:-1]),
    )


def _rows(name: str, outcomes: _Outcomes) -> Iterator[FigureRow]:
    wanted = FIGURES[name]
    printed = {job.key: found for job, found in published.figure(name, wanted.cluster).items()}
    recorded = {cell.job.key: cell for cell in _recorded(wanted.cluster)}
    for job, planned in outcomes.items():
        base = job if wanted.same_size else _base(job, outcomes)
        step = None if base is None else outcomes[base][_BASE].iteration_time_s
        cell = recorded.get(job.key)
        base_cell = cell if wanted.same_size else _base_cell(job, recorded.values())
        for planner in wanted.planners:
            outcome = planned[planner]
            yield FigureRow(
                job=job,
                planner=planner,
                ours=over(step, outcome.iteration_time_s),
                artifact=over(_shipped(cell, planner), _shipped(base_cell, _BASE)),
                paper=printed.get(job.key, {}).get(planner),
                outcome=outcome,
            )


def _shipped(cell: published.ArtifactCell | None, planner: str) -> float | None:
    return None if cell is None else cell.throughput(planner)


def _recorded(cluster: str) -> list[published.ArtifactCell]:
    return [cell for cell in published.artifact().values() if cell.job.cluster == cluster]


def _base(job: PaperJob, outcomes: _Outcomes) -> PaperJob | None:
    """The smallest job of a model for which Manual has a plan."""
    found = (
        other
        for other, planned in outcomes.items()
        if other.model == job.model and planned[_BASE].iteration_time_s is not None
    )
    return min(found, key=lambda other: other.key, default=None)


def _base_cell(
    job: PaperJob, cells: Iterable[published.ArtifactCell]
) -> published.ArtifactCell | None:
    """The artifact's, of the same size where the experiment fixes the micro batch."""
    found = (
        cell
        for cell in cells
        if cell.job.model == job.model
        and cell.throughput(_BASE) is not None
        and (cell.job.num_gpus == job.num_gpus or job.micro_batch_size is None)
    )
    return min(found, key=lambda cell: cell.job.key, default=None)


def _gain(planner: str, cluster: str, outcomes: _Outcomes) -> Gain:
    """How our plans compare with a baseline's over all jobs of an experiment."""
    gains: list[float] = []
    terms: Counter[str] = Counter()
    only_ours = 0
    for planned in outcomes.values():
        mine, other = planned[_OURS].iteration_time_s, planned[planner].iteration_time_s
        if mine is not None and other is not None:
            gains.append(other / mine)
            terms.update(filter(None, [planned[planner].worst_term]))
        elif mine is not None:
            only_ours += 1
    recorded = [
        [cell.gain(planner, rule) for rule in published.RULES] for cell in _recorded(cluster)
    ]
    priced = [found for found in recorded if None not in found]
    means = (geometric_mean(filter(None, column)) for column in zip(*priced, strict=True))
    return Gain(
        planner=planner,
        jobs=len(gains),
        only_ours=only_ours,
        ours=geometric_mean(gains),
        least=min(gains, default=None),
        artifact={rule: m for rule, m in zip(published.RULES, means, strict=False) if m},
        instances=len(priced),
        paper=published.gains(cluster).get(planner),
        worst_terms=dict(terms.most_common()),
    )


def geometric_mean(values: Iterable[float]) -> float | None:
    """The geometric mean, or ``None`` of nothing.

    >>> geometric_mean([1.0, 4.0])
    2.0
    """
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else None


def _cells(row: FigureRow) -> tuple[str, ...]:
    job = row.job
    ratios = map(ratio, (row.ours, row.artifact, row.paper))
    size = str(job.micro_batch_size or "")
    return (job.model, str(job.num_gpus), size, row.planner, row.outcome.layout, *ratios)


def ratio(value: float | None) -> str:
    """A ratio in a table."""
    return "" if value is None else f"{value:.2f}x"


def table2(run: Runner, keep: Keep = lambda job: True) -> Report:
    """The plans of each planner for 512 devices of the fat tree."""
    printed = {row["model"]: row for row in published.rows("table2")}
    degrees = {cell.job.key[:2]: cell.degrees for cell in reversed(_recorded(FAT_TREE))}
    cells = []
    for model in MODELS:
        job = PaperJob(model=model, cluster=FAT_TREE, num_gpus=_TABLE2_GPUS)
        if not keep(job):
            continue
        planned, recorded = run(job, _ON_FAT_TREE), degrees.get(job.key[:2])
        for planner in _ON_FAT_TREE:
            words = ", ".join(map(str, recorded)) if recorded and planner == _OURS else ""
            artifact = f"{{{words}}}" if words else ""
            paper = f"{{{printed[model][planner]}}}"
            cells.append((model, planner, planned[planner].layout, artifact, paper))
    return Report(
        name="table2",
        title="Table 2: plans on 512 devices of the fat tree",
        head=("model", "planner", "ours", "artifact", "paper"),
        cells=tuple(cells),
    )


def table4(run: Runner, keep: Keep = lambda job: True) -> Report:
    """How long Mist's and our search take, on the H100 cluster."""
    cells = []
    for row in published.rows("minutes"):
        job = PaperJob(model=row["model"], cluster=SPINE_LEAF, num_gpus=_TABLE4_GPUS)
        planners = ("mist", _OURS) if keep(job) else ()
        planned = run(job, planners) if planners else {}
        for planner in planners:
            ours = format_seconds(planned[planner].seconds)
            proof = "proven" if planned[planner].optimal else ""
            cells.append((row["model"], planner, proof, ours, "", f"{row[planner]} min"))
    return Report(
        name="table4",
        title="Table 4: time of the search",
        head=("model", "planner", "proof", "ours", "artifact", "paper"),
        cells=tuple(cells),
    )


def table7(run: ZeroRunner, keep: Keep = lambda job: True) -> Report:
    """Models in memory too small for them without ZeRO (appendix C.3)."""
    cells = []
    for row in published.rows("zero"):
        model, size = row["model"], int(row["memory_bytes"])
        if not keep(PaperJob(model=model, cluster=FAT_TREE, num_gpus=_TABLE4_GPUS)):
            continue
        memory = f"{size / 1e9:g} GB" if size >= 1e9 else f"{size / 1e6:g} MB"
        printed = f"{row['num_devices']} devices, {{{row['degrees']}}}; {row['zero']}"
        for optimizer, without, with_zero in run(model):
            job = f"{model}\n{memory}, {optimizer}"
            cells.append((f"{job}\nno ZeRO", without, "", "no plan"))
            cells.append((f"{job}\nZeRO", with_zero, "", printed))
    return Report(
        name="table7",
        title="Table 7: ZeRO where memory is short",
        head=("job", "ours", "artifact", "paper"),
        cells=tuple(cells),
    )
