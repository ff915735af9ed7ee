"""A layer's operators and collectives in the order in which a micro batch meets them.

Read downwards it is the forward pass, upwards the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nest_megatron.model.graph import LayerCollective, LayerGraph, Operator, Part

#: The closed forms write the second residual and what follows the experts before their place.
_FROM_EXPERTS = "unpermute"
_LATE = (_FROM_EXPERTS, "mlp_residual")
#: Collectives that bring a GEMM its input; all others carry its output on.
_INWARDS = ("all_gather", "send_recv")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """An operator, and the collectives on its two sides.

    Args:
        above: those between it and the operator before, forward and backward.
        below: those between it and the operator after.
    """

    operator: Operator
    above: tuple[LayerCollective, ...] = ()
    below: tuple[LayerCollective, ...] = ()


def steps(graph: LayerGraph) -> tuple[Step, ...]:
    """The operators of a layer in order, each collective at one of them."""
    operators = _in_order(graph.operators)
    above: dict[int, list[LayerCollective]] = {}
    below: dict[int, list[LayerCollective]] = {}
    for collective in graph.collectives:
        at, is_above = _place(collective, operators)
        (above if is_above else below).setdefault(at, []).append(collective)
    return tuple(
        Step(operator=op, above=tuple(above.get(at, ())), below=tuple(below.get(at, ())))
        for at, op in enumerate(operators)
    )


def _in_order(operators: Sequence[Operator]) -> tuple[Operator, ...]:
    """Operators as they run; a graph that an extractor has recorded is in order already."""
    parts = [op.part for op in operators]
    recorded = Part.CORE_ATTENTION not in parts or (
        Part.PROJECTION in parts and parts.index(Part.CORE_ATTENTION) < parts.index(Part.PROJECTION)
    )
    if recorded and not any(op.name == _FROM_EXPERTS for op in operators):
        return tuple(operators)
    order = {part: at for at, part in enumerate(Part)}
    order[Part.EXPERT_ACTIVATION] = order[Part.EXPERTS]  # between their two GEMMs

    def place(op: Operator) -> tuple[int, int]:
        late = _LATE.index(op.name) + 1 if op.name in _LATE else 0
        return late, order[op.part]

    return tuple(sorted(operators, key=place))


def _place(collective: LayerCollective, operators: Sequence[Operator]) -> tuple[int, bool]:
    """The operator that a collective lies beside, and whether it lies above it."""
    names = [op.name for op in operators]
    if collective.part is Part.DISPATCH:
        from_experts = (collective.kind == "reduce_scatter") != collective.backward
        if from_experts and collective.kind != "all_to_all" and _FROM_EXPERTS in names:
            return names.index(_FROM_EXPERTS), True
        return _beside(collective, operators), False
    inwards = collective.kind in _INWARDS
    return _beside(collective, operators), inwards != collective.backward


def _beside(collective: LayerCollective, operators: Sequence[Operator]) -> int:
    """The operator that a collective belongs to: by name, or else the first of its part."""
    names = [op.name for op in operators]
    anchor = collective.hidden_under or collective.name.rpartition(".")[0]
    if anchor in names:
        return names.index(anchor)
    within = [at for at, op in enumerate(operators) if op.part is collective.part]
    alike = [at for at in within if anchor and names[at].startswith(anchor)]
    return next(iter(alike or within), len(operators) - 1)
