"""Drawings of layers and chains hold everything, and nothing lies on anything else."""

from __future__ import annotations

import builtins
import itertools
import struct
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from nest_megatron.errors import UserInputError
from nest_megatron.model.graph import Group, Part
from nest_megatron.model.spec import LayerKind
from nest_megatron.report.canvas import PIXELS, Box, Canvas, as_svg
from nest_megatron.report.chain_drawing import chain_canvas, draw_chain
from nest_megatron.report.operator_drawing import (
    FLOPS_PER_BYTE,
    GROUP_COLOURS,
    draw_layer,
    layer_canvas,
)
from tests.report.graphs import KINDS, chain, layer

CANVASES = {
    **{kind.value: layer_canvas(layer(kind), f"model, {kind.value} layer") for kind in KINDS},
    "chain": chain_canvas(chain()),
    "long chain": chain_canvas(chain(100)),
}


def texts(path: Path) -> list[str]:
    """The words of an .svg file."""
    root = ET.fromstring(path.read_bytes())
    return [node.text or "" for node in root.iter() if node.tag.endswith("text")]


def overlap(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


@pytest.mark.parametrize("name", CANVASES)
def test_no_words_lie_on_words_or_outside(name: str) -> None:
    canvas = CANVASES[name]
    bounds = [(words.bounds(), words.text) for words in canvas.words()]
    for (left, upper, right, lower), text in bounds:
        assert left >= 0, text
        assert upper >= 0, text
        assert right <= canvas.width, text
        assert lower <= canvas.height, text
    clashes = [(a[1], b[1]) for a, b in itertools.combinations(bounds, 2) if overlap(a[0], b[0])]
    assert not clashes


@pytest.mark.parametrize("kind", KINDS)
def test_the_svg_holds_every_operator_and_collective(kind: LayerKind, tmp_path: Path) -> None:
    graph, path = layer(kind), tmp_path / "layer.svg"
    size = draw_layer(graph, path, "model <x> & co")
    root = ET.fromstring(path.read_text(encoding="utf-8"))
    assert (root.get("width"), root.get("height")) == tuple(map(str, size))
    words = texts(path)
    bands = {part.value.replace("_", " ") for part in Part}
    for op in graph.operators:
        times = words.count(op.name)  # a part of the same name has its own words as well
        assert times == 2 or (times > 2 and op.name in bands), "once forward, once backward"
    drawn = sum(" over " in text for text in words)
    assert drawn == len(graph.collectives)
    for collective in graph.collectives:
        kind_words = f"{collective.kind.replace('_', '-')} over {collective.group.value}: "
        assert any(text.startswith(kind_words) for text in words)
        if collective.hidden_under:
            assert any(f"(under {collective.hidden_under})" in text for text in words)
    assert "model <x> & co" in words


def test_boxes_are_as_wide_as_their_time() -> None:
    graph = layer(LayerKind.HEAD)
    boxes = [
        shape
        for shape in layer_canvas(graph, "head").shapes
        if isinstance(shape, Box) and shape.height == 32.0
    ]
    by_row = sorted(boxes, key=lambda box: (box.x + box.width / 2, box.y))
    forward, backward = by_row[: len(graph.operators)], by_row[len(graph.operators) :]
    at, product = next((i, op) for i, op in enumerate(graph.operators) if op.name == "output_layer")
    times = [
        max(product.flops / FLOPS_PER_BYTE, product.bytes_moved),
        max(product.backward_flops / FLOPS_PER_BYTE, product.backward_bytes_moved),
    ]
    longer = backward[at].width / forward[at].width
    assert longer == pytest.approx(times[1] / times[0])
    assert max(box.width for box in boxes) == pytest.approx(520.0)


def test_groups_have_colours_of_their_own() -> None:
    assert len({GROUP_COLOURS[group] for group in Group}) == len(Group)


@pytest.mark.parametrize("what", ["layer", "chain"])
def test_the_png_is_a_picture_of_the_stated_size(what: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the report extra is not installed")
    path = tmp_path / "picture.png"
    if what == "layer":
        size = draw_layer(layer(LayerKind.MOE), path, "price: $1 and $2")
    else:
        size = draw_chain(chain(), path)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", content[16:24]) == size
    assert size[0] == 1240 * PIXELS
    from matplotlib.image import imread

    pixels = imread(path)
    assert pixels.shape[:2] == size[::-1]
    assert pixels.min() < 0.3, "something dark is drawn"


def test_a_chain_is_drawn_with_its_blocks(tmp_path: Path) -> None:
    path = tmp_path / "chain.svg"
    draw_chain(chain(80), path)
    words = texts(path)
    assert "80 x Layer  layers.0 to layers.79" in words
    assert "2.00 GFLOP  3.00 MB  1.00 M parameters  keeps 4.19 MB, each" in words
    assert sum("passed on" in text for text in words) == 2
    assert {"fc", "act"} <= set(words)


def test_a_picture_is_the_same_twice() -> None:
    assert as_svg(CANVASES["moe"]) == as_svg(layer_canvas(layer(LayerKind.MOE), "model, moe layer"))


def test_other_suffixes_and_missing_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match=r"\.png, \.svg"):
        draw_chain(chain(), tmp_path / "chain.gif")
    with pytest.raises(UserInputError, match="nowhere"):
        draw_chain(chain(), tmp_path / "nowhere" / "chain.svg")


def test_without_matplotlib_an_svg_still_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    draw_chain(chain(), tmp_path / "chain.svg")
    with pytest.raises(UserInputError, match=r"pip install .*matplotlib"):
        draw_chain(chain(), tmp_path / "chain.png")


def test_a_canvas_of_nothing() -> None:
    assert as_svg(Canvas(10, 10, "x")).count("<rect") == 1
