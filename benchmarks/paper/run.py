"""``paper``: the experiments of the NEST paper on our cost model, as tables and pictures.

In a picture of Figures 5 to 7, throughput is relative to that of nest, a panel a model: lines are
ours and open circles the paper's, each over its own nest.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from benchmarks.paper import experiments
from benchmarks.paper.ablation import NUM_GPUS, research_words, table7_row
from benchmarks.paper.experiments import FigureRow, Gain, PlannerResult, Report, ratio
from benchmarks.paper.published import RULES, PaperJob, over
from nest_megatron.config.compose import compose
from nest_megatron.config.overrides import parse
from nest_megatron.config.request import request_of
from nest_megatron.errors import OK, UserInputError, nearest
from nest_megatron.files import require_folder, write_bytes
from nest_megatron.plain import to_plain
from nest_megatron.planner import Request
from nest_megatron.printing import print_to_stderr
from nest_megatron.report.charts import check_picture, render
from nest_megatron.report.console import show, show_json
from nest_megatron.report.tables import EdgelessTable, figure_columns, name_columns, word_columns
from nest_megatron.report.words import TERM_WORDS
from nest_megatron.research.comparison import NEST, Compared, compare
from nest_megatron.research.comparison_run import layout_lines
from nest_megatron.research.nest_dp.job import PaperOptimizer

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
    if as_json:
        show_json({**to_plain(report), "notes": list(notes(report))})
    else:
        show(paper_report(report))
    if chart is not None:
        draw_figure(report, chart)
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
            raise UserInputError("--model", model, limit, fix)

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
            ", ".join([*models, *map(str, num_gpus)]),
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
        print_to_stderr(f"{job.model} on {job.num_gpus} of {job.cluster}{size}")
    others = [name for name in planners if name != NEST]
    return {each.name: _outcome(each) for each in compare(request_for(job, overrides), others)}


def _outcome(compared: Compared) -> PlannerResult:
    plan = compared.plan
    return PlannerResult(
        iteration_time_s=None if plan is None else plan.predicted.iteration_time_s,
        layout=compared.reason if plan is None else " ".join(layout_lines(plan)),
        seconds=compared.search_s,
        worst_term=compared.worst_term or "",
        optimal=plan is not None and plan.search.certificate == "optimal",
    )


def request_for(job: PaperJob, overrides: Sequence[str] = ()) -> Request:
    """An experiment's job as every planner gets it; what the experiment fixes wins."""
    size = job.micro_batch_size
    fixed = [] if size is None else [f"train.micro_batch_size={size}"]
    batch = f"train.global_batch_size={GLOBAL_BATCH_SIZE}"
    return _request(job.model, job.cluster, job.num_gpus, (batch, *overrides, *fixed))


def _request(model: str, cluster: str, num_gpus: int, overrides: Sequence[str]) -> Request:
    where = (f"model={model}", f"cluster={cluster}", f"cluster.num_gpus={num_gpus}")
    nominal = ("memory.max_oom_chance=0.5", "search.tie_percent=0")  # the paper's know no other
    return request_of(compose(parse([*where, *nominal, *overrides])))


