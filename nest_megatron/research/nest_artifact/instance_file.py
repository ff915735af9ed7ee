"""The artifact's solver input, ``<model>_<devices>.json``.

Read as ``from_json`` and ``checkInputCorrectness`` of its C++ read it, and more strictly: what
would crash or be misread there is refused here. Fields that the format lacks are tolerated, as
there, and noted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from nest_megatron.documents import read_json
from nest_megatron.errors import UserInputError
from nest_megatron.plain import Count, NonNegative, Positive, Source, from_plain
from nest_megatron.research.nest_artifact.records import (
    Chain,
    Edges,
    FixedPlan,
    Instance,
    Layer,
    Network,
    Optimizer,
)

#: More would take tables of hundreds of megabytes, or minutes.
_MOST_LAYERS = 1_000
_MOST_DEVICES = 1_000_000
_FIX = "Correct it in the file."
SOURCE = Source(correct=_FIX, add="Add it to the file.", whole_floats=True, is_foreign=True)

_Edge = tuple[int, int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class _FileNode:
    id: int
    parameterSize: NonNegative
    activationSize: NonNegative
    optimalLatencyFw: NonNegative
    optimalLatencyBw: NonNegative
    isTensorParallelized: bool
    energy: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _FileEdge:
    sourceId: int
    destId: int
    communicationCost: NonNegative


@dataclass(frozen=True, slots=True, kw_only=True)
class FileBaseline:
    """A fixed plan of the format."""

    p: Count
    d: Count
    t: Count
    num_transformer_layers: Count
    layer_partition: tuple[Count, ...] | None = None

    def named(self, name: str) -> FixedPlan:
        """The plan under its name in the file."""
        return FixedPlan(
            name=name,
            num_stages=self.p,
            data_parallel_size=self.d,
            tensor_model_parallel_size=self.t,
            num_layers=self.num_transformer_layers,
            layer_partition=self.layer_partition or (),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    ep_degree: Count
    sp_enabled: bool
    cp_degree: Count
    maxMemoryPerDevice: Positive
    maxDevices: Count
    bandwidth: Positive  # this and frequency are priced nowhere in this mode
    bws: tuple[Positive, ...]
    latency_per_level: tuple[NonNegative, ...]
    devices_per_level: tuple[Count, ...]
    frequency: Positive
    mbsInBatch: Count
    nodes: Mapping[str, tuple[_FileNode, ...]]
    edges: Mapping[str, tuple[_FileEdge, ...]]
    activationRecomputation: bool
    optimizerAlgorithm: Optimizer
    baselines: Mapping[str, FileBaseline] | None = None


def wrong(where: str, value: object, limit: str, fix: str = _FIX) -> UserInputError:
    """The error for one value."""
    return UserInputError(where, value=value, limit=limit, fix=fix)


def read_instance(path: Path) -> Instance:
    """Read an instance.

    Raises:
        UserInputError: for the first field that is missing or wrong, with its place.
    """
    document = read_json(path, "instance", unique_keys=True)
    file = from_plain(_File, document, source=SOURCE)
    _check_same_degrees(file)
    if file.maxDevices > _MOST_DEVICES:
        raise wrong("maxDevices", file.maxDevices, f"it must be at most {_MOST_DEVICES:,}")
    degrees = sorted(file.nodes, key=lambda tp: (len(tp), tp))
    chains = {_as_number(tp): _chain(file, tp) for tp in degrees}
    _check_same_nodes(chains)
    return Instance(
        chains=chains,
        network=_network(file),
        num_devices=file.maxDevices,
        memory_bytes=file.maxMemoryPerDevice,
        num_micro_batches=file.mbsInBatch,
        expert_model_parallel_size=file.ep_degree,
        context_parallel_size=file.cp_degree,
        sequence_parallel=file.sp_enabled,
        recompute=file.activationRecomputation,
        optimizer=file.optimizerAlgorithm,
        baselines={name: each.named(name) for name, each in (file.baselines or {}).items()},
        notes=tuple(dict.fromkeys(_notes(document))),
    )


def _notes(document: Mapping[str, Any]) -> Iterator[str]:
    """Names that the format does not have."""
    for prefix, objects, kind in (
        ("", [document], _File),
        ("nodes: ", itertools.chain.from_iterable(document["nodes"].values()), _FileNode),
        ("edges: ", itertools.chain.from_iterable(document["edges"].values()), _FileEdge),
        ("baselines: ", (document.get("baselines") or {}).values(), FileBaseline),
    ):
        known = {field.name for field in fields(kind)}
        for each in objects:
            yield from (f"{prefix}{name} is not read" for name in sorted(each.keys() - known))


def _as_number(text: str) -> int:
    if not text.isascii() or not text.isdigit() or text.startswith("0"):
        limit = "a tensor degree must be a whole number of at least 1"
        raise wrong(f"nodes.{text}", text, limit)
    return int(text)


def _check_same_degrees(file: _File) -> None:
    if not file.nodes:
        raise wrong("nodes", {}, "there is no tensor degree in it")
    if set(file.nodes) != set(file.edges):
        limit = f"it must hold the tensor degrees of nodes, {sorted(file.nodes)}"
        raise wrong("edges", sorted(file.edges), limit)


def _check_same_nodes(chains: dict[int, Chain]) -> None:
    orders = {tp: tuple(layer.node_id for layer in chain.layers) for tp, chain in chains.items()}
    first = next(iter(orders))
    for tp, order in orders.items():
        if order != orders[first]:
            differing = sorted(set(order) ^ set(orders[first])) or list(order)
            raise wrong(
                f"nodes.{tp}", differing, f"its nodes are not those of tensor degree {first}"
            )


def _network(file: _File) -> Network:
    fan_outs, number = file.devices_per_level, len(file.devices_per_level)
    if math.prod(fan_outs) != file.maxDevices or not fan_outs:
        limit = f"its product must be maxDevices, {file.maxDevices}"
        raise wrong("devices_per_level", list(fan_outs), limit)
    for name, values in (("bws", file.bws), ("latency_per_level", file.latency_per_level)):
        if len(values) != number:
            raise wrong(name, list(values), f"devices_per_level has {number} levels")
    return Network(fan_outs=fan_outs, bandwidths=file.bws, latencies=file.latency_per_level)


def _chain(file: _File, tp: str) -> Chain:
    layers: dict[int, Layer] = {}
    for at, node in enumerate(file.nodes[tp]):
        place = f"nodes.{tp}[{at}]"
        if node.id in layers:
            raise wrong(f"{place}.id", node.id, "two nodes have this id")
        if node.isTensorParallelized and tp == "1":
            limit = "at tensor degree 1 nothing is tensor parallel"
            raise wrong(f"{place}.isTensorParallelized", True, limit)
        layers[node.id] = _layer(node)
    if not 0 < len(layers) <= _MOST_LAYERS:
        raise wrong(f"nodes.{tp}", len(layers), f"it must hold 1 to {_MOST_LAYERS:,} nodes")
    pairs: dict[tuple[int, int], float] = {}
    for at, edge in enumerate(file.edges[tp]):
        place = f"edges.{tp}[{at}]"
        for name in ("sourceId", "destId"):
            if getattr(edge, name) not in layers:
                limit = "there is no node with this id"
                raise wrong(f"{place}.{name}", getattr(edge, name), limit)
        ends = (edge.sourceId, edge.destId)
        if ends in pairs:
            raise wrong(place, list(ends), "two edges join these nodes")
        pairs[ends] = edge.communicationCost
    return chain_of(layers, [(*ends, size) for ends, size in pairs.items()], f"edges.{tp}")


def _layer(node: _FileNode) -> Layer:
    return Layer(
        node_id=node.id,
        forward=node.optimalLatencyFw,
        backward=node.optimalLatencyBw,
        weight_bytes=node.parameterSize,
        activation_bytes=node.activationSize,
    )


def chain_of(layers: dict[int, Layer], edges: Sequence[_Edge], where: str) -> Chain:
    """Layers by node id, and edges between node ids, as a chain.

    Raises:
        UserInputError: where the edges form a cycle or leave two layers in no order; the artifact
            does not support branches either.
    """
    order = _order(list(layers), edges, where)
    place = {node_id: at for at, node_id in enumerate(order)}
    incoming: list[list[tuple[int, float]]] = [[] for _ in order]
    outgoing: list[list[tuple[int, float]]] = [[] for _ in order]
    for source, target, num_bytes in edges:
        incoming[place[target]].append((place[source], num_bytes))
        outgoing[place[source]].append((place[target], num_bytes))
    return Chain(
        layers=tuple(layers[node_id] for node_id in order),
        incoming=_frozen(incoming),
        outgoing=_frozen(outgoing),
    )


def _frozen(edges: Iterable[Iterable[tuple[int, float]]]) -> tuple[Edges, ...]:
    return tuple(tuple(each) for each in edges)


def _order(node_ids: list[int], edges: Sequence[_Edge], where: str) -> list[int]:
    """The only topological order."""
    before: dict[int, list[int]] = {node_id: [] for node_id in node_ids}
    for source, target, _ in edges:
        before[target].append(source)
    graph, order = TopologicalSorter(before), list[int]()
    try:
        graph.prepare()
    except CycleError as error:
        raise wrong(where, sorted(set(error.args[1])), "these nodes stand in a cycle") from error
    while graph:
        ready = graph.get_ready()
        if len(ready) > 1:
            limit = "no edges order these nodes, and the layers must form a chain"
            raise wrong(where, sorted(ready), limit, "Join branches into one node.")
        order += ready
        graph.done(*ready)
    return order
