"""How long extraction takes, and how far closed forms are from what it finds.

Run where torch and megatron-core are installed::

    python benchmarks/extraction.py [--out docs/extraction.md]

Each model's distinct units are extracted in a fresh process with an empty cache, then loaded in
another one. The table of agreement is of every layer kind at tensor sizes of 1 to 8.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import yaml

from nest_megatron.files import write_text
from nest_megatron.megatron_core import layers
from nest_megatron.model.catalogue import spec_from_mapping
from nest_megatron.model.layer_pattern import LayerKind
from nest_megatron.model.operators import layer_graph
from nest_megatron.model.parameters import layer_parameters
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import TransformerSpec

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.megatron_core.local_layers import local_layer  # noqa: E402
from tools.markdown import table  # noqa: E402

MODELS = ROOT / "hydra_configs" / "model"
#: Model, and the most seconds that its extraction may take.
TIMED = {"llama3_70b": 10.0, "deepseek_v3": 20.0}
COMPARED = (
    "gpt3_175b",
    "llama3_70b",
    "qwen3_32b",
    "nemotron4_340b",
    "mixtral_8x7b",
    "qwen3_30b_a3b",
    "deepseek_v3",
)
#: Layers that the planner's own closed form is held against: model, kind, expert ranks.
BLOCKS = (
    ("nemotron_h_8b", LayerKind.MAMBA, 1),
    ("qwen3_next_80b_a3b", LayerKind.LINEAR, 1),
    ("nemotron3_super", LayerKind.EXPERTS, 64),
    ("t5_220m", LayerKind.ENCODER, 1),
    ("t5_220m", LayerKind.CROSS, 1),
)
RUNS = 3


def model(name: str) -> TransformerSpec:
    """A model of the catalogue."""
    values = yaml.safe_load((MODELS / f"{name}.yaml").read_text(encoding="utf-8"))
    values.pop("description", None)
    return spec_from_mapping(values)


def timed_shard(spec: TransformerSpec) -> LayerShard:
    """Eight tensor ranks, and eight expert ranks where there are experts."""
    return LayerShard(
        tensor_model_parallel_size=8,
        sequence_parallel=True,
        expert_model_parallel_size=8 if spec.is_moe else 1,
    )


def extract_all(name: str) -> None:
    """Extract or load every distinct unit of a model, and print the seconds it took."""
    spec = model(name)
    started = time.perf_counter()
    for kind in dict.fromkeys(spec.layer_kinds()):
        layers.cached_layer(spec, kind, timed_shard(spec))
    print(json.dumps({"seconds": time.perf_counter() - started, "torch": "torch" in sys.modules}))


def seconds(name: str, folder: str) -> tuple[float, bool]:
    """Seconds of ``extract_all`` in a fresh process, and whether torch was loaded."""
    done = subprocess.run(
        [sys.executable, __file__, "--extract", name],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, layers.CACHE_VARIABLE: folder},
    )
    answer = json.loads(done.stdout.splitlines()[-1])
    return answer["seconds"], answer["torch"]


def times() -> Iterator[list[str]]:
    """Cold and warm times of each model."""
    for name, limit in TIMED.items():
        cold, warm = [], []
        for _ in range(RUNS):
            with tempfile.TemporaryDirectory() as folder:
                cold.append(seconds(name, folder)[0])
                again, loads_torch = seconds(name, folder)
                assert not loads_torch
                warm.append(again)
        kinds = ", ".join(dict.fromkeys(model(name).layer_kinds()))
        yield [
            name,
            kinds,
            f"{statistics.median(cold):.2f}",
            f"{limit:.0f}",
            f"{1e3 * statistics.median(warm):.0f}",
        ]


def compared_shards(spec: TransformerSpec, kind: LayerKind) -> Iterator[LayerShard]:
    """Tensor sizes of 1 to 8, with sequence parallelism and without where Megatron trains so."""
    for tp in (1, 2, 4, 8):
        if spec.query_groups < tp and not spec.multi_latent_attention:
            continue  # megatron-core's local attention needs a query group for each rank
        for sequence_parallel in sorted({False, tp > 1}):
            if kind is LayerKind.MOE and sequence_parallel != (tp > 1):
                continue
            for flash in (True, False):
                experts = spec.num_experts or 0
                yield LayerShard(
                    tensor_model_parallel_size=tp,
                    sequence_parallel=sequence_parallel,
                    flash_attention=flash,
                    expert_model_parallel_size=max(1, experts // 4) if kind is LayerKind.MOE else 1,
                )


def agreement() -> Iterator[list[str]]:
    """Largest differences of each layer kind over its shards, in per cent."""
    for name in COMPARED:
        spec = model(name)
        for kind in sorted({LayerKind.DENSE, LayerKind.MOE}.intersection(spec.layer_kinds())):
            shards = list(compared_shards(spec, kind))
            parameters, flops, saved = 0, 0.0, 0.0
            for shard in shards:
                seen = layers.cached_layer(spec, kind, shard)
                formula = local_layer(spec, kind, shard)
                backward = sum(op.backward_flops for op in seen.graph.operators)
                parameters += seen.parameters != formula.parameters
                flops = max(flops, abs(seen.graph.flops() / formula.flops - 1))
                flops = max(flops, abs(backward / formula.backward_flops - 1))
                kept = seen.graph.total_saved_bytes() / formula.total_saved_bytes()
                saved = max(saved, abs(kept - 1))
            yield agreement_row(name, kind, len(shards), parameters, flops, saved)


def blocks_of_hybrids() -> Iterator[list[str]]:
    """Largest differences of each block from ``model/operators``, forward, in per cent."""
    for name, kind, experts in BLOCKS:
        spec = model(name)
        degrees = [(1, False), (2, False), (4, True)][: 1 if kind is LayerKind.EXPERTS else 3]
        parameters, flops, saved = 0, 0.0, 0.0
        for tp, sequence_parallel in degrees:
            shard = LayerShard(
                tensor_model_parallel_size=tp,
                sequence_parallel=sequence_parallel,
                expert_model_parallel_size=experts,
            )
            seen, formula = layers.cached_layer(spec, kind, shard), layer_graph(spec, kind, shard)
            parameters += seen.parameters != layer_parameters(spec, kind, tp, experts, 1)
            flops = max(flops, abs(seen.graph.flops() / formula.flops() - 1))
            kept = seen.graph.total_saved_bytes() / formula.total_saved_bytes()
            saved = max(saved, abs(kept - 1))
        yield agreement_row(name, kind, len(degrees), parameters, flops, saved)


def agreement_row(
    name: str, kind: LayerKind, shards: int, parameters: int, flops: float, saved: float
) -> list[str]:
    """A row of the tables of agreement."""
    return [
        name,
        kind.value,
        str(shards),
        "equal" if not parameters else f"{parameters} differ",
        f"{100 * flops:.3f}",
        f"{100 * saved:.3f}",
    ]


def document() -> str:
    """The tables, with what they were made by."""
    versions = ", ".join(
        f"{package} {importlib.metadata.version(package)}" for package in ("torch", "megatron-core")
    )
    machine = f"{os.cpu_count()} cores of {platform.machine()}, Python {platform.python_version()}"
    cold = table(
        ["Model", "Units", "Cold s", "Asked", "From the cache ms"], list(times()), numeric=3
    )
    columns = ["Model", "Layer", "Shards", "Parameters", "FLOPs: worst %"]
    columns.append("Saved activations: worst %")
    compared = table(columns, list(agreement()), numeric=4)
    others = table(columns, list(blocks_of_hybrids()), numeric=4)
    return f"""# Layers extracted, and the closed forms

