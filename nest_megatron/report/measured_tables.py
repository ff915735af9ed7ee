"""A measured network, and layer profiles, as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from nest_megatron.cluster.records import Cluster, CollectiveKind, NetworkLevel
from nest_megatron.plain import to_plain
from nest_megatron.profile.network import CollectiveSample, LevelFit, NetworkProfile, kinds_of
from nest_megatron.profile.records import LayerProfile, Timing
from nest_megatron.report.tables import (
    FittingTable,
    figure_columns,
    name_columns,
    pairs,
    word_columns,
)
from nest_megatron.units import GB, GIB, format_seconds

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
    levels = {} if described is None else {level.name: level for level in described.levels}
    heads = ("Latency", "Startup", "GB/s", "Share", *(["Described"] if levels else []), "Residual")
    table = FittingTable(*name_columns("Level", "Collective"), *figure_columns(*heads))
    for fit in fits:
        told = _shares(levels[fit.name]) if levels else {}
        level, *times = [fit.name, format_seconds(fit.latency_s), format_seconds(fit.startup_s)]
        for name, (kind, share) in _shares(fit).items():
            figures = [f"{share * fit.bandwidth_bytes_per_s / GB:.2f}", f"{share:.3f}"]
            if levels:
                figures.append(f"{told[name][1]:.3f}" if name in told else "")
            table.add_row(level, name, *times, *figures, f"{100 * fit.residuals[kind]:.1f} %")
            level, times = "", ["", ""]
    return table


def _shares(level: LevelFit | NetworkLevel) -> dict[str, tuple[CollectiveKind, float]]:
    """By what to call a bandwidth: whose it is, and its share of the level's."""
    shares: dict[str, tuple[CollectiveKind, float | None]] = {}
    for kind in CollectiveKind:
        shares[kind.value] = kind, level.efficiency.get(kind)
        if kind is CollectiveKind.ALL_REDUCE:
            shares |= {words: (kind, getattr(level, name)) for name, words in _SUMS.items()}
    return {name: (kind, share) for name, (kind, share) in shares.items() if share is not None}


def samples_table(samples: Sequence[CollectiveSample]) -> RenderableType:
    """A row for each kind and group, ranks on a host by hosts: the ends of its sizes."""
    heads = ("Group", "Sizes", "Smallest", "Takes", "Largest", "Takes", "Spread")
    table = FittingTable(*name_columns("Collective"), *figure_columns(*heads))
    for kind in kinds_of(samples):
        for shape in sorted({each.shape for each in samples if each.kind is kind}):
            own = [each for each in samples if each.kind is kind and each.shape == shape]
            least, most = (pick(own, key=lambda each: each.message_bytes) for pick in (min, max))
            spreads = sorted(each.spread for each in own if each.spread is not None)
            table.add_row(
                kind.value,
                " x ".join(map(str, shape)),
                str(len({each.message_bytes for each in own})),
                *(_size(least.message_bytes), format_seconds(least.seconds)),
                *(_size(most.message_bytes), format_seconds(most.seconds)),
                f"{100 * spreads[len(spreads) // 2]:.0f} %" if spreads else "",
            )
    return table


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


_DEGREES = {
    "TP": "tensor_model_parallel_size",
    "CP": "context_parallel_size",
    "EP": "expert_model_parallel_size",
    "ETP": "expert_tensor_parallel_size",
    "MBS": "micro_batch_size",
}
#: Longer names are folded, so that the other columns keep their width at 80.
_NAME_WIDTH = 28


def profiles_table(entries: Sequence[tuple[LayerProfile, bool]]) -> RenderableType:
    """One profile a row; each is given with whether it came with the package."""
    longest = max(len(profile.name) for profile, _ in entries)
    rows = (
        (
            profile.name,
            profile.model.name,
            profile.machine.device_name,
            f"{profile.model.seq_length:,}",
            str(len(profile.timings)),
            "shipped" if shipped else "imported" if profile.imported else "measured",
        )
        for profile, shipped in entries
    )
    return FittingTable(
        *word_columns("Profile", min_width=min(longest, _NAME_WIDTH)),
        *word_columns("Model", "Device", min_width=8),
        *figure_columns("Tokens"),
        *figure_columns("Timings", min_width=7),
        *name_columns("From", min_width=8),
        rows=rows,
    )


def profile_details(profile: LayerProfile, fingerprint: str) -> RenderableType:
    """A profile's origin, its machine and every timing."""
    machine, told = to_plain(profile.machine), ("device_name", "memory_bytes", "is_cpu")
    rows = {
        "created": profile.created + (", imported" if profile.imported else ""),
        "fingerprint": fingerprint,
        "model": f"{profile.model.name}, sequences of {profile.model.seq_length:,} tokens",
        "precision": profile.precision.value,
        "device": profile.machine.describe(),
        **{k: str(value) for k, value in machine.items() if value is not None and k not in told},
        **({"note": profile.note} if profile.note else {}),
    }
    title = Text(profile.name, style="bold")
    return Group(title, pairs(rows.items()), timings_table(profile.timings))


def timings_table(timings: Sequence[Timing]) -> RenderableType:
    """One timing a row."""
    rows = (
        (
            timing.block.value + (" SP" if timing.sequence_parallel else ""),
            *(str(getattr(timing, name)) for name in _DEGREES.values()),
            format_seconds(timing.forward_s),
            format_seconds(timing.backward_s),
            f"{100 * timing.spread:.1f} %",
            f"{timing.saved_bytes / GIB:.2f}",
        )
        for timing in timings
    )
    heads = (*_DEGREES, "Forward", "Backward", "Spread", "Saved GiB")
    return FittingTable(*name_columns("Layer block"), *figure_columns(*heads), rows=rows)
