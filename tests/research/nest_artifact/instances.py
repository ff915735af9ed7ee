"""Instances for tests: recorded ones, and small random ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from nest_megatron.research.nest_artifact.files import chain_of, read_instance
from nest_megatron.research.nest_artifact.price import Chain, Instance, Layer, Network, Optimizer

DATA = Path(__file__).parent / "data"
#: The whole folder; it lies beside the checkout where it is there at all.
FOLDER = Path(__file__).resolve().parents[3].parent / "shared" / "nest_artifact"

Sizes = st.integers(min_value=0, max_value=60)


def recorded(name: str) -> Instance:
    """An instance of the data folder."""
    return read_instance(DATA / f"{name}.json")


def plain(name: str) -> dict[str, Any]:
    """Its file as it is."""
    found: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
    return found


@st.composite
def chains(draw: st.DrawFn, num_layers: int) -> Chain:
    """Layers with unrelated figures, joined one by one, some edges skipping some."""
    times = st.floats(min_value=0.0, max_value=9.0)
    layers = {
        at: Layer(
            node_id=at,
            forward=draw(times),
            backward=draw(times),
            weight_bytes=float(draw(Sizes)),
            activation_bytes=float(draw(Sizes)),
        )
        for at in range(num_layers)
    }
    edges = {
        (one, other): float(draw(Sizes))
        for one in range(num_layers)
        for other in range(one + 1, num_layers)
        if other == one + 1 or draw(st.integers(0, 3)) == 0
    }
    return chain_of(layers, edges, "edges")


@st.composite
def instances(draw: st.DrawFn, most_layers: int = 5) -> Instance:
    """Small instances: links that weigh, memory that may be short, devices that may be few."""
    num_layers = draw(st.integers(1, most_layers))
    fan_outs = draw(st.sampled_from([(2,), (2, 2), (2, 2, 2), (3, 2), (4, 2), (1, 5)]))
    num_devices = 1
    for fan_out in fan_outs:
        num_devices *= fan_out
    rates = st.floats(min_value=1.0, max_value=50.0)
    return Instance(
        chains={tp: draw(chains(num_layers)) for tp in draw(st.sampled_from([(1,), (1, 2), (2,)]))},
        network=Network(
            fan_outs=fan_outs,
            bandwidths=tuple(draw(rates) for _ in fan_outs),
            latencies=tuple(draw(st.floats(0.0, 2.0)) for _ in fan_outs),
        ),
        num_devices=num_devices,
        memory_bytes=float(draw(st.integers(20, 900))),
        num_micro_batches=draw(st.integers(1, 9)),
        expert_model_parallel_size=draw(st.sampled_from([1, 1, 2])),
        context_parallel_size=1,
        sequence_parallel=False,
        recompute=draw(st.booleans()),
        optimizer=draw(st.sampled_from(Optimizer)),
        baselines={},
    )
