"""A measured network as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from nest_megatron.cluster.records import Cluster, CollectiveKind
from nest_megatron.profile.network import CollectiveSample, LevelFit, NetworkProfile, kinds_of
from nest_megatron.report.tables import FittingTable, figure_columns, name_columns
from nest_megatron.units import GB, format_seconds

#: Fields of a level for an all-reduce that is no ring, and what they are called here.
_SUMS = {"reduction_efficiency": "reduce by switch", "tree_efficiency": "reduce by tree"}


def profile_lines(profile: NetworkProfile) -> RenderableType:
    """Whose measurements they are, and what is missing."""
    versions = ", ".join(f"{name} {version}" for name, version in profile.versions.items())
    title = Text.assemble((profile.name, "bold"), f", {len(profile.samples)} samples")
    lines = [title, Text(f"  {profile.source}"), Text(f"  {profile.created}, {versions}")]
    for kind, reason in profile.not_measured.items():
        lines.append(Text(f"  {kind} is not measured: {reason}", style="yellow"))
    return Group(*lines)


def levels_table(fits: Sequence[LevelFit], described: Cluster | None = None) -> RenderableType:
    """A row for each level and kind of collective.

    Args:
        described: the cluster of whose nominal bandwidths the shares are; its own efficiencies are
            shown beside them.
    """
    beside = [] if described is None else ["Described"]
    heads = ("Latency", "Startup", "GB/s", "Share", *beside, "Residual")
    table = FittingTable(*name_columns("Level", "Collective"), *figure_columns(*heads))
    for fit in fits:
        for number, (name, kind, share) in enumerate(_shares(fit)):
            first = [fit.name, name, format_seconds(fit.latency_s), format_seconds(fit.startup_s)]
            rate = share * fit.bandwidth_bytes_per_s / GB
            known = [] if described is None else [_described(described, fit.name, name)]
            table.add_row(
                *(first if number == 0 else ["", name, "", ""]),
                f"{rate:.2f}",
                f"{share:.3f}",
                *known,
                f"{100 * fit.residuals[kind]:.1f} %",
            )
    return table


def _shares(fit: LevelFit) -> Iterator[tuple[str, CollectiveKind, float]]:
    """What to call a bandwidth, which kind's it is, and its share of the level's."""
    for kind in CollectiveKind:
        if kind in fit.efficiency:
            yield kind.value, kind, fit.efficiency[kind]
        if kind is CollectiveKind.ALL_REDUCE:
            for name, words in _SUMS.items():
                share = getattr(fit, name)
                if share is not None:
                    yield words, kind, share


def _described(cluster: Cluster, name: str, words: str) -> str:
    """The share that a cluster's description names."""
    level = next(each for each in cluster.levels if each.name == name)
    fields = {shown: getattr(level, field) for field, shown in _SUMS.items()}
    share = fields[words] if words in fields else level.efficiency.get(CollectiveKind(words))
    return "" if share is None else f"{share:.3f}"


def samples_table(samples: Sequence[CollectiveSample]) -> RenderableType:
    """A row for each kind and group, ranks on a host by hosts: the ends of its sizes."""
    heads = ("Group", "Sizes", "Smallest", "Takes", "Largest", "Takes", "Spread")
    table = FittingTable(*name_columns("Collective"), *figure_columns(*heads))
    for kind in kinds_of(samples):
        for shape in sorted({each.shape for each in samples if each.kind is kind}):
            own = [each for each in samples if each.kind is kind and each.shape == shape]
            table.add_row(kind.value, *_range_cells(own))
    return table


def _range_cells(own: Sequence[CollectiveSample]) -> list[str]:
    least = min(own, key=lambda each: each.message_bytes)
    most = max(own, key=lambda each: each.message_bytes)
    spreads = sorted(each.spread for each in own if each.spread is not None)
    return [
        " x ".join(map(str, least.shape)),
        str(len({each.message_bytes for each in own})),
        _size(least.message_bytes),
        format_seconds(least.seconds),
        _size(most.message_bytes),
        format_seconds(most.seconds),
        f"{100 * spreads[len(spreads) // 2]:.0f} %" if spreads else "",
    ]


def _size(num_bytes: float) -> str:
    """Bytes in few characters.

    >>> _size(512), _size(65536), _size(3 * 2**30)
    ('512 B', '64 KiB', '3 GiB')
    """
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} GiB"
