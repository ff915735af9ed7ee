"""Predicted against measured step time on this machine's own cores: profile, plan, train, compare.

Run from the project's root, on a quiet machine with two cores and megatron-core::

    python benchmarks/cpu_end_to_end.py --out docs/accuracy/cpu_end_to_end.md

Two processes with one thread each time the pieces of a small GPT and gloo's collectives, both at
the same time. From these the cost model predicts the layouts of ``cpu_job.py``, and the planner
chooses among all that are legal. Then every layout is trained for some steps with megatron-core
over gloo. Nothing is fitted to the steps that were measured.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.cpu_job import (  # noqa: E402
    PRECISION,
    TRIAL,
    Figures,
    Trial,
    cluster_of,
    settings_of,
)
from benchmarks.cpu_ranks import (  # noqa: E402
    Call,
    Ran,
    on_two_ranks,
    others_share,
    slower_figures,
    slower_timings,
    step_seconds,
)
from benchmarks.cpu_report import Outcome, Row, as_document, as_markdown, as_text  # noqa: E402
from nest_megatron.cluster.records import Cluster  # noqa: E402
from nest_megatron.cost_model.settings import CostSettings  # noqa: E402
from nest_megatron.files import write_text  # noqa: E402
from nest_megatron.parallel.plan import ParallelPlan  # noqa: E402
from nest_megatron.planner import PlanRequest, estimate_plan, plan  # noqa: E402
from nest_megatron.profile.lookup import LayerTimes  # noqa: E402
from nest_megatron.profile.network import NetworkProfile  # noqa: E402
from nest_megatron.profile.records import LayerProfile, Machine, Timing, default_name  # noqa: E402
from nest_megatron.profile.store import FOLDER_VARIABLE, find_entry, record  # noqa: E402

CHOICE = "the planner's choice"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the machine told, before anything is predicted."""

    figures: Figures
    machine: Machine
    timings: tuple[Timing, ...]
    network: NetworkProfile


def measure(trial: Trial, folder: Path) -> Measured:
    """Time the pieces, the collectives and the cores."""
    calls = [Call("figures"), Call("pieces", (trial,)), Call("network", (trial,))]
    figures, pieces, networks = on_two_ranks(folder, calls)
    return Measured(
        figures=slower_figures(figures),
        machine=pieces[0][0],
        timings=slower_timings([timings for _, timings in pieces]),
        network=networks[0],
    )


def stored_times(trial: Trial, measured: Measured) -> LayerTimes:
    """The timings as a plan finds them: written to the store, and read from it."""
    name = default_name(measured.machine, trial.spec, PRECISION)
    record(
        LayerProfile(
            name=name,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            precision=PRECISION,
            note="in float32, which no number format of a plan stands for",
            machine=measured.machine,
            model=trial.spec,
            timings=measured.timings,
        )
    )
    return LayerTimes(spec=trial.spec, profiles=(find_entry(name).read(),))


def predicted(
    trial: Trial, cluster: Cluster, settings: CostSettings, times: LayerTimes
) -> tuple[dict[str, ParallelPlan], str]:
    """Every layout with its prediction, and the name of the planner's choice."""
    plans = {
        layout.name: estimate_plan(
            trial.spec,
            cluster,
            settings,
            layout.grid(trial.global_batch_size),
            layout.partition(trial.spec),
            times,
        )
        for layout in trial.layouts
    }
    found = plan(
        PlanRequest(
            spec=trial.spec,
            cluster=cluster,
            global_batch_size=trial.global_batch_size,
            settings=settings,
            space=trial.space(),
            times=times,
        )
    )
    assert isinstance(found, ParallelPlan), found
    return with_choice(plans, found)


def with_choice(
    plans: Mapping[str, ParallelPlan], found: ParallelPlan
) -> tuple[dict[str, ParallelPlan], str]:
    """The plans and the planner's choice, which may be one of them and then has its name."""
    for name, each in plans.items():
        if each.parallel == found.parallel and each.train == found.train:
            return {**plans, name: found}, name
    return {**plans, CHOICE: found}, CHOICE


def trained(
    trial: Trial, plans: Mapping[str, ParallelPlan], folder: Path
) -> tuple[dict[str, Row], Figures]:
    """Train every plan; what was seen beside what was predicted, and the cores' figures after."""
    calls = [Call("train", (each, trial.warm_up, trial.steps)) for each in plans.values()]
    *runs, figures = on_two_ranks(folder, [*(trial.rounds * calls), Call("figures")])
    rows = {
        name: _row(each, runs[index :: len(calls)])
        for index, (name, each) in enumerate(plans.items())
    }
    return rows, slower_figures(figures)


def _row(planned: ParallelPlan, turns: Sequence[Sequence[Ran]]) -> Row:
    """The quicker turn of a layout, and how far the slowest was from it."""
    seconds = [step_seconds(ranks) for ranks in turns]
    ranks = turns[seconds.index(min(seconds))]
    return Row(
        plan=planned,
        measured_s=min(seconds),
        spread=max(seconds) / min(seconds) - 1,
        others_share=others_share(ranks),
        memory_bytes=max(ran.memory_bytes for ran in ranks),
        loss=next(ran.loss for ran in ranks if ran.loss is not None),
    )


def run(trial: Trial, folder: Path) -> Outcome:
    """Measure, predict, train; the processes' files go into a folder."""
    started = datetime.now(UTC)
    measured = measure(trial, folder)
    settings = settings_of(measured.figures)
    cluster = cluster_of(measured.figures, measured.network, measured.machine.memory_bytes)
    times = stored_times(trial, measured)
    plans, choice = predicted(trial, cluster, settings, times)
    rows, after = trained(trial, plans, folder)
    return Outcome(
        trial=trial,
        machine=measured.machine,
        network=measured.network,
        figures=measured.figures,
        figures_after=after,
        optimizer_step_s=times.optimizer_step() or 0.0,
        rows=rows,
        choice=choice,
        started=started.isoformat(timespec="minutes"),
        seconds=(datetime.now(UTC) - started).total_seconds(),
    )


def main() -> None:
    """Run all and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print figures for other programs")
    parser.add_argument("--out", type=Path, help="write a page in Markdown")
    parser.add_argument("--keep", type=Path, help="keep the profile and all results in this folder")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cpu-end-to-end-") as scratch:
        folder = asked.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        os.environ[FOLDER_VARIABLE] = str(folder / "profiles")
        outcome = run(TRIAL, folder)
    print(json.dumps(as_document(outcome), indent=2) if asked.json else as_text(outcome))
    if asked.out:
        write_text(asked.out, as_markdown(outcome))


if __name__ == "__main__":
    main()
