"""Pictures of boxes, lines and words, laid out once and written as .svg or .png.

The .svg needs nothing; the .png is drawn by matplotlib (the ``report`` extra).
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nest_megatron.errors import UserInputError
from nest_megatron.files import MARK, write_bytes
from nest_megatron.packages import install_command
from nest_megatron.report.markup import Markup, element, joined
from nest_megatron.report.palette import picture_metadata

#: Formats that ``write_picture`` writes, by suffix.
SUFFIXES = (".png", ".svg")
#: Pixels of a .png for one unit of a drawing.
PIXELS = 2
INK, SOFT, PAPER = "#1b1f26", "#5a626e", "#ffffff"
_FAMILY = "DejaVu Sans, Verdana, sans-serif"
_DPI = 100
#: Width of an average character of DejaVu Sans, in its own size; of wide text a little more.
_CHARACTER = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A rectangle from its upper left corner.

    Args:
        edge: colour of its outline.
        dashed: of the outline.
    """

    x: float
    y: float
    width: float
    height: float
    fill: str
    edge: str | None = None
    dashed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line, with a head at its end if it is an arrow."""

    x1: float
    y1: float
    x2: float
    y2: float
    colour: str = SOFT
    arrow: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """A line of text.

    Args:
        x: left end, middle or right end, as ``anchor`` says (``start``, ``middle``, ``end``).
        y: middle of its height.
        size: of the letters, in units of the drawing.
    """

    text: str
    x: float
    y: float
    anchor: str = "start"
    size: float = 11.0
    bold: bool = False
    colour: str = INK

    def bounds(self) -> tuple[float, float, float, float]:
        """Left, upper, right and lower end; never narrower than what is drawn."""
        width = width_of(self.text, size=self.size, bold=self.bold)
        left = self.x - {"start": 0.0, "middle": 0.5, "end": 1.0}[self.anchor] * width
        return left, self.y - self.size / 2, left + width, self.y + self.size / 2


@dataclass(slots=True)
class Canvas:
    """Shapes in the order in which they are drawn."""

    width: float
    height: float
    title: str
    shapes: list[Box | Line | Words] = field(default_factory=list)

    def add(self, *shapes: Box | Line | Words) -> None:
        """Draw on top of what is there."""
        self.shapes.extend(shapes)

    def words(self) -> Iterable[Words]:
        """All text."""
        return (shape for shape in self.shapes if isinstance(shape, Words))


def width_of(text: str, *, size: float = 11.0, bold: bool = False) -> float:
    """Width of a line of text, a little too large rather than too small."""
    return len(text) * size * _CHARACTER * (1.12 if bold else 1.0)


def shortened(text: str, width: float, *, size: float = 11.0, bold: bool = False) -> str:
    """A text that fits, its end cut off where it has to be.

    >>> shortened("reduce_scatter", 60.0), shortened("mlp", 60.0)
    ('reduce_s…', 'mlp')
    """
    most = int(width / (width_of("x", size=size, bold=bold)))
    return text if len(text) <= most else f"{text[: max(0, most - 1)]}…"


def shortened_path(path: str, width: float, *, size: float = 11.0, bold: bool = False) -> str:
    """A dotted path that fits: its end says most, so parts go from its beginning.

    >>> shortened_path("mlp.experts.linear_fc1", 120.0)
    '…linear_fc1'
    """
    rest, fits = path, width_of(path, size=size, bold=bold) <= width
    while not fits and "." in rest:
        rest = rest.partition(".")[2]
        fits = width_of(f"…{rest}", size=size, bold=bold) <= width
    words = path if rest == path else f"…{rest}"
    return shortened(words, width, size=size, bold=bold)


def check_suffix(path: Path, what: str) -> None:
    """Refuse a file whose name is that of no picture.

    Raises:
        UserInputError: naming the suffixes.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise UserInputError(
            what,
            value=str(path),
            limit=f"a picture is one of {', '.join(SUFFIXES)}",
            fix="Give the file one of these suffixes.",
        )


def write_picture(canvas: Canvas, path: Path, what: str = "--draw") -> tuple[int, int]:
    """Write a drawing.

    Returns:
        Width and height: pixels of a .png, units of an .svg.

    Raises:
        UserInputError: for another suffix, a file that cannot be written, or a .png without
            matplotlib.
    """
    check_suffix(path, what)
    if path.suffix.lower() == ".svg":
        write_bytes(path, as_svg(canvas).encode("utf-8"))
        return round(canvas.width), round(canvas.height)
    write_bytes(path, _as_png(canvas, what))
    return round(canvas.width) * PIXELS, round(canvas.height) * PIXELS


