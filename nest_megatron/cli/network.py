"""``nest-megatron network``: clusters from measured collectives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from nest_megatron.cli.command_kinds import NEXT, OUTPUT, Command, Group, json_option
from nest_megatron.cli.complete import complete_catalogue
from nest_megatron.cluster.records import CollectiveKind
from nest_megatron.config.entries import cluster_entry
from nest_megatron.errors import OK, UserInputError
from nest_megatron.files import write_text
from nest_megatron.plain import to_plain
from nest_megatron.profile import network as profiles
from nest_megatron.profile.network_import import (
    FittedNetwork,
    cluster_text,
    fit_network,
    read_measurements,
)
from nest_megatron.report.console import say, show, show_json


@click.group(
    cls=Group,
    examples=(
        "nest-megatron network import all_reduce_perf.log",
        "nest-megatron network show network.yaml",
    ),
)
def network() -> None:
    """Measured networks: figures for a cluster from timed collectives."""


@network.command(
    "import",
    cls=Command,
    examples=(
        "nest-megatron network import all_reduce_perf.log",
        "nest-megatron network import inside.log over.log --cluster dgx_h100"
        + NEXT
        + "--out measured.yaml --profile network.yaml",
        "nest-megatron network import network.yaml --cluster dgx_h100 --json",
    ),
)
@click.argument(
    "paths", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE..."
)
@click.option(
    "--kind",
    type=click.Choice(["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"]),
    help="What a log measures that does not say so; its file's name if not given.",
)
@click.option(
    "--cluster",
    "cluster_name",
    metavar="NAME",
    shell_complete=complete_catalogue("cluster"),
    help="The cluster that was measured: from the catalogue, or a file.",
)
@click.option("--out", type=OUTPUT, help="Write that cluster here, its network as measured.")
@click.option(
    "--profile", "profile_out", type=OUTPUT, help="Keep the samples and their fit in this file."
)
@json_option
def network_import(
    paths: tuple[Path, ...],
    *,
    kind: str | None,
    cluster_name: str | None,
    out: Path | None,
    profile_out: Path | None,
    as_json: bool,
) -> int:
    """Fit a network to the output of nccl-tests, or to a profile that was measured.

    Reads all_reduce_perf, all_gather_perf, reduce_scatter_perf, alltoall_perf and sendrecv_perf,
    one run a file or many. Plan on the result with nest-megatron plan cluster=./measured.yaml.
    """
    if out is not None and cluster_name is None:
        raise UserInputError(
            "--out",
            value=str(out),
            limit="a cluster needs the accelerator and the levels of one that is described",
            fix="Add --cluster with a name of the catalogue or a file.",
        )
    profile = read_measurements(paths, None if kind is None else CollectiveKind(kind))
    found = fit_network(profile, None if cluster_name is None else cluster_entry(cluster_name))
    written: list[Path] = []
    if out is not None and found.cluster is not None and cluster_name is not None:
        write_text(out, cluster_text(found.cluster, cluster_name, out))
        written.append(out)
    if profile_out is not None:
        profiles.write(found.profile, profile_out)
        written.append(profile_out)
    _tell(found, written, as_json=as_json)
    return OK


@network.command(
    "show",
    cls=Command,
    examples=("nest-megatron network show network.yaml",),
)
@click.argument("path", type=click.Path(path_type=Path), metavar="NETWORK.YAML")
@json_option
def network_show(path: Path, *, as_json: bool) -> int:
    """Show a network profile: what was measured, and the figures fitted to it."""
    profile = profiles.read(path)
    if as_json:
        show_json(to_plain(profile))
        return OK
    from nest_megatron.report.network_tables import levels_table, profile_lines, samples_table
    from nest_megatron.report.terminal import notes_report

    show(profile_lines(profile), levels_table(profile.fits), samples_table(profile.samples))
    if profile.notes:
        show(notes_report(profile.notes))
    return OK


def _tell(found: FittedNetwork, written: Sequence[Path], *, as_json: bool) -> None:
    if as_json:
        show_json(
            {
                "samples": len(found.profile.samples),
                "versions": found.profile.versions,
                "levels": [to_plain(fit) for fit in found.fits],
                "notes": found.notes,
                "written": [str(path) for path in written],
            }
        )
        return
    from nest_megatron.report.network_tables import levels_table, profile_lines
    from nest_megatron.report.terminal import notes_report

    show(profile_lines(found.profile), levels_table(found.fits, found.described))
    if found.notes:
        show(notes_report(found.notes))
    for path in written:
        say(f"Wrote {path}.")
