"""The artifact's files: its solver's input ``<model>_<devices>.json``, and plans.

Read as ``from_json`` and ``checkInputCorrectness`` of its C++ read them, and more strictly: what
would crash or be misread there is refused here. Fields that the format lacks are tolerated, as
there, and noted.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from graphlib import CycleError, TopologicalSorter
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from nest_megatron.documents import read_json
from nest_megatron.errors import UserInputError, nearest
from nest_megatron.files import write_text
from nest_megatron.plain import (
    Count,
    Index,
    NonNegative,
    Positive,
    Source,
    from_plain,
    frozen,
    key_of,
)
from nest_megatron.research.nest_artifact.price import (
    AS_ARTIFACT,
    ArtifactRule,
    Chain,
    FixedPlan,
    Instance,
    Layer,
    Network,
    Optimizer,
    Stage,
    StagePlacement,
)

#: More would take tables of hundreds of megabytes, or minutes.
_MOST_LAYERS = 1_000
_MOST_DEVICES = 1_000_000
_FIX = "Correct it in the file."
_SOURCE = Source(correct=_FIX, add="Add it to the file.", whole_floats=True, is_foreign=True)
_RENUMBER = "List each layer once, in the order of the chain, first stage first."


@frozen
class _FileNode(Layer):
    isTensorParallelized: bool
    energy: object = None


@frozen
class _FileEdge:
    sourceId: int
    destId: int
    communicationCost: NonNegative


@frozen
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
    baselines: Mapping[str, FixedPlan] | None = None


@frozen
class _FileStage:
    devicesForStage: Count
    nodes: tuple[int, ...]


@frozen
class _FileOutput:
    stages: tuple[_FileStage, ...]
    dataParallelDegree: Count
    tensorParallelDegree: Count
    finalTimePerBatch: NonNegative | None = None
    networkSkeleton: tuple[tuple[Index, tuple[Index, ...]], ...] | None = None


def _wrong(where: str, value: object, limit: str, fix: str = _FIX) -> UserInputError:
    return UserInputError(where, value, limit, fix)


def read_instance(path: Path) -> Instance:
    """Read an instance.

    Raises:
        UserInputError: for the first field that is missing or wrong, with its place.
    """
    document = read_json(path, "instance")
    file = from_plain(_File, document, source=_SOURCE)
    if not file.nodes:
        raise _wrong("nodes", {}, "there is no tensor degree in it")
    if set(file.nodes) != set(file.edges):
        limit = f"it must hold the tensor degrees of nodes, {sorted(file.nodes)}"
        raise _wrong("edges", sorted(file.edges), limit)
    if file.maxDevices > _MOST_DEVICES:
        raise _wrong("maxDevices", file.maxDevices, f"it must be at most {_MOST_DEVICES:,}")
    chains = {}
    for tp in sorted(file.nodes, key=lambda tp: (len(tp), tp)):
        if not tp.isascii() or not tp.isdigit() or tp.startswith("0"):
            limit = "a tensor degree must be a whole number of at least 1"
            raise _wrong(f"nodes.{tp}", tp, limit)
        chains[int(tp)] = _chain(file, tp)
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
        baselines=dict(file.baselines or {}),
        notes=tuple(dict.fromkeys(_notes(document))),
    )


def _notes(document: Mapping[str, Any]) -> Iterator[str]:
    """Names that the format does not have."""
    for prefix, objects, kind in (
        ("", [document], _File),
        ("nodes: ", itertools.chain.from_iterable(document["nodes"].values()), _FileNode),
        ("edges: ", itertools.chain.from_iterable(document["edges"].values()), _FileEdge),
        ("baselines: ", (document.get("baselines") or {}).values(), FixedPlan),
    ):
        known = {*map(key_of, fields(kind))}
        for each in objects:
            yield from (f"{prefix}{name} is not read" for name in sorted(each.keys() - known))


def _check_same_nodes(chains: dict[int, Chain]) -> None:
    orders = {tp: [layer.node_id for layer in chain.layers] for tp, chain in chains.items()}
    least, expected = next(iter(orders.items()))
    for tp, order in orders.items():
        if order != expected:
            differing = sorted(set(order) ^ set(expected)) or order
            limit = f"its nodes are not those of tensor degree {least}"
            raise _wrong(f"nodes.{tp}", differing, limit)


def _network(file: _File) -> Network:
    fan_outs, number = file.devices_per_level, len(file.devices_per_level)
    if math.prod(fan_outs) != file.maxDevices or not fan_outs:
        limit = f"its product must be maxDevices, {file.maxDevices}"
        raise _wrong("devices_per_level", list(fan_outs), limit)
    for name, values in (("bws", file.bws), ("latency_per_level", file.latency_per_level)):
        if len(values) != number:
            raise _wrong(name, list(values), f"devices_per_level has {number} levels")
    return Network(fan_outs=fan_outs, bandwidths=file.bws, latencies=file.latency_per_level)


def _chain(file: _File, tp: str) -> Chain:
    layers: dict[int, Layer] = {}
    for at, node in enumerate(file.nodes[tp]):
        where = f"nodes.{tp}[{at}]"
        if node.node_id in layers:
            raise _wrong(f"{where}.id", node.node_id, "two nodes have this id")
        if node.isTensorParallelized and tp == "1":
            limit = "at tensor degree 1 nothing is tensor parallel"
            raise _wrong(f"{where}.isTensorParallelized", True, limit)
        layers[node.node_id] = node
    if not 0 < len(layers) <= _MOST_LAYERS:
        raise _wrong(f"nodes.{tp}", len(layers), f"it must hold 1 to {_MOST_LAYERS:,} nodes")
    sizes = {}
    for at, edge in enumerate(file.edges[tp]):
        where, ends = f"edges.{tp}[{at}]", (edge.sourceId, edge.destId)
        for name, node_id in zip(("sourceId", "destId"), ends, strict=True):
            if node_id not in layers:
                raise _wrong(f"{where}.{name}", node_id, "there is no node with this id")
        if ends in sizes:
            raise _wrong(where, list(ends), "two edges join these nodes")
        sizes[ends] = edge.communicationCost
    return chain_of(layers, sizes, f"edges.{tp}")


def chain_of(
    layers: Mapping[int, Layer], edges: Mapping[tuple[int, int], float], where: str
) -> Chain:
    """Layers by node id, and edges between node ids with their bytes, as a chain.

    Raises:
        UserInputError: where the edges form a cycle or leave two layers in no order; the artifact
            does not support branches either.
    """
    order = _order(layers, edges, where)
    place = {node_id: at for at, node_id in enumerate(order)}
    incoming: list[list[tuple[int, float]]] = [[] for _ in order]
    outgoing: list[list[tuple[int, float]]] = [[] for _ in order]
    for (source, target), num_bytes in edges.items():
        incoming[place[target]].append((place[source], num_bytes))
        outgoing[place[source]].append((place[target], num_bytes))
    return Chain(
        layers=tuple(layers[node_id] for node_id in order),
        incoming=tuple(map(tuple, incoming)),
        outgoing=tuple(map(tuple, outgoing)),
    )


def _order(node_ids: Iterable[int], edges: Iterable[tuple[int, int]], where: str) -> list[int]:
    """The only topological order."""
    graph, order = TopologicalSorter[int](dict.fromkeys(node_ids, ())), list[int]()
    for source, target in edges:
        graph.add(target, source)
    try:
        graph.prepare()
    except CycleError as error:
        raise _wrong(where, sorted(set(error.args[1])), "these nodes stand in a cycle") from error
    while graph:
        ready = graph.get_ready()
        if len(ready) > 1:
            limit = "no edges order these nodes, and the layers must form a chain"
            raise _wrong(where, sorted(ready), limit, "Join branches into one node.")
        order += ready
        graph.done(*ready)
    return order


def read_placement(
    path: Path, instance: Instance, rule: ArtifactRule = AS_ARTIFACT
) -> tuple[StagePlacement, float | None]:
    """A plan for an instance, and the time per batch that its file gives, if it gives one.

    Args:
        path: the solver's output (``stages``, ``dataParallelDegree``, ``tensorParallelDegree``), a
            recorded result with that under ``output``, or a baseline (``p``, ``d``, ``t``,
            ``num_transformer_layers``).

    Raises:
        UserInputError: for the first field that is missing, wrong, or no part of the instance.
    """
    document, where = read_json(path, "placement"), ""
    if isinstance(document, dict) and "output" in document:
        document, where = document["output"], "output"
    if isinstance(document, dict) and "stages" not in document and "p" in document:
        baseline = from_plain(FixedPlan, document, where, _SOURCE)
        return baseline_placement(instance, path.stem, baseline, rule), None
    output, prefix = from_plain(_FileOutput, document, where, _SOURCE), f"{where}.".lstrip(".")
    tp = output.tensorParallelDegree
    chain = _chain_for(instance, tp, f"{prefix}tensorParallelDegree")
    placement = StagePlacement(
        stages=tuple(_stages(output, chain, f"{prefix}stages")),
        data_parallel_size=output.dataParallelDegree,
        tensor_model_parallel_size=tp,
        printed_devices=_printed_devices(output, len(chain.layers), f"{prefix}networkSkeleton"),
    )
    return placement, output.finalTimePerBatch


def write_placement(path: Path, instance: Instance, placement: StagePlacement, time: float) -> None:
    """Write a plan as the artifact's solver writes its output."""
    layers = instance.chains[placement.tensor_model_parallel_size].layers
    document = {
        "dataParallelDegree": placement.data_parallel_size,
        "finalTimePerBatch": time,
        "stages": [
            {
                "devicesForStage": stage.num_devices,
                "nodes": [layer.node_id for layer in layers[stage.first : stage.end]],
            }
            for stage in placement.stages
        ],
        "tensorParallelDegree": placement.tensor_model_parallel_size,
    }
    write_text(path, json.dumps(document, indent=1) + "\n")


