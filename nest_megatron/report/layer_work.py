"""The work of a layer, and of a chain: tables for a terminal, and charts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import RenderableType
from rich.table import Column, Table
from rich.text import Text

from nest_megatron.model.graph import (
    ChainBlock,
    ChainGraph,
    ChainOperator,
    Group,
    LayerCollective,
    LayerGraph,
    Operator,
    Part,
)
from nest_megatron.report.charts import (
    INK,
    PAPER,
    SOFT,
    TERM_COLOURS,
    ink_on,
    style_panel,
    write_chart,
    write_legend,
    write_title,
)
from nest_megatron.report.tables import (
    FittingTable,
    figure_columns,
    heading,
    word_columns,
)

#: Characters of a name that keep their line; the same beside many figures.
_WIDE, _NARROW = 21, 17
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
    graph: LayerGraph, title: str, facts: Iterable[tuple[str, str]] = ()
) -> Iterator[RenderableType]:
    """Everything of one layer: facts, operators, collectives, saved activations."""
    yield Text(f"\n{title}", style="bold")
    for name, value in facts:
        yield Text(f"  {name}: {value}", style="dim")
    yield heading("Operators (GFLOP and MB, forward and backward)")
    yield _operator_table(graph)
    if graph.collectives:
        yield heading("Collectives")
        yield _collective_table(graph)
    yield heading("Saved for the backward pass")
    yield _saved_table(graph)


def _sums(figures: Figures, items: Sequence[object]) -> list[str]:
    return [_number(sum(getattr(i, name) for i in items) / unit) for _, name, unit in figures]


def _heads(figures: Figures) -> tuple[str, ...]:
    return tuple(head for head, _, _ in figures)


def _operator_table(graph: LayerGraph) -> Table:
    table = FittingTable(
        _name_column("Part", (op.part.value for op in graph.operators)),
        _name_column("Operator", (op.name for op in graph.operators), _NARROW),
        *word_columns("Kind"),
        *figure_columns(*_heads(_WORK), "kern"),
        pad_edge=False,
    )
    for part, ops in groupby(_in_order(graph.operators), lambda op: op.part.value):
        for at, op in enumerate(ops):
            kernels = f"{op.num_kernels:,}"
            kind = _KINDS[op.kind.value]
            table.add_row("" if at else part, op.name, kind, *_sums(_WORK, [op]), kernels)
    kernels = f"{sum(op.num_kernels for op in graph.operators):,}"
    table.add_section()
    table.add_row("total", "", "", *_sums(_WORK, graph.operators), kernels, style="bold")
    return table


def _collective_table(graph: LayerGraph) -> Table:
    table = FittingTable(
        _name_column("Collective", (each.name for each in graph.collectives)),
        *word_columns("Group", "Kind"),
        *figure_columns("MB", "x"),
        "pass",
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


def chain_report(graph: ChainGraph) -> Iterator[RenderableType]:
    """A model's chain of blocks, then the operators of each kind of block."""
    yield Text(f"\n{_chain_title(graph)}", style="bold")
    yield heading("Blocks (one forward pass)")
    yield _block_table(graph)
    for kind, count in graph.kinds().items():
        block = next(block for block in graph.blocks if block.kind == kind)
        times = f", {count} of them" if count > 1 else ""
        yield heading(f"{kind}: {block.name}{times}")
        yield _block_operators(graph, block)


def _chain_title(graph: ChainGraph) -> str:
    shapes = ", ".join(f"{list(each.sizes)} {each.dtype}" for each in graph.inputs)
    return f"{graph.name} on {shapes}"


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
    for op in graph.within(block):
        module = _inner_name(op, block) or "."
        target = op.target.removeprefix("aten.")
        table.add_row(module, target, _KINDS[op.kind.value], *_sums(_MODULE, [op]))
    return table


def _inner_name(op: ChainOperator, block: ChainBlock) -> str:
    """The module of an operator, inside that of its block."""
    return op.module.removeprefix(block.name.partition("#")[0]).removeprefix(".")


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


def _name_column(head: str, names: Iterable[str], most: int = _WIDE) -> Column:
    """A column of names that keep their line on a narrow terminal, up to a limit."""
    longest = max(map(len, names), default=0)
    return word_columns(head, min_width=max(len(head), min(longest, most)))[0]


#: The closed forms write what follows the experts, and the second residual, before their place.
_FROM_EXPERTS = "unpermute"
_LATE = {_FROM_EXPERTS: 1, "mlp_residual": 2}
#: Collectives that bring a GEMM its input; all others carry its output on.
_INWARDS = ("all_gather", "send_recv")


class Step(NamedTuple):
    """An operator, and the collectives before it in the forward pass and after it."""

    operator: Operator
    above: list[LayerCollective]
    below: list[LayerCollective]


