"""The work of a layer, and of a chain, as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from nest_megatron.model.graph import (
    ChainBlock,
    ChainGraph,
    LayerCollective,
    LayerGraph,
    Operator,
    Part,
)
from nest_megatron.report.tables import (
    FittingTable,
    figure_columns,
    heading,
    name_columns,
    word_columns,
)

#: Characters of a name that keep their line.
_WIDE = 21
#: The same beside many figures.
_NARROW = 17
_MIB = 2.0**20
_KINDS = {
    "gemm": "gemm",
    "grouped_gemm": "grouped",
    "attention": "attn",
    "scan": "scan",
    "memory_bound": "memory",
}


Figures = Sequence[tuple[str, str, float]]
#: Figures of work: head, field and what one of the table's units is.
_FLOPS, _BYTES, _SAVED = (
    ("GFLOP", "flops", 1e9),
    ("MB", "bytes_moved", 1e6),
    ("saved MiB", "saved_bytes", _MIB),
)
_BACK = ("back", "backward_flops", 1e9), ("back", "backward_bytes_moved", 1e6)
_WORK: Figures = (_FLOPS, _BACK[0], _BYTES, _BACK[1])
_BLOCK: Figures = (_FLOPS, _BYTES, ("params M", "parameters", 1e6), _SAVED)
_MODULE: Figures = (_FLOPS, _BYTES, ("out MiB", "output_bytes", _MIB), _SAVED)


def layer_report(
    graph: LayerGraph, title: str, facts: Sequence[tuple[str, str]] = ()
) -> RenderableType:
    """Everything of one layer: facts, operators, collectives, saved activations."""
    parts: list[RenderableType] = [Text(f"\n{title}", style="bold")]
    parts += [Text(f"  {name}: {value}", style="dim") for name, value in facts]
    parts += [heading("Operators (GFLOP and MB, forward and backward)"), _operator_table(graph)]
    if graph.collectives:
        parts += [heading("Collectives"), _collective_table(graph)]
    parts += [heading("Saved for the backward pass"), _saved_table(graph)]
    return Group(*parts)


def _sums(figures: Figures, items: Sequence[object]) -> list[str]:
    return [_number(sum(getattr(i, name) for i in items) / unit) for _, name, unit in figures]


def _heads(figures: Figures) -> tuple[str, ...]:
    return tuple(head for head, _, _ in figures)


def _operator_table(graph: LayerGraph) -> Table:
    parts, names = [op.part.value for op in graph.operators], [op.name for op in graph.operators]
    wide = {"Part": parts, "Operator": [name[:_NARROW] for name in names]}
    table = FittingTable(
        *_wide_columns("Part", "Operator", "Kind", wide=wide),
        *figure_columns(*_heads(_WORK), "kern"),
        pad_edge=False,
    )
    for part, ops in groupby((step.operator for step in steps(graph)), lambda op: op.part.value):
        for at, op in enumerate(ops):
            kernels = f"{op.num_kernels:,}"
            kind = _KINDS[op.kind.value]
            table.add_row("" if at else part, op.name, kind, *_sums(_WORK, [op]), kernels)
    kernels = f"{sum(op.num_kernels for op in graph.operators):,}"
    table.add_section()
    table.add_row("total", "", "", *_sums(_WORK, graph.operators), kernels, style="bold")
    return table


def _collective_table(graph: LayerGraph) -> Table:
    wide = {"Collective": [each.name for each in graph.collectives]}
    table = FittingTable(
        *_wide_columns("Collective", "Group", "Kind", wide=wide),
        *figure_columns("MB", "x"),
        *name_columns("pass"),
        *word_columns("hidden under"),
        pad_edge=False,
    )
    for each in sorted(graph.collectives, key=lambda each: each.backward):
        size, way = _number(each.message_bytes / 1e6), "back" if each.backward else "forth"
        cells = (size, f"{each.num_calls:,}", way, each.hidden_under or "-")
        table.add_row(each.name, each.group.value, each.kind, *cells)
    table.add_section()
    calls = sum(each.num_calls for each in graph.collectives)
    total = sum(each.num_calls * each.message_bytes for each in graph.collectives)
    table.add_row("all calls", "", "", _number(total / 1e6), f"{calls:,}", "", "", style="bold")
    return table


def _saved_table(graph: LayerGraph) -> Table:
    table = FittingTable(*word_columns("Part"), *figure_columns("MiB", "share"), pad_edge=False)
    total, saved = graph.total_saved_bytes(), list(graph.saved_bytes)
    sums = {part: sum(size for where, size in saved if where is part) for part in Part}
    by_part = {part.value: size for part, size in sums.items() if size}
    for name, num_bytes in {"the layer's input": graph.input_bytes, **by_part}.items():
        share = f"{100 * num_bytes / total:.1f} %" if total else ""
        table.add_row(name, _number(num_bytes / _MIB), share)
    table.add_section()
    table.add_row("total", _number(total / _MIB), "", style="bold")
    table.add_row("at work in the backward pass", _number(graph.working_bytes / _MIB), "")
    return table


def chain_report(graph: ChainGraph) -> RenderableType:
    """A model's chain of blocks, then the operators of each kind of block."""
    shapes = ", ".join(f"{list(each.sizes)} {each.dtype}" for each in graph.inputs)
    parts: list[RenderableType] = [Text(f"\n{graph.name} on {shapes}", style="bold")]
    parts += [heading("Blocks (one forward pass)"), _block_table(graph)]
    for kind, count in graph.kinds().items():
        block = next(block for block in graph.blocks if block.kind == kind)
        times = f", {count} of them" if count > 1 else ""
        parts += [heading(f"{kind}: {block.name}{times}"), _block_operators(graph, block)]
    return Group(*parts)


