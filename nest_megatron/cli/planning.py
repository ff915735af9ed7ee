"""The work of ``plan`` and ``estimate``."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nest_megatron.api import Plan, planned_command
from nest_megatron.api.jobs import estimate_job, estimate_typed, plan_job, plan_typed
from nest_megatron.cli.command_kinds import forced
from nest_megatron.cluster.placement import (
    Launcher,
    describe_groups,
    inner_groups,
    launch_file,
    launch_file_words,
    network_order,
    on_hosts,
    whole_groups,
)
from nest_megatron.cluster.records import Cluster
from nest_megatron.config.catalogue import read_cluster
from nest_megatron.config.compose import Settings, compose
from nest_megatron.config.defaults import with_defaults
from nest_megatron.config.overrides import Setting, parse, refuse_sweeps, split_launcher
from nest_megatron.config.space import require_all_gpus
from nest_megatron.cost_model.memory import within_error
from nest_megatron.errors import ENDED_EARLY, NOTHING_FITS, OK, UserInputError
from nest_megatron.files import check_output, is_standard_output, write_text
from nest_megatron.integrations.megatron_lm.attach import LAUNCHER
from nest_megatron.integrations.plan_job import TypedCommand
from nest_megatron.layout import plan_file
from nest_megatron.layout.plan import ParallelPlan, script_words
from nest_megatron.plain import frozen, to_plain
from nest_megatron.printing import print_to_stderr
from nest_megatron.report.console import command_lines, progress, say, show, show_json
from nest_megatron.report.failure import WITHOUT_PLAN
from nest_megatron.report.memory_words import plan_verdict
from nest_megatron.report.terminal import changes_table
from nest_megatron.units import Seconds, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

    from nest_megatron.integrations.typed_command import CommandPlan


@frozen
class Placement:
    """Hosts in the order of ranks, and the configuration of a job on them.

    Args:
        packed: the same job on hosts that fill the cluster's groups; ``None`` where these do.
        note: how the hosts lie.
    """

    hosts: tuple[str, ...]
    per_host: int
    composed: Settings
    packed: Settings | None
    note: str

    def compared(self, found: ParallelPlan, plan: Callable[[Settings], ParallelPlan]) -> str:
        """What a packed allocation would give beside this one.

        Args:
            found: the plan for the hosts.
            plan: makes the plan of another configuration.
        """
        if self.packed is None:
            return "Hosts side by side would give the same: these fill their groups."
        own = found.predicted.iteration_time_s
        try:
            best = plan(self.packed).predicted.iteration_time_s
        except WITHOUT_PLAN:
            return "For hosts side by side no plan was found; what they would give is not known."
        side_by_side = f"{format_seconds(best)} on hosts side by side in full groups"
        longer = f"{100.0 * (own / best - 1.0):+.1f} % for where these lie".replace("-0.0", "+0.0")
        return f"Predicted step {format_seconds(own)}; {side_by_side} ({longer})."

    def write(self, path: Path, launcher: Launcher) -> str:
        """Write the launcher's file, and say how it is read."""
        write_text(path, launch_file(launcher, self.hosts, self.per_host))
        name = "FILE" if is_standard_output(path) else shlex.quote(str(path))
        return launch_file_words(launcher, name, self.hosts, self.per_host)