def named_baseline(
    instance: Instance, name: str, rule: ArtifactRule = AS_ARTIFACT
) -> StagePlacement:
    """A baseline that the instance carries.

    Raises:
        UserInputError: for a name that it does not carry, or a plan that makes no stages.
    """
    if name not in instance.baselines:
        known = sorted(instance.baselines)
        fix = nearest(name, known) if known else "Give a placement file instead."
        raise _wrong("--baseline", name, "the instance has no such baseline", fix)
    return baseline_placement(instance, name, instance.baselines[name], rule)


def baseline_placement(
    instance: Instance, name: str, baseline: FixedPlan, rule: ArtifactRule = AS_ARTIFACT
) -> StagePlacement:
    """A fixed plan as stages: its boundaries, or ceil(layers / p) layers a stage.

    Raises:
        UserInputError: where a stage is left empty or the instance lacks the degree;
            the artifact's solver crashes on both.
    """
    layers = _chain_for(instance, baseline.t, f"{name}.t").layers
    if baseline.num_transformer_layers > len(layers):
        limit = f"the instance has {len(layers)} layers, its embedding among them"
        raise _wrong(f"{name}.num_transformer_layers", baseline.num_transformer_layers, limit)
    boundaries = _baseline_boundaries(name, baseline)
    if not rule.baseline_cuts_count_embedding:
        embeddings = sum(layer.node_id < 0 for layer in layers)
        boundaries = [at + embeddings for at in boundaries]
    ends = [0, *(min(at, len(layers)) for at in boundaries[:-1]), len(layers)]
    for number, (first, end) in enumerate(pairwise(ends)):
        if end <= first:
            limit = f"stage {number} of {baseline.p} would be empty"
            raise _wrong(f"{name}.p", baseline.p, limit, "Give fewer stages.")
    devices = instance.devices_per_stage(baseline.t)
    return StagePlacement(
        stages=tuple(Stage(first=a, end=b, num_devices=devices) for a, b in pairwise(ends)),
        data_parallel_size=baseline.d,
        tensor_model_parallel_size=baseline.t,
        is_baseline=True,
    )


