"""Tables of layers and chains say what the records hold."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterable

import pytest
from rich.console import Console, RenderableType

from nest_megatron.model.graph import Part
from nest_megatron.model.layer_pattern import LayerKind
from nest_megatron.report.layer_work import chain_report, layer_report, steps
from tests.report.graphs import KINDS, chain, layer


def printed(parts: Iterable[RenderableType], width: int = 80) -> str:
    """What a terminal shows."""
    console = Console(width=width, record=True, file=io.StringIO())
    for part in parts:
        console.print(part)
    return console.export_text()


def row(text: str, name: str) -> list[str]:
    """The words of the first line that names something."""
    return next(line.split() for line in text.splitlines() if name in line.split())


@pytest.mark.parametrize("kind", KINDS)
def test_every_operator_and_collective_is_there(kind: LayerKind) -> None:
    graph = layer(kind)
    text = printed(layer_report(graph, "a layer"), width=120)
    for op in graph.operators:
        assert op.name in text
    for collective in graph.collectives:
        assert collective.name in text
    for part, num_bytes in graph.saved_bytes:
        assert not num_bytes or part.value in text


def test_figures_and_totals() -> None:
    graph = layer(LayerKind.DENSE)
    text = printed(layer_report(graph, "a layer", [("parameters", "1,234")]))
    fc1 = next(op for op in graph.operators if op.name == "fc1")
    giga = f"{fc1.flops / 1e9:.2f}"
    assert row(text, "fc1")[-5:-3] == [giga, f"{fc1.backward_flops / 1e9:.1f}"]
    total = f"{graph.flops() / 1e9:.1f}"
    assert row(text, "total")[1] == total
    assert "parameters: 1,234" in text
    kept = f"{graph.total_saved_bytes() / 2**20:.1f}"
    assert [kept] in [line.split()[1:] for line in text.splitlines() if line.startswith(" total")]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_cut_off_at_80_columns(kind: LayerKind) -> None:
    text = printed(layer_report(layer(kind), "a layer"))
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_operators_come_in_the_order_of_the_forward_pass() -> None:
    names = [step.operator.name for step in steps(layer(LayerKind.MOE))]
    for before, after in [
        ("query_up", "core_attention"),
        ("core_attention", "projection"),
        ("projection", "residual"),
        ("residual", "mlp_norm"),
        ("permute", "expert_fc1"),
        ("expert_fc1", "expert_activation"),
        ("expert_activation", "expert_fc2"),
        ("expert_fc2", "unpermute"),
        ("unpermute", "mlp_residual"),
    ]:
        assert names.index(before) < names.index(after)
    assert names[-1] == "mlp_residual"


def test_a_recorded_order_is_kept() -> None:
    graph = layer(LayerKind.DENSE)
    recorded = tuple(step.operator for step in steps(graph))
    moved = (recorded[1], recorded[0], *recorded[2:])
    again = steps(dataclasses.replace(graph, operators=moved))
    assert tuple(step.operator for step in again) == moved


def test_collectives_lie_where_they_happen() -> None:
    by_name = {step.operator.name: step for step in steps(layer(LayerKind.MOE))}
    above = {(c.name, c.backward) for c in by_name["query_up"].above}
    own = {("query_up.gather", False), ("query_up.scatter", True)}
    assert above == own | {("positions.gather", False)}
    assert {(c.name, c.backward) for c in by_name["projection"].below} == {
        ("projection.scatter", False),
        ("projection.gather", True),
    }
    assert {c.name for c in by_name["permute"].below} >= {"token_all_to_all", "expert_all_gather"}
    assert {c.name for c in by_name["unpermute"].above} == {
        "expert_reduce_scatter",
        "expert_all_gather",
    }
    placed = sum(len(step.above) + len(step.below) for step in by_name.values())
    assert placed == len(layer(LayerKind.MOE).collectives)


def test_an_empty_layer_is_no_error() -> None:
    graph = dataclasses.replace(
        layer(LayerKind.DENSE), operators=(), collectives=(), saved_bytes=(), input_bytes=0.0
    )
    assert "total" in printed(layer_report(graph, "nothing"))
    assert Part.QKV.value not in printed(layer_report(graph, "nothing"))


def test_a_chain_has_neighbours_of_one_kind_in_one_row() -> None:
    text = printed(chain_report(chain(3)), width=110)
    assert "Model<1> on [1, 2048] int64" in text
    line = next(line for line in text.splitlines() if "layers.0 to layers.2 (3)" in line)
    assert line.split()[-5:] == ["6.00", "9.00", "3.00", "12.0", "1.00"]
    assert "Layer: layers.0, 3 of them" in text
    assert row(text, "total")[1] == "12.0"
