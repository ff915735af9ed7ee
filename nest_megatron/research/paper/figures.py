"""Figures 5 to 7: the throughput of each planner over models and cluster sizes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from nest_megatron.research.paper import published
from nest_megatron.research.paper.outcome import (
    FigureRow,
    Gain,
    PlannerResult,
    Report,
    Runner,
    geometric_mean,
)
from nest_megatron.research.paper.published import Cell, PaperJob

#: The models of the paper, in its order.
MODELS = ("bert_large", "llama2_7b", "llama3_70b", "mixtral_8x7b", "gpt3_175b")
#: Cluster sizes of Figures 5 and 7.
NUM_GPUS = (64, 128, 256, 512, 1024)
FAT_TREE, SPINE_LEAF = "tpuv4_fat_tree", "h100_spine_leaf"
_BASE = "manual"

Keep = Callable[[PaperJob], bool]


def figure5(run: Runner, keep: Keep = lambda job: True) -> Report:
    """Five models on 64 to 1,024 devices of the fat tree.

    Args:
        keep: which jobs to run.
    """
    planners = ("manual", "mcmc", "alpa_e", "phaze", "nest")
    jobs = [PaperJob(model=m, cluster=FAT_TREE, num_gpus=n) for m in MODELS for n in NUM_GPUS]
    return _report(
        "figure5",
        "Figure 5: throughput on the fat tree, relative to Manual at the smallest size it runs at",
        filter(keep, jobs),
        planners,
        run,
        published.figure("figure5", FAT_TREE),
    )


def figure6(run: Runner, keep: Keep = lambda job: True) -> Report:
    """Micro batches of 1 to 8 sequences on 256 devices of the fat tree."""
    planners = ("manual", "mcmc", "alpa_e", "phaze", "nest")
    models = ("bert_large", "llama2_7b", "llama3_70b")
    jobs = [
        PaperJob(model=model, cluster=FAT_TREE, num_gpus=256, micro_batch_size=size)
        for model in models
        for size in (1, 2, 4, 8)
    ]
    return _report(
        "figure6",
        "Figure 6: throughput by micro batch on 256 devices of the fat tree, relative to Manual "
        "at the smallest it runs at",
        filter(keep, jobs),
        planners,
        run,
        published.figure("figure6", FAT_TREE),
    )


def figure7(run: Runner, keep: Keep = lambda job: True) -> Report:
    """Five models on 64 to 1,024 H100s of the spine-leaf cluster.

    The authors print ratios of three jobs, to Manual on the same devices.
    """
    planners = ("manual", "mcmc", "mist", "phaze", "nest")
    jobs = [PaperJob(model=m, cluster=SPINE_LEAF, num_gpus=n) for m in MODELS for n in NUM_GPUS]
    return _report(
        "figure7",
        "Figure 7: throughput on the H100 spine-leaf cluster, relative to Manual on as many GPUs",
        filter(keep, jobs),
        planners,
        run,
        published.h100_ratios(),
        same_size=True,
    )


def _report(
    name: str,
    title: str,
    jobs: Iterable[PaperJob],
    planners: Sequence[str],
    run: Runner,
    printed: Sequence[Cell],
    *,
    same_size: bool = False,
) -> Report:
    outcomes = {job: run(job, planners) for job in jobs}
    rows = tuple(_rows(outcomes, planners, printed, same_size=same_size))
    cluster = next(iter(outcomes)).cluster if outcomes else FAT_TREE
    baselines = [planner for planner in planners if planner != "nest"]
    gains = tuple(_gain(planner, cluster, outcomes) for planner in baselines)
    return Report(
        name=name,
        title=title,
        head=("model", "GPUs", "micro batch", "planner", "layout", "ours", "artifact", "paper"),
        cells=tuple(_cells(row) for row in rows),
        rows=rows,
        gains=gains,
    )


def _rows(
    outcomes: Mapping[PaperJob, Mapping[str, PlannerResult]],
    planners: Sequence[str],
    printed: Sequence[Cell],
    *,
    same_size: bool,
) -> Iterator[FigureRow]:
    by_job = {_key(cell.job): cell for cell in printed}
    for job, planned in outcomes.items():
        base = job if same_size else _base(job, outcomes)
        artifact_base = job if same_size else _artifact_base(job)
        cell = by_job.get(_key(job))
        for planner in planners:
            yield FigureRow(
                job=job,
                planner=planner,
                ours=_ours(outcomes, base, planned[planner]),
                artifact=_artifact(job, artifact_base, planner),
                paper=None if cell is None else cell.throughputs.get(planner),
                outcome=planned[planner],
            )


def _key(job: PaperJob) -> tuple[str, int, int]:
    """Experiments that fix no micro batch were printed for 1."""
    return job.model, job.num_gpus, job.micro_batch_size or 1


def _base(
    job: PaperJob, outcomes: Mapping[PaperJob, Mapping[str, PlannerResult]]
) -> PaperJob | None:
    """The smallest job of a model for which Manual has a plan."""
    same = [other for other in outcomes if other.model == job.model]
    found = [other for other in same if outcomes[other][_BASE].iteration_time_s is not None]
    return min(found, key=_key, default=None)


def _ours(
    outcomes: Mapping[PaperJob, Mapping[str, PlannerResult]],
    base: PaperJob | None,
    outcome: PlannerResult,
) -> float | None:
    if base is None or outcome.iteration_time_s is None:
        return None
    whole = outcomes[base][_BASE].iteration_time_s
    return None if whole is None else whole / outcome.iteration_time_s


def _artifact_base(job: PaperJob) -> PaperJob | None:
    found = [
        cell.job
        for cell in published.artifact().values()
        if (cell.job.model, cell.job.cluster) == (job.model, job.cluster)
        and _as_shipped(cell, _BASE) is not None
        and (cell.job.num_gpus == job.num_gpus or job.micro_batch_size is None)
    ]
    return min(found, key=_key, default=None)


def _artifact(job: PaperJob, base: PaperJob | None, planner: str) -> float | None:
    cells = {_key(cell.job): cell for cell in _on(job.cluster)}
    cell, whole = cells.get(_key(job)), None if base is None else cells.get(_key(base))
    if cell is None or whole is None:
        return None
    value, reference = _as_shipped(cell, planner), _as_shipped(whole, _BASE)
    return None if value is None or reference is None else value / reference


def _as_shipped(cell: published.ArtifactCell, planner: str) -> float | None:
    """A planner's throughput as the artifact prices it."""
    if planner == "nest":
        return cell.nest
    return cell.baselines.get(planner, {}).get("as_shipped")


