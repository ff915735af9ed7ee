"""Layer profiles as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from nest_megatron.plain import to_plain
from nest_megatron.profile.records import LayerProfile, Timing
from nest_megatron.report.tables import (
    FittingTable,
    figure_columns,
    name_columns,
    pairs,
    word_columns,
)
from nest_megatron.units import GIB, format_seconds

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
    """One profile a row.

    Args:
        entries: each with whether it came with the package.
    """
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
