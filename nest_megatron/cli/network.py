"""``nest-megatron network``: clusters from measured collectives."""

from __future__ import annotations

from pathlib import Path

import click

from nest_megatron.cli.command_kinds import NEXT, OUTPUT, PATH, group, json_option, option
from nest_megatron.cli.complete import completing_catalogue
from nest_megatron.cluster.records import CollectiveKind
from nest_megatron.config.catalogue import named_cluster
from nest_megatron.errors import UserInputError
from nest_megatron.files import write_text
from nest_megatron.plain import to_plain
from nest_megatron.profile import network as profiles
from nest_megatron.profile.network_import import cluster_text, fit_network, read_measurements
from nest_megatron.report.console import say, show, show_json


@group(
    "nest-megatron network import all_reduce_perf.log",
    "nest-megatron network show network.yaml",
)
def network() -> None:
    """Fit a cluster's network to timed collectives."""


@network.subcommand(
    "import",
    "nest-megatron network import all_reduce_perf.log",
    f"nest-megatron network import inside.log over.log --cluster dgx_h100{NEXT}"
    "--out measured.yaml --profile network.yaml",
    "nest-megatron network import network.yaml --cluster dgx_h100 --json",
)
@click.argument("paths", nargs=-1, required=True, type=PATH, metavar="FILE...")
@option(
    "--kind",
    "The collective of a log that does not name it; by default taken from the file name.",
    click.Choice(["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"]),
)
@option(
    "--cluster",
    "The measured cluster: a name of the catalogue, or a file.",
    metavar="NAME",
    shell_complete=completing_catalogue("cluster"),
)
@option("--out", "Write the cluster with its measured network here.", OUTPUT)
@option("--profile", "Write the samples and their fit to this file.", OUTPUT)
@json_option
def network_import(
    paths: tuple[Path, ...],
    *,
    kind: str | None,
    cluster: str | None,
    out: Path | None,
    profile: Path | None,
    as_json: bool,
) -> None:
    """Fit a network to the output of nccl-tests, or to a measured network profile.

    Reads all_reduce_perf, all_gather_perf, reduce_scatter_perf, alltoall_perf and sendrecv_perf; a
    file may hold several runs. Use the result with: nest-megatron plan cluster=./measured.yaml
    """
    from nest_megatron.report.catalogue_tables import levels_table, profile_lines
    from nest_megatron.report.terminal import notes_report

    if out is not None and cluster is None:
        raise UserInputError(
            "--out",
            str(out),
            "a cluster needs the accelerator and the levels of one that is described",
            "Add --cluster with a name of the catalogue or a file.",
        )
    measured = read_measurements(paths, None if kind is None else CollectiveKind(kind))
    described = None if cluster is None else named_cluster(cluster)
    found = fit_network(measured, described)
    if out is not None and found.cluster is not None and cluster is not None:
        write_text(out, cluster_text(found.cluster, cluster, out))
    if profile is not None:
        profiles.write(found.profile, profile)
    written = [str(path) for path in (out, profile) if path is not None]
    if as_json:
        show_json(
            {
                "samples": len(found.profile.samples),
                "versions": found.profile.versions,
                "levels": [to_plain(fit) for fit in found.profile.fits],
                "notes": found.notes,
                "written": written,
            }
        )
        return
    table = levels_table(found.profile.fits, described)
    show(profile_lines(found.profile), table, notes_report(found.notes))
    for path in written:
        say(f"Wrote {path}.")


@network.subcommand("show", "nest-megatron network show network.yaml")
@click.argument("path", type=PATH, metavar="NETWORK.YAML")
@json_option
def network_show(path: Path, *, as_json: bool) -> None:
    """Show a network profile: the measurements, and the figures fitted to them."""
    from nest_megatron.report.catalogue_tables import levels_table, profile_lines, samples_table
    from nest_megatron.report.terminal import notes_report

    found = profiles.read(path)
    if as_json:
        show_json(to_plain(found))
    else:
        tables = levels_table(found.fits), samples_table(found.samples)
        notes = (*found.notes, *found.fit_notes)
        show(profile_lines(found), *tables, notes_report(notes))
