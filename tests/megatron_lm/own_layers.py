"""Builds a job's layers in a process of its own.

Standard input holds a command's arguments; standard output is a JSON object: for each block and
each way of making layers, the parameters and some fields of the configuration.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from nest_megatron.integrations.megatron_lm import own_layers
from nest_megatron.integrations.megatron_lm.own_layers import JobLayers, job_arguments
from nest_megatron.integrations.megatron_lm.parser import read_argv
from nest_megatron.integrations.megatron_lm.read import read_job
from nest_megatron.megatron_core.stage import MakeLayers, Where, staged
from nest_megatron.megatron_core.units import Layers, build
from nest_megatron.model.layer_pattern import LayerKind
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.profile.layer_timer import _UNITS

#: Taken from the configuration, to see that the job's own flags reach the layers.
FIELDS = ("bias_activation_fusion", "recompute_granularity", "num_layers", "seq_length", "fp8")


def without_builders(make: JobLayers) -> MakeLayers:
    """The same where no checkout lies beside the script."""

    def made(spec: TransformerSpec, shard: LayerShard) -> Layers:
        kept, own_layers._builders = own_layers._builders, lambda: None
        try:
            return make(spec, shard)
        finally:
            own_layers._builders = kept

    return made


def main() -> None:
    """Build every block in every way."""
    asked = json.load(sys.stdin)
    command = read_argv(asked["script"], asked["argv"], asked["version"])
    spec = read_job(command).spec
    own = JobLayers(job_arguments(command, {"tokenizer_type": "GPT2BPETokenizer"}), Where.CPU)
    shard = LayerShard(**asked["shard"], flash_attention=False)
    ways = {"own": own, "no builders": without_builders(own), "framework": None}
    found: dict[str, dict[str, Any]] = {}
    for block in spec.blocks:
        kind, stretch = _UNITS[block]
        for way, make in ways.items():
            found.setdefault(block.value, {})[way] = built(spec, kind, shard, stretch, make)
    print("BUILT", json.dumps(found))


def built(
    spec: TransformerSpec, kind: LayerKind, shard: LayerShard, stretch: Any, make: Any
) -> dict[str, Any]:
    """Parameters of a block, and fields of its configuration."""
    with staged(spec, kind, shard, where=Where.CPU, make_layers=make) as layers:
        module = build(layers, kind, stretch=stretch).module
        config = {name: getattr(layers.config, name, None) for name in FIELDS}
        return {"parameters": sum(p.numel() for p in module.parameters()), **config}


if __name__ == "__main__":
    main()
