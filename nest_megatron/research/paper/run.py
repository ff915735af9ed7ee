"""``paper``: the experiments of the NEST paper on our cost model."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from nest_megatron.config.compose import compose
from nest_megatron.config.overrides import parse
from nest_megatron.config.request import request_of
from nest_megatron.errors import OK, UserInputError, nearest
from nest_megatron.plain import to_plain
from nest_megatron.planner import PlanRequest
from nest_megatron.report.console import show, show_json
from nest_megatron.research.comparison import NEST, Compared, compare
from nest_megatron.research.nest_dp.job import PaperOptimizer
from nest_megatron.research.nest_dp.run import NUM_GPUS, research_words, table7_row
from nest_megatron.research.paper import experiments
from nest_megatron.research.paper.experiments import PlannerResult, Report
from nest_megatron.research.paper.published import PaperJob
from nest_megatron.research.report.comparison import layout_words
from nest_megatron.research.report.paper import check_figure, draw_figure, notes, paper_report

#: Sequences of one optimizer step in every experiment of the paper.
GLOBAL_BATCH_SIZE = 4096


def run_paper(
    name: str,
    *,
    models: Sequence[str],
    num_gpus: Sequence[int],
    overrides: Sequence[str],
    chart: Path | None,
    as_json: bool,
) -> int:
    """Run one experiment, or the part of it that is asked for."""
    if chart is not None:
        check_figure(name, chart)
    report = experiment(name, models=models, num_gpus=num_gpus, overrides=overrides)
    if chart is not None:
        draw_figure(report, chart)
    if as_json:
        show_json({**to_plain(report), "notes": list(notes(report))})
    else:
        show(paper_report(report))
    return OK


def experiment(
    name: str,
    *,
    models: Sequence[str] = (),
    num_gpus: Sequence[int] = (),
    overrides: Sequence[str] = (),
) -> Report:
    """An experiment's report, of all jobs or of some models and sizes, with settings of every job.

    Raises:
        UserInputError: for a model that is in none, or if no job is left.
    """
    known = sorted({*experiments.MODELS, "gpt3_35b"})
    for model in models:
        if model not in known:
            limit, fix = "the paper's models are " + ", ".join(known), nearest(model, known)
            raise UserInputError("--model", value=model, limit=limit, fix=fix)

    def keep(job: PaperJob) -> bool:
        return job.model in (models or [job.model]) and job.num_gpus in (num_gpus or [job.num_gpus])

    run = partial(_plans, overrides=overrides)
    if name == "table7":
        report = experiments.table7(partial(_zero_plans, overrides=overrides), keep)
    elif name in experiments.FIGURES:
        report = experiments.figure(name, run, keep)
    else:
        report = {"table2": experiments.table2, "table4": experiments.table4}[name](run, keep)
    if not report.cells:
        raise UserInputError(
            name,
            value=", ".join([*models, *map(str, num_gpus)]),
            limit="no job of this experiment is left",
            fix="Name a model and a number of GPUs that it has, or none.",
        )
    return report


def _plans(
    job: PaperJob, planners: Sequence[str], *, overrides: Sequence[str]
) -> Mapping[str, PlannerResult]:
    """A job by each of the planners."""
    size = "" if job.micro_batch_size is None else f", micro batch {job.micro_batch_size}"
    if sys.stderr.isatty():
        print(f"{job.model} on {job.num_gpus} of {job.cluster}{size}", file=sys.stderr)
    others = [name for name in planners if name != NEST]
    return {each.name: _outcome(each) for each in compare(request_for(job, overrides), others)}


def _outcome(compared: Compared) -> PlannerResult:
    plan = compared.plan
    return PlannerResult(
        iteration_time_s=None if plan is None else plan.predicted.iteration_time_s,
        layout=compared.reason if plan is None else " ".join(layout_words(plan)),
        seconds=compared.search_s,
        worst_term=compared.worst_term or "",
        optimal=plan is not None and plan.search.certificate == "optimal",
    )


def request_for(job: PaperJob, overrides: Sequence[str] = ()) -> PlanRequest:
    """An experiment's job as every planner gets it; what the experiment fixes wins."""
    size = job.micro_batch_size
    fixed = [] if size is None else [f"train.micro_batch_size={size}"]
    batch = f"train.global_batch_size={GLOBAL_BATCH_SIZE}"
    return _request(job.model, job.cluster, job.num_gpus, (batch, *overrides, *fixed))


def _request(model: str, cluster: str, num_gpus: int, overrides: Sequence[str]) -> PlanRequest:
    where = (f"model={model}", f"cluster={cluster}", f"cluster.num_gpus={num_gpus}")
    return request_of(compose(parse([*where, *overrides])))


def _zero_plans(model: str, *, overrides: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """For each optimizer its name, and what Table 7 has without and with ZeRO."""
    request = _request(model, experiments.FAT_TREE, NUM_GPUS, overrides)
    for optimizer in PaperOptimizer:
        row = table7_row(request.spec, request.cluster, request.settings, optimizer)
        yield optimizer.value, research_words(row.without), research_words(row.with_zero)