def steps(graph: LayerGraph) -> list[Step]:
    """The operators of a layer in order, each collective at one of them."""
    operators = _in_order(graph.operators)
    found = [Step(operator, [], []) for operator in operators]
    for collective in graph.collectives:
        at, is_above = _place(collective, operators)
        (found[at].above if is_above else found[at].below).append(collective)
    return found


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
    return tuple(sorted(operators, key=lambda op: (_LATE.get(op.name, 0), order[op.part])))


def _place(collective: LayerCollective, operators: Sequence[Operator]) -> tuple[int, bool]:
    """The operator that a collective lies beside, and whether it lies above it.

    Its operator is known by name, or else the first of its part.
    """
    names = [op.name for op in operators]
    is_above = (collective.kind in _INWARDS) != collective.backward
    if collective.part is Part.DISPATCH:
        is_above = False
        from_experts = (collective.kind == "reduce_scatter") != collective.backward
        if from_experts and collective.kind != "all_to_all" and _FROM_EXPERTS in names:
            return names.index(_FROM_EXPERTS), True
    anchor = collective.hidden_under or collective.name.rpartition(".")[0]
    if anchor in names:
        return names.index(anchor), is_above
    within = [at for at, op in enumerate(operators) if op.part is collective.part]
    alike = [at for at in within if anchor and names[at].startswith(anchor)]
    return next(iter(alike or within), len(operators) - 1), is_above


#: FLOPs that an accelerator does while it moves a byte: 989 TFLOP/s and 3.35 TB/s of an H100 SXM
#: (NVIDIA's data sheet), which is close to that of its neighbours.
FLOPS_PER_BYTE = 295.0
ARITHMETIC, TRAFFIC = "#2f6fb7", "#c98a00"
_LIMITS = (("limited by arithmetic", ARITHMETIC), ("limited by memory traffic", TRAFFIC))
GROUP_COLOURS = {
    Group.TENSOR: TERM_COLOURS["tp_communication"],
    Group.CONTEXT: TERM_COLOURS["dp_communication"],
    Group.EXPERT: "#1f8a70",
    Group.EXPERT_TENSOR: "#8fd0bd",
}
_BAND = "#f5f6f8"
#: Inches: the whole width, and of a layer and of a chain a row, and what is above and below them.
_WIDTH, _LAYER_ROW, _LAYER_AROUND, _CHAIN_ROW, _CHAIN_AROUND = 13.0, 0.24, 2.0, 0.26, 1.9
#: End of an axis on which the longest bar ends at 1, with space for its figures.
_END = 1.45
#: Rows of a block at least: its name, its figures, its bar, what it passes on.
_LEAST = 4
#: Parts of a block that are listed beside it.
_MOST_PARTS = 12


@dataclass(frozen=True, slots=True)
class _Work:
    """FLOPs and bytes."""

    flops: float
    num_bytes: float

    @property
    def time(self) -> float:
        """How long it takes, in bytes that could be moved meanwhile."""
        return max(self.flops / FLOPS_PER_BYTE, self.num_bytes)

    @property
    def colour(self) -> str:
        """Colour of what limits it."""
        return ARITHMETIC if self.flops / FLOPS_PER_BYTE > self.num_bytes else TRAFFIC

    def __add__(self, other: _Work) -> _Work:
        return _Work(self.flops + other.flops, self.num_bytes + other.num_bytes)

    def __str__(self) -> str:
        flops = [scaled(self.flops, "FLOP")] if self.flops else []
        return "  ".join([*flops, scaled(self.num_bytes, "B")])


_NOTHING = _Work(0.0, 0.0)


class _Row(NamedTuple):
    """An operator, or collectives that lie between two operators."""

    part: str
    operator: Operator | None = None
    forward: LayerCollective | None = None
    backward: LayerCollective | None = None


def draw_layer(graph: LayerGraph, path: Path, title: str) -> None:
    """Draw a layer into a ``.png`` or ``.svg`` file."""
    size = (_WIDTH, _LAYER_AROUND + _LAYER_ROW * len(_rows(graph)))
    write_chart(lambda figure: draw_layer_on(figure, graph, title), size, path, "--draw")


