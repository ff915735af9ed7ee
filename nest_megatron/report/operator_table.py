"""The work of a layer, and of a chain, as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from nest_megatron.model.chain import ChainBlock, ChainGraph
from nest_megatron.model.graph import LayerCollective, LayerGraph, Operator, Part
from nest_megatron.report.operator_flow import steps
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
_GIGA, _MEGA, _MIB = 1e9, 1e6, 2.0**20
_KINDS = {"gemm": "gemm", "grouped_gemm": "grouped", "attention": "attn", "memory_bound": "memory"}


def layer_report(
    graph: LayerGraph, title: str, facts: Sequence[tuple[str, str]] = ()
) -> RenderableType:
    """Everything of one layer: operators, collectives, saved activations.

    Args:
        facts: lines under the title (parameters, provenance).
    """
    parts: list[RenderableType] = [Text(f"\n{title}", style="bold")]
    parts += [Text(f"  {name}: {value}", style="dim") for name, value in facts]
    parts += [heading("Operators (GFLOP and MB, forward and backward)"), operator_table(graph)]
    if graph.collectives:
        parts += [heading("Collectives"), collective_table(graph)]
    parts += [heading("Saved for the backward pass"), saved_table(graph)]
    return Group(*parts)


def operator_table(graph: LayerGraph) -> Table:
    """Operators in the order of the forward pass, with totals."""
    parts, names = [op.part.value for op in graph.operators], [op.name for op in graph.operators]
    wide = {"Part": parts, "Operator": [name[:_NARROW] for name in names]}
    table = FittingTable(
        *_wide_columns("Part", "Operator", "Kind", wide=wide),
        *figure_columns("GFLOP", "back", "MB", "back", "kern"),
        pad_edge=False,
    )
    previous: Part | None = None
    for op in (step.operator for step in steps(graph)):
        part = "" if op.part is previous else op.part.value
        previous = op.part
        kind = _KINDS[op.kind.value]
        table.add_row(part, op.name, kind, *_work_cells([op]), f"{op.num_kernels:,}")
    kernels = sum(op.num_kernels for op in graph.operators)
    table.add_section()
    table.add_row("total", "", "", *_work_cells(graph.operators), f"{kernels:,}", style="bold")
    return table


def collective_table(graph: LayerGraph) -> Table:
    """Collectives, forward ones first, with the bytes of all their calls."""
    wide = {"Collective": [each.name for each in graph.collectives]}
    table = FittingTable(
        *_wide_columns("Collective", "Group", "Kind", wide=wide),
        *figure_columns("MB", "x"),
        *name_columns("pass"),
        *word_columns("hidden under"),
        pad_edge=False,
    )
    for each in sorted(graph.collectives, key=lambda each: each.backward):
        table.add_row(*_collective_cells(each))
    table.add_section()
    calls = sum(each.num_calls for each in graph.collectives)
    total = sum(each.num_calls * each.message_bytes for each in graph.collectives)
    table.add_row("all calls", "", "", _number(total / _MEGA), f"{calls:,}", "", "", style="bold")
    return table


def _collective_cells(each: LayerCollective) -> tuple[str, ...]:
    return (
        each.name,
        each.group.value,
        each.kind,
        _number(each.message_bytes / _MEGA),
        f"{each.num_calls:,}",
        "back" if each.backward else "forth",
        each.hidden_under or "-",
    )


def saved_table(graph: LayerGraph) -> Table:
    """Bytes that the layer saves, by part, each storage once."""
    table = FittingTable(*word_columns("Part"), *figure_columns("MiB", "share"), pad_edge=False)
    total = graph.total_saved_bytes()
    rows = {"the layer's input": graph.input_bytes, **_by_part(graph.saved_bytes)}
    for name, num_bytes in rows.items():
        share = f"{100 * num_bytes / total:.1f} %" if total else ""
        table.add_row(name, _number(num_bytes / _MIB), share)
    table.add_section()
    table.add_row("total", _number(total / _MIB), "", style="bold")
    table.add_row("at work in the backward pass", _number(graph.working_bytes / _MIB), "")
    return table


def _by_part(saved: Iterable[tuple[Part, float]]) -> Mapping[str, float]:
    """Bytes by part, in the order of the parts; empty ones left out."""
    sums: dict[Part, float] = {}
    for part, num_bytes in saved:
        sums[part] = sums.get(part, 0.0) + num_bytes
    return {part.value: sums[part] for part in Part if sums.get(part)}


def chain_report(graph: ChainGraph) -> RenderableType:
    """A model's chain of blocks, then the operators of each kind of block."""
    shapes = ", ".join(f"{list(each.sizes)} {each.dtype}" for each in graph.inputs)
    title = f"\n{graph.name} on {shapes}"
    parts: list[RenderableType] = [Text(title, style="bold")]
    parts += [heading("Blocks (one forward pass)"), block_table(graph)]
    for kind, count in graph.kinds().items():
        block = next(block for block in graph.blocks if block.kind == kind)
        times = f", {count} of them" if count > 1 else ""
        parts += [heading(f"{kind}: {block.name}{times}"), _block_operators(graph, block)]
    return Group(*parts)


