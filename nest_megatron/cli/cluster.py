"""``nest-megatron cluster`` and ``network``: clusters from what machines report, and measure."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from nest_megatron.cli.command_kinds import (
    NEXT,
    OUTPUT,
    PATH,
    flag,
    forced,
    group,
    json_option,
    option,
)
from nest_megatron.cli.complete import completing_catalogue
from nest_megatron.cluster import sources
from nest_megatron.cluster.hosts import this_host
from nest_megatron.cluster.records import CollectiveKind
from nest_megatron.cluster.topology import host_file
from nest_megatron.config.catalogue import named_cluster
from nest_megatron.config.launch import MixedGpus
from nest_megatron.errors import UserInputError
from nest_megatron.files import expanded, is_standard_output, write_text
from nest_megatron.plain import to_plain
from nest_megatron.profile import network as profiles
from nest_megatron.profile.network_import import cluster_text, fit_network, read_measurements
from nest_megatron.report.console import say, say_written, show, show_json, show_or_json

_ONE_SOURCE = "one source names the hosts"


def _file_for(path: Path, name: str) -> Path:
    """The file of which a text says how to plan on it: ``NAME.yaml`` where the text is printed."""
    return Path(f"{name}.yaml") if is_standard_output(path) else path


@group(
    "nest-megatron cluster new site",
    "nest-megatron cluster report",
    f"nest-megatron cluster discover --read reports.jsonl --read fabric.txt{NEXT}"
    "--out site.yaml --hosts-out hosts.txt",
)
def cluster() -> None:
    """Describe your cluster (GPUs, adapters, switches) in a file that plan reads."""


@cluster.subcommand("report", "nest-megatron cluster report")
@option("--name", "What Slurm or Kubernetes calls this host; by default its host name.")
def cluster_report(*, name: str | None) -> None:
    """Print this host's hardware as one line of JSON, for discover --read.

    It reads NVML, nvidia-smi topo -m and /sys/class/infiniband. It does not touch CUDA.
    """
    say(json.dumps(to_plain(this_host(name))))


@cluster.subcommand(
    "new", "nest-megatron cluster new site", "nest-megatron cluster new --out h100.yaml"
)
@click.argument("name", required=False)
@option("--out", "The file to write; by default NAME.yaml.", OUTPUT)
def cluster_new(*, name: str | None, out: Path | None) -> None:
    """Write a cluster file to edit: it is valid as written and explains each field.

    An existing file is replaced with --force alone.
    """
    from nest_megatron.config.cluster_detection import cluster_template

    if name is None and out is None:
        raise click.UsageError("Missing argument 'NAME', or --out FILE.")
    path = Path(f"{name}.yaml") if out is None else out
    text = cluster_template(name, _file_for(path, name or "mine"))
    what = "--out" if out is not None else "NAME"
    if not (forced() or is_standard_output(path)) and os.path.lexists(expanded(path, what)):
        fix = "Name another, or add --force to replace it."
        raise UserInputError(what, str(path), "this file exists", fix)
    write_text(path, text)
    if not is_standard_output(path):
        say(f"Wrote {path}. Change what is marked CHANGE in it; its head says how to plan on it.")


@cluster.subcommand(
    "discover",
    "nest-megatron cluster discover --read reports.jsonl",
    f"nest-megatron cluster discover --read reports.jsonl --read fabric.txt{NEXT}"
    "--out site.yaml --hosts-out hosts.txt",
    "nest-megatron cluster discover --hosts racks.txt --cluster dgx_h100 --json",
)
@flag(
    "--slurm", "The hosts of this Slurm allocation.", excludes=("--kubernetes --local", _ONE_SOURCE)
)
@flag("--kubernetes", "What kubectl shows.", excludes=("--local", _ONE_SOURCE))
@flag("--local", "This host alone.")
@option(
    "--read outputs",
    "The saved output of a program: cluster report, scontrol show topology or node, "
    "ibnetdiscover, ibstat, nvidia-smi topo -m or -L, kubectl get nodes -o json, NCCL's topology.",
    PATH,
    multiple=True,
)
@option("--hosts", "A file with HOST GROUP... in each line: rack, row, ...", PATH)
@option(
    "--cluster base",
    "A cluster of the catalogue, or a file, for what cannot be detected.",
    metavar="NAME",
    shell_complete=completing_catalogue("cluster"),
)
@option(
    "--mixed-gpus",
    "If hosts have different GPUs: refuse, or plan as if all had the slower kind.",
    click.Choice([each.value for each in MixedGpus]),
    default=MixedGpus.REFUSE.value,
    show_default=True,
)
@option("--out", "Write the cluster here.", OUTPUT)
@option("--hosts-out", "Write the hosts and their groups here.", OUTPUT)
@json_option
def cluster_discover(
    outputs: tuple[Path, ...],
    *,
    slurm: bool,
    kubernetes: bool,
    local: bool,
    hosts: Path | None,
    base: str | None,
    mixed_gpus: str,
    out: Path | None,
    hosts_out: Path | None,
    as_json: bool,
) -> None:
    """Detect a cluster from what its machines report, and list what had to be assumed.

    The default source is the Slurm allocation where there is one, else this host. Use the result
    with: nest-megatron plan cluster=./site.yaml --hosts hosts.txt
    """
    from nest_megatron.config.cluster_detection import discovered

    if not (slurm or kubernetes or local or outputs or hosts):
        slurm = "SLURM_JOB_ID" in os.environ
        local = not slurm
    given = sources.Sources(hosts=(this_host(),)) if local else sources.Sources()
    if slurm:
        given = sources.slurm_job(os.environ)
    if kubernetes:
        given = sources.kubernetes_nodes()
    for path in outputs:
        given = given.joined(sources.saved_output(path))
    found = discovered(
        given,
        listed=None if hosts is None else sources.read_hosts(hosts),
        base=base,
        mixed=MixedGpus(mixed_gpus),
    )
    written = [*map(str, filter(None, (out, hosts_out)))]
    if as_json:
        show_json(
            {
                "cluster": to_plain(found.cluster),
                "hosts": {host.name: found.topology.of(host.name) for host in found.hosts},
                "seen": found.seen,
                "assumed": found.assumed,
                "notes": found.notes,
                "written": written,
            }
        )
    else:
        say(f"{found.cluster.describe()} on {len(found.hosts)} hosts")
        for title, lines in (
            ("Seen", found.seen),
            ("Not seen, and assumed", found.assumed),
            ("Notes", found.notes),
        ):
            if lines:
                say(f"\n{title}")
                for line in lines:
                    say(f"  {line}")
    if out is not None:
        write_text(out, found.text(_file_for(out, found.cluster.name)))
    if hosts_out is not None:
        names = [host.name for host in found.hosts]
        write_text(hosts_out, host_file(found.topology, names))
    if not as_json:
        say_written(out, hosts_out)


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
@option(
    "--out",
    "Write the cluster with its measured network here.",
    OUTPUT,
    needs="--cluster with a name of the catalogue or a file",
)
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

    measured = read_measurements(paths, None if kind is None else CollectiveKind(kind))
    described = None if cluster is None else named_cluster(cluster)
    found = fit_network(measured, described)
    written = [*map(str, filter(None, (out, profile)))]
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
    else:
        table = levels_table(found.profile.fits, described)
        show(profile_lines(found.profile), table, notes_report(found.notes))
    if out is not None and found.cluster is not None and cluster is not None:
        write_text(out, cluster_text(found.cluster, cluster, _file_for(out, found.cluster.name)))
    if profile is not None:
        profiles.write(found.profile, profile)
    if not as_json:
        say_written(out, profile)


@network.subcommand("show", "nest-megatron network show network.yaml")
@click.argument("path", type=PATH, metavar="NETWORK.YAML")
@json_option
def network_show(path: Path, *, as_json: bool) -> None:
    """Show a network profile: the measurements, and the figures fitted to them."""
    from nest_megatron.report.catalogue_tables import levels_table, profile_lines, samples_table
    from nest_megatron.report.terminal import notes_report

    found = profiles.read(path)
    show_or_json(
        lambda: to_plain(found),
        lambda: (
            profile_lines(found),
            levels_table(found.fits),
            samples_table(found.samples),
            notes_report((*found.notes, *found.fit_notes)),
        ),
        as_json=as_json,
    )