def draw_layer_on(figure: Any, graph: LayerGraph, title: str) -> None:
    """Fill a matplotlib figure: operators from top to bottom, and which collectives run.

    The left half is the forward pass, read downwards; the right one the backward pass, upwards.
    """
    rows = _rows(graph)
    write_title(figure, title)
    panels = figure.subplots(1, 2, sharey=True)
    times = [_work(op, side).time for op in graph.operators for side in (0, 1)]
    for side, axes in enumerate(panels):
        _draw_pass(axes, graph, rows, side, max(times, default=0.0) or 1.0)
    names = [row.operator.name if row.operator else "" for row in rows]
    panels[0].set_yticks(range(len(rows)), names)
    panels[0].tick_params(labelsize=8)
    panels[0].set_ylim(len(rows) - 0.4, -0.6)
    used, entries = {each.group for each in graph.collectives}, [*_LIMITS]
    for group, colour in GROUP_COLOURS.items():
        if group in used:
            entries.append((f"{group.name.lower().replace('_', ' ')} parallel", colour))
    about = (
        f"Saved for the backward pass: {scaled(graph.total_saved_bytes(), 'B')}. "
        f"Length: time at {FLOPS_PER_BYTE:g} FLOPs a byte, one scale for both passes; "
        "% of the pass. Dashed: may hide under an operator."
    )
    write_legend(figure, entries, "left", len(entries), about)


def _rows(graph: LayerGraph) -> list[_Row]:
    rows: list[_Row] = []
    for step in steps(graph):
        part = step.operator.part.value.replace("_", " ")
        rows += _between(part, step.above)
        rows.append(_Row(part, operator=step.operator))
        rows += _between(part, step.below)
    return rows


def _between(part: str, collectives: Sequence[LayerCollective]) -> Iterator[_Row]:
    """Collectives in as few rows as they need; backward ones run upwards."""
    forward = [each for each in collectives if not each.backward]
    backward = [each for each in collectives if each.backward][::-1]
    for ahead, back in zip_longest(forward, backward):
        yield _Row(part, forward=ahead, backward=back)


def _work(operator: Operator, side: int) -> _Work:
    """The forward (0) or backward pass (1) of an operator."""
    if side == 0:
        return _Work(operator.flops, operator.bytes_moved)
    return _Work(operator.backward_flops, operator.backward_bytes_moved)


def _draw_pass(
    axes: Any, graph: LayerGraph, rows: Sequence[_Row], side: int, longest: float
) -> None:
    """One pass: bars of operators to scale, collectives across the whole width."""
    works = [_work(op, side) for op in graph.operators]
    total = sum(work.time for work in works) or 1.0
    for at, row in enumerate(rows):
        collective = row.backward if side else row.forward
        work = _work(row.operator, side) if row.operator else _NOTHING
        if work != _NOTHING:
            share = 100 * work.time / total
            words = f"{work}  {f'{share:.0f} %' if share >= 0.5 else '<1 %'}"
            length = max(0.004, work.time / longest)
            axes.barh(at, length, 0.72, color=work.colour)
            axes.text(length + 0.01, at, words, va="center", fontsize=7.5, color=SOFT)
        elif collective:
            _draw_collective(axes, at, collective)
    name = "backward pass, upwards" if side else "forward pass, downwards"
    style_panel(axes, f"{name}: {sum(works, _NOTHING)} in all", labelbottom=False)
    axes.set_xlim(0, _END)
    first = 0
    for number, (part, members) in enumerate(groupby(rows, key=lambda row: row.part)):
        last = first + len(list(members)) - 1
        if number % 2 == 0:
            axes.axhspan(first - 0.5, last + 0.5, color=_BAND, zorder=0)
        if side:  # the name of each part at the right end of its rows
            look = {"va": "center", "fontsize": 8, "fontweight": "bold"}
            axes.text(_END + 0.02, (first + last) / 2, part, **look)
        first = last + 1


def _draw_collective(axes: Any, at: int, collective: LayerCollective) -> None:
    """One that may hide under an operator is an outline."""
    colour, hidden = GROUP_COLOURS[collective.group], bool(collective.hidden_under)
    look = {"facecolor": PAPER if hidden else colour, "edgecolor": colour}
    axes.barh(at, _END, 0.66, linestyle="--" if hidden else "-", **look)
    place = {"ha": "center", "va": "center", "fontsize": 7.5}
    size = scaled(collective.message_bytes, "B")
    words = [collective.kind.replace("_", "-"), f"over {collective.group.value}:", size]
    words += [f"x {collective.num_calls}"] if collective.num_calls > 1 else []
    words += [f"(under {collective.hidden_under})"] if hidden else []
    axes.text(_END / 2, at, " ".join(words), color=INK if hidden else ink_on(colour), **place)


def draw_chain(graph: ChainGraph, path: Path) -> None:
    """Draw a chain into a ``.png`` or ``.svg`` file."""
    size = (_WIDTH, _CHAIN_AROUND + _CHAIN_ROW * sum(_heights(graph)))
    write_chart(lambda figure: draw_chain_on(figure, graph), size, path, "--draw")


