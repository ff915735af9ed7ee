"""HTML and SVG elements that escape whatever is put into them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

#: Elements without an end tag.
_VOID = frozenset({"meta", "br"})


class Markup(str):
    """Text that is markup already; every other text is escaped where it is used."""

    __slots__ = ()


def element(tag: str, *children: object, **attributes: object) -> Markup:
    """One element with its children and attributes.

    Args:
        attributes: ``class_`` is ``class``, other underlines are dashes; ``None`` leaves one out.

    >>> element("td", "<b>", class_="num")
    '<td class="num">&lt;b&gt;</td>'
    """
    words = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    if tag in _VOID:
        return Markup(f"<{tag}{words}>")
    return Markup(f"<{tag}{words}>{joined(children)}</{tag}>")


def joined(parts: Iterable[object], between: str = "") -> Markup:
    """Parts one after another, escaped unless they are markup."""
    return Markup(between.join(p if isinstance(p, Markup) else escape(str(p)) for p in parts))


def table(
    head: Sequence[object],
    rows: Iterable[Sequence[object]],
    caption: str,
    *,
    numeric: int = 0,
    narrow: bool = False,
) -> Markup:
    """A table that a screen reader can follow: a caption, headed columns, a headed first cell.

    Args:
        numeric: how many columns at the right end hold figures.
        narrow: as wide as its contents instead of the page.
    """
    first = len(head) - numeric
    columns = [
        element("th", name, scope="col", class_="num" if i >= first else None)
        for i, name in enumerate(head)
    ]
    body = [
        joined(
            element("th", cell, scope="row")
            if i == 0
            else element("td", cell, class_="num" if i >= first else None)
            for i, cell in enumerate(row)
        )
        for row in rows
    ]
    whole = element(
        "table",
        element("caption", caption),
        element("thead", element("tr", *columns)),
        element("tbody", *(element("tr", cells) for cells in body)),
    )
    return element("div", whole, class_="scroll narrow" if narrow else "scroll")