def _zero_plans(model: str, *, overrides: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """For each optimizer its name, and what Table 7 has without and with ZeRO."""
    request = _request(model, experiments.FAT_TREE, NUM_GPUS, overrides)
    for optimizer in PaperOptimizer:
        row = table7_row(request.spec, request.cluster, request.settings, optimizer)
        yield optimizer.value, research_words(row.without), research_words(row.with_zero)


_NAMES = {
    "manual": "Manual",
    "mcmc": "MCMC",
    "alpa_e": "Alpa-E",
    "mist": "Mist",
    "phaze": "Phaze",
}
#: What holds for every experiment.
_COMMON = (
    "All planners are priced by one rule here: the cost model of `nest-megatron plan`, every "
    "network term in seconds where the traffic runs, memory with the optimizer's states in "
    "float32, stages cut as well as each method allows itself. In the artifact, links weigh a "
    "thousandth of the layers (seconds are added to milliseconds), the optimizer keeps no states, "
    "and a baseline's stages are priced last to first.",
    "The models are the published ones. The artifact traces the output projection into every "
    "layer, so that its Llama-3-70B has 152 billion parameters and wants more stages.",
    "Ours searches the micro batch, context, expert and virtual-stage degrees, ZeRO and "
    "recomputation as well; in the artifact they are inputs. All plans are such as Megatron "
    "launches: every replica has equally many stages, and every GPU works.",
)
_NOTE_2 = (
    "Ours is written as in Megatron (degrees of 1 left out, PP 4x7 with 7 virtual stages, MBS the "
    "micro batch), the other two as stages, replicas, tensor degree, sequence-parallel width, "
    "and for Mixtral expert and context width; Alpa's is its number of stages."
)
_NOTE_4 = (
    "Ours is the search alone, with its proof, on 1,024 GPUs; the paper gives minutes, profiling "
    "included, and the size is not among the published files. Mist stands here for its space "
    "(ZeRO, recomputation, micro batch, uneven stages on a flat network) searched exactly by our "
    "solver: its own time is that of a mixed-integer program."
)
_NOTE_7 = (
    "Research mode: the paper's recurrence and its account of memory, ZeRO on and off, GB read as "
    "GiB. A stage that needs ZeRO takes as many more devices as its degree, and they carry no "
    "samples of their own, as the paper has it. The catalogue's Llama-3-70B has 80 layers of 856 "
    "million parameters, and with SGD they fit without ZeRO; in the artifact each has the output "
    "projection as well, 1,906 million. With the artifact's own layers nothing fits without ZeRO, "
    "and with it 230 and 600 devices are enough, because each stage takes the first setting that "
    "fits where it stands (docs/recurrence.md, python benchmarks/recurrence.py)."
)


def notes(report: Report) -> Sequence[str]:
    """What explains a report's differences, one paragraph each."""
    if report.gains:
        return (*map(_about_gain, report.gains), *_COMMON)
    return {"table2": (_NOTE_2, *_COMMON), "table4": (_NOTE_4,), "table7": (_NOTE_7,)}[report.name]


def _about_gain(gain: Gain) -> str:
    """One paragraph on one baseline: here, in the artifact, in the paper, and why."""
    name = _NAMES[gain.planner]
    if gain.ours is None:
        return f"{name}: no job of this run has both plans."
    jobs = "1 job" if gain.jobs == 1 else f"{gain.jobs} jobs"
    paper = "" if gain.paper is None else f", {gain.paper:.2f}x in the paper"
    told = [f"{name}: {gain.ours:.2f}x here over {jobs}{paper}."]
    if gain.only_ours:
        told.append(f"It has no plan for {gain.only_ours} more.")
    if gain.artifact:
        shipped, one, best = (gain.artifact[rule] for rule in RULES)
        told.append(
            f"On the {gain.instances} recorded instances the artifact's plan gains {shipped:.2f}x "
            f"as shipped, {one:.2f}x when the baseline's stages are priced in the order of any "
            f"other plan, and {best:.2f}x when its degrees get the cuts that suit them best."
        )
    if gain.worst_terms:
        term, times = next(iter(gain.worst_terms.items()))
        told.append(f"Here it loses most in {TERM_WORDS.get(term, term)}, in {times} of them.")
    return " ".join(told)


def paper_report(report: Report) -> RenderableType:
    """The table, the gains of a figure, and why the columns differ."""
    parts: list[RenderableType] = [Text(report.title, style="bold")]
    if report.rows:
        heading = Text("\nGeometric-mean gain of nest over each planner\n")
        parts += [_figure(report.rows), heading, _gains(report.gains)]
    else:
        may_wrap = {"layout", "ours", "paper"}
        columns = ((word_columns if n in may_wrap else name_columns)(n) for n in report.head)
        table = EdgelessTable(*(column for (column,) in columns))
        for cells in report.cells:
            table.add_row(*cells, style="bold" if "nest" in cells else "")
        parts.append(table)
    parts.append(Text("\nWhy they differ\n"))
    parts += [Padding(Text(note), (0, 2, 1, 2)) for note in notes(report)]
    return Group(*parts)


def _figure(rows: Sequence[FigureRow]) -> RenderableType:
    """The rows of a figure, a block a job."""
    figures = figure_columns("ours", "artifact", "paper")
    table = EdgelessTable(*name_columns("planner"), *word_columns("layout"), *figures)
    for job, group in groupby(rows, key=lambda row: row.job):
        size = f", micro batch {job.micro_batch_size}" if job.micro_batch_size else ""
        table.add_row("", Text(f"{job.model}, {job.num_gpus} GPUs{size}", style="underline"))
        for row in group:
            ratios = map(ratio, (row.ours, row.artifact, row.paper))
            style = "bold" if row.planner == "nest" else ""
            table.add_row(row.planner, row.outcome.layout, *ratios, style=style)
    return table


def _gains(rows: Iterable[Gain]) -> RenderableType:
    """A row a baseline: ours, the artifact's by its own pricing and by one rule, the paper's."""
    heads = ("jobs", "ours", "least", "artifact", "one rule", "best cuts", "paper")
    table = EdgelessTable(*name_columns("planner"), *figure_columns(*heads))
    for gain in rows:
        recorded = (gain.artifact.get(rule) for rule in RULES)
        values = (gain.ours, gain.least, *recorded, gain.paper)
        jobs = str(gain.jobs) + (f" (+{gain.only_ours})" if gain.only_ours else "")
        table.add_row(gain.planner, jobs, *map(ratio, values))
    return table


_COLOURS = {
    "manual": "#858b95",
    "mcmc": "#c98a00",
    "alpa_e": "#7d57b2",
    "mist": "#1f8a70",
    "phaze": "#b3364b",
    "nest": "#2f6fb7",
}
_WIDTH, _LEAST_WIDTH, _HEIGHT = 2.6, 6.5, 3.1


def check_figure(name: str, path: Path) -> None:
    """Refuse a picture that cannot be drawn, before the minutes that an experiment takes.

    Raises:
        UserInputError: for a table, another suffix, a missing folder, or without matplotlib.
    """
    if not name.startswith("figure"):
        raise UserInputError(
            "--chart", name, limit="it is a table", fix="Leave --chart out, or run a figure."
        )
    check_picture(path, "--chart")
    require_folder(path, "--chart")


def draw_figure(report: Report, path: Path) -> None:
    """Write a figure's picture.

    Raises:
        UserInputError: as ``check_figure``, or if the file cannot be written.
    """
    check_figure(report.name, path)
    models = list(dict.fromkeys(row.job.model for row in report.rows))
    size = (max(_LEAST_WIDTH, _WIDTH * len(models)), _HEIGHT)
    settings, draw = {"font.size": 8}, lambda figure: _draw(figure, report, models)
    write_bytes(path, render(draw, size, path.suffix, dpi=130, settings=settings))


def _draw(figure: Any, report: Report, models: Sequence[str]) -> None:
    figure.set_layout_engine("constrained")
    panels = figure.subplots(1, len(models), squeeze=False)[0]
    for axes, model in zip(panels, models, strict=True):
        _panel(axes, model, [row for row in report.rows if row.job.model == model])
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False)
    figure.suptitle(f"{report.title.partition(',')[0]}, over that of nest", fontsize=9)