def draw_chain_on(figure: Any, graph: ChainGraph) -> None:
    """Fill a matplotlib figure: neighbours of one kind on the left, parts of one of them beside."""
    write_title(figure, _chain_title(graph))
    blocks, parts = figure.subplots(1, 2, sharey=True)
    _draw_blocks(blocks, graph)
    _draw_parts(parts, graph)
    for axes, title in ((blocks, "blocks, one forward pass"), (parts, "parts of one block")):
        style_panel(axes, title, labelbottom=False, labelsize=8)
    blocks.set_ylim(sum(_heights(graph)), -0.5)
    about = (
        f"In all {scaled(graph.flops(), 'FLOP')}, "
        f"{scaled(graph.parameters(), '').strip()} parameters, "
        f"{scaled(graph.saved_bytes(), 'B')} saved for the backward pass. Length: time at "
        f"{FLOPS_PER_BYTE:g} FLOPs a byte, each half with a scale of its own."
    )
    write_legend(figure, _LIMITS, "left", 2, about)


def _heights(graph: ChainGraph) -> list[int]:
    """Rows of each run of equal blocks."""
    return [max(_LEAST, 1 + len(_parts(graph, run[0]))) for run in graph.runs()]


def _draw_blocks(axes: Any, graph: ChainGraph) -> None:
    runs, top = graph.runs(), 0.0
    times = []  # of each run's operators, by the colour of what limits them
    for run in runs:
        works = [_Work(op.flops, op.bytes_moved) for op in graph.within(run[0])]
        time = {
            colour: len(run) * sum(work.time for work in works if work.colour == colour)
            for _, colour in _LIMITS
        }
        times.append(time)
    longest = max((sum(time.values()) for time in times), default=0.0) or 1.0
    for run, time, height in zip(runs, times, _heights(graph), strict=True):
        name, figures = _run_words(run)
        axes.text(0, top, name, va="center", fontsize=9, fontweight="bold")
        axes.text(0, top + 0.9, figures, va="center", fontsize=8, color=SOFT)
        ends = time[ARITHMETIC] / longest, time[TRAFFIC] / longest
        axes.barh(top + 1.8, ends[0], 0.6, color=ARITHMETIC)
        axes.barh(top + 1.8, ends[1], 0.6, left=ends[0], color=TRAFFIC)
        if run is not runs[-1]:
            words = f"↓ {scaled(run[-1].cut_bytes, 'B')} passed on"
            axes.text(0.5, top + height - 1.2, words, va="center", fontsize=8, color=SOFT)
        top += height
    axes.set_xlim(0, 1)
    axes.set_yticks([])


def _run_words(run: Sequence[ChainBlock]) -> tuple[str, str]:
    first = run[0]
    name = f"{first.name}  {first.kind}"
    if len(run) > 1:
        name = f"{len(run)} x {first.kind}  {first.name} to {run[-1].name}"
    parameters = f"{scaled(first.parameters, '').strip()} parameters"
    figures = [
        str(_Work(first.flops, first.bytes_moved)),
        *([parameters] if first.parameters else []),
        f"saves {scaled(run[-1].saved_bytes, 'B')}",
    ]
    return name, "  ".join(figures) + (", each" if len(run) > 1 else "")


def _draw_parts(axes: Any, graph: ChainGraph) -> None:
    top = 0
    for run, height in zip(graph.runs(), _heights(graph), strict=True):
        parts = _parts(graph, run[0])
        longest = max((work.time for work in parts.values()), default=0.0) or 1.0
        for at, (name, work) in enumerate(parts.items(), start=top):
            length = max(0.006, work.time / longest)
            axes.barh(at, length, 0.7, color=work.colour)
            axes.text(length + 0.01, at, str(work), va="center", fontsize=7.5, color=SOFT)
            axes.text(-0.02, at, name, va="center", ha="right", fontsize=8)
        top += height
    axes.set_xlim(-0.1, 1.4)


def _parts(graph: ChainGraph, block: ChainBlock) -> dict[str, _Work]:
    """Work of a block's parts; one without parts has none. The largest of many."""
    parts: dict[str, _Work] = {}
    for op in graph.within(block):
        name = _inner_name(op, block) or "(itself)"
        parts[name] = parts.get(name, _NOTHING) + _Work(op.flops, op.bytes_moved)
    if len(parts) < 2:
        return {}
    if len(parts) <= _MOST_PARTS:
        return parts
    largest = sorted(parts, key=lambda name: -parts[name].time)[: _MOST_PARTS - 1]
    others = [work for name, work in parts.items() if name not in largest]
    shown = {name: work for name, work in parts.items() if name in largest}
    return {**shown, f"({len(others)} more)": sum(others, _NOTHING)}


def scaled(value: float, unit: str) -> str:
    """A figure with three digits and an SI prefix.

    >>> scaled(33_554_432, "B"), scaled(12.0, "B")
    ('33.6 MB', '12 B')
    """
    for power, prefix in ((15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if value >= 10**power:
            size = value / 10**power
            return f"{size:.{2 if size < 10 else 1 if size < 100 else 0}f} {prefix}{unit}"
    return f"{value:.0f} {unit}"
