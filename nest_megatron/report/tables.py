"""Tables for a terminal: one look for all, and nothing is lost on a narrow one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from nest_megatron.plain import frozen

#: A name, and what is said of it.
Pair = tuple[str, str | Text]

#: Least width of a column of words, which wraps; of one that is cut with an ellipsis by design.
_WORDS, _CUT = 12, 8
#: Columns of the longest bar, and of the shortest on a narrow terminal.
_BAR_WIDTH, _LEAST_BAR = 22, 6


class FittingTable(Table):
    """A table whose numbers are never cut; a head without more is of a column of names.

    Too wide, its columns first give up their padding; then each row is printed as a list.
    """

    def __init__(
        self, *columns: Column | str, rows: Iterable[Sequence[RenderableType]] = (), **options: Any
    ) -> None:
        look = {"box": SIMPLE_HEAD, "padding": (0, 1, 0, 0), "header_style": "bold", **options}
        named = (Column(each, no_wrap=True) if isinstance(each, str) else each for each in columns)
        super().__init__(*named, **look)
        for row in rows:
            self.add_row(*row)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Print the table, or the list where a column would be lost."""
        naturals = [_natural(column, console, options) for column in self.columns]
        needs = [*map(_need, self.columns, naturals)]
        if self._width(needs) > options.max_width and self.box is not None:
            self.padding = 0
        spare = options.max_width - self._width(needs)
        if spare < 0:
            yield from self._rows_apart()
            return
        for column, need, natural in zip(self.columns, needs, naturals, strict=True):
            column.min_width, more = need, max(0, natural - need)
            if column.no_wrap:  # cut before a figure is
                more = min(more, spare)
            if column.no_wrap or need > _WORDS:
                # rich makes one that wraps narrower than its least width, and the table too wide
                column.width = need + more * (more <= spare)
                spare -= column.width - need
        yield from super().__rich_console__(console, options)

    def _width(self, needs: Sequence[int]) -> int:
        """Of the whole table, where its columns have these."""
        padding = sum(self._get_padding_width(index) for index in range(len(needs)))
        return sum(needs) + padding + self._extra_width

    def _rows_apart(self) -> RenderResult:
        """Each row as pairs of a column's name and its value."""
        yield Text("")
        for cells in zip(*(column.cells for column in self.columns), strict=True):
            pairs = Table.grid(Column(style="bold"), *word_columns(""), padding=(0, 2, 0, 0))
            for column, cell in zip(self.columns, cells, strict=True):
                if cell != "":
                    pairs.add_row(column.header, cell)
            yield Padding(pairs, (0, 0, 0, 1))
            yield Text("")


class EdgelessTable(FittingTable):
    """A table that begins and ends with its words."""

    def __init__(self, *columns: Column | str, **options: Any) -> None:
        look = {"show_edge": False, "pad_edge": False, "padding": (0, 1), **options}
        super().__init__(*columns, **look)


def _need(column: Column, natural: int) -> int:
    """Least width at which nothing of a column is lost."""
    if column.justify == "right":
        return natural
    if column.min_width is not None:
        return column.min_width
    return min(natural, _CUT if column.no_wrap else _WORDS)


def _natural(column: Column, console: Console, options: ConsoleOptions) -> int:
    """Width of a column whose cells have all the room that they take."""
    cells, wide = (column.header, *column.cells), options.update(max_width=10_000)
    return max(Measurement.get(console, wide, cell).maximum for cell in cells)


def name_columns(*heads: str, **options: Any) -> list[Column]:
    """Columns of names, each on one line."""
    return [Column(head, no_wrap=True, **options) for head in heads]


def word_columns(*heads: str, **options: Any) -> list[Column]:
    """Columns of words, which wrap."""
    return [Column(head, overflow="fold", **options) for head in heads]


def figure_columns(*heads: str, **options: Any) -> list[Column]:
    """Columns of figures, at the right."""
    return [Column(head, justify="right", no_wrap=True, **options) for head in heads]


def figure(value: float | None, digits: int = 1, *, signed: bool = False) -> str:
    """A figure with so many digits behind the point, or nothing.

    >>> figure(1.25, signed=True), figure(None)
    ('+1.2', '')
    """
    if value is None:
        return ""
    return f"{value:+.{digits}f}" if signed else f"{value:.{digits}f}"


def pairs(rows: Iterable[Pair], style: str = "cyan") -> RenderableType:
    """Names, in a style, beside what is said of them; names of nothing are left out."""
    columns = *name_columns("", style=style), *word_columns("")
    table = Table.grid(*columns, padding=(0, 2, 0, 0))
    for name, value in rows:
        if value:
            table.add_row(name, Text(value) if isinstance(value, str) else value)
    return indented(table)


def indented(part: RenderableType | str) -> RenderableType:
    """A part under a heading; a text as it stands."""
    return Padding(Text(part) if isinstance(part, str) else part, (0, 2))


def heading(text: str) -> Text:
    """Of a section."""
    return Text(f"\n{text}", style="bold cyan")


@frozen
class Bar:
    """A share of the width that is left for bars, in whole characters, which survive plain text."""

    share: float
    style: str

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(_LEAST_BAR, options.max_width), min(_BAR_WIDTH, options.max_width))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, _BAR_WIDTH)
        yield Text("#" * round(self.share * width), style=self.style)
