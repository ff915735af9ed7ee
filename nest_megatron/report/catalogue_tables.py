"""The catalogue, layer profiles and measured networks as tables for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from nest_megatron.cluster.records import Cluster, CollectiveKind, NetworkLevel
from nest_megatron.model.layer_pattern import LayerKind
from nest_megatron.model.parameters import active_model_parameters, model_parameters
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.plain import to_plain
from nest_megatron.profile.network import CollectiveSample, LevelFit, NetworkProfile, kinds_of
from nest_megatron.profile.records import LayerProfile, Timing
from nest_megatron.report.tables import (
    EdgelessTable,
    FittingTable,
    Pair,
    figure_columns,
    name_columns,
    pairs,
    word_columns,
)
from nest_megatron.units import GB, GIB, format_gib, format_seconds

#: How fields begin that say nothing of a model without experts, and without latent attention.
_OF_EXPERTS, _OF_LATENT = (
    ("num_experts", "moe_"),
    ("q_lora", "kv_lora", "qk_head", "qk_pos", "v_head"),
)


def model_document(
    spec: TransformerSpec, notes: Sequence[str] = (), refusals: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """A model for programs, layers counted by kind.

    Args:
        notes: what was not read of its file.
        refusals: why each target does not take it, empty where it does; ``None`` leaves it out.
    """
    found = {
        **to_plain(spec),
        "parameters": model_parameters(spec),
        "active_parameters": active_model_parameters(spec),
        "layer_kinds": _layers(spec),
        "notes": list(notes),
    }
    if refusals is not None:
        found["targets"] = [name for name, why in refusals.items() if not why]
        found["refused_by"] = {name: why for name, why in refusals.items() if why}
    return found


def _layers(spec: TransformerSpec) -> dict[str, int]:
    """Decoder layers by kind, and MTP layers."""
    found = Counter(kind.value for kind in spec.layer_kinds() if kind.is_layer)
    if spec.num_mtp_layers:
        found[LayerKind.MTP.value] = spec.num_mtp_layers
    return found


def models_table(specs: Sequence[TransformerSpec]) -> RenderableType:
    """One model a row, whole on 60 columns."""
    rows = (
        (
            spec.name,
            _billions(model_parameters(spec)),
            _billions(active_model_parameters(spec)) if spec.is_moe else "",
            str(spec.num_layers),
            str(spec.hidden_size),
            f"{spec.moe_router_topk} of {spec.num_experts}" if spec.is_moe else "",
        )
        for spec in specs
    )
    longest = max((len(spec.name) for spec in specs), default=0)
    return EdgelessTable(
        *name_columns("Model", min_width=longest),
        *figure_columns("Params", "Active", "Layers", "Hidden", "Experts"),
        rows=rows,
    )


def _billions(count: int) -> str:
    """A number of parameters in at most six characters.

    >>> _billions(70_553_706_496), _billions(999_885_952), _billions(335_174_656)
    ('70.6 B', '1.0 B', '335 M')
    >>> _billions(671_026_419_200), _billions(8_202_900_000_000)
    ('671 B', '8.2 T')
    """
    for unit, size in (("T", 1e12), ("B", 1e9)):
        if count >= 0.9995 * size:
            return f"{count / size:.{1 if count < 99.95 * size else 0}f} {unit}"
    return f"{count / 1e6:.0f} M"


def model_details(spec: TransformerSpec, refusals: Mapping[str, str]) -> RenderableType:
    """Every field of a model that says something of it, and which frameworks take it.

    Args:
        refusals: why each target does not take it, empty where it does.
    """
    fields = to_plain(spec)
    del fields["moe_layer_pattern"]  # one number a layer, counted by kind
    idle: tuple[str, ...] = () if spec.is_moe else _OF_EXPERTS
    idle += () if spec.multi_latent_attention else _OF_LATENT
    rows = {"parameters": f"{model_parameters(spec):,}"}
    if spec.is_moe:
        rows["active parameters"] = f"{active_model_parameters(spec):,}"
    kinds = _layers(spec).items()
    rows["layers"] = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in kinds)
    for name, value in fields.items():
        if value is not None and not name.startswith(idle):
            rows[name] = str(value)
    title, taken = Text(spec.name, style="bold"), pairs(_taken(refusals))
    return Group(title, pairs(rows.items()), Text(""), taken)


def _taken(refusals: Mapping[str, str]) -> Iterator[Pair]:
    """Releases of each framework that take a model, and why others do not.

    >>> dict(_taken({"megatron_lm_0.15": "no", "megatron_lm_0.16": "", "megatron_lm_0.17": ""}))
    {'megatron_lm_0.15': 'not taken: no', 'megatron_lm_0.16 to 0.17': 'takes it'}
    """
    by_framework = groupby(refusals, lambda name: (name.rpartition("_")[0], bool(refusals[name])))
    for (framework, is_refused), targets in by_framework:
        names = [*targets]
        first, last = (name.rpartition("_")[2] for name in (names[0], names[-1]))
        releases = first if first == last else f"{first} to {last}"
        why = f"not taken: {refusals[names[-1]]}" if is_refused else "takes it"
        yield f"{framework}_{releases}", why


def clusters_table(entries: Sequence[tuple[str, Cluster]]) -> RenderableType:
    """One cluster a row; bandwidth is what one device sends to those of a level."""
    rows = (
        (
            name,
            cluster.accelerator.name,
            format_gib(cluster.accelerator.memory_bytes),
            ", ".join(
                f"{level.num_devices or 'all'}: {level.bandwidth_bytes_per_s / 1e9:.4g}"
                for level in cluster.levels
            ),
        )
        for name, cluster in entries
    )
    devices = [cluster.accelerator.name for _, cluster in entries]
    return EdgelessTable(
        *name_columns("Cluster", min_width=max((len(name) for name, _ in entries), default=0)),
        *name_columns("Device", min_width=max(map(len, devices), default=0)),
        *figure_columns("Memory"),
        *word_columns("GPUs: GB/s each"),
        rows=rows,
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
        "Level",
        "Devices",
        *figure_columns("GB/s each", "Latency"),
        *word_columns("Share reached"),
        rows=levels,
    )
    sources = pairs((level.name, level.source) for level in cluster.levels)
    return Group(Text(cluster.name, style="bold"), pairs(rows.items()), table, sources)


def _shares(level: NetworkLevel) -> Iterator[Pair]:
    """What collectives reach of a level's bandwidth, and what else of it narrows them."""
    yield from ((str(kind), f"{share:g}") for kind, share in level.efficiency.items())
    if level.reduction_efficiency is not None:
        yield "reduced in the network", f"{level.reduction_efficiency:g}"
    if level.max_rails is not None:
        yield "adapters of one group at most", str(level.max_rails)
    if level.ring_shares:
        yield "links of 2, 3, ... GPUs", " ".join(f"{share:g}" for share in level.ring_shares)


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
    table = FittingTable("Level", "Collective", *figure_columns(*heads))
    for fit in fits:
        told = _fit_shares(levels[fit.name]) if levels else {}
        level, *times = [fit.name, format_seconds(fit.latency_s), format_seconds(fit.startup_s)]
        for name, (kind, share) in _fit_shares(fit).items():
            figures = [f"{share * fit.bandwidth_bytes_per_s / GB:.2f}", f"{share:.3f}"]
            if levels:
                figures.append(f"{told[name][1]:.3f}" if name in told else "")
            table.add_row(level, name, *times, *figures, f"{100 * fit.residuals[kind]:.1f} %")
            level, times = "", ["", ""]
    return table


def _fit_shares(level: LevelFit | NetworkLevel) -> dict[str, tuple[CollectiveKind, float]]:
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
    table = FittingTable("Collective", *figure_columns(*heads))
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
        "note": profile.note,
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
    return FittingTable("Layer block", *figure_columns(*heads), rows=rows)
