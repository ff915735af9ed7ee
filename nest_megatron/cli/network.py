"""``nest-megatron network``: clusters from measured collectives."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import yaml

from nest_megatron.catalogue_files import catalogue_names, catalogue_root
from nest_megatron.cli.command_kinds import NEXT, OUTPUT, Command, Group, json_option
from nest_megatron.cli.complete import complete_catalogue
from nest_megatron.cluster.records import Cluster, CollectiveKind
from nest_megatron.config.entries import cluster_entry
from nest_megatron.errors import OK, UserInputError
from nest_megatron.files import read_text, write_text
from nest_megatron.plain import to_plain
from nest_megatron.profile import network as profiles
from nest_megatron.profile.nccl_tests import read_logs
from nest_megatron.profile.network import LevelFit, NetworkBackend, NetworkProfile
from nest_megatron.profile.network_fit import fit_hosts
from nest_megatron.profile.network_place import fit_cluster, measured_cluster
from nest_megatron.report.console import say, show, show_json
from nest_megatron.version import __version__


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


_HEAD = """\
# Written by nest-megatron {version}: the network of cluster={name} as measured, each level with its
# source. Plan on it with nest-megatron plan cluster=./{file}.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What an import ends with; ``cluster`` is the measured one, ``described`` the named one."""

    profile: NetworkProfile
    fits: tuple[LevelFit, ...]
    notes: tuple[str, ...]
    described: Cluster | None = None
    cluster: Cluster | None = None


def run_import(
    paths: Sequence[Path],
    *,
    kind: str | None,
    cluster_name: str | None,
    out: Path | None,
    profile_out: Path | None,
    as_json: bool,
) -> int:
    """Read measurements, fit a network to them, and write it as a cluster."""
    if out is not None and cluster_name is None:
        raise UserInputError(
            "--out",
            value=str(out),
            limit="a cluster needs the accelerator and the levels of one that is described",
            fix="Add --cluster with a name of the catalogue or a file.",
        )
    profile = _read(paths, None if kind is None else CollectiveKind(kind))
    found = _fit(profile, cluster_name)
    written: list[Path] = []
    if out is not None and found.cluster is not None and cluster_name is not None:
        write_text(out, _cluster_text(found.cluster, cluster_name, out))
        written.append(out)
    if profile_out is not None:
        profiles.write(found.profile, profile_out)
        written.append(profile_out)
    _tell(found, written, as_json=as_json)
    return OK


def _read(paths: Sequence[Path], kind: CollectiveKind | None) -> NetworkProfile:
    """One profile of all files: logs of nccl-tests, or a profile that was measured."""
    texts = [(str(path), read_text(path, "measurements")) for path in paths]
    found = [profiles.load(text, name) for name, text in texts if profiles.is_profile(text)]
    if found and len(texts) > 1:
        raise UserInputError(
            "measurements",
            value=[name for name, _ in texts],
            limit="a network profile is imported alone",
            fix="Import it by itself, or the logs of nccl-tests.",
        )
    if found:
        return found[0]
    reading = read_logs(texts, kind)
    return NetworkProfile(
        name=paths[0].stem,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        source=f"nccl-tests: {', '.join(path.name for path in paths)}",
        backend=NetworkBackend.IMPORTED,
        versions={"nest-megatron": __version__, **reading.versions},
        samples=reading.samples,
        notes=reading.notes,
    )


def _fit(profile: NetworkProfile, cluster_name: str | None) -> _Found:
    if cluster_name is None:
        fitted = fit_hosts(profile.samples)
        profile = dataclasses.replace(profile, fits=fitted.fits)
        return _Found(profile=profile, fits=fitted.fits, notes=(*profile.notes, *fitted.notes))
    described = cluster_entry(cluster_name)
    fitted = fit_cluster(profile, described)
    return _Found(
        profile=dataclasses.replace(profile, fits=fitted.fits),
        fits=fitted.fits,
        notes=(*profile.notes, *fitted.notes),
        described=described,
        cluster=measured_cluster(profile, described, fitted),
    )


def _cluster_text(cluster: Cluster, name: str, out: Path) -> str:
    """A cluster's file: the accelerator by reference where it can be, and the measured levels."""
    fields: dict[str, Any] = to_plain(cluster)
    fields["description"] = f"{cluster.description or cluster.name}, network measured"
    fields["levels"] = [_given(level) for level in fields["levels"]]
    defaults = _defaults(name)
    if defaults:
        del fields["accelerator"]
        fields = {"defaults": defaults, **fields}
    body = yaml.safe_dump(_given(fields), sort_keys=False, width=100, allow_unicode=True)
    return _HEAD.format(version=__version__, name=name, file=out.name) + str(body)


def _defaults(name: str) -> list[Any]:
    """How a cluster of the catalogue names its accelerator, so that the new file follows it."""
    if name not in catalogue_names("cluster"):
        return []
    path = catalogue_root().joinpath("cluster", f"{name}.yaml")
    found: list[Any] = yaml.safe_load(path.read_text(encoding="utf-8")).get("defaults", [])
    return found


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that say something; the outermost level's ``num_devices`` is null on purpose."""
    return {
        key: _rounded(value)
        for key, value in fields.items()
        if value not in (None, [], "") or key == "num_devices"
    }


def _rounded(value: Any) -> Any:
    """Measured numbers with the digits that they are worth."""
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _tell(found: _Found, written: Sequence[Path], *, as_json: bool) -> None:
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
