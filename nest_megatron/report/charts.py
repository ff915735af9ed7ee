"""What all charts share: settings, colours, how they are written."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from nest_megatron.errors import UserInputError
from nest_megatron.files import MARK, write_bytes
from nest_megatron.packages import require_package

#: Formats of a chart, by suffix.
SUFFIXES = (".png", ".svg")
INK, SOFT, IDLE, PAPER = "#1b1f26", "#5a626e", "#eceef1", "#ffffff"
OTHER_COLOUR = "#858b95"
#: What an iteration's time goes into; one hue for communication inside a replica.
TERM_COLOURS = {
    "compute": "#2f6fb7",
    "recompute": "#8fb8e0",
    "tp_communication": "#b3364b",
    "cp_communication": "#d4607a",
    "ep_communication": "#e68fa2",
    "pp_communication": "#efbcc6",
    "pipeline_bubble": "#c5cad2",
    "dp_communication": "#7d57b2",
    "optimizer": "#c98a00",
    "embedding_sync": "#a98bd0",
    "stragglers": "#5f4a8b",
    "host": OTHER_COLOUR,
}
MEMORY_COLOURS = {
    "weights": "#2f6fb7",
    "gradients": "#8fb8e0",
    "optimizer": "#c98a00",
    "activations": "#1f8a70",
    "working": "#8fd0bd",
}

_DPI = 110
_SETTINGS = {
    "font.family": "DejaVu Sans",
    "svg.hashsalt": "nest-megatron",  # the same file from the same plan
    "svg.fonttype": "none",
    "text.parse_math": False,  # names are text, whatever they hold
}


def check_picture(path: Path, what: str, *others: str) -> None:
    """Refuse a picture that cannot be drawn, before the work that it is to show.

    Args:
        others: suffixes of what is written instead of a picture.
    """
    suffix = path.suffix.lower()
    if suffix in SUFFIXES:
        check_matplotlib(what)
    elif suffix not in others:
        raise UserInputError(
            what,
            str(path),
            f"a {'file' if others else 'picture'} is one of {', '.join((*others, *SUFFIXES))}",
            "Give the file one of these suffixes.",
        )


def check_matplotlib(what: str) -> None:
    """Refuse a chart where the library that draws it is not installed."""
    limit = "charts are drawn by matplotlib, which is not installed"
    require_package("matplotlib", "pictures", what, limit)


def render(
    draw: Callable[[Any], None],
    size: tuple[float, float],
    suffix: str,
    *,
    what: str = "chart",
    dpi: int = _DPI,
    settings: Mapping[str, object] | None = None,
) -> bytes:
    """A chart as a file's content; the same bytes from the same data.

    Args:
        draw: fills the matplotlib figure that it is given.
        size: width and height in inches.
        suffix: ``.png`` or ``.svg``.
        what: the option that names it, for errors.
        settings: matplotlib's, beside those of every chart.
    """
    check_matplotlib(what)
    import matplotlib
    from matplotlib.figure import Figure

    kind = suffix.removeprefix(".").lower()
    made = {"Creator": MARK, "Date": None} if kind == "svg" else {"Software": MARK}
    stream = io.BytesIO()
    with matplotlib.rc_context({**_SETTINGS, **(settings or {})}):
        figure = Figure(figsize=size, dpi=dpi)
        draw(figure)
        figure.savefig(stream, format=kind, metadata=made)
    return stream.getvalue()


def write_chart(
    draw: Callable[[Any], None], size: tuple[float, float], path: Path, what: str
) -> None:
    """Write a chart into a ``.png`` or ``.svg`` file."""
    check_picture(path, what)
    write_bytes(path, render(draw, size, path.suffix, what=what))


def write_title(figure: Any, title: str) -> None:
    """The title of a chart of work, at the left."""
    figure.set_layout_engine("constrained")
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11)


def style_panel(axes: Any, title: str, **ticks: object) -> None:
    """A panel of a chart of work, under its title, without a frame."""
    axes.set_title(title, fontsize=9, color=SOFT)
    axes.spines[:].set_visible(False)
    axes.tick_params(left=False, bottom=False, **ticks)


def write_legend(
    figure: Any, entries: Iterable[tuple[str, str]], place: str, ncols: int, title: str = ""
) -> None:
    """What colours mean, outside of the axes."""
    from matplotlib.patches import Patch

    patches = [Patch(color=colour, label=name) for name, colour in entries]
    look = {"fontsize": 8, "title_fontsize": 8, "frameon": False, "ncols": ncols}
    figure.legend(handles=patches, loc=f"outside lower {place}", title=title or None, **look)


def blended(first: str, last: str, share: float) -> str:
    """A colour between two.

    >>> blended("#ffffff", "#1d4f8c", 0.5)
    '#8ea7c6'
    """
    pairs = zip(*(bytes.fromhex(colour[1:]) for colour in (first, last)), strict=True)
    return f"#{bytes(round(a + share * (b - a)) for a, b in pairs).hex()}"


def ink_on(colour: str) -> str:
    """Black or white, whichever has the greater contrast with a colour (WCAG 2.2).

    >>> ink_on("#ffffff"), ink_on("#1d4f8c")
    ('#000000', '#ffffff')
    """
    parts = [part / 255 for part in bytes.fromhex(colour[1:])]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "#000000" if (luminance + 0.05) ** 2 > 0.05 * 1.05 else "#ffffff"