def as_svg(canvas: Canvas) -> str:
    """The drawing as a whole .svg file."""
    width, height = f"{round(canvas.width)}", f"{round(canvas.height)}"
    paper = Box(x=0, y=0, width=canvas.width, height=canvas.height, fill=PAPER)
    svg = element(
        "svg",
        element("title", canvas.title),
        joined(map(_svg, [paper, *canvas.shapes])),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width} {height}",
        width=width,
        height=height,
        font_family=_FAMILY,
        role="img",
    )
    return f'<?xml version="1.0" encoding="utf-8"?>\n<!-- {MARK} -->\n{svg}\n'


def _svg(shape: Box | Line | Words) -> Markup:
    if isinstance(shape, Box):
        size = {"width": f"{shape.width:.1f}", "height": f"{shape.height:.1f}"}
        dashes = "4 3" if shape.dashed else None
        look = {"fill": shape.fill, "stroke": shape.edge, "stroke_dasharray": dashes}
        return element("rect", x=f"{shape.x:.1f}", y=f"{shape.y:.1f}", **size, **look)
    if isinstance(shape, Words):
        place = {"x": f"{shape.x:.1f}", "y": f"{shape.y + 0.36 * shape.size:.1f}"}
        look = {"text_anchor": shape.anchor, "font_size": f"{shape.size:g}", "fill": shape.colour}
        weight = "bold" if shape.bold else None
        return element("text", shape.text, **place, **look, font_weight=weight)
    ends = {name: f"{getattr(shape, name):.1f}" for name in ("x1", "y1", "x2", "y2")}
    line = element("line", **ends, stroke=shape.colour)
    if not shape.arrow:
        return line
    down = 1 if shape.y2 >= shape.y1 else -1
    tip = f"M{shape.x2 - 4:.1f} {shape.y2 - 6 * down:.1f}h8l-4 {6 * down}z"
    return joined([line, element("path", d=tip, fill=shape.colour)])


def _as_png(canvas: Canvas, what: str) -> bytes:
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserInputError(
            what,
            value=".png",
            limit="it is drawn by matplotlib, which is not installed",
            fix=f"{install_command('report')}, or name an .svg file instead.",
        ) from error
    width, height = round(canvas.width), round(canvas.height)
    with mpl.rc_context({"text.parse_math": False, "font.family": "DejaVu Sans"}):
        figure = Figure(figsize=(width / _DPI, height / _DPI), dpi=_DPI * PIXELS, facecolor=PAPER)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, width), ylim=(height, 0))
        axes.axis("off")
        for order, shape in enumerate(canvas.shapes):
            _paint(axes, shape, order)
        stream = io.BytesIO()
        figure.savefig(stream, format="png", metadata=picture_metadata("png"))
    return stream.getvalue()


def _paint(axes: Any, shape: Box | Line | Words, order: int) -> None:
    from matplotlib.patches import Rectangle

    if isinstance(shape, Box):
        look: dict[str, Any] = {
            "fc": shape.fill,
            "ec": shape.edge or "none",
            "lw": 0.72,
            "zorder": order,
        }
        dashes = (0, (4, 3)) if shape.dashed else "solid"
        axes.add_patch(Rectangle((shape.x, shape.y), shape.width, shape.height, ls=dashes, **look))
    elif isinstance(shape, Words):
        side = {"start": "left", "middle": "center", "end": "right"}[shape.anchor]
        weight = "bold" if shape.bold else "normal"
        look = {"color": shape.colour, "fontweight": weight, "ha": side, "zorder": order}
        # 72 points an inch, and an inch is 100 units
        size = shape.size * 72 / _DPI
        axes.text(shape.x, shape.y, shape.text, fontsize=size, va="center_baseline", **look)
    else:
        axes.plot(
            [shape.x1, shape.x2], [shape.y1, shape.y2], color=shape.colour, lw=0.72, zorder=order
        )
        if shape.arrow:
            mark = "v" if shape.y2 >= shape.y1 else "^"
            up = 3 if mark == "v" else -3
            axes.plot(
                [shape.x2], [shape.y2 - up], mark, color=shape.colour, ms=5, mew=0, zorder=order
            )