def _baseline_boundaries(name: str, baseline: FixedPlan) -> list[int]:
    """Where each stage ends, in layers."""
    partition, count = baseline.layer_partition, baseline.p
    if not partition:
        each = -(-baseline.num_transformer_layers // count)
        return [min((n + 1) * each, baseline.num_transformer_layers) for n in range(count)]
    if len(partition) != count or sum(partition) != baseline.num_transformer_layers:
        limit = f"it must share {baseline.num_transformer_layers} layers among {count} stages"
        raise _wrong(f"{name}.layer_partition", list(partition), limit)
    return list(accumulate(partition))


def _chain_for(instance: Instance, tp: int, where: str) -> Chain:
    if tp not in instance.chains:
        known = ", ".join(map(str, instance.chains))
        raise _wrong(where, tp, f"the instance has tensor degrees {known}", "Use one of them.")
    return instance.chains[tp]


def _stages(output: _FileOutput, chain: Chain, where: str) -> Iterator[Stage]:
    order, end = tuple(layer.node_id for layer in chain.layers), 0
    for at, stage in enumerate(output.stages):
        first, end = end, end + len(stage.nodes)
        if not stage.nodes or stage.nodes != order[first:end]:
            expected = order[first] if first < len(order) else "no further node"
            limit = f"it must be a run of the chain that begins with {expected}"
            raise _wrong(f"{where}[{at}].nodes", list(stage.nodes), limit, _RENUMBER)
        yield Stage(first=first, end=end, num_devices=stage.devicesForStage)
    if end < len(order):
        raise _wrong(where, list(order[end:]), "these nodes are in no stage", _RENUMBER)


def _printed_devices(output: _FileOutput, num_layers: int, where: str) -> tuple[int, ...]:
    """The first listed device of each layer, layers counted along the chain."""
    if output.networkSkeleton is None:
        return ()
    devices: dict[int, int] = {}
    for device, layers in output.networkSkeleton:
        for layer in layers:
            devices.setdefault(layer, device)
    if sorted(devices) != list(range(num_layers)):
        raise _wrong(where, sorted(devices), f"it must hold the layers 0 to {num_layers - 1}")
    return tuple(devices[layer] for layer in range(num_layers))
