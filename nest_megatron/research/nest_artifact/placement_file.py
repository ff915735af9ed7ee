"""Plans in files: a solver's output, a recorded result that holds one, or a baseline."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from nest_megatron.documents import read_json
from nest_megatron.errors import nearest
from nest_megatron.files import write_text
from nest_megatron.plain import Count, Index, NonNegative, from_plain
from nest_megatron.research.nest_artifact.instance_file import SOURCE, FileBaseline, wrong
from nest_megatron.research.nest_artifact.records import (
    Chain,
    FixedPlan,
    Instance,
    Stage,
    StagePlacement,
)
from nest_megatron.research.nest_artifact.rule import AS_ARTIFACT, ArtifactRule


@dataclass(frozen=True, slots=True, kw_only=True)
class _FileStage:
    devicesForStage: Count
    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _FileOutput:
    stages: tuple[_FileStage, ...]
    dataParallelDegree: Count
    tensorParallelDegree: Count
    finalTimePerBatch: NonNegative | None = None
    networkSkeleton: tuple[tuple[Index, tuple[Index, ...]], ...] | None = None


_RENUMBER = "List each layer once, in the order of the chain, first stage first."


def read_placement(
    path: Path, instance: Instance, rule: ArtifactRule = AS_ARTIFACT
) -> tuple[StagePlacement, float | None]:
    """A plan for an instance, and the time per batch that its file gives, if it gives one.

    Args:
        path: the solver's output (``stages``, ``dataParallelDegree``, ``tensorParallelDegree``), a
            recorded result with that under ``output``, or a baseline (``p``, ``d``, ``t``,
            ``num_transformer_layers``).

    Raises:
        UserInputError: for the first field that is missing, wrong, or no part of the instance.
    """
    document, where = read_json(path, "placement", unique_keys=True), ""
    if isinstance(document, dict) and "output" in document:
        document, where = document["output"], "output"
    if isinstance(document, dict) and "stages" not in document and "p" in document:
        baseline = from_plain(FileBaseline, document, where, SOURCE).named(path.stem)
        return baseline_placement(instance, baseline, rule), None
    output, prefix = from_plain(_FileOutput, document, where, SOURCE), f"{where}.".lstrip(".")
    tp = output.tensorParallelDegree
    chain = _chain(instance, tp, f"{prefix}tensorParallelDegree")
    placement = StagePlacement(
        stages=tuple(_stages(output, chain, f"{prefix}stages")),
        data_parallel_size=output.dataParallelDegree,
        tensor_model_parallel_size=tp,
        printed_devices=_printed_devices(output, len(chain.layers), f"{prefix}networkSkeleton"),
    )
    return placement, output.finalTimePerBatch


def write_placement(path: Path, instance: Instance, placement: StagePlacement, time: float) -> None:
    """Write a plan as the artifact's solver writes its output."""
    chain = instance.chains[placement.tensor_model_parallel_size]
    document = {
        "dataParallelDegree": placement.data_parallel_size,
        "finalTimePerBatch": time,
        "stages": stages_as_plain(chain, placement),
        "tensorParallelDegree": placement.tensor_model_parallel_size,
    }
    write_text(path, json.dumps(document, indent=1) + "\n")


def stages_as_plain(chain: Chain, placement: StagePlacement) -> list[dict[str, Any]]:
    """Stages in the artifact's words."""
    return [
        {
            "devicesForStage": stage.num_devices,
            "nodes": [layer.node_id for layer in chain.layers[stage.first : stage.end]],
        }
        for stage in placement.stages
    ]


def named_baseline(
    instance: Instance, name: str, rule: ArtifactRule = AS_ARTIFACT
) -> StagePlacement:
    """A baseline that the instance carries.

    Raises:
        UserInputError: for a name that it does not carry, or a plan that makes no stages.
    """
    if name not in instance.baselines:
        known = sorted(instance.baselines)
        fix = nearest(name, known) if known else "Give a placement file instead."
        raise wrong("--baseline", name, "the instance has no such baseline", fix)
    return baseline_placement(instance, instance.baselines[name], rule)


