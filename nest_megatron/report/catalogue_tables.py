"""The catalogue as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from nest_megatron.cluster.records import Cluster
from nest_megatron.model.parameters import active_parameters, total_parameters
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.plain import to_plain
from nest_megatron.report.fitting import FittingTable
from nest_megatron.units import format_gib, format_seconds


def model_document(spec: TransformerSpec) -> dict[str, Any]:
    """A model for programs."""
    counts = {"parameters": total_parameters(spec), "active_parameters": active_parameters(spec)}
    return {**to_plain(spec), **counts}


def models_table(specs: Sequence[TransformerSpec]) -> RenderableType:
    """One model a row."""
    table = _table(expand=True)
    table.add_column("Model", no_wrap=True, min_width=max(len(spec.name) for spec in specs))
    for head, width in (("Params", 7), ("Active", 6), ("Layers", 6), ("Hidden", 6), ("Experts", 9)):
        table.add_column(head, justify="right", no_wrap=True, min_width=width)
    table.add_column("Source", overflow="ellipsis", no_wrap=True, ratio=1)
    for spec in specs:
        table.add_row(
            spec.name,
            billions(total_parameters(spec)),
            billions(active_parameters(spec)) if spec.is_moe else "",
            str(spec.num_layers),
            str(spec.hidden_size),
            f"{spec.num_experts} top {spec.moe_router_topk}" if spec.is_moe else "",
            spec.source,
        )
    return table


def billions(count: int) -> str:
    """A number of parameters.

    >>> billions(70_553_706_496), billions(335_174_656)
    ('70.6 B', '335 M')
    """
    return f"{count / 1e9:.1f} B" if count >= 1e9 else f"{count / 1e6:.0f} M"


def model_details(spec: TransformerSpec) -> RenderableType:
    """Every field of a model."""
    rows = [("parameters", f"{total_parameters(spec):,}")]
    if spec.is_moe:
        rows.append(("active parameters", f"{active_parameters(spec):,}"))
    fields = to_plain(spec)
    pattern = fields.pop("moe_layer_pattern")
    rows += [(name, str(value)) for name, value in fields.items() if value is not None]
    if pattern:
        rows.append(("expert layers", f"{sum(pattern)} of {len(pattern)}"))
    return Group(Text(spec.name, style="bold"), _pairs(rows))


def clusters_table(entries: Sequence[tuple[str, Cluster]]) -> RenderableType:
    """One cluster a row; bandwidth is what one device sends through each level."""
    table = _table(expand=True)
    table.add_column("Cluster", no_wrap=True, min_width=max(len(name) for name, _ in entries))
    table.add_column("Device", no_wrap=True, min_width=15)
    table.add_column("Memory", justify="right", no_wrap=True, min_width=9)
    table.add_column("Levels: devices, GB/s each", overflow="fold", ratio=3)
    table.add_column("Source", overflow="ellipsis", no_wrap=True, ratio=2)
    for name, cluster in entries:
        accelerator = cluster.accelerator
        table.add_row(
            name,
            accelerator.name,
            format_gib(accelerator.memory_bytes),
            _levels(cluster),
            accelerator.source,
        )
    return table


def cluster_details(cluster: Cluster) -> RenderableType:
    """The device and every network level of a cluster."""
    accelerator = cluster.accelerator
    peaks = ", ".join(
        f"{precision} {flops / 1e12:.0f} TFLOP/s x {accelerator.gemm_efficiency[precision]:g}"
        for precision, flops in accelerator.peak_flops_per_s.items()
    )
    bandwidth = accelerator.memory_bandwidth_bytes_per_s
    rows = [
        ("description", cluster.description),
        ("num_gpus", str(cluster.num_gpus)),
        ("device", f"{accelerator.name}, {format_gib(accelerator.memory_bytes)}"),
        ("peaks", peaks),
        ("memory", f"{bandwidth / 1e12:.2f} TB/s x {accelerator.memory_efficiency:g}"),
        ("source", accelerator.source),
    ]
    table = _table()
    for head in ("Level", "Devices"):
        table.add_column(head, no_wrap=True)
    table.add_column("GB/s each", justify="right")
    table.add_column("Latency", justify="right")
    table.add_column("Share reached", overflow="fold")
    for level in cluster.levels:
        shares = ", ".join(f"{kind} {share:g}" for kind, share in level.efficiency.items())
        table.add_row(
            level.name,
            str(level.num_devices or "all"),
            f"{level.bandwidth_bytes_per_s / 1e9:.4g}",
            format_seconds(level.latency_s),
            shares,
        )
    sources = [(level.name, level.source) for level in cluster.levels if level.source]
    return Group(Text(cluster.name, style="bold"), _pairs(rows), table, _pairs(sources))


def _levels(cluster: Cluster) -> str:
    return "\n".join(
        f"{level.name} {level.num_devices or 'all'}: {level.bandwidth_bytes_per_s / 1e9:.4g}"
        for level in cluster.levels
    )


def _pairs(rows: Sequence[tuple[str, str]]) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(value))
    return Padding(table, (0, 2))


def _table(*, expand: bool = False) -> Table:
    return FittingTable(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), header_style="bold", expand=expand)
