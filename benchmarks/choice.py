"""What the default choice gives up against the fastest plan that rather starts, and what it stands.

Run from the project's root with a file of measured runs (``nest-megatron validate --help``)::

    python benchmarks/choice.py throughput.csv --every 4 --out docs/published_choices.md

For jobs that NVIDIA published, as ``expert_layouts.py`` reads them, the nominal plan (the fastest
that rather starts than not) and the default one are searched and compared with each other and with
the published layout. Then, for some of the jobs, the world is made different from what was priced,
and both plans are priced there beside the best plan of that world.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.expert_layouts import job_name, layout  # noqa: E402
from benchmarks.expert_search import Published, fastest, published_runs, space_of  # noqa: E402
from nest_megatron.cluster.records import Cluster  # noqa: E402
from nest_megatron.cost_model.estimate import estimate  # noqa: E402
from nest_megatron.cost_model.model import CostModel  # noqa: E402
from nest_megatron.cost_model.peak_limit import out_of_memory  # noqa: E402
from nest_megatron.cost_model.settings import CostSettings  # noqa: E402
from nest_megatron.cost_model.uncertainty import (  # noqa: E402
    Predictive,
    predictive,
    probability_faster,
)
from nest_megatron.errors import UserInputError  # noqa: E402
from nest_megatron.files import write_text  # noqa: E402
from nest_megatron.layout.plan import ParallelPlan  # noqa: E402
from nest_megatron.planner import Request, plan  # noqa: E402
from tools.markdown import table  # noqa: E402

#: A gain above this is doubted, and a chance from which it counts as sure.
GAIN, SURE = 0.1, 0.9
#: Goals: share of jobs with a sure gain, and what the default may give up, per cent.
MOST_SURE_PCT, MOST_GIVEN_UP_PCT = 5.0, 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What a job runs on."""

    cluster: Cluster
    settings: CostSettings


def _slower_compute(world: World) -> World:
    slowdown = 1.1 * world.settings.compute_slowdown
    return dataclasses.replace(
        world, settings=dataclasses.replace(world.settings, compute_slowdown=slowdown)
    )


def _slower_network(world: World) -> World:
    inside, *outside = world.cluster.levels
    halved = (
        dataclasses.replace(level, bandwidth_bytes_per_s=level.bandwidth_bytes_per_s / 2)
        for level in outside
    )
    return dataclasses.replace(
        world, cluster=dataclasses.replace(world.cluster, levels=(inside, *halved))
    )


def _imbalanced(world: World) -> World:
    return dataclasses.replace(
        world, settings=dataclasses.replace(world.settings, expert_imbalance=1.5)
    )


def _less_memory(world: World) -> World:
    device = world.cluster.accelerator
    device = dataclasses.replace(device, memory_bytes=int(0.95 * device.memory_bytes))
    return dataclasses.replace(
        world, cluster=dataclasses.replace(world.cluster, accelerator=device)
    )


