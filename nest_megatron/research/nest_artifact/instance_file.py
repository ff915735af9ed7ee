"""The artifact's solver input, ``<model>_<devices>.json``.

Read as ``from_json`` and ``checkInputCorrectness`` of its C++ read it, and more strictly: what
would crash or be misread there is refused here. Fields that the format lacks are tolerated, as
there, and noted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from nest_megatron.research.nest_artifact.fields import Fields, number, read_json, whole, wrong
from nest_megatron.research.nest_artifact.records import (
    Baseline,
    Chain,
    Edges,
    Instance,
    Layer,
    Network,
    Optimizer,
)

_TOP = {
    *("ep_degree", "sp_enabled", "cp_degree", "maxMemoryPerDevice", "maxDevices", "bandwidth"),
    *("bws", "latency_per_level", "devices_per_level", "frequency", "mbsInBatch", "nodes"),
    *("edges", "activationRecomputation", "optimizerAlgorithm", "baselines"),
}
_NODE = {
    *("id", "parameterSize", "activationSize", "optimalLatencyFw", "optimalLatencyBw"),
    *("isTensorParallelized", "energy"),
}
_EDGE = {"sourceId", "destId", "communicationCost"}
_BASELINE = {"p", "d", "t", "num_transformer_layers", "layer_partition"}

#: More would take tables of hundreds of megabytes, or minutes.
_MOST_LAYERS = 1_000
_MOST_DEVICES = 1_000_000

_Edge = tuple[int, int, float]


def read_instance(path: Path) -> Instance:
    """Read an instance.

    Raises:
        UserInputError: for the first field that is missing or wrong, with its place.
    """
    top = read_json(path, "instance")
    nodes, edges = top.inner("nodes"), top.inner("edges")
    _check_same_degrees(nodes, edges)
    notes = [f"{name} is not read" for name in top.beyond(_TOP)]
    chains = {
        whole(_as_number(tp, nodes), nodes.place(tp)): _chain(nodes, edges, tp, notes)
        for tp in sorted(nodes.values, key=lambda tp: (len(tp), tp))
    }
    _check_same_nodes(chains)
    for name in ("bandwidth", "frequency"):  # priced nowhere in this mode, but part of the format
        top.number(name, above=True)
    num_devices = top.whole("maxDevices", most=_MOST_DEVICES)
    return Instance(
        chains=chains,
        network=_network(top, num_devices),
        num_devices=num_devices,
        memory_bytes=top.number("maxMemoryPerDevice", above=True),
        num_micro_batches=top.whole("mbsInBatch"),
        expert_model_parallel_size=top.whole("ep_degree"),
        context_parallel_size=top.whole("cp_degree"),
        sequence_parallel=top.flag("sp_enabled"),
        recompute=top.flag("activationRecomputation"),
        optimizer=_optimizer(top),
        baselines=_baselines(top, notes),
        notes=tuple(dict.fromkeys(notes)),
    )


def _as_number(text: str, nodes: Fields) -> int:
    if not text.isascii() or not text.isdigit() or text.startswith("0"):
        raise wrong(nodes.place(text), text, "a tensor degree must be a whole number of at least 1")
    return int(text)


def _check_same_degrees(nodes: Fields, edges: Fields) -> None:
    if not nodes.values:
        raise wrong("nodes", {}, "there is no tensor degree in it")
    if set(nodes.values) != set(edges.values):
        given = sorted(edges.values)
        raise wrong(
            "edges", given, f"it must hold the tensor degrees of nodes, {sorted(nodes.values)}"
        )


def _check_same_nodes(chains: dict[int, Chain]) -> None:
    orders = {tp: tuple(layer.node_id for layer in chain.layers) for tp, chain in chains.items()}
    first = next(iter(orders))
    for tp, order in orders.items():
        if order != orders[first]:
            differing = sorted(set(order) ^ set(orders[first])) or list(order)
            raise wrong(
                f"nodes.{tp}",
                differing,
                f"its nodes are not those of tensor degree {first}",
            )


def _network(top: Fields, num_devices: int) -> Network:
    fan_outs = tuple(
        whole(value, f"devices_per_level[{at}]")
        for at, value in enumerate(top.items("devices_per_level"))
    )
    if math.prod(fan_outs) != num_devices or not fan_outs:
        limit = f"its product must be maxDevices, {num_devices}"
        raise wrong("devices_per_level", list(fan_outs), limit)
    return Network(
        fan_outs=fan_outs,
        bandwidths=_per_level(top, "bws", len(fan_outs), above=True),
        latencies=_per_level(top, "latency_per_level", len(fan_outs), above=False),
    )


def _per_level(top: Fields, name: str, num_levels: int, *, above: bool) -> tuple[float, ...]:
    values = top.items(name)
    if len(values) != num_levels:
        raise wrong(name, values, f"devices_per_level has {num_levels} levels")
    return tuple(number(value, f"{name}[{at}]", above=above) for at, value in enumerate(values))


def _optimizer(top: Fields) -> Optimizer:
    name = top.get("optimizerAlgorithm")
    known = [optimizer.value for optimizer in Optimizer]
    if name not in known:
        raise wrong("optimizerAlgorithm", name, f"it must be {' or '.join(known)}")
    return Optimizer(name)


def _chain(nodes: Fields, edges: Fields, tp: str, notes: list[str]) -> Chain:
    layers: dict[int, Layer] = {}
    for fields in nodes.objects(tp):
        layer = _layer(fields, tp)
        if layer.node_id in layers:
            raise wrong(fields.place("id"), layer.node_id, "two nodes have this id")
        layers[layer.node_id] = layer
        notes.extend(f"nodes: {name} is not read" for name in fields.beyond(_NODE))
    if not 0 < len(layers) <= _MOST_LAYERS:
        limit = f"it must hold 1 to {_MOST_LAYERS:,} nodes"
        raise wrong(nodes.place(tp), len(layers), limit)
    pairs: dict[tuple[int, int], float] = {}
    for fields in edges.objects(tp):
        source, target, num_bytes = _edge(fields, layers)
        if (source, target) in pairs:
            raise wrong(fields.where, [source, target], "two edges join these nodes")
        pairs[source, target] = num_bytes
        notes.extend(f"edges: {name} is not read" for name in fields.beyond(_EDGE))
    return chain_of(layers, [(*ends, size) for ends, size in pairs.items()], f"edges.{tp}")


def _layer(fields: Fields, tp: str) -> Layer:
    if fields.flag("isTensorParallelized") and tp == "1":
        place = fields.place("isTensorParallelized")
        raise wrong(place, True, "at tensor degree 1 nothing is tensor parallel")
    return Layer(
        node_id=whole(fields.get("id"), fields.place("id"), least=None),
        forward=fields.number("optimalLatencyFw"),
        backward=fields.number("optimalLatencyBw"),
        weight_bytes=fields.number("parameterSize"),
        activation_bytes=fields.number("activationSize"),
    )


def _edge(fields: Fields, layers: dict[int, Layer]) -> _Edge:
    ends = []
    for name in ("sourceId", "destId"):
        end = whole(fields.get(name), fields.place(name), least=None)
        if end not in layers:
            raise wrong(fields.place(name), end, "there is no node with this id")
        ends.append(end)
    return ends[0], ends[1], fields.number("communicationCost")


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
    waiting = dict.fromkeys(node_ids, 0)
    after: dict[int, list[int]] = {node_id: [] for node_id in node_ids}
    for source, target, _ in edges:
        waiting[target] += 1
        after[source].append(target)
    ready, order = [node_id for node_id in node_ids if not waiting[node_id]], list[int]()
    while ready:
        if len(ready) > 1:
            limit = "no edges order these nodes, and the layers must form a chain"
            raise wrong(where, sorted(ready), limit, "Join branches into one node.")
        order.append(ready.pop())
        for target in after[order[-1]]:
            waiting[target] -= 1
            if not waiting[target]:
                ready.append(target)
    if len(order) < len(node_ids):
        raise wrong(where, sorted(set(node_ids) - set(order)), "these nodes stand in a cycle")
    return order


def _baselines(top: Fields, notes: list[str]) -> dict[str, Baseline]:
    if top.values.get("baselines") is None:
        return {}
    inner = top.inner("baselines")
    found = {name: baseline_of(inner.inner(name), name) for name in inner.values}
    for name in inner.values:
        notes.extend(f"baselines: {key} is not read" for key in inner.inner(name).beyond(_BASELINE))
    return found


def baseline_of(fields: Fields, name: str) -> Baseline:
    """A fixed plan of the format: p, d, t, num_transformer_layers, and perhaps layer_partition."""
    partition: tuple[int, ...] = ()
    if fields.values.get("layer_partition") is not None:
        partition = tuple(
            whole(value, f"{fields.place('layer_partition')}[{at}]")
            for at, value in enumerate(fields.items("layer_partition"))
        )
    return Baseline(
        name=name,
        num_stages=fields.whole("p"),
        data_parallel_size=fields.whole("d"),
        tensor_model_parallel_size=fields.whole("t"),
        num_layers=fields.whole("num_transformer_layers"),
        layer_partition=partition,
    )