Written on {date.today()} by `python benchmarks/extraction.py --out docs/extraction.md`:
{machine}, {versions}.

## Time

Every distinct unit of a model at TP 8 with sequence parallelism (EP 8), each under all its
recompute settings; the median of {RUNS} fresh processes, imports of torch and megatron-core
included. From the cache neither is loaded.

{cold}

## Agreement

The closed forms of the local layers (`tests/megatron_core/local_layers.py`) against what
megatron-core's own modules do under fake tensors: TP 1, 2, 4 and 8, with and without
sequence parallelism, with fused attention and with attention in two GEMMs. FLOPs are of the
forward and of the backward pass; saved activations are what autograd holds between the two, each
storage once.
`tests/megatron_core/test_agreement.py` fails beyond 0, 1 and 2 %.

{compared}

Mamba-2 layers, gated delta nets (`linear`), experts that see narrower tokens
(`moe_latent_size`) and the layers of T5, against the closed form that plans are priced by
(`nest_megatron/model/operators`), at TP 1 and 2 and at TP 4 with sequence parallelism (experts at
TP 1). FLOPs are of the forward pass. A scan's kernel is a stand-in that runs its products and
keeps what the kernel keeps (`nest_megatron/megatron_core/scans.py`); all around it is
megatron-core's own module.
`tests/megatron_core/test_scans.py` fails beyond 0, 1 and 2 %.

{others}

The layers that jobs run, Transformer Engine's, cannot be followed without running them. Their
closed form (`nest_megatron/model/operators`) is not fitted to the table above; its memory is
compared with measured runs in [accuracy.md](accuracy.md).
"""


def main() -> None:
    """Print the document, or write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--extract", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.extract:
        extract_all(options.extract)
    elif options.out:
        write_text(options.out, document())
    else:
        print(document())


if __name__ == "__main__":
    main()
