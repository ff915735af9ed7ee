"""``nest-megatron profile``: times a model's layers, and the network, on the devices at hand."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from nest_megatron.cli.command_kinds import (
    FOLDER,
    NEXT,
    OUTPUT,
    PATH,
    Duration,
    command,
    flag,
    json_option,
    option,
    settings_argument,
)
from nest_megatron.cli.profile_request import (
    ProfileRequest,
    measuring_here,
    request_of_plan,
    request_of_settings,
)
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.settings import restored_settings
from nest_megatron.errors import BAD_INPUT, OK, UserInputError
from nest_megatron.files import now
from nest_megatron.megatron_core.stage import Where, require_megatron
from nest_megatron.megatron_core.substitutes import quiet
from nest_megatron.model.execution import Implementation
from nest_megatron.plain import frozen, to_plain
from nest_megatron.planner.to_measure import minutes, profile_s
from nest_megatron.printing import print_to_stderr
from nest_megatron.profile import network, store
from nest_megatron.profile.network import NETWORK_SHARE, NetworkProfile
from nest_megatron.profile.network_fit import require_least_squares
from nest_megatron.profile.records import (
    SHAPE,
    LayerProfile,
    Machine,
    Timing,
    default_name,
    fingerprint,
    fingerprint_of,
)
from nest_megatron.profile.session import (
    BUDGET_S,
    Ranks,
    Skipped,
    Task,
    gpu_uuid,
    leave,
    measure_network,
    meet,
    ranks,
    run,
    with_clocks,
)
from nest_megatron.report.console import say, show, show_json, status_line
from nest_megatron.units import counted

if TYPE_CHECKING:
    from nest_megatron.profile.layer_timer import Measuring

#: Shapes of one reason that are named.
_NAMED = 3
#: A block and how it is divided (``Timing.shape``).
Shape = tuple[object, ...]


@command(
    "nest-megatron profile model=llama3_8b train.seq_length=128 --max-seconds 5",
    "torchrun --nproc-per-node 8 -m nest_megatron.profile model=llama3_70b cluster=dgx_h100"
    f"{NEXT}cluster.num_gpus=64",
    "torchrun --nproc-per-node 8 -m nest_megatron.profile --for plan.yaml",
)
@settings_argument
@option("--config-dir", "A folder with your own model/ or cluster/ files.", FOLDER)
@option(
    "--for for_plan",
    "Time only what decides between the plan and the runners-up that could be faster.",
    PATH,
    metavar="PLAN.YAML",
    excludes=("KEY=VALUE --config-dir", "the plan says what is timed"),
)
@option(
    "--max-seconds",
    "Time limit, in seconds or with a unit (10min). Shapes that the best plans need come "
    "first; what is not reached is interpolated.",
    Duration("max_seconds"),
    default=BUDGET_S,
    show_default=True,
)
@option(
    "--implementation",
    "Megatron's --transformer-impl; by default transformer_engine where it is installed.",
    click.Choice(["local", "transformer_engine"]),
)
@flag("--cpu on_cpu", "Time on the CPU, even if there is a GPU.")
@flag("--again", "Time shapes again that are already stored.")
@option(
    "--collectives/--no-collectives",
    "With several ranks: time the network between them, in a quarter of the time limit.",
    default=True,
)
@option("--network-out", "Write the network's figures here.", OUTPUT)
@json_option
def profile(
    *,
    overrides: Sequence[str],
    config_dir: Path | None,
    for_plan: Path | None,
    max_seconds: float,
    implementation: str | None,
    on_cpu: bool,
    again: bool,
    collectives: bool,
    network_out: Path | None,
    as_json: bool,
) -> int:
    """Time a model's layers on this machine's devices, and the network between them.

    Runs in one process or under torchrun, where each rank times its share of the shapes on its
    GPU. Timings are stored (nest-megatron profiles); plans for the same device and layers use
    them. python -m nest_megatron.profile --from pretrain_gpt.py FLAGS times the layers of a
    training script.
    """
    if for_plan is None:
        request = request_of_settings(overrides, config_dir)
    else:
        request = request_of_plan(for_plan)
    require_megatron("profile")
    here = ranks()
    times_network = collectives and here.size > 1
    if network_out is not None and not times_network:
        limit = "no network is timed in one process, or with --no-collectives"
        raise UserInputError("--network-out", str(network_out), limit, "Leave it out.")
    if times_network:
        require_least_squares("profile", "; --no-collectives times the layers alone")
    measuring = measuring_here(here, implementation, on_cpu=on_cpu)
    tasks = tasks_of_rank(request, here, measuring, again=again)
    times_both = times_network and tasks.num_left > 0
    layers_s = max_seconds * (1 - NETWORK_SHARE if times_both else 1.0)
    if for_plan is not None:
        if not (tasks.shapes or times_network):
            raise UserInputError(
                "--for",
                str(for_plan),
                f"{request.names} have the same shapes of layers",
                "Time the network too, under torchrun with a process for each GPU; or run them: "
                "nest-megatron tune tells how long that takes.",
            )
        if here.rank == 0:
            less = " less a quarter" if times_both else ""
            print_to_stderr(tasks.words_before(f"{layers_s:g} s (--max-seconds{less})"))
    begun = time.monotonic()
    found = _time(tasks, measuring, begun + layers_s)
    if here.size > 1:
        until = begun + max_seconds if times_network else None
        found = _joined(found, here, measuring.where, until)
    if here.rank == 0:
        _tell(tasks, found, network_out, as_json=as_json)
    return BAD_INPUT if tasks.shapes and not (found.timings or tasks.known) else OK


class Timed(NamedTuple):
    """What was measured: by this process, or by all.

    Args:
        seconds: of the layers; ``network_s`` of the network.
    """

    timings: Sequence[Timing]
    skipped: Sequence[Skipped]
    seconds: float
    network: NetworkProfile | None = None
    network_s: float = 0.0


def _joined(found: Timed, here: Ranks, where: Where, until: float | None) -> Timed:
    """What all ranks have measured, and on rank 0 the network between them.

    Args:
        until: moment after which no collective is measured; ``None`` for no network.
    """
    everyone, hosts = meet(where, found, to_measure=until is not None)
    measured, begun = None, time.monotonic()
    if until is not None:
        left = max(1.0, until - begun)
        if here.rank == 0:
            print_to_stderr(
                f"Timing the network between {counted(here.size, 'process')}: no measurement "
                f"begins after {left:.0f} s (--max-seconds)."
            )
        measured = measure_network(hosts, left)
    network_s = time.monotonic() - begun
    leave()
    return Timed(
        timings=[timing for part in everyone for timing in part.timings],
        skipped=[one for part in everyone for one in part.skipped],
        seconds=max(part.seconds for part in everyone),
        network=measured,
        network_s=network_s,
    )


@frozen
class RankTasks:
    """What this process is to time.

    Args:
        shapes: that all ranks together should have.
        known: of these, those that were stored when this process looked.
    """

    request: ProfileRequest
    machine: Machine
    ranks: Ranks
    tasks: tuple[Task, ...]
    shapes: frozenset[Shape]
    known: frozenset[Shape]

    @property
    def num_left(self) -> int:
        """Shapes that are still to be timed, by all ranks."""
        return len(self.shapes - self.known)

    def words_before(self, ends: str) -> str:
        """What is timed of the layers in which plans differ, and for how long, before it begins.

        Args:
            ends: after which time none begins.
        """
        names, plan = self.request.names, self.request.plan
        if not self.shapes:
            return f"No layer differs in shape between {names}: no layer is timed."
        if not self.num_left:
            shapes = f"{counted(len(self.shapes), 'shape')} of layers in which {names} differ"
            return f"Stored already, and not timed again (--again): {shapes}."
        assert plan is not None
        model = CostModel(plan.model, plan.cluster, restored_settings(plan.provenance.settings))
        needed = "" if self.machine.is_cpu else f"{minutes(profile_s(model, self.tasks))}; "
        shapes = f"{counted(self.num_left, 'shape')} of layers in which {names} differ"
        return f"Timing {shapes}: {needed}none begins after {ends}."

    def profile(self, timings: Sequence[Timing]) -> LayerProfile:
        """The profile that timings make."""
        return LayerProfile(
            name=default_name(self.machine, self.request.spec, self.request.precision),
            created=now(),
            precision=self.request.precision,
            machine=with_clocks(self.machine),
            model=self.request.spec,
            timings=tuple(timings),
        )


def tasks_of_rank(
    request: ProfileRequest, here: Ranks, measuring: Measuring, *, again: bool
) -> RankTasks:
    """The tasks of one process: shapes that plans need first, and are not stored yet.

    Args:
        again: time what is stored already, too.
    """
    with quiet():
        from nest_megatron.profile.session import share_of, this_machine

        machine = this_machine(measuring.where, measuring.implementation)
    known = () if again else _known(machine, request)
    flash = measuring.implementation is Implementation.TRANSFORMER_ENGINE
    tasks = request.tasks(flash_attention=flash)
    shapes = frozenset(map(shape_of, tasks))
    stored = shapes.intersection(timing.shape for timing in known)
    # Shared out before what is known is left out: another rank may have stored its first by now.
    mine = share_of(tasks, here.rank, here.size)
    return RankTasks(
        request=request,
        machine=machine,
        ranks=here,
        tasks=tuple(task for task in mine if shape_of(task) not in stored),
        shapes=shapes,
        known=stored,
    )


def shape_of(task: Task) -> Shape:
    """What tells timings apart (``Timing.shape``)."""
    return (task.block, *(getattr(task.shard, name) for name in SHAPE))


def _known(machine: Machine, request: ProfileRequest) -> tuple[Timing, ...]:
    """Timings that the store holds already for this machine and these layers."""
    wanted = fingerprint(machine, request.spec, request.precision)
    entries = (each for each in store.stored_entries() if each.line("fingerprint") == wanted)
    profiles = (entry.read() for entry in entries)
    own = (each for each in profiles if not each.imported and fingerprint_of(each) == wanted)
    return tuple(timing for profile in own for timing in profile.timings)


def _time(own: RankTasks, measuring: Measuring, until: float) -> Timed:
    """Time this process's tasks; each timing is stored at once, so that none is lost."""
    begun = time.monotonic()
    timings: list[Timing] = []
    skipped: list[Skipped] = []
    on_cpu = own.machine.is_cpu
    alone = contextlib.nullcontext() if on_cpu else store.timing_alone(gpu_uuid())
    try:
        line = status_line("timing layers", is_shown=not own.ranks.rank)
        with quiet(), alone, line as tell:
            for found in run(own.request.spec, own.tasks, measuring, until=until):
                if isinstance(found, Skipped):
                    skipped.append(found)
                    continue
                timings.append(found)
                store.record(own.profile([found]))
                tell(f"timing layers: {len(timings)} of {len(own.tasks)} shapes")
    except KeyboardInterrupt as error:
        stored = f"{counted(len(timings), 'shape')} timed by this process, and stored"
        raise KeyboardInterrupt(stored) from error
    return Timed(timings=timings, skipped=skipped, seconds=time.monotonic() - begun)


