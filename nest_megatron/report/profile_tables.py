"""Layer profiles as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from nest_megatron.plain import to_plain
from nest_megatron.profile.records import LayerProfile, Timing
from nest_megatron.report.fitting import FittingTable
from nest_megatron.units import GIB, format_seconds

_DEGREES = {
    "TP": "tensor_model_parallel_size",
    "CP": "context_parallel_size",
    "EP": "expert_model_parallel_size",
    "ETP": "expert_tensor_parallel_size",
    "MBS": "micro_batch_size",
}
#: Longer names are folded, so that the other columns keep their room at 80.
_NAME_WIDTH = 28


def profiles_table(entries: Sequence[tuple[LayerProfile, bool]]) -> RenderableType:
    """One profile a row.

    Args:
        entries: each with whether it came with the package.
    """
    table = _table()
    longest = max(len(profile.name) for profile, _ in entries)
    table.add_column("Profile", overflow="fold", min_width=min(longest, _NAME_WIDTH))
    for head in ("Model", "Device"):
        table.add_column(head, overflow="fold", min_width=8)
    table.add_column("Tokens", justify="right", no_wrap=True)
    table.add_column("Timings", justify="right", no_wrap=True, min_width=7)
    table.add_column("From", no_wrap=True, min_width=8)
    for profile, shipped in entries:
        table.add_row(
            profile.name,
            profile.model.name,
            profile.machine.device_name,
            f"{profile.model.seq_length:,}",
            str(len(profile.timings)),
            "shipped" if shipped else "imported" if profile.imported else "measured",
        )
    return table


def profile_details(profile: LayerProfile, fingerprint: str) -> RenderableType:
    """A profile's origin, its machine and every timing."""
    machine = to_plain(profile.machine)
    rows = [
        ("created", profile.created + (", imported" if profile.imported else "")),
        ("fingerprint", fingerprint),
        ("model", f"{profile.model.name}, sequences of {profile.model.seq_length:,} tokens"),
        ("precision", profile.precision.value),
        ("device", profile.machine.describe()),
    ]
    rows += [
        (name, str(value))
        for name, value in machine.items()
        if value is not None and name not in ("device_name", "memory_bytes", "is_cpu")
    ]
    if profile.note:
        rows.append(("note", profile.note))
    return Group(Text(profile.name, style="bold"), _pairs(rows), timings_table(profile.timings))


def timings_table(timings: Sequence[Timing]) -> RenderableType:
    """One timing a row."""
    table = _table()
    table.add_column("Piece", no_wrap=True)
    for head in (*_DEGREES, "Forward", "Backward", "Spread", "Kept GiB"):
        table.add_column(head, justify="right", no_wrap=True)
    for timing in timings:
        table.add_row(
            timing.piece.value + (" SP" if timing.sequence_parallel else ""),
            *(str(getattr(timing, name)) for name in _DEGREES.values()),
            format_seconds(timing.forward_s),
            format_seconds(timing.backward_s),
            f"{100 * timing.spread:.1f} %",
            f"{timing.saved_bytes / GIB:.2f}",
        )
    return table


def _pairs(rows: Sequence[tuple[str, str]]) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(value))
    return Padding(table, (0, 2))


def _table() -> Table:
    return FittingTable(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), header_style="bold")