WORLDS: Mapping[str, Callable[[World], World]] = {
    "compute 10 % slower": _slower_compute,
    "network between nodes half as fast": _slower_network,
    "experts 1.5 times imbalanced": _imbalanced,
    "5 % of memory gone": _less_memory,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Both choices for a published job.

    Args:
        gain: chance that the default plan is faster than the published layout by ``GAIN``.
        risks: chances of the nominal and of the default plan to run out of memory.
    """

    run: Published
    nominal: ParallelPlan
    default: ParallelPlan
    gain: float
    risks: tuple[float, float]

    @property
    def given_up_pct(self) -> float:
        """By how much the default's predicted step is longer than the nominal one's."""
        return 100.0 * (_seconds(self.default) / _seconds(self.nominal) - 1.0)

    @property
    def predicted_gain_pct(self) -> float:
        """By how much the published layout is predicted to be slower than the default plan."""
        return 100.0 * (self.run.prediction.iteration_time_s / _seconds(self.default) - 1.0)


def _seconds(found: ParallelPlan) -> float:
    return found.predicted.iteration_time_s


def world_of(run: Published) -> World:
    """The world that a published job is priced in."""
    return World(cluster=run.job.cluster, settings=run.job.settings)


#: The fastest plan that rather starts than not, whatever it takes to run it.
NOMINAL = {"max_oom_chance": 0.5, "tie_percent": 0.0}


def planned(run: Published, world: World, seconds: float, **rule: float) -> ParallelPlan | None:
    """The plan of a rule for a job in some world; ``None`` where none is legal or found in time."""
    asked = Request(
        spec=run.job.spec,
        cluster=world.cluster,
        settings=world.settings,
        global_batch_size=run.prediction.layout.global_batch_size,
        space=space_of(run),
        max_seconds=seconds,
        **rule,
    )
    try:
        found = plan(asked)
    except UserInputError:
        return None
    return found if isinstance(found, ParallelPlan) else None


def chosen(run: Published, seconds: float) -> Chosen | None:
    """Both choices for a job; ``None`` where nothing is found."""
    world = world_of(run)
    nominal = planned(run, world, seconds, **NOMINAL)
    default = planned(run, world, seconds)
    if nominal is None or default is None:
        return None
    told = run.prediction
    model = CostModel(run.job.spec, world.cluster, world.settings)
    published = predictive(model, told.layout, told.iteration_time_s)
    ours = _step(model, default)
    gain = probability_faster(ours, published, 1.0 - 1.0 / (1.0 + GAIN))
    risks = _risk(model, nominal), _risk(model, default)
    return Chosen(run=run, nominal=nominal, default=default, gain=gain, risks=risks)


def _step(model: CostModel, found: ParallelPlan) -> Predictive:
    return predictive(model, found.layout, _seconds(found))


def _risk(model: CostModel, found: ParallelPlan) -> float:
    """Chance that a plan runs out of memory in the world of a model."""
    priced = estimate(model, found.layout)
    peak = max(stage.peak_memory_bytes for stage in priced.stages)
    return out_of_memory(model, found.layout, peak)


def slower_pct(run: Published, world: World, best_s: float, found: ParallelPlan) -> float:
    """By how much a plan is slower than the best one of a world; infinite if it does not start."""
    model = CostModel(run.job.spec, world.cluster, world.settings)
    if _risk(model, found) > 0.5:
        return math.inf
    priced_s = estimate(model, found.layout).iteration_time_s
    return 100.0 * (priced_s / best_s - 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stand:
    """What both choices cost in another world, in per cent of its best plan's step."""

    run: Published
    world: str
    nominal_pct: float
    default_pct: float
    layout_changes: bool


def stands(each: Chosen, seconds: float) -> Iterator[Stand]:
    """Both choices of a job in every other world that concerns it."""
    for name, change in WORLDS.items():
        if "experts" in name and not each.run.job.spec.is_moe:
            continue
        world = change(world_of(each.run))
        best = planned(each.run, world, seconds, **NOMINAL)
        if best is None:
            continue
        yield Stand(
            run=each.run,
            world=name,
            nominal_pct=slower_pct(each.run, world, _seconds(best), each.nominal),
            default_pct=slower_pct(each.run, world, _seconds(best), each.default),
            layout_changes=best.layout.dims != each.nominal.layout.dims,
        )


COMMAND = "python benchmarks/choice.py {file} --every {every} --worlds {worlds}"
HEAD = """\
# The default choice for published jobs

Written on {today} by `{command}`.

{jobs} of the pretraining jobs that NVIDIA publishes with their layout, one in {every}
([expert_layouts.md](expert_layouts.md) has them all). Nominal: the fastest plan that rather starts
than not (`memory.max_oom_chance=0.5 search.tie_percent=0`). Default: what is planned where nothing
is said ([choice.md](choice.md)).

* The default gives up **{given_up:.1f} %** of predicted step against the nominal plan in the mean,
  {most:.1f} % at most, more than {limit:g} % in {above} of {jobs} jobs (goal: none). For it the
  mean chance to run out of memory falls from {nominal_risk:.0f} to {default_risk:.1f} %.
* Its gain over the published layout is above {gain:.0f} % with a chance of {sure:.0f} in 10 in
  **{doubted} of {jobs}** jobs (goal: at most {share:g} %); by its prediction alone in {alone}.
"""


def document(
    found: Sequence[Chosen], worlds: Sequence[Stand], options: Mapping[str, object]
) -> str:
    """The page.

    Args:
        options: that the command was given.
    """
    given_up = [each.given_up_pct for each in found]
    lines = [
        HEAD.format(
            today=date.today(),
            command=f"{COMMAND.format(**options)} --out docs/published_choices.md",
            every=options["every"],
            jobs=len(found),
            given_up=statistics.fmean(given_up),
            most=max(given_up),
            limit=MOST_GIVEN_UP_PCT,
            above=sum(each > MOST_GIVEN_UP_PCT for each in given_up),
            nominal_risk=100 * statistics.fmean(each.risks[0] for each in found),
            default_risk=100 * statistics.fmean(each.risks[1] for each in found),
            gain=100 * GAIN,
            sure=10 * SURE,
            doubted=sum(each.gain >= SURE for each in found),
            share=MOST_SURE_PCT,
            alone=sum(each.predicted_gain_pct > 100 * GAIN for each in found),
        ),
        *_worlds(worlds),
        *_jobs(found),
    ]
    return "\n".join(lines) + "\n"


def _worlds(worlds: Sequence[Stand]) -> Iterator[str]:
    if not worlds:
        return
    yield "## Where the world is not as it was priced\n"
    yield "Both plans priced in another world, against the best plan of that world. slower: by how"
    yield "many per cent, the mean over plans that start, and at most. layout changes: jobs whose"
    yield "best plan has other degrees there. do not start: plans that more likely than not run out"
    yield "of memory there.\n"
    rows = []
    for name in WORLDS:
        mine = [each for each in worlds if each.world == name]
        if mine:
            nominal, default = (
                [getattr(each, field) for each in mine] for field in ("nominal_pct", "default_pct")
            )
            changed = sum(each.layout_changes for each in mine)
            rows.append((name, str(len(mine)), str(changed), *_means(nominal), *_means(default)))
    head = ("world", "jobs", "layout changes", "nominal slower %", "at most", "do not start")
    yield table((*head, "default slower %", "at most", "do not start"), rows, numeric=8)
    yield ""


def _means(values: Sequence[float]) -> tuple[str, str, str]:
    started = [each for each in values if math.isfinite(each)]
    failed = str(len(values) - len(started))
    if not started:
        return "", "", failed
    return f"{statistics.fmean(started):.1f}", f"{max(started):.1f}", failed


def _jobs(found: Sequence[Chosen]) -> Iterator[str]:
    yield "## Every job\n"
    yield "given up: predicted step of the default over the nominal plan's. gain: predicted step of"
    yield "the published layout over the default's, and the chance that it is really above 10 %."
    yield "out of memory: the chances of the nominal and of the default plan.\n"
    rows = [
        (
            each.run.row["row_id"],
            job_name(each.run.row),
            layout(each.run.prediction.layout),
            layout(each.default.layout),
            f"{each.given_up_pct:.1f}",
            " → ".join(f"{100 * risk:.0f}" for risk in each.risks),
            f"{each.predicted_gain_pct:+.1f}",
            f"{100 * each.gain:.0f} %",
        )
        for each in found
    ]
    yield table(_JOB_HEAD, rows)


_JOB_HEAD = (
    *("row", "job", "published", "default", "given up %", "out of memory %"),
    *("gain %", "chance"),
)


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, metavar="THROUGHPUT.CSV")
    parser.add_argument("--out", type=Path, metavar="FILE.md", help="write the table here")
    parser.add_argument("--seconds", type=float, default=30.0, help="of search for each plan")
    parser.add_argument("--every", type=int, default=1, help="look at every n-th job only")
    parser.add_argument("--worlds", type=int, default=5, help="other worlds for every n-th of them")
    options = parser.parse_args()
    found: list[Chosen] = []
    worlds: list[Stand] = []
    runs = fastest(published_runs(options.file))[:: options.every]
    for number, run in enumerate(runs):
        each = chosen(run, options.seconds)
        if each is None:
            print(f"{run.row['row_id']} no plan", flush=True)
            continue
        found.append(each)
        text = f"given up {each.given_up_pct:.1f} %, gain {each.predicted_gain_pct:+.1f} %"
        print(f"{number + 1}/{len(runs)} {run.row['row_id']} {text}, {each.gain:.2f}", flush=True)
        if number % options.worlds == 0:
            worlds += stands(each, options.seconds)
    text = document(
        found,
        worlds,
        {"file": options.file.name, "every": options.every, "worlds": options.worlds},
    )
    print(text.partition("\n## Every job")[0])
    if options.out:
        write_text(options.out, text)


if __name__ == "__main__":
    main()