def placed(composed: Settings, path: Path) -> Placement:
    """A job on the hosts of a file, at the size that they are.

    Raises:
        UserInputError: if the file cannot be read, or does not go with the cluster.
    """
    from nest_megatron.cluster.sources import read_hosts

    require_all_gpus(composed, "a job on the hosts of a file")
    topology, cluster = read_hosts(path), read_cluster(composed)
    hosts = tuple(topology.groups)
    groups = inner_groups(cluster, tuple(topology.groups.values()))
    given = on_hosts(cluster, groups)
    if "cluster.num_gpus" in composed.given and cluster.num_gpus != given.num_gpus:
        raise UserInputError(
            "cluster.num_gpus",
            cluster.num_gpus,
            f"{path} names {len(hosts)} hosts with {given.num_gpus} GPUs",
            "Leave it out: the hosts are the size of the job.",
        )
    names = [level.name for level in cluster.levels[1:-1]]
    note = f"{describe_groups(groups, names)}."
    pieces = ", ".join(
        f"{size} of level {name}" for name, size in zip(names, whole_groups(groups), strict=True)
    )
    if pieces and given.levels[-1] == cluster.levels[-1]:
        note += f" Priced as groups of {pieces}: no two ranks are nearer than that."
    packed = cluster.resized(given.num_gpus)
    return Placement(
        hosts=tuple(hosts[i] for i in network_order(groups)),
        per_host=given.launch_gpus_per_host,
        composed=_with_cluster(composed, given),
        packed=None if _crossed(given) == _crossed(packed) else _with_cluster(composed, packed),
        note=note,
    )


def _crossed(cluster: Cluster) -> list[tuple[str, int]]:
    """The levels that a job of the cluster's size has, with their groups."""
    sizes = cluster.group_sizes()
    count = next(i for i, size in enumerate(sizes, 1) if size >= cluster.num_gpus)
    return [(level.name, size) for level, size in zip(cluster.levels[:count], sizes, strict=False)]


def _with_cluster(composed: Settings, cluster: Cluster) -> Settings:
    return dataclasses.replace(
        composed, cluster=to_plain(cluster), given={**composed.given, "cluster.num_gpus": None}
    )


@frozen
class CommandOptions:
    """Options of the commands that price a job.

    Args:
        free: flags of the user's command that may change; ``estimate`` changes none.
    """

    overrides: Sequence[str]
    config_dir: Path | None
    from_command: str | tuple[str, ...] | None
    free: str = ""
    megatron_version: str | None
    strict: bool = False
    as_json: bool

    def command(self) -> TypedCommand | None:
        """The user's command, if there is one; its text may come from standard input."""
        text = sys.stdin.read() if self.from_command == "-" else self.from_command
        if text is None:
            return None
        free = tuple(name for name in self.free.split(",") if name.strip())
        return TypedCommand(text=text, free=free, version=self.megatron_version, strict=self.strict)


@frozen
class EstimateOptions(CommandOptions):
    """Options of ``estimate``."""

    full: bool


@frozen
class PlanOptions(CommandOptions):
    """Options of ``plan``.

    Args:
        begun_s: when the command began (``time.monotonic``), for ``search.max_seconds``.
    """

    multirun: bool
    shortlist: bool
    for_nodes: str | None
    hosts: Path | None
    hostfile: Path | None
    launcher: str
    for_gpus: str | None
    html: Path | None
    full: bool
    begun_s: Seconds | None

    def settings(self) -> tuple[tuple[Setting, ...], tuple[Setting, ...]]:
        """Settings of the job, or of the sweep, and of the launcher that runs it."""
        overrides, launcher = split_launcher(self.overrides)
        return parse(overrides), launcher

    def job_settings(self) -> tuple[Setting, ...]:
        """Settings of one job, which no launcher runs."""
        settings, launcher = self.settings()
        for setting in launcher:
            limit = "a launcher runs the jobs of a sweep, and one job is planned"
            fix = "Leave it out, or add --multirun."
            raise UserInputError(setting.key, setting.value, limit, fix)
        return settings


