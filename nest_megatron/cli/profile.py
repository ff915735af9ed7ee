"""``nest-megatron profile``: times a model's layers, and the network, on the devices at hand."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nest_megatron.cli.command_kinds import FOLDER, NEXT, OUTPUT, Command, json_option
from nest_megatron.cli.complete import complete_override
from nest_megatron.cli.profile_tasks import Session, session
from nest_megatron.config.compose import compose
from nest_megatron.config.overrides import parse, refuse_sweeps
from nest_megatron.config.request import read_spec
from nest_megatron.errors import OK, UserInputError
from nest_megatron.megatron_core.installed import require_megatron
from nest_megatron.megatron_core.stage import Where
from nest_megatron.megatron_core.substitutes import quiet
from nest_megatron.model.implementation import Implementation
from nest_megatron.model.spec import ModelFamily, TransformerSpec
from nest_megatron.plain import to_plain
from nest_megatron.profile import network, store
from nest_megatron.profile.installed import installed_versions
from nest_megatron.profile.network import NetworkProfile
from nest_megatron.profile.ranks import Ranks, leave, measure_network, meet, ranks
from nest_megatron.profile.records import LayerProfile, Timing, default_name
from nest_megatron.report.console import say, show, show_json

if TYPE_CHECKING:
    from nest_megatron.profile.layer_timer import Measuring
    from nest_megatron.profile.session import Task


@click.command(
    cls=Command,
    examples=(
        "nest-megatron profile model=llama3_8b train.seq_length=128 --max-seconds 5",
        "torchrun --nproc-per-node 8 -m nest_megatron.profile model=llama3_70b cluster=dgx_h100"
        + NEXT
        + "cluster.num_gpus=64",
    ),
)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=complete_override)
@click.option("--config-dir", type=FOLDER, help="A folder with your own model/ or cluster/ files.")
@click.option(
    "--max-seconds",
    type=float,
    default=120.0,
    show_default=True,
    help="Budget; shapes that the best plans need come first, the rest is interpolated.",
)
@click.option(
    "--implementation",
    type=click.Choice(["local", "transformer_engine"]),
    help="Megatron's --transformer-impl; Transformer Engine's where it is installed.",
)
@click.option("--cpu", "on_cpu", is_flag=True, help="Time on the CPU, although there is a GPU.")
@click.option("--again", is_flag=True, help="Time what is stored already, too.")
@click.option(
    "--collectives/--no-collectives",
    default=True,
    help="With several ranks: time the network between them, with a quarter of the budget.",
)
@click.option("--network-out", type=OUTPUT, help="Write the network's figures here.")
@json_option
def profile(**options: Any) -> int:
    """Time a model's layers on the devices that are here, and the network between them.

    In one process, or under torchrun: each rank times its share of the shapes on its own GPU.
    Timings are stored (`nest-megatron profiles`) and used by plans for the same device and layers.
    """
    return run_profile(**options)


#: Share of the budget that the network gets where there are several ranks.
_NETWORK_SHARE = 0.25


def run_profile(
    *,
    overrides: Sequence[str],
    config_dir: Path | None,
    max_seconds: float,
    implementation: str | None,
    on_cpu: bool,
    again: bool,
    collectives: bool,
    network_out: Path | None,
    as_json: bool,
) -> int:
    """Time the layer blocks of a model, and the collectives between the ranks."""
    started = time.monotonic()
    if not max_seconds > 0:
        raise UserInputError(
            "--max-seconds", value=max_seconds, limit="it must be above 0", fix="Give the seconds."
        )
    settings = parse(overrides, config_dir)
    refuse_sweeps(settings)
    composed = compose(settings, config_dir)
    spec = _plannable(read_spec(composed.config))
    require_megatron("profile")
    here = ranks()
    times_network = collectives and here.size > 1
    budget = max_seconds * (1 - _NETWORK_SHARE if times_network else 1.0)
    measuring = _measuring(here, implementation, on_cpu=on_cpu)
    job = session(composed, spec, here, measuring, again=again)
    timings, skipped = _time(job, measuring, started + budget)
    measured = None
    if here.size > 1:
        everyone, hosts = meet(measuring.where, (timings, skipped))
        timings = [timing for part, _ in everyone for timing in part]
        skipped = [words for _, part in everyone for words in part]
        if times_network:
            left = max_seconds - (time.monotonic() - started)
            measured = measure_network(hosts, left)
        leave()
    if here.rank == 0:
        profile = store.record(_profile(job, timings)) if timings else None
        seconds = time.monotonic() - started
        written = None if measured is None else _keep_network(measured, network_out)
        _tell(job, profile, timings, skipped, seconds, measured, written, as_json=as_json)
    return OK


def _plannable(spec: TransformerSpec) -> TransformerSpec:
    if spec.family is not ModelFamily.GPT:
        raise UserInputError(
            "model",
            value=spec.name,
            limit="only the layers of GPT-like models are built here",
            fix="Profile a GPT-like model; BERT is planned from data sheets.",
        )
    return spec


def _measuring(here: Ranks, implementation: str | None, *, on_cpu: bool) -> Measuring:
    """Where and how this process measures; its device is chosen here."""
    import torch

    with quiet():
        from nest_megatron.profile.layer_timer import Measuring

    where = Where.GPU if torch.cuda.is_available() and not on_cpu else Where.CPU
    if where is Where.GPU:
        torch.cuda.set_device(here.local_rank % torch.cuda.device_count())
    else:
        cores = len(os.sched_getaffinity(0))  # more threads than these wait for one another
        torch.set_num_threads(max(1, cores // here.local_size))
    has_engine = where is Where.GPU and "transformer_engine" in installed_versions()
    chosen = Implementation.TRANSFORMER_ENGINE if has_engine else Implementation.LOCAL
    if implementation is not None:
        chosen = Implementation(implementation)
    if chosen is Implementation.TRANSFORMER_ENGINE and not has_engine:
        raise UserInputError(
            "--implementation",
            value=chosen.value,
            limit="it needs a GPU and the package transformer-engine",
            fix="Use local.",
        )
    return Measuring(where=where, implementation=chosen)


def _profile(job: Session, timings: Sequence[Timing]) -> LayerProfile:
    return LayerProfile(
        name=default_name(job.machine, job.spec, job.precision),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        precision=job.precision,
        machine=job.machine,
        model=job.spec,
        timings=tuple(timings),
    )


def _time(job: Session, measuring: Measuring, until: float) -> tuple[list[Timing], list[str]]:
    """Time this process's tasks; each timing is stored at once, so that none is lost."""
    from nest_megatron.profile.session import run

    skipped: list[str] = []

    def skip(task: Task, why: str) -> None:
        shard = task.shard
        words = f"{task.block} at tp {shard.tensor_model_parallel_size}"
        skipped.append(f"{words}, micro batch {shard.micro_batch_size}: {why}")

    timings: list[Timing] = []
    with quiet(), _status(job) as report:
        for timing in run(job.spec, job.tasks, measuring, until=until, on_skip=skip):
            timings.append(timing)
            store.record(_profile(job, [timing]))
            report(len(timings))
    return timings, skipped


