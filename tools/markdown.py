"""Markdown tables of benchmarks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, numeric: int = 0) -> str:
    r"""A table; a bar inside a cell is escaped.

    Args:
        numeric: how many columns at the right end hold figures.

    >>> print(table(["a", "b"], [["x|y", "1"]], numeric=1))
    | a | b |
    |---|--:|
    | x\|y | 1 |
    """
    first = len(head) - numeric
    rule = "".join("--:|" if i >= first else "---|" for i in range(len(head)))
    return "\n".join((_line(head), f"|{rule}", *map(_line, rows)))


def _line(cells: Sequence[str]) -> str:
    escaped = (cell.replace("|", "\\|").replace("\n", " ") for cell in cells)
    return f"| {' | '.join(escaped)} |"
