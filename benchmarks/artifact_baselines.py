r"""The artifact's fixed plans under three rules: as it prices them, as it prices its own, best cut.

Run from the project's root, with a folder of instances and recorded results::

    python benchmarks/artifact_baselines.py FOLDER \
        --out benchmarks/paper/data/artifact.yaml
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from nest_megatron.errors import UserInputError  # noqa: E402
from nest_megatron.files import write_text  # noqa: E402
from nest_megatron.research.nest_artifact.files import named_baseline, read_instance  # noqa: E402
from nest_megatron.research.nest_artifact.price import (  # noqa: E402
    AS_ARTIFACT,
    FixedPlan,
    Instance,
    Stage,
    StagePlacement,
    price,
    rule_without,
)
from nest_megatron.research.nest_artifact.search import (  # noqa: E402
    ArtifactSolution,
    boundary_table,
    solve,
)

#: The catalogue's names of the artifact's models. Its "bert" and "bertlarge" are two traces of one.
MODELS = {
    "bert": "bert_large",
    "bertlarge": "bert_large",
    "llama2": "llama2_7b",
    "llama3": "llama3_70b",
    "mixtral": "mixtral_8x7b",
    "gpt3": "gpt3_175b",
}
CLUSTERS = {"tpuv4_fatTree": "tpuv4_fat_tree", "h100_spineLeaf": "h100_spine_leaf"}
ONE_RULE = rule_without(["baselines_last_stage_first"])
HEAD = """\
# The artifact's plans and its baselines on the recorded instances: samples per unit of the
# instances' time, in the artifact's formula. as_shipped: baselines as the artifact prices them.
# one_rule: priced in the order of any other plan. best_cuts: the same degrees with the cuts that
# suit them best. null: it does not run. degrees: stages, replicas, tensor degree. Written by
#   python benchmarks/artifact_baselines.py FOLDER \
#       --out benchmarks/paper/data/artifact.yaml
# on instances of scai-tech/Nest @3e163ad; the operators' schedule is CP-SAT's instead of Gurobi's.
"""


def times(instance: Instance, name: str) -> dict[str, float | None]:
    """A fixed plan's time per batch under each rule."""
    found: dict[str, float | None] = {}
    for rule_name, rule in (("as_shipped", AS_ARTIFACT), ("one_rule", ONE_RULE)):
        try:
            placement = named_baseline(instance, name, rule)
            found[rule_name] = price(instance, placement, rule).time_per_batch
        except UserInputError:
            found[rule_name] = None
    found["best_cuts"] = best_cuts(instance, instance.baselines[name])
    return found


def best_cuts(instance: Instance, baseline: FixedPlan) -> float | None:
    """The time of a fixed plan's degrees with the best cuts for them."""
    width, depth = baseline.t, baseline.p
    if width not in instance.chains or depth > len(instance.chains[width].layers):
        return None
    table = boundary_table(instance, width, ONE_RULE)
    devices = instance.devices_per_stage(width)
    if depth * baseline.d * devices > instance.num_devices:
        return None
    priced = []
    for _, end in table.first_stages(depth):
        stages = tuple(
            Stage(first=first, end=last, num_devices=devices)
            for first, last in pairwise(table.boundaries(depth, end))
        )
        placement = StagePlacement(
            stages=stages,
            data_parallel_size=baseline.d,
            tensor_model_parallel_size=width,
        )
        priced.append(price(instance, placement, ONE_RULE).time_per_batch)
    return min((time for time in priced if time is not None), default=None)


def cells(folder: Path) -> Iterator[dict[str, Any]]:
    """One entry an instance; those of other degrees of a model that is there are left out."""
    for path in sorted(p for p in folder.rglob("*.json") if not p.stem.endswith(".result")):
        name, num_devices = path.stem.rsplit("_", 1)
        model, _, variant = name.partition("_")
        if model in MODELS:
            size = int(variant.removeprefix("mbs") or 1)
            head = {"model": MODELS[model], "cluster": CLUSTERS[path.parent.name]}
            sizes = {"num_gpus": int(num_devices), "micro_batch_size": size}
            yield head | sizes | cell(read_instance(path), size)


def cell(instance: Instance, micro_batch_size: int) -> dict[str, Any]:
    """The artifact's plan and its baselines on one instance."""
    found = solve(instance)
    assert isinstance(found, ArtifactSolution)
    placement = found.placement
    width = placement.tensor_model_parallel_size
    degrees = [len(placement.stages), placement.data_parallel_size, width]
    samples = instance.num_micro_batches * micro_batch_size * instance.expert_model_parallel_size

    def throughput(time: float | None) -> float | None:
        return None if time is None else float(f"{samples / time:.7g}")

    own: dict[str, Any] = {"degrees": degrees, "nest": throughput(found.price.time)}
    for name in instance.baselines:
        priced = times(instance, name)
        own[name.lower()] = {rule: throughput(time) for rule, time in priced.items()}
    return own


def main() -> int:
    """Write the file, or print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = {"cells": list(cells(options.folder))}
    text = HEAD + yaml.safe_dump(found, sort_keys=False, default_flow_style=None, width=126)
    if options.out is None:
        print(text, end="")
    else:
        write_text(options.out, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
