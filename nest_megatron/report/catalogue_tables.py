"""The catalogue as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from nest_megatron.cluster.records import Cluster
from nest_megatron.model.parameters import active_parameters, total_parameters
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.plain import to_plain
from nest_megatron.report.tables import (
    FittingTable,
    figure_columns,
    name_columns,
    pairs,
    word_columns,
)
from nest_megatron.units import format_gib, format_seconds


def model_document(spec: TransformerSpec) -> dict[str, Any]:
    """A model for programs."""
    counts = {"parameters": total_parameters(spec), "active_parameters": active_parameters(spec)}
    return {**to_plain(spec), **counts}


def models_table(specs: Sequence[TransformerSpec]) -> RenderableType:
    """One model a row."""
    rows = (
        (
            spec.name,
            _billions(total_parameters(spec)),
            _billions(active_parameters(spec)) if spec.is_moe else "",
            str(spec.num_layers),
            str(spec.hidden_size),
            f"{spec.num_experts} top {spec.moe_router_topk}" if spec.is_moe else "",
            spec.source,
        )
        for spec in specs
    )
    return FittingTable(
        *name_columns("Model", min_width=max(len(spec.name) for spec in specs)),
        *figure_columns("Params", min_width=7),
        *figure_columns("Active", "Layers", "Hidden", min_width=6),
        *figure_columns("Experts", min_width=9),
        *name_columns("Source", overflow="ellipsis", ratio=1),
        rows=rows,
        expand=True,
    )


def _billions(count: int) -> str:
    """A number of parameters.

    >>> _billions(70_553_706_496), _billions(335_174_656)
    ('70.6 B', '335 M')
    """
    return f"{count / 1e9:.1f} B" if count >= 1e9 else f"{count / 1e6:.0f} M"


def model_details(spec: TransformerSpec) -> RenderableType:
    """Every field of a model."""
    fields = to_plain(spec)
    pattern = fields.pop("moe_layer_pattern")
    active = {"active parameters": f"{active_parameters(spec):,}"} if spec.is_moe else {}
    experts = {"expert layers": f"{sum(pattern)} of {len(pattern)}"} if pattern else {}
    shown = {name: str(value) for name, value in fields.items() if value is not None}
    rows = {"parameters": f"{total_parameters(spec):,}", **active, **shown, **experts}
    return Group(Text(spec.name, style="bold"), pairs(rows.items()))


def clusters_table(entries: Sequence[tuple[str, Cluster]]) -> RenderableType:
    """One cluster a row; bandwidth is what one device sends through each level."""
    rows = (
        (
            name,
            cluster.accelerator.name,
            format_gib(cluster.accelerator.memory_bytes),
            "\n".join(
                f"{level.name} {level.num_devices or 'all'}: "
                f"{level.bandwidth_bytes_per_s / 1e9:.4g}"
                for level in cluster.levels
            ),
            cluster.accelerator.source,
        )
        for name, cluster in entries
    )
    return FittingTable(
        *name_columns("Cluster", min_width=max(len(name) for name, _ in entries)),
        *name_columns("Device", min_width=15),
        *figure_columns("Memory", min_width=9),
        *word_columns("Levels: devices, GB/s each", ratio=3),
        *name_columns("Source", overflow="ellipsis", ratio=2),
        rows=rows,
        expand=True,
    )


def cluster_details(cluster: Cluster) -> RenderableType:
    """The device and every network level of a cluster."""
    device = cluster.accelerator
    peaks = ", ".join(
        f"{precision} {flops / 1e12:.0f} TFLOP/s x {device.gemm_efficiency[precision]:g}"
        for precision, flops in device.peak_flops_per_s.items()
    )
    bandwidth = f"{device.memory_bandwidth_bytes_per_s / 1e12:.2f} TB/s"
    rows = {
        "description": cluster.description,
        "num_gpus": str(cluster.num_gpus),
        "device": f"{device.name}, {format_gib(device.memory_bytes)}",
        "peaks": peaks,
        "memory": f"{bandwidth} x {device.memory_efficiency:g}",
        "source": device.source,
    }
    levels = (
        (
            level.name,
            str(level.num_devices or "all"),
            f"{level.bandwidth_bytes_per_s / 1e9:.4g}",
            format_seconds(level.latency_s),
            ", ".join(f"{kind} {share:g}" for kind, share in level.efficiency.items()),
        )
        for level in cluster.levels
    )
    table = FittingTable(
        *name_columns("Level", "Devices"),
        *figure_columns("GB/s each", "Latency"),
        *word_columns("Share reached"),
        rows=levels,
    )
    sources = [(level.name, level.source) for level in cluster.levels if level.source]
    return Group(Text(cluster.name, style="bold"), pairs(rows.items()), table, pairs(sources))