def block_table(graph: ChainGraph) -> Table:
    """The chain, neighbours of one kind in one row."""
    heads = ("GFLOP", "MB", "params M", "saved MiB", "passed on MiB")
    table = FittingTable(*word_columns("Block", "Kind"), *figure_columns(*heads), pad_edge=False)
    for run in graph.runs():
        table.add_row(_run_name(run), run[0].kind, *_block_cells(run))
    table.add_section()
    whole = sum(block.bytes_moved for block in graph.blocks)
    cells = (graph.flops() / _GIGA, whole / _MEGA, graph.parameters() / 1e6)
    saved = _number(graph.saved_bytes() / _MIB)
    table.add_row("total", "", *map(_number, cells), saved, "", style="bold")
    return table


def _run_name(run: Sequence[ChainBlock]) -> str:
    """``layers.0 to layers.3 (4)`` of four neighbours."""
    if len(run) == 1:
        return run[0].name
    return f"{run[0].name} to {run[-1].name} ({len(run)})"


def _block_cells(run: Sequence[ChainBlock]) -> tuple[str, ...]:
    return (
        _number(sum(block.flops for block in run) / _GIGA),
        _number(sum(block.bytes_moved for block in run) / _MEGA),
        _number(sum(block.parameters for block in run) / 1e6),
        _number(sum(block.saved_bytes for block in run) / _MIB),
        _number(run[-1].cut_bytes / _MIB),
    )


def _block_operators(graph: ChainGraph, block: ChainBlock) -> Table:
    heads = ("GFLOP", "MB", "out MiB", "saved MiB")
    table = FittingTable(
        *word_columns("Module", "Operator", "Kind"), *figure_columns(*heads), pad_edge=False
    )
    inside = block.name.partition("#")[0]
    for op in graph.within(block):
        module = op.module.removeprefix(inside).removeprefix(".")
        numbers = (op.flops / _GIGA, op.bytes_moved / _MEGA, op.output_bytes / _MIB)
        saved = _number(op.saved_bytes / _MIB)
        target = op.target.removeprefix("aten.")
        table.add_row(module or ".", target, _KINDS[op.kind.value], *map(_number, numbers), saved)
    return table


def _work_cells(operators: Sequence[Operator]) -> tuple[str, ...]:
    """FLOPs forward and backward, bytes forward and backward, in the table's units."""
    return (
        _number(sum(op.flops for op in operators) / _GIGA),
        _number(sum(op.backward_flops for op in operators) / _GIGA),
        _number(sum(op.bytes_moved for op in operators) / _MEGA),
        _number(sum(op.backward_bytes_moved for op in operators) / _MEGA),
    )


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
    """Columns of text.

    Args:
        wide: by head, words that keep their line on a narrow terminal, up to a limit.
    """
    for head in heads:
        longest = max(map(len, wide.get(head, ())), default=0)
        least = max(len(head), min(longest, _WIDE)) if longest else None
        yield from word_columns(head, min_width=least)
