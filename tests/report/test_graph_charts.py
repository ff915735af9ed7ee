"""Charts of layers and chains hold everything, and no words lie on others or outside."""

from __future__ import annotations

import itertools
import struct
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from nest_megatron.errors import UserInputError
from nest_megatron.model.graph import Group
from nest_megatron.model.layer_pattern import LayerKind
from nest_megatron.report.layer_work import (
    FLOPS_PER_BYTE,
    GROUP_COLOURS,
    draw_chain,
    draw_chain_on,
    draw_layer,
    draw_layer_on,
)
from tests.report.graphs import KINDS, chain, layer

CHARTS: dict[str, Callable[[Any], None]] = {
    **{
        kind.value: lambda figure, kind=kind: draw_layer_on(figure, layer(kind), f"{kind} layer")
        for kind in KINDS
    },
    "chain": lambda figure: draw_chain_on(figure, chain()),
    "long chain": lambda figure: draw_chain_on(figure, chain(100)),
}


@cache
def drawn(name: str) -> Figure:
    """A chart, laid out as it is saved."""
    rows = 2 * sum(len(layer(kind).operators) for kind in KINDS)
    figure = Figure(figsize=(13, 0.24 * rows), dpi=110)
    CHARTS[name](figure)
    figure.draw_without_rendering()
    return figure


def words(figure: Figure) -> list[Text]:
    """What can be read."""
    found = figure.findobj(lambda item: isinstance(item, Text) and item.get_visible())
    return [text for text in found if text.get_text()]


def texts(path: Path) -> list[str]:
    """The words of an .svg file."""
    root = ET.fromstring(path.read_bytes())
    return [node.text or "" for node in root.iter() if node.tag.endswith("text")]


@pytest.mark.parametrize("name", CHARTS)
def test_no_words_lie_on_words_or_outside(name: str) -> None:
    figure = drawn(name)
    boxes = [(text.get_window_extent().padded(-1), text.get_text()) for text in words(figure)]
    for box, text in boxes:
        assert 0 <= box.x0 <= box.x1 <= figure.bbox.width, text
        assert 0 <= box.y0 <= box.y1 <= figure.bbox.height, text
    assert not [(a[1], b[1]) for a, b in itertools.combinations(boxes, 2) if a[0].overlaps(b[0])]


@pytest.mark.parametrize("kind", KINDS)
def test_the_svg_holds_every_operator_and_collective(kind: LayerKind, tmp_path: Path) -> None:
    graph, path = layer(kind), tmp_path / "layer.svg"
    draw_layer(graph, path, "model <x> & co")
    found = texts(path)
    assert {op.name for op in graph.operators} <= set(found)
    assert {op.part.value.replace("_", " ") for op in graph.operators} <= set(found)
    assert sum(" over " in text for text in found) == len(graph.collectives)
    for collective in graph.collectives:
        kind_words = f"{collective.kind.replace('_', '-')} over {collective.group.value}: "
        assert any(text.startswith(kind_words) for text in found)
        if collective.hidden_under:
            assert any(f"(under {collective.hidden_under})" in text for text in found)
    assert "model <x> & co" in found


def test_bars_are_as_long_as_their_time() -> None:
    graph = layer(LayerKind.HEAD)
    lengths = [
        [bar.get_width() for bar in axes.patches if abs(bar.get_height() - 0.72) < 1e-9]
        for axes in drawn(LayerKind.HEAD.value).axes
    ]
    at, product = next((i, op) for i, op in enumerate(graph.operators) if op.name == "output_layer")
    times = [
        max(product.flops / FLOPS_PER_BYTE, product.bytes_moved),
        max(product.backward_flops / FLOPS_PER_BYTE, product.backward_bytes_moved),
    ]
    assert lengths[1][at] / lengths[0][at] == pytest.approx(times[1] / times[0])
    assert max(map(max, lengths)) == pytest.approx(1.0)


def test_groups_have_colours_of_their_own() -> None:
    assert len({GROUP_COLOURS[group] for group in Group}) == len(Group)


@pytest.mark.parametrize("what", ["layer", "chain"])
def test_the_png_is_a_picture(what: str, tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    if what == "layer":
        draw_layer(layer(LayerKind.MOE), path, "price: $1 and $2")
    else:
        draw_chain(chain(), path)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", content[16:24])[0] == 13 * 110
    from matplotlib.image import imread

    assert imread(path).min() < 0.3, "something dark is drawn"


def test_a_chain_is_drawn_with_its_blocks(tmp_path: Path) -> None:
    path = tmp_path / "chain.svg"
    draw_chain(chain(80), path)
    found = texts(path)
    assert "80 x Layer  layers.0 to layers.79" in found
    assert "2.00 GFLOP  3.00 MB  1.00 M parameters  saves 4.19 MB, each" in found
    assert sum("passed on" in text for text in found) == 2
    assert {"fc", "act"} <= set(found)


def test_a_picture_is_the_same_twice(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        draw_layer(layer(LayerKind.MOE), tmp_path / name, "model, moe layer")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_other_suffixes_and_missing_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match=r"\.png, \.svg"):
        draw_chain(chain(), tmp_path / "chain.gif")
    with pytest.raises(UserInputError, match="nowhere"):
        draw_chain(chain(), tmp_path / "nowhere" / "chain.svg")


def test_without_matplotlib_the_fix_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserInputError, match=r"nest-megatron\[pictures\]"):
        draw_chain(chain(), tmp_path / "chain.svg")
