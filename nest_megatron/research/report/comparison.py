"""A comparison of planners as a table and in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType

from nest_megatron.parallel.plan import ParallelPlan
from nest_megatron.report.tables import (
    FittingTable,
    figure_columns,
    heading,
    name_columns,
    pairs,
    word_columns,
)
from nest_megatron.report.words import TERM_WORDS
from nest_megatron.research.comparison import NEST, Compared
from nest_megatron.units import GIB, format_seconds

_TRAFFIC = ("tp_communication", "cp_communication", "ep_communication")
#: Shares of the throughput of ``nest`` that are told apart from it.
_EQUAL = 0.9995


def comparison_report(rows: Sequence[Compared]) -> RenderableType:
    """What ``compare`` prints: the table, and why each lost."""
    ordered = fastest_first(rows)
    return Group(
        comparison_table(ordered),
        heading("Why each is where it is"),
        pairs((row.name, why(row)) for row in ordered),
    )


def fastest_first(rows: Sequence[Compared]) -> list[Compared]:
    """Planners with a plan by its step, ``nest`` first among equals; then those without."""

    def place(row: Compared) -> tuple[bool, float, bool]:
        step = 0.0 if row.plan is None else row.plan.predicted.iteration_time_s
        return row.plan is None, step, row.name != NEST

    return sorted(rows, key=place)


def comparison_table(rows: Sequence[Compared]) -> RenderableType:
    """One row a planner."""
    table = FittingTable(
        *name_columns("Planner"),
        *figure_columns("Step", "Tokens/s", "Of nest"),
        *word_columns("Layout"),
        *figure_columns("GiB", "Search"),
        pad_edge=False,
    )
    for row in rows:
        table.add_row(*cells(row), style="bold" if row.name == NEST else "")
    return table


def cells(row: Compared) -> list[str]:
    """A planner by the columns of the table."""
    search = f"{row.search_s:.2f} s"
    if row.plan is None:
        return [row.name, "-", "-", "-", "no plan", "-", search]
    predicted = row.plan.predicted
    share = row.relative_throughput
    return [
        row.name,
        format_seconds(predicted.iteration_time_s),
        f"{tokens_per_s(row.plan):,.0f}",
        "-" if share is None else f"{100 * share:.1f}%{' tie' if row.is_tie else ''}",
        "\n".join(layout_words(row.plan)),
        f"{predicted.peak_memory_bytes / GIB:.1f}",
        search,
    ]


def tokens_per_s(plan: ParallelPlan) -> float:
    """Tokens that all GPUs of a plan work through in a second."""
    train = plan.train
    return train.global_batch_size * train.seq_length / plan.predicted.iteration_time_s


def layout_words(plan: ParallelPlan) -> list[str]:
    """A plan's layout in two or three short texts; a degree of 1 is left out.

    Example: ``TP 4 PP 4x7 DP 32``, ``MBS 1 ZeRO-1``, ``recompute full block 2``.
    """
    grid = plan.grid()
    dims = grid.dims
    virtual = dims.virtual_pipeline_model_parallel_size
    stages = f"{dims.pipeline_model_parallel_size}{f'x{virtual}' if virtual > 1 else ''}"
    degrees = {
        "TP": str(dims.tensor_model_parallel_size),
        "PP": stages,
        "CP": str(dims.context_parallel_size),
        "EP": str(dims.expert_model_parallel_size),
        "DP": str(dims.data_parallel_size),
    }
    shown = " ".join(f"{name} {value}" for name, value in degrees.items() if value != "1")
    batch = f"MBS {grid.micro_batch_size} ZeRO-{int(grid.zero)}"
    recompute = grid.recompute.label()
    parts = (shown, batch, "" if recompute == "none" else f"recompute {recompute}")
    return [part for part in parts if part]


def why(row: Compared) -> str:
    """Why a planner is where it is, in plain sentences."""
    if row.plan is None:
        return f"No plan: {row.reason}."
    if row.name == NEST:
        return f"{_capital(row.reason)}."
    worst, share = row.worst_term, row.relative_throughput
    if share is None:
        return f"{_capital(row.reason)}."
    if worst is None or share >= _EQUAL:
        return f"As fast as {NEST}. Chosen as {row.reason}."
    tie = "A tie within the error of predictions. " if row.is_tie else ""
    lost, most = format_seconds(row.lost_s), format_seconds(row.differences[worst])
    return f"{tie}Loses {lost} a step, most in {_words(worst)}: +{most}. Chosen as {row.reason}."


def _words(term: str) -> str:
    return f"{TERM_WORDS[term]} traffic" if term in _TRAFFIC else TERM_WORDS[term]


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