def _tell(own: RankTasks, found: Timed, network_out: Path | None, *, as_json: bool) -> None:
    """Store what was measured, and print it."""
    timings, skipped, measured = found.timings, found.skipped, found.network
    profile = store.record(own.profile(timings)) if timings else None
    written = network_out
    if measured and written is None:
        folder = store.profiles_folder() / "networks"
        folder.mkdir(parents=True, exist_ok=True)
        written = folder / f"{measured.name}.yaml"
    num_known = len(own.known - {timing.shape for timing in timings})
    left = len(own.shapes) - num_known - len(timings) - len(skipped)
    stored_now = {timing.block for timing in _known(own.machine, own.request)}
    lacking = {shape[0] for shape in own.shapes} - stored_now  # nothing to interpolate from
    analytic = [block.value for block in own.request.spec.blocks if block in lacking]
    if as_json:
        show_json(
            {
                "profile": None if profile is None else profile.name,
                "seconds": found.seconds + found.network_s,
                "measured": to_plain(timings),
                "known": num_known,
                "skipped": [f"{one.task}: {one.reason}" for one in skipped],
                "not_begun": left,
                "analytic": analytic,
                "network": to_plain(measured),
                "network_file": None if measured is None else str(written),
            }
        )
        if measured and written:
            network.write(measured, written)
        return
    from nest_megatron.report.catalogue_tables import levels_table, profile_lines, timings_table
    from nest_megatron.report.terminal import notes_report

    if timings:
        show(timings_table(timings))
    if own.shapes:
        stored = f", {num_known} were stored already" if num_known else ""
        later = f", {left} were not begun in time (--max-seconds)" if left else ""
        shapes = f"{len(timings)} of {counted(len(own.shapes), 'shape')}"
        say(f"{shapes} timed in {found.seconds:.0f} s{stored}{later}.")
    reasons = defaultdict(list)
    for one in skipped:
        reasons[one.reason].append(one)
    for reason, those in reasons.items():
        more = f"; and {len(those) - _NAMED} more" if len(those) > _NAMED else ""
        named = "; ".join(str(one.task) for one in those[:_NAMED])
        say(f"Not timed ({reason}): {named}{more}.")
    if rest := ", ".join(analytic):
        say(f"No time of {rest} is stored: plans take it from data sheets or imported profiles.")
    if profile is not None:
        device = "this CPU" if own.machine.is_cpu else own.machine.device_name
        say(f"Profile {profile.name} is of {device}; `nest-megatron profiles show {profile.name}`.")
    if measured and written:
        say(f"The network was timed in {found.network_s:.0f} s.")
        table = [levels_table(measured.fits)] if measured.fits else []
        show(profile_lines(measured), *table, notes_report((*measured.notes, *measured.fit_notes)))
        network.write(measured, written)
        say(f"The network is in {written}; `nest-megatron network import {written} --cluster NAME")
        say("--out measured.yaml` makes a cluster of it.")
