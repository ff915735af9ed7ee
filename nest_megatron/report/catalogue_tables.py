"""The catalogue as tables for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from nest_megatron.cluster.records import Cluster, NetworkLevel
from nest_megatron.model.layer_pattern import LayerKind
from nest_megatron.model.parameters import active_model_parameters, model_parameters
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


def model_document(spec: TransformerSpec, notes: Sequence[str] = ()) -> dict[str, Any]:
    """A model for programs, layers counted by kind; ``notes``: what was not read of its file."""
    counts = {
        "parameters": model_parameters(spec),
        "active_parameters": active_model_parameters(spec),
    }
    return {**to_plain(spec), **counts, "layer_kinds": _layers(spec), "notes": list(notes)}


def _layers(spec: TransformerSpec) -> dict[str, int]:
    """Decoder layers by kind, and MTP layers."""
    counted = Counter(kind.value for kind in spec.layer_kinds() if kind.is_layer)
    mtp = {LayerKind.MTP.value: spec.num_mtp_layers} if spec.num_mtp_layers else {}
    return {**counted, **mtp}


def models_table(specs: Sequence[TransformerSpec]) -> RenderableType:
    """One model a row."""
    rows = (
        (
            spec.name,
            _billions(model_parameters(spec)),
            _billions(active_model_parameters(spec)) if spec.is_moe else "",
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
    del fields["moe_layer_pattern"]  # one number a layer, counted by kind
    active = {"active parameters": f"{active_model_parameters(spec):,}"} if spec.is_moe else {}
    kinds = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in _layers(spec).items())
    shown = {name: str(value) for name, value in fields.items() if value is not None}
    rows = {"parameters": f"{model_parameters(spec):,}", **active, "layers": kinds, **shown}
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


def cluster_document(cluster: Cluster) -> dict[str, Any]:
    """A cluster for programs, with the GPUs of each node that a job of its size takes."""
    return {**to_plain(cluster), "gpus_per_node": cluster.group_sizes()[0]}


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
        "num_gpus": f"{cluster.num_gpus}, {cluster.group_sizes()[0]} in each node, "
        f"{cluster.launch_gpus_per_host} on each host",
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
            ", ".join(f"{name} {share}" for name, share in _shares(level)),
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


def _shares(level: NetworkLevel) -> Iterator[tuple[str, str]]:
    """What collectives reach of a level's bandwidth, and what else of it narrows them."""
    yield from ((str(kind), f"{share:g}") for kind, share in level.efficiency.items())
    if level.reduction_efficiency is not None:
        yield "reduced in the network", f"{level.reduction_efficiency:g}"
    if level.max_rails is not None:
        yield "adapters of one group at most", str(level.max_rails)
    if level.ring_shares:
        yield "links of 2, 3, ... GPUs", " ".join(f"{share:g}" for share in level.ring_shares)