def _panel(axes: Any, model: str, rows: Sequence[FigureRow]) -> None:
    by_size = len({row.job.num_gpus for row in rows}) == 1
    best = {row.job: row for row in rows if row.planner == "nest"}
    for planner in dict.fromkeys(row.planner for row in rows):
        mine = [row for row in rows if row.planner == planner]
        places = [_place(row, by_size) for row in mine]
        ours = [over(row.ours, best[row.job].ours) for row in mine]
        paper = [over(row.paper, best[row.job].paper) for row in mine]
        look = {"color": _COLOURS[planner]}
        axes.plot(*_seen(places, ours), marker=".", label=planner, **look)
        circles = {"marker": "o", "linestyle": "", "markerfacecolor": "none"}
        axes.plot(*_seen(places, paper), **circles, **look)
    ticks = sorted({_place(row, by_size) for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick}" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(0, 1.1)
    axes.set_title(model, fontsize=8)
    axes.set_xlabel("micro batch" if by_size else "GPUs")
    axes.grid(linewidth=0.3)


def _seen(places: Sequence[int], values: Sequence[float | None]) -> Any:
    found = [(x, y) for x, y in zip(places, values, strict=True) if y is not None]
    return [x for x, _ in found], [y for _, y in found]


def _place(row: FigureRow, by_size: bool) -> int:
    return (row.job.micro_batch_size or 1) if by_size else row.job.num_gpus
