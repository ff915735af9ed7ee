"""Predicted against measured step time on this machine's own cores: profile, plan, train, compare.

Run from the project's root, on a quiet machine with two cores and megatron-core::

    python benchmarks/cpu_end_to_end.py --out docs/accuracy/cpu_end_to_end.md

It takes six minutes on quiet cores, says on standard error what it has done, waits up to
``--patience`` in all for other processes to leave the cores, and ends after ``--max-seconds``.

Two processes with one thread each time gloo's collectives, and the blocks of a small GPT in turns
with real training of the layouts of ``cpu_job.py`` (megatron-core over gloo). From the blocks and
the collectives alone the cost model predicts every layout, and the planner chooses among all that
are legal. Nothing is fitted to the steps that were measured.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
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
from benchmarks.cpu_ranks import Call, Limits, Ran, memory_bytes, on_two_ranks  # noqa: E402
from benchmarks.cpu_report import Outcome, Row, as_document, as_markdown, as_text  # noqa: E402
from benchmarks.cpu_turns import (  # noqa: E402
    others_share,
    quicker_timings,
    slower_figures,
    slower_timings,
    step_seconds,
)
from nest_megatron.cluster.records import Cluster  # noqa: E402
from nest_megatron.cost_model.settings import CostSettings  # noqa: E402
from nest_megatron.files import write_text  # noqa: E402
from nest_megatron.layout.plan import ParallelPlan  # noqa: E402
from nest_megatron.planner import Request, estimate_for, plan  # noqa: E402
from nest_megatron.profile.lookup import LayerTimes  # noqa: E402
from nest_megatron.profile.records import LayerProfile, Machine, Timing, default_name  # noqa: E402
from nest_megatron.profile.session import tasks_of  # noqa: E402
from nest_megatron.profile.store import FOLDER_VARIABLE, find_entry, record  # noqa: E402

CHOICE = "the planner's choice"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """What was timed in turns.

    Args:
        timings: of the blocks.
        runs: of each layout, by name, every turn.
        figures: of the cores after all.
    """

    machine: Machine
    timings: tuple[Timing, ...]
    runs: dict[str, list[list[Ran]]]
    figures: Figures


def in_turns(
    trial: Trial, plans: Mapping[str, ParallelPlan], folder: Path, limits: Limits
) -> Turns:
    """Train the layouts, with some blocks timed before each.

    A core's speed drifts, and more when it was idle before: timed first, blocks would be faster
    than the same work is in training.
    """
    tasks = tasks_of(trial.spec, tuple(trial.shards()))
    shares = [tasks[index :: len(plans)] for index in range(len(plans))]
    turn = [
        call
        for (name, plan), share in zip(plans.items(), shares, strict=True)
        for call in (Call("blocks", (trial, share)), _training(trial, plan, name))
    ]
    *found, figures = on_two_ranks(folder, [*(trial.rounds * turn), Call("figures")], limits)
    blocks, runs, count = found[0::2], found[1::2], len(plans)
    turns = [
        [timing for ranks in blocks[first : first + count] for timing in _slower(ranks)]
        for first in range(0, len(blocks), count)
    ]
    return Turns(
        machine=blocks[0][0][0],
        timings=quicker_timings(turns),
        runs={name: runs[index::count] for index, name in enumerate(plans)},
        figures=slower_figures(figures),
    )


def _training(trial: Trial, plan: ParallelPlan, name: str) -> Call:
    return Call("train", (plan, trial.warm_up, trial.steps), name)


def _slower(ranks: Sequence[tuple[Machine, list[Timing]]]) -> tuple[Timing, ...]:
    return slower_timings([timings for _, timings in ranks])


def stored_times(trial: Trial, turns: Turns) -> LayerTimes:
    """The timings as a plan finds them: written to the store, and read from it."""
    name = default_name(turns.machine, trial.spec, PRECISION)
    record(
        LayerProfile(
            name=name,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            precision=PRECISION,
            note="in float32, which no number format of a plan stands for",
            machine=turns.machine,
            model=trial.spec,
            timings=turns.timings,
        )
    )
    return LayerTimes(spec=trial.spec, profiles=(find_entry(name).read(),))


def estimated(
    trial: Trial, cluster: Cluster, settings: CostSettings, times: LayerTimes | None
) -> dict[str, ParallelPlan]:
    """Every layout as a plan; what is launched does not depend on the times."""
    request = Request(
        spec=trial.spec,
        cluster=cluster,
        global_batch_size=trial.global_batch_size,
        settings=settings,
        times=times,
    )
    size, spec = trial.global_batch_size, trial.spec
    return {
        each.name: estimate_for(request, each.grid(size).with_stages(each.partition(spec)))
        for each in trial.layouts
    }


def chosen(
    trial: Trial, cluster: Cluster, settings: CostSettings, times: LayerTimes
) -> ParallelPlan:
    """What the planner makes of the job."""
    found = plan(
        Request(
            spec=trial.spec,
            cluster=cluster,
            global_batch_size=trial.global_batch_size,
            settings=settings,
            space=trial.space(),
            times=times,
            max_oom_chance=0.5,
            tie_percent=0.0,
        )
    )
    assert isinstance(found, ParallelPlan), found
    return found


def same_layout(plans: Mapping[str, ParallelPlan], found: ParallelPlan) -> str | None:
    """The name of the layout that a plan is, if it is one of these."""
    for name, each in plans.items():
        if each.layout == found.layout and each.train == found.train:
            return name
    return None


def row_of(planned: ParallelPlan, turns: Sequence[Sequence[Ran]]) -> Row:
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


def run(trial: Trial, folder: Path, limits: Limits | None = None) -> Outcome:
    """Measure, predict, train; the processes' files go into a folder.

    Raises:
        RuntimeError: if a rank failed, or the time was over.
    """
    limits = Limits() if limits is None else limits
    started = datetime.now(UTC)
    limits.tell("1. the cores and the network")
    figures, networks = on_two_ranks(folder, [Call("figures"), Call("network", (trial,))], limits)
    before, network = slower_figures(figures), networks[0]
    settings = settings_of(before)
    cluster = cluster_of(before, network, memory_bytes())
    limits.tell(f"2. blocks and {len(trial.layouts)} layouts in turns, {trial.rounds} times")
    turns = in_turns(trial, estimated(trial, cluster, settings, None), folder, limits)
    times = stored_times(trial, turns)
    plans, best = (f(trial, cluster, settings, times) for f in (estimated, chosen))
    name = same_layout(plans, best)
    if name is None:
        limits.tell("3. the planner's choice, which is none of the layouts")
        runs = on_two_ranks(folder, trial.rounds * [_training(trial, best, CHOICE)], limits)
        plans, turns.runs[CHOICE] = {**plans, CHOICE: best}, runs
    else:
        plans[name] = best  # which says how it was searched
    return Outcome(
        trial=trial,
        machine=turns.machine,
        network=network,
        figures=before,
        figures_after=turns.figures,
        optimizer_step_s=times.optimizer_step() or 0.0,
        rows={name: row_of(each, turns.runs[name]) for name, each in plans.items()},
        choice=name or CHOICE,
        started=started.isoformat(timespec="minutes"),
        seconds=(datetime.now(UTC) - started).total_seconds(),
    )


def main() -> None:
    """Run all and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print figures for other programs")
    parser.add_argument("--out", type=Path, help="write a page in Markdown")
    parser.add_argument("--keep", type=Path, help="keep the profile and all results in this folder")
    parser.add_argument(
        "--patience",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="time in all to wait while other processes are at work, and to repeat what they spoil",
    )
    parser.add_argument(
        "--max-seconds",
        type=float,
        default=1200.0,
        metavar="SECONDS",
        help="end after so long; six minutes are needed on quiet cores (1200)",
    )
    asked = parser.parse_args()
    limits = Limits(patience_s=asked.patience, max_seconds=asked.max_seconds)
    limits.tell = lambda text: print(
        f"{time.monotonic() - limits.started:6.0f} s  {text}", file=sys.stderr, flush=True
    )
    with tempfile.TemporaryDirectory(prefix="cpu-end-to-end-") as scratch:
        folder = asked.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        os.environ[FOLDER_VARIABLE] = str(folder / "profiles")
        try:
            outcome = run(TRIAL, folder, limits)
        except RuntimeError as error:
            sys.exit(f"cpu_end_to_end: {error}")
    print(json.dumps(as_document(outcome), indent=2) if asked.json else as_text(outcome))
    if asked.out:
        write_text(asked.out, as_markdown(outcome))


if __name__ == "__main__":
    main()