def _block_table(graph: ChainGraph) -> Table:
    """The chain, neighbours of one kind in one row."""
    table = FittingTable(
        *word_columns("Block", "Kind"),
        *figure_columns(*_heads(_BLOCK), "passed on MiB"),
        pad_edge=False,
    )
    for run in graph.runs():
        name = run[0].name
        if len(run) > 1:
            name += f" to {run[-1].name} ({len(run)})"
        table.add_row(name, run[0].kind, *_sums(_BLOCK, run), _number(run[-1].cut_bytes / _MIB))
    table.add_section()
    whole = sum(block.bytes_moved for block in graph.blocks)
    cells = (graph.flops() / 1e9, whole / 1e6, graph.parameters() / 1e6, graph.saved_bytes() / _MIB)
    table.add_row("total", "", *map(_number, cells), "", style="bold")
    return table


def _block_operators(graph: ChainGraph, block: ChainBlock) -> Table:
    columns = *word_columns("Module", "Operator", "Kind"), *figure_columns(*_heads(_MODULE))
    table = FittingTable(*columns, pad_edge=False)
    inside = block.name.partition("#")[0]
    for op in graph.within(block):
        module = op.module.removeprefix(inside).removeprefix(".") or "."
        target = op.target.removeprefix("aten.")
        table.add_row(module, target, _KINDS[op.kind.value], *_sums(_MODULE, [op]))
    return table


def _number(value: float) -> str:
    """A figure with about three digits, and a dash for nothing.

    >>> _number(0.0), _number(0.01234), _number(12.34), _number(4303.6)
    ('-', '0.0123', '12.3', '4,304')
    """
    if not value:
        return "-"
    if value < 1:
        return f"{value:.3g}"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:,.0f}"


def _wide_columns(*heads: str, wide: Mapping[str, Sequence[str]]) -> Iterator[Column]:
    """Columns of text; by head, words that keep their line on a narrow terminal, up to a limit."""
    for head in heads:
        longest = max(map(len, wide.get(head, ())), default=0)
        least = max(len(head), min(longest, _WIDE)) if longest else None
        yield from word_columns(head, min_width=least)


#: The closed forms write the second residual and what follows the experts before their place.
_FROM_EXPERTS = "unpermute"
_LATE = (_FROM_EXPERTS, "mlp_residual")
#: Collectives that bring a GEMM its input; all others carry its output on.
_INWARDS = ("all_gather", "send_recv")


class Step(NamedTuple):
    """An operator, and the collectives before it in the forward pass and after it."""

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
        return _anchor(collective, operators), False
    inwards = collective.kind in _INWARDS
    return _anchor(collective, operators), inwards != collective.backward


def _anchor(collective: LayerCollective, operators: Sequence[Operator]) -> int:
    """The operator that a collective belongs to: by name, or else the first of its part."""
    names = [op.name for op in operators]
    anchor = collective.hidden_under or collective.name.rpartition(".")[0]
    if anchor in names:
        return names.index(anchor)
    within = [at for at, op in enumerate(operators) if op.part is collective.part]
    alike = [at for at in within if anchor and names[at].startswith(anchor)]
    return next(iter(alike or within), len(operators) - 1)
