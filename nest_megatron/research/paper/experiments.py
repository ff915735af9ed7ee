"""``paper``: the experiments of the NEST paper on our cost model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from nest_megatron.config.compose import compose
from nest_megatron.config.overrides import parse
from nest_megatron.config.request import request_of
from nest_megatron.errors import OK, UserInputError, nearest
from nest_megatron.plain import to_plain
from nest_megatron.planner import PlanRequest
from nest_megatron.report.console import show, show_json
from nest_megatron.research.comparison import NEST, Compared, compare
from nest_megatron.research.nest_dp.ablation import NUM_GPUS, table7_row
from nest_megatron.research.nest_dp.job import PaperOptimizer
from nest_megatron.research.nest_dp.plan import research_words
from nest_megatron.research.paper import figures, tables
from nest_megatron.research.paper.outcome import PlannerResult, Report
from nest_megatron.research.paper.published import PaperJob
from nest_megatron.research.report.comparison import layout_words

#: Sequences of one optimizer step in every experiment of the paper.
GLOBAL_BATCH_SIZE = 4096
EXPERIMENTS: Mapping[str, Callable[..., Report]] = {
    "table2": tables.table2,
    "figure5": figures.figure5,
    "figure6": figures.figure6,
    "figure7": figures.figure7,
    "table4": tables.table4,
    "table7": tables.table7,
}


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
        from nest_megatron.research.report.paper_chart import check_figure

        check_figure(name, chart)
    report = experiment(name, models=models, num_gpus=num_gpus, overrides=overrides)
    if chart is not None:
        from nest_megatron.research.report.paper_chart import draw_figure

        draw_figure(report, chart)
    if as_json:
        from nest_megatron.research.report.paper_notes import notes

        show_json({**to_plain(report), "notes": list(notes(report))})
        return OK
    from nest_megatron.research.report.paper_tables import paper_report

    show(paper_report(report))
    return OK


def experiment(
    name: str,
    *,
    models: Sequence[str] = (),
    num_gpus: Sequence[int] = (),
    overrides: Sequence[str] = (),
) -> Report:
    """An experiment's report.

    Args:
        models, num_gpus: the jobs to keep; all if none are named.
        overrides: settings of every job, under those of the experiment.

    Raises:
        UserInputError: for a model that is in none, or if no job is left.
    """
    known = sorted({*figures.MODELS, "gpt3_35b"})
    for model in models:
        if model not in known:
            fix = nearest(model, known)
            limit = "the paper's models are " + ", ".join(known)
            raise UserInputError("--model", value=model, limit=limit, fix=fix)

    def keep(job: PaperJob) -> bool:
        return job.model in (models or [job.model]) and job.num_gpus in (num_gpus or [job.num_gpus])

    run = _zero_runner(overrides) if name == "table7" else _runner(overrides)
    report = EXPERIMENTS[name](run, keep)
    if not report.cells:
        raise UserInputError(
            name,
            value=", ".join([*models, *map(str, num_gpus)]),
            limit="no job of this experiment is left",
            fix="Name a model and a number of GPUs that it has, or none.",
        )
    return report


def _runner(
    overrides: Sequence[str],
) -> Callable[[PaperJob, Sequence[str]], Mapping[str, PlannerResult]]:
    def run(job: PaperJob, planners: Sequence[str]) -> Mapping[str, PlannerResult]:
        fixed = job.micro_batch_size
        size = "" if fixed is None else f", micro batch {fixed}"
        if sys.stderr.isatty():
            print(f"{job.model} on {job.num_gpus} of {job.cluster}{size}", file=sys.stderr)
        request = request_for(job, overrides)
        others = [name for name in planners if name != NEST]
        return {each.name: _outcome(each) for each in compare(request, others)}

    return run


def request_for(job: PaperJob, overrides: Sequence[str] = ()) -> PlanRequest:
    """An experiment's job as every planner gets it; what the experiment fixes wins."""
    fixed = job.micro_batch_size
    settings = [
        f"model={job.model}",
        f"cluster={job.cluster}",
        f"cluster.num_gpus={job.num_gpus}",
        f"train.global_batch_size={GLOBAL_BATCH_SIZE}",
        *overrides,
        *([] if fixed is None else [f"train.micro_batch_size={fixed}"]),
    ]
    return request_of(compose(parse(settings)))


def _zero_runner(overrides: Sequence[str]) -> tables.ZeroRunner:
    def run(model: str) -> Sequence[tables.ZeroOutcome]:
        where = (f"cluster={figures.FAT_TREE}", f"cluster.num_gpus={NUM_GPUS}")
        composed = compose(parse([f"model={model}", *where, *overrides]))
        request = request_of(composed)
        rows = [
            table7_row(request.spec, request.cluster, request.settings, optimizer)
            for optimizer in (PaperOptimizer.SGD, PaperOptimizer.ADAM)
        ]
        return [
            tables.ZeroOutcome(
                optimizer=row.optimizer.value,
                without=research_words(row.without),
                with_zero=research_words(row.with_zero),
            )
            for row in rows
        ]

    return run


def _outcome(compared: Compared) -> PlannerResult:
    plan = compared.plan
    return PlannerResult(
        iteration_time_s=None if plan is None else plan.predicted.iteration_time_s,
        layout=compared.reason if plan is None else " ".join(layout_words(plan)),
        seconds=compared.search_s,
        worst_term=compared.worst_term or "",
        optimal=plan is not None and plan.search.certificate == "optimal",
    )