def run_plan(options: PlanOptions) -> int:
    """Plan one job and print the result."""
    composed = composed_settings(options.job_settings(), options.config_dir)
    placement = None if options.hosts is None else placed(composed, options.hosts)
    composed = composed if placement is None else placement.composed
    command = options.command()
    found, parts = _planned(composed, options, command)
    if placement is not None:
        compared = placement.compared(
            found.record, lambda packed: _planned(packed, options, command)[0].record
        )
        notes = (*found.record.notes, placement.note, compared)  # in its file, too
        record = dataclasses.replace(found.record, notes=notes)
        found = dataclasses.replace(found, record=record)
    _tell(found, composed, options, parts)
    if options.html:
        found.explain().write_html(options.html, force=True)  # checked before
    if placement and options.hostfile:
        words = placement.write(options.hostfile, Launcher(options.launcher))
        if not options.as_json:
            say(f"Wrote the host file, which is read by\n  {words}")
    return ENDED_EARLY if found.search.may_be_far_off else OK


def run_estimate(options: EstimateOptions) -> int:
    """Price one layout and print the prediction."""
    composed = composed_settings(parse(options.overrides), options.config_dir)
    command = options.command()
    found = estimate_job(composed) if command is None else estimate_typed(command, composed)
    _tell(found, composed, options)
    predicted = found.predicted
    may_fit = within_error(predicted.peak_memory_bytes, predicted.capacity_bytes)
    return OK if predicted.fits or may_fit else NOTHING_FITS


def composed_settings(settings: Sequence[Setting], config_dir: Path | None) -> Settings:
    """One job, whose ``out`` may be written.

    The command has checked the text that was typed; other settings may complete it.
    """
    refuse_sweeps(settings)
    composed = compose(with_defaults(settings), config_dir)
    if composed.out is not None:
        check_output("out", Path(composed.out), force=forced())
    return composed


def _planned(
    composed: Settings, options: PlanOptions, command: TypedCommand | None
) -> tuple[Plan, list[RenderableType]]:
    """A plan, and of a user's command what it becomes."""
    with progress() as report:
        if command is None:
            found = plan_job(
                composed, begun_s=options.begun_s, shortlist=options.shortlist, on_progress=report
            )
            return found, []
        planned = plan_typed(
            command, composed, options.begun_s, report, shortlist=options.shortlist
        )
    return planned_command(planned, composed), _command_parts(planned, with_reasons=options.full)


def _command_parts(found: CommandPlan, *, with_reasons: bool) -> list[RenderableType]:
    from nest_megatron.integrations.launchers import is_secret
    from nest_megatron.integrations.plan_output import change_rows

    rows, command = change_rows(found.changes), found.job.command
    changes = rows if with_reasons else [(*each[:3], "") for each in rows]
    what = "the recipe's fields" if command is None else "your command"
    changed = [f"Changes to {what}\n", changes_table(changes, found.plan.model)]
    if command is None:
        return [*changed, ""] if changes else ["The recipe is already the plan.\n"]
    launch = found.plan.launch[LAUNCHER]
    secret = {name: text for name, text in command.environment.items() if is_secret(name)}
    before = {**secret, **launch.environment}.items()
    return [
        *(changed if changes else ["Your command is already the plan."]),
        "\nThe command\n",
        command_lines([*launch.launcher, *script_words(command.script), *launch.argv], before),
        "",
    ]


def _tell(
    found: Plan,
    composed: Settings,
    options: PlanOptions | EstimateOptions,
    more: Sequence[RenderableType] = (),
) -> None:
    """Print a plan and write it: where one of the two fails, the other is done."""
    out = composed.out
    try:
        if options.as_json:
            show_json(found.to_dict())
        else:
            show(*found.report(*more, full=options.full))
    finally:
        if out:
            plan_file.write(found.record, Path(out))
    if options.as_json:
        return
    if out and not is_standard_output(Path(out)):
        say(f"Written to {out}. Next: nest-megatron explain {shlex.quote(out)}")
    elif not options.full:
        kept = ", out=plan.yaml keeps it" if isinstance(options, PlanOptions) else ""
        say(f"Next: --full prints every figure{kept}.")
    if not found.predicted.fits:
        verdict = plan_verdict(found.record)
        print_to_stderr(f"{verdict[0].upper()}{verdict[1:]}: peak memory per GPU.")