def _on(cluster: str) -> list[published.ArtifactCell]:
    return [cell for cell in published.artifact().values() if cell.job.cluster == cluster]


def _gain(
    planner: str, cluster: str, outcomes: Mapping[PaperJob, Mapping[str, PlannerResult]]
) -> Gain:
    """How our plans compare with a baseline's over all jobs of an experiment."""
    gains: list[float] = []
    only_ours = 0
    terms: Counter[str] = Counter()
    for planned in outcomes.values():
        mine, other = planned["nest"].iteration_time_s, planned[planner].iteration_time_s
        if mine is not None and other is not None:
            gains.append(other / mine)
            terms.update(filter(None, [planned[planner].worst_term]))
        elif mine is not None:
            only_ours += 1
    recorded = [
        {rule: cell.gain(planner, rule) for rule in published.RULES} for cell in _on(cluster)
    ]
    priced = [gains for gains in recorded if None not in gains.values()]
    return Gain(
        planner=planner,
        jobs=len(gains),
        only_ours=only_ours,
        ours=geometric_mean(gains),
        least=min(gains, default=None),
        artifact=_means(priced),
        instances=len(priced),
        paper=published.gains(cluster).get(planner),
        worst_terms=dict(terms.most_common()),
    )


def _means(gains: Sequence[Mapping[str, float | None]]) -> dict[str, float]:
    """The geometric mean by rule."""
    means = {rule: geometric_mean(g[rule] or math.nan for g in gains) for rule in published.RULES}
    return {rule: mean for rule, mean in means.items() if mean is not None}


def _cells(row: FigureRow) -> tuple[str, ...]:
    job = row.job
    size = "" if job.micro_batch_size is None else str(job.micro_batch_size)
    ratios = [_ratio(value) for value in (row.ours, row.artifact, row.paper)]
    return (job.model, str(job.num_gpus), size, row.planner, row.outcome.layout, *ratios)


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"
