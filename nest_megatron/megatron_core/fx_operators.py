"""The nodes of a trace as operators and edges: FLOPs, traffic, parameters, what is saved.

Views are no operators: what reads a view reads the tensor behind it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nest_megatron.megatron_core.fx_trace import PLACE, Place, Trace
from nest_megatron.model.graph import ChainEdge, ChainOperator, OperatorKind

_ATTENTION = ("scaled_dot_product", "flash_attention", "efficient_attention", "flex_attention")
_GROUPED = ("_grouped_mm", "_scaled_grouped_mm")
#: These read the rows that they are asked for, and no more of the table.
_GATHERS = frozenset({"embedding", "index", "index_select", "gather", "take"})
#: These give memory that nothing has been written to, or constants of the program.
_FREE = frozenset(
    {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "lift_fresh_copy"}
)
_CPU_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainWork:
    """Operators in the order of the run and their places, edges, and what is saved first where."""

    operators: tuple[ChainOperator, ...]
    places: tuple[Place, ...]
    edges: tuple[ChainEdge, ...]
    saved: tuple[tuple[Place, float], ...]


def chain_work(trace: Trace) -> ChainWork:
    """Work and traffic of every operator of a trace."""
    makers = {_storage(t): f"input_{i}" for i, t in enumerate(trace.inputs)}
    unused = {_storage(weight): weight.numel() for weight in trace.weights.values()}
    saved = _saved(trace)
    operators: list[ChainOperator] = []
    places: list[Place] = []
    edges: list[ChainEdge] = []
    for node in trace.graph.nodes:
        if not _runs(node, makers):
            continue
        read = _read(node)
        edges += [
            ChainEdge(source=makers[s], target=node.name, num_bytes=num_bytes)
            for s, num_bytes in read.items()
            if s in makers
        ]
        parameters = sum(unused.pop(storage, 0) for storage in read)
        operators.append(_operator(node, read, parameters, makers, saved))
        places.append(_place(node))
        makers |= dict.fromkeys(map(_storage, _tensors(node)), node.name)
    return ChainWork(
        operators=tuple(operators),
        places=tuple(places),
        edges=tuple(edges),
        saved=tuple(saved.values()),
    )


def _saved(trace: Trace) -> dict[int, tuple[Place, float]]:
    """Storages that the backward pass needs besides the weights, with where each is saved first."""
    known = {_storage(t) for t in (*trace.weights.values(), *trace.buffers.values())}
    found: dict[int, tuple[Place, float]] = {}
    for tensor, place in trace.saved:
        if (storage := _storage(tensor)) not in known:
            found.setdefault(storage, (place, float(tensor.untyped_storage().nbytes())))
    return found


def _operator(
    node: Any,
    read: dict[int, float],
    parameters: int,
    makers: dict[int, str],
    saved: dict[int, tuple[Place, float]],
) -> ChainOperator:
    out = {_storage(t): _size(t) for t in _tensors(node)}
    output_bytes = sum(out.values())
    if _name(node) in _GATHERS:
        table = _tensors(node.args[0])
        read = {**read, **{_storage(t): min(output_bytes, _size(t)) for t in table}}
    written_before = [s for s in out if s in makers]  # an update in place keeps what it was
    return ChainOperator(
        name=node.name,
        target=".".join(str(node.target).split(".")[:2]),  # "aten.mm" of "aten.mm.default"
        module=_place(node).path,
        kind=_kind(node),
        flops=float(_flops(node)),
        bytes_moved=sum(read.values()) + output_bytes,
        parameters=parameters,
        output_bytes=output_bytes,
        saved_bytes=sum(saved[s][1] for s in out if s in saved and s not in written_before),
    )


def _runs(node: Any, makers: dict[int, str]) -> bool:
    """Whether a node is an operator that a device works on."""
    if node.op != "call_function" or not hasattr(node.target, "_schema"):
        return False
    if _name(node) in _FREE:
        return False
    given = {_storage(t) for argument in node.all_input_nodes for t in _tensors(argument)}
    made = {_storage(t) for t in _tensors(node)}
    if node.target._schema.is_mutable:
        return bool(made)
    return not made <= (given | makers.keys())


def _read(node: Any) -> dict[int, float]:
    """Bytes that a node reads of each storage."""
    read: dict[int, float] = {}
    for argument in node.all_input_nodes:
        for tensor in _tensors(argument):
            storage = _storage(tensor)
            read[storage] = max(read.get(storage, 0.0), _size(tensor))
    return read


def _tensors(node: Any) -> list[Any]:
    """The tensors that a node gives."""
    import torch

    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [each for each in value if isinstance(each, torch.Tensor)]
    return []


def _place(node: Any) -> Place:
    place: Place = node.meta.get(PLACE, Place())
    return place


def _storage(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)


def _size(tensor: Any) -> float:
    """Bytes of a tensor; of one that is expanded, those that are really there."""
    whole: int = tensor.untyped_storage().nbytes()
    return float(min(tensor.numel() * tensor.element_size(), whole))


def _name(node: Any) -> str:
    """``add`` of ``aten.add_.Tensor``."""
    name: str = node.target._schema.name.rpartition("::")[2]
    return name.removesuffix("_")


def _kind(node: Any) -> OperatorKind:
    from torch.utils.flop_counter import flop_registry

    name = _name(node)
    if any(word in name for word in _ATTENTION):
        return OperatorKind.ATTENTION
    if name in _GROUPED:
        return OperatorKind.GROUPED_GEMM
    if node.target.overloadpacket in flop_registry:
        return OperatorKind.GEMM
    return OperatorKind.MEMORY_BOUND


def _flops(node: Any) -> int:
    """Forward FLOPs by torch's own registry; operators that it lacks have none."""
    import torch
    from torch.utils.flop_counter import flop_registry

    if _name(node) == _CPU_ATTENTION:
        return _attention_flops(node)
    formula = flop_registry.get(node.target.overloadpacket)
    if formula is None:
        return _grouped_flops(node) if _name(node) in _GROUPED else 0

    def value(argument: Any) -> Any:
        return argument.meta.get("val") if isinstance(argument, torch.fx.Node) else argument

    args = torch.fx.map_arg(node.args, value)
    options = torch.fx.map_arg(node.kwargs, value)
    return int(formula(*args, **options, out_val=node.meta.get("val")))


def _attention_flops(node: Any) -> int:
    """The registry's formula, with key and value heads repeated to the query's number."""
    import torch
    from torch.utils.flop_counter import flop_registry

    shapes = [argument.meta["val"].shape for argument in node.args[:3]]
    formula = flop_registry[torch.ops.aten._scaled_dot_product_flash_attention]
    repeated = [torch.empty((*shapes[0][:2], *shape[2:]), device="meta") for shape in shapes]
    return int(formula(*repeated, out_val=repeated[0]))


def _grouped_flops(node: Any) -> int:
    """A GEMM for each group: whatever the split, every row meets one matrix."""
    left, right = (argument.meta["val"].shape for argument in node.args[:2])
    rows = left.numel() // left[-1]
    return int(2 * rows * left[-1] * right[-1])