def baseline_placement(
    instance: Instance, baseline: FixedPlan, rule: ArtifactRule = AS_ARTIFACT
) -> StagePlacement:
    """A fixed plan as stages: its own boundaries, or ceil(layers / p) layers a stage.

    Raises:
        UserInputError: where a stage is left empty or the instance lacks the degree;
            the artifact's solver crashes on both.
    """
    tp = baseline.tensor_model_parallel_size
    chain = _chain(instance, tp, f"{baseline.name}.t")
    if baseline.num_layers > len(chain.layers):
        limit = f"the instance has {len(chain.layers)} layers, its embedding among them"
        raise wrong(f"{baseline.name}.num_transformer_layers", baseline.num_layers, limit)
    boundaries = _baseline_boundaries(baseline)
    if not rule.baseline_cuts_count_embedding:
        embeddings = sum(layer.node_id < 0 for layer in chain.layers)
        boundaries = [at + embeddings for at in boundaries]
    ends = [0, *(min(at, len(chain.layers)) for at in boundaries[:-1]), len(chain.layers)]
    for number, (first, end) in enumerate(pairwise(ends)):
        if end <= first:
            limit = f"stage {number} of {baseline.num_stages} would be empty"
            raise wrong(f"{baseline.name}.p", baseline.num_stages, limit, "Give fewer stages.")
    devices = instance.devices_per_stage(tp)
    return StagePlacement(
        stages=tuple(Stage(first=a, end=b, num_devices=devices) for a, b in pairwise(ends)),
        data_parallel_size=baseline.data_parallel_size,
        tensor_model_parallel_size=tp,
        is_baseline=True,
    )


def _baseline_boundaries(baseline: FixedPlan) -> list[int]:
    """Where each stage ends, in layers."""
    partition, count = baseline.layer_partition, baseline.num_stages
    if not partition:
        each = -(-baseline.num_layers // count)
        return [min((n + 1) * each, baseline.num_layers) for n in range(count)]
    if len(partition) != count or sum(partition) != baseline.num_layers:
        limit = f"it must share {baseline.num_layers} layers among {count} stages"
        raise wrong(f"{baseline.name}.layer_partition", list(partition), limit)
    return list(accumulate(partition))


def _chain(instance: Instance, tp: int, where: str) -> Chain:
    if tp not in instance.chains:
        known = ", ".join(map(str, instance.chains))
        raise wrong(where, tp, f"the instance has tensor degrees {known}", "Use one of them.")
    return instance.chains[tp]


def _stages(output: _FileOutput, chain: Chain, where: str) -> list[Stage]:
    order = tuple(layer.node_id for layer in chain.layers)
    found: list[Stage] = []
    for at, stage in enumerate(output.stages):
        first = found[-1].end if found else 0
        end = first + len(stage.nodes)
        if not stage.nodes or stage.nodes != order[first:end]:
            expected = order[first] if first < len(order) else "no further node"
            limit = f"it must be a run of the chain that begins with {expected}"
            raise wrong(f"{where}[{at}].nodes", list(stage.nodes), limit, _RENUMBER)
        found.append(Stage(first=first, end=end, num_devices=stage.devicesForStage))
    if not found or found[-1].end < len(order):
        missing = list(order[found[-1].end if found else 0 :])
        raise wrong(where, missing, "these nodes are in no stage", _RENUMBER)
    return found


def _printed_devices(output: _FileOutput, num_layers: int, where: str) -> tuple[int, ...]:
    """The first listed device of each layer, layers counted along the chain."""
    if output.networkSkeleton is None:
        return ()
    devices: dict[int, int] = {}
    for device, layers in output.networkSkeleton:
        for layer in layers:
            devices.setdefault(layer, device)
    if sorted(devices) != list(range(num_layers)):
        limit = f"it must hold the layers 0 to {num_layers - 1}"
        raise wrong(where, sorted(devices), limit)
    return tuple(devices[layer] for layer in range(num_layers))
