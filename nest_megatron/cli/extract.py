"""``nest-megatron extract``: the work of a model's layers, or of a module of the user's own."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from nest_megatron.cli.command_kinds import (
    FOLDER,
    NEXT,
    OUTPUT,
    command,
    flag,
    forced,
    json_option,
    option,
    settings_argument,
    version_option,
)
from nest_megatron.config.compose import compose
from nest_megatron.config.job import CostInputs, Job
from nest_megatron.config.overrides import parse, refuse_sweeps
from nest_megatron.config.space import read_shard
from nest_megatron.errors import UserInputError
from nest_megatron.files import check_output, require_folder
from nest_megatron.integrations.typed_command import read_model
from nest_megatron.layout.dims import LAYER_DEGREES
from nest_megatron.megatron_core.chain import build, extract_chain, read_inputs, require_torch
from nest_megatron.megatron_core.layers import ExtractedLayer, cached_layer
from nest_megatron.megatron_core.stage import require_megatron
from nest_megatron.model.execution import Implementation
from nest_megatron.model.layer_pattern import LayerKind
from nest_megatron.model.operators import layer_graph
from nest_megatron.model.parameters import unit_parameters
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.plain import to_plain
from nest_megatron.report.charts import check_picture
from nest_megatron.report.console import say_written, show, show_json, show_or_json

_MODULE = "--module NAME; a model's own sizes are train.micro_batch_size and train.seq_length"


@command(
    "nest-megatron extract model=llama3_70b parallel.tensor_model_parallel_size=8",
    f"nest-megatron extract model=deepseek_v3 parallel.tensor_model_parallel_size=8{NEXT}"
    f"parallel.expert_model_parallel_size=8 parallel.expert_tensor_parallel_size=1{NEXT}"
    "--layer moe --closed-form --draw moe.svg",
    "nest-megatron extract --from 'pretrain_gpt.py <your flags>' --unfused",
    f"nest-megatron extract --module my_model:build --input 1,2048 --dtype int64{NEXT}"
    "--draw chain.svg",
)
@settings_argument
@option(
    "--layer",
    "The layer of the model (dense, moe, mamba, ...); all prints one of each kind.",
    default="all",
    metavar="KIND",
    show_default=True,
)
@option(
    "--implementation",
    "The layers to build, as Megatron's --transformer-impl.",
    click.Choice(["local", "transformer_engine"]),
    default="local",
    show_default=True,
)
@flag("--unfused", "Unfused attention: two GEMMs, whose scores are saved for the backward pass.")
@option(
    "--from from_command",
    "Your Megatron-LM command, in quotes, in place of model=; - reads it from standard "
    "input. To read it from a launch script, end the line with: -- bash train.sh",
    metavar="COMMAND",
)
@version_option
@flag(
    "--closed-form",
    "Use the planner's own formulas (of Transformer Engine's layers); needs no torch.",
    excludes=("--implementation", "no layer is built"),
)
@option(
    "--module",
    "A model of your own: NAME takes nothing and returns a torch.nn.Module.",
    metavar="PACKAGE.MODULE:NAME",
    excludes=(
        "KEY=VALUE --layer --implementation --unfused --from --megatron-version --closed-form "
        "--config-dir",
        "there are no settings and none of Megatron's layers",
    ),
)
@option(
    "--input inputs",
    "With --module: the shape of an input. Repeatable, once for each input.",
    multiple=True,
    needs=_MODULE,
    metavar="[KEYWORD=]1,2048",
)
@option(
    "--dtype dtypes",
    "With --module: the number type of all inputs, or of each. [default: float32]",
    multiple=True,
    needs=_MODULE,
    metavar="TYPE",
)
@option("--draw", "Write a picture (.svg or .png) of each layer that is printed.", OUTPUT)
@option("--config-dir", "A folder with your own model/ files.", FOLDER)
@json_option
def extract(
    *,
    overrides: Sequence[str],
    layer: str,
    implementation: str,
    unfused: bool,
    closed_form: bool,
    from_command: str | tuple[str, ...] | None,
    megatron_version: str | None,
    module: str | None,
    inputs: Sequence[str],
    dtypes: Sequence[str],
    draw: Path | None,
    config_dir: Path | None,
    as_json: bool,
) -> None:
    """Show the work of one layer on one rank, traced from megatron-core's own modules.

    Prints operators with FLOPs and memory traffic, collectives with their groups, and bytes of
    saved activations, forward and backward. It needs no GPU. --module traces any PyTorch model
    with torch.fx into its chain of blocks, without allocating its weights.
    """
    if draw is not None:  # before the work, not after it
        check_picture(draw, "--draw")
        require_folder(draw, "--draw")
    if module is not None:
        _extract_module(module, inputs, dtypes, draw, as_json=as_json)
        return
    settings = parse(overrides)
    refuse_sweeps(settings)
    composed = compose(settings, config_dir)
    text = sys.stdin.read() if from_command == "-" else from_command
    spec, flags = read_model(text, megatron_version, composed)
    CostInputs(composed, Job(spec=spec)).costs()  # refuses what the cost model would
    shard = read_shard(composed, spec, flags)
    shard = dataclasses.replace(shard, flash_attention=not unfused)
    source = None if closed_form else Implementation(implementation)
    kinds = list(dict.fromkeys(spec.layer_kinds()))
    if layer != "all":
        if layer not in kinds:
            fix = f"It has {', '.join(kinds)}."
            raise UserInputError("--layer", layer, f"{spec.name} has no such layer", fix)
        kinds = [LayerKind(layer)]
    layers = {kind: _layer(spec, kind, shard, source) for kind in kinds}
    pictures = _pictures(draw, layers)
    idle = {k for k in composed.given if k not in _MATTERS and not k.startswith("model.")}
    notes = [f"{key} does not change the work of a layer." for key in sorted(idle)]
    if as_json:
        every = spec.layer_kinds()
        show_json(
            {
                "model": spec.name,
                "shard": to_plain(shard),
                "layers": [
                    {"kind": kind.value, "count": every.count(kind), **_fields(traced)}
                    for kind, traced in layers.items()
                ],
                "notes": notes,
                "pictures": [*map(str, pictures)],
            }
        )
    else:
        from nest_megatron.report.layer_work import layer_report
        from nest_megatron.report.terminal import notes_report

        for kind, traced in layers.items():
            show(*layer_report(traced.graph, _title(spec, shard, kind), _facts(traced)))
        show(notes_report(notes))
    for (kind, traced), path in zip(layers.items(), pictures, strict=False):  # all, or none
        from nest_megatron.report.layer_work import draw_layer

        draw_layer(traced.graph, path, _title(spec, shard, kind))
        if not as_json:
            say_written(path)


def _extract_module(
    name: str, inputs: Sequence[str], dtypes: Sequence[str], draw: Path | None, *, as_json: bool
) -> None:
    """Trace a module, draw its chain, and print it."""
    shapes = read_inputs(inputs, dtypes)
    require_torch()
    graph = extract_chain(build(name), shapes)
    from nest_megatron.report.layer_work import chain_report, draw_chain

    pictures = [] if draw is None else [str(draw)]
    show_or_json(
        lambda: {"module": name, "chain": to_plain(graph), "pictures": pictures},
        lambda: chain_report(graph),
        as_json=as_json,
    )
    if draw is not None:
        draw_chain(graph, draw)
        if not as_json:
            say_written(draw)


def _layer(
    spec: TransformerSpec, kind: LayerKind, shard: LayerShard, source: Implementation | None
) -> ExtractedLayer:
    """A layer of megatron-core, or without one of its implementations of the closed form."""
    if source is None:
        degrees = (
            shard.tensor_model_parallel_size,
            shard.expert_model_parallel_size,
            shard.expert_tensor_parallel_size,
        )
        counts = unit_parameters(spec, *degrees, single_stage=False)
        return ExtractedLayer(
            graph=layer_graph(spec, kind, shard),
            parameters=counts[spec.layer_kinds().index(kind)],
            recompute={},
            provenance={"source": "closed form, Transformer Engine's layers"},
        )
    require_megatron()
    from nest_megatron.megatron_core.substitutes import quiet

    with quiet():
        return cached_layer(spec, kind, shard, implementation=source)


def _fields(layer: ExtractedLayer) -> dict[str, Any]:
    count, saved = layer.parameters, layer.graph.total_saved_bytes()
    parameters = {"dense": count.dense, "expert": count.expert}
    return {**to_plain(layer), "total_saved_bytes": saved, "parameters": parameters}


def _facts(layer: ExtractedLayer) -> Iterator[tuple[str, str]]:
    yield "parameters", f"{layer.parameters.total:,}"
    if layer.parameters.expert:
        yield "of them in experts", f"{layer.parameters.expert:,}"
    for name, words in layer.provenance.items():
        yield name.replace("_", " "), words
    for label, saved in layer.recompute.items():
        yield f"kept with recompute {label}", f"{saved.saved_bytes / 2**20:,.1f} MiB"


def _pictures(draw: Path | None, layers: Mapping[LayerKind, ExtractedLayer]) -> list[Path]:
    """Files for pictures of the layers: of several, one each."""
    if draw is None:
        return []
    paths = [draw]
    if len(layers) > 1:
        paths = [draw.with_name(f"{draw.stem}-{kind.value}{draw.suffix}") for kind in layers]
        for path in paths:
            check_output("--draw", path, force=forced())
    return paths


def _title(spec: TransformerSpec, shard: LayerShard, kind: LayerKind) -> str:
    degrees = {
        "CP": shard.context_parallel_size,
        "EP": shard.expert_model_parallel_size,
        "ETP": shard.expert_tensor_parallel_size if spec.is_moe else 1,
    }
    words = [f"TP {shard.tensor_model_parallel_size}"]
    words += [f"{name} {size}" for name, size in degrees.items() if size > 1]
    words += ["SP"] if shard.sequence_parallel else []
    count = spec.layer_kinds().count(kind)
    times = f" ({count} of them)" if count > 1 else ""
    batch = f"{shard.micro_batch_size} x {spec.seq_length:,} tokens"
    return f"{spec.name}, {kind.value} layer{times}: {' '.join(words)}, {batch}"


_MATTERS = (
    *("model", "train.micro_batch_size", "train.seq_length"),
    *(f"parallel.{name}" for name in (*LAYER_DEGREES, "sequence_parallel")),
)
