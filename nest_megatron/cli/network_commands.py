"""``nest-megatron network``; what its commands do is in ``cli/network.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from nest_megatron.cli.command_kinds import NEXT, OUTPUT, Command, Group, json_option
from nest_megatron.cli.complete import complete_catalogue


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
def network_import(paths: tuple[Path, ...], **options: Any) -> int:
    """Fit a network to the output of nccl-tests, or to a profile that was measured.

    Reads all_reduce_perf, all_gather_perf, reduce_scatter_perf, alltoall_perf and sendrecv_perf,
    one run a file or many. Plan on the result with nest-megatron plan cluster=./measured.yaml.
    """
    from nest_megatron.cli.network import run_import

    return run_import(paths, **options)


@network.command(
    "show",
    cls=Command,
    examples=("nest-megatron network show network.yaml",),
)
@click.argument("path", type=click.Path(path_type=Path), metavar="NETWORK.YAML")
@json_option
def network_show(path: Path, *, as_json: bool) -> int:
    """Show a network profile: what was measured, and the figures fitted to it."""
    from nest_megatron.cli.network import run_show

    return run_show(path, as_json=as_json)