@contextlib.contextmanager
def _status(job: Session) -> Iterator[Callable[[int], None]]:
    """A line on rank 0's terminal that says how far it is."""
    if job.ranks.rank or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True).status("timing layers") as status:
        yield lambda done: status.update(f"timing layers: {done} of {len(job.tasks)} shapes")


def _keep_network(measured: NetworkProfile, out: Path | None) -> Path:
    """Write the network's profile where it was asked for, or beside the layer profiles."""
    if out is None:
        folder = store.profiles_folder() / "networks"
        folder.mkdir(parents=True, exist_ok=True)
        out = folder / f"{measured.name}.yaml"
    network.write(measured, out)
    return out


def _tell(
    job: Session,
    profile: LayerProfile | None,
    timings: Sequence[Timing],
    skipped: Sequence[str],
    seconds: float,
    measured: NetworkProfile | None,
    written: Path | None,
    *,
    as_json: bool,
) -> None:
    wanted = job.num_shapes
    num_known = len(job.known - {timing.shape for timing in timings})
    left = wanted - num_known - len(timings) - len(skipped)
    if as_json:
        show_json(
            {
                "profile": None if profile is None else profile.name,
                "seconds": seconds,
                "measured": [to_plain(timing) for timing in timings],
                "known": num_known,
                "skipped": list(skipped),
                "left_to_interpolate": left,
                "network": None if measured is None else to_plain(measured),
                "network_file": None if written is None else str(written),
            }
        )
        return
    from nest_megatron.report.profile_tables import timings_table

    if timings:
        show(timings_table(timings))
    stored = f", {num_known} were stored already" if num_known else ""
    later = f", {left} are left to interpolate" if left else ""
    say(f"{len(timings)} of {wanted} shapes timed in {seconds:.0f} s{stored}{later}.")
    for words in skipped:
        say(f"Not timed: {words}.")
    if profile is not None:
        device = "this CPU" if job.machine.is_cpu else job.machine.device_name
        say(f"Profile {profile.name} is of {device}; `nest-megatron profiles show {profile.name}`.")
    if measured is not None and written is not None:
        from nest_megatron.report.network_tables import levels_table, profile_lines

        show(profile_lines(measured), levels_table(measured.fits))
        say(f"The network is in {written}; `nest-megatron network import {written} --cluster NAME")
        say("--out measured.yaml` makes a cluster of it.")
