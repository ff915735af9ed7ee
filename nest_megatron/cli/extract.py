"""``nest-megatron extract``: the work of a model's layers, or of a module of the user's own."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from nest_megatron.cli.command_kinds import (
    FOLDER,
    NEXT,
    OUTPUT,
    command,
    forced,
    json_option,
    settings_argument,
    version_option,
)
from nest_megatron.config.compose import Settings, compose
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
from nest_megatron.report.console import show, show_json


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
@click.option(
    "--layer",
    default="all",
    metavar="KIND",
    show_default=True,
    help="The layer of the model (dense, moe, mamba, ...); all prints one of each kind.",
)
@click.option(
    "--implementation",
    type=click.Choice(["local", "transformer_engine"]),
    default="local",
    show_default=True,
    help="The layers to build, as Megatron's --transformer-impl.",
)
@click.option(
    "--unfused",
    is_flag=True,
    help="Unfused attention: two GEMMs, whose scores are saved for the backward pass.",
)
@click.option(
    "--from",
    "from_command",
    metavar="COMMAND",
    help="Your Megatron-LM command, in quotes, in place of model=; - reads it from standard "
    "input. To read it from a launch script, end the line with: -- bash train.sh",
)
@version_option
@click.option(
    "--closed-form",
    is_flag=True,
    help="Use the planner's own formulas (of Transformer Engine's layers); needs no torch.",
)
@click.option(
    "--module",
    metavar="PACKAGE.MODULE:NAME",
    help="A model of your own: NAME takes nothing and returns a torch.nn.Module.",
)
@click.option(
    "--input",
    "inputs",
    multiple=True,
    metavar="[KEYWORD=]1,2048",
    help="With --module: the shape of an input. Repeatable, once for each input.",
)
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    metavar="TYPE",
    help="With --module: the number type of all inputs, or of each. [default: float32]",
)
@click.option(
    "--draw", type=OUTPUT, help="Write a picture (.svg or .png) of each layer that is printed."
)
@click.option("--config-dir", type=FOLDER, help="A folder with your own model/ files.")
@json_option
def extract(**options: Any) -> None:
    """Show the work of one layer on one rank, traced from megatron-core's own modules.

    Prints operators with FLOPs and memory traffic, collectives with their groups, and bytes of
    saved activations, forward and backward. It needs no GPU. --module traces any PyTorch model
    with torch.fx into its chain of blocks, without allocating its weights.
    """
    given = _Options(**options)
    if given.draw is not None:  # before the work, not after it
        check_picture(given.draw, "--draw")
        require_folder(given.draw, "--draw")
    given.refuse_mixed()
    if given.module is None:
        _extract_layers(given)
    else:
        _extract_module(given, given.module)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """What the command line says; each field is an option's name."""

    overrides: Sequence[str]
    layer: str
    implementation: str
    unfused: bool
    closed_form: bool
    from_command: str | tuple[str, ...] | None
    megatron_version: str | None
    module: str | None
    inputs: Sequence[str]
    dtypes: Sequence[str]
    draw: Path | None
    config_dir: Path | None
    as_json: bool

    def refuse_mixed(self) -> None:
        """Refuse options of a module beside a model's, and the other way round."""
        if self.module is not None and (self.overrides or self.closed_form):
            raise UserInputError(
                "--module",
                " ".join(self.overrides) or "--closed-form",
                limit="a module of your own has no settings and no formulas",
                fix="Leave them out; what --module names builds the model as you want it.",
            )
        if self.module is None and (self.inputs or self.dtypes):
            raise UserInputError(
                "--input" if self.inputs else "--dtype",
                ", ".join(self.inputs or self.dtypes),
                limit="it goes with --module",
                fix="Add --module, or leave it out: a model's own sizes are train.micro_batch_size "
                "and train.seq_length.",
            )


def _extract_module(options: _Options, name: str) -> None:
    """Trace a module, draw its chain, and print it."""
    shapes = read_inputs(options.inputs, options.dtypes)
    require_torch()
    graph = extract_chain(build(name), shapes)
    pictures = [] if options.draw is None else [options.draw]
    if options.draw is not None:
        from nest_megatron.report.work_charts import draw_chain

        draw_chain(graph, options.draw)
    if options.as_json:
        written = [str(path) for path in pictures]
        show_json({"module": name, "chain": to_plain(graph), "pictures": written})
        return
    from nest_megatron.report.operator_table import chain_report

    show(chain_report(graph), *(f"Wrote {path}." for path in pictures))


def _extract_layers(options: _Options) -> None:
    """Draw, and print, the work of a model's layers."""
    settings = parse(options.overrides)
    refuse_sweeps(settings)
    composed = compose(settings, options.config_dir)
    text = sys.stdin.read() if options.from_command == "-" else options.from_command
    spec, flags = read_model(composed, text, options.megatron_version)
    CostInputs(composed, Job(spec=spec)).costs()  # refuses what the cost model would
    shard = read_shard(composed, spec, flags)
    shard = dataclasses.replace(shard, flash_attention=not options.unfused)
    layers = {kind: _layer(spec, kind, shard, options) for kind in _kinds(spec, options.layer)}
    pictures = _draw(options.draw, spec, shard, layers)
    notes, counts = _notes(composed), Counter(spec.layer_kinds())
    if options.as_json:
        found = [
            {"kind": kind.value, "count": counts[kind], **_fields(layer)}
            for kind, layer in layers.items()
        ]
        written = [str(path) for path in pictures]
        model = {"model": spec.name, "shard": to_plain(shard)}
        show_json({**model, "layers": found, "notes": notes, "pictures": written})
        return
    from nest_megatron.report.operator_table import layer_report
    from nest_megatron.report.terminal import notes_report

    for kind, layer in layers.items():
        show(layer_report(layer.graph, _title(spec, shard, kind), list(_facts(layer))))
    show(notes_report(notes), *(f"Wrote {path}." for path in pictures))


def _kinds(spec: TransformerSpec, layer: str) -> list[LayerKind]:
    """The kinds of layer asked for, in the order of the model."""
    known = list(dict.fromkeys(spec.layer_kinds()))
    if layer != "all" and layer not in known:
        raise UserInputError(
            "--layer", layer, f"{spec.name} has no such layer", f"It has {', '.join(known)}."
        )
    return known if layer == "all" else [LayerKind(layer)]


def _layer(
    spec: TransformerSpec, kind: LayerKind, shard: LayerShard, options: _Options
) -> ExtractedLayer:
    """A layer of the closed form, or of megatron-core; only here it is asked for."""
    if options.closed_form:
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
        implementation = Implementation(options.implementation)
        return cached_layer(spec, kind, shard, implementation=implementation)


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


def _draw(
    draw: Path | None,
    spec: TransformerSpec,
    shard: LayerShard,
    layers: Mapping[LayerKind, ExtractedLayer],
) -> list[Path]:
    """Pictures of the layers: of several, a file each."""
    if draw is None:
        return []
    from nest_megatron.report.work_charts import draw_layer

    paths = [draw]
    if len(layers) > 1:
        paths = [draw.with_name(f"{draw.stem}-{kind.value}{draw.suffix}") for kind in layers]
        for path in paths:
            check_output("--draw", path, force=forced())
    for (kind, layer), path in zip(layers.items(), paths, strict=True):
        draw_layer(layer.graph, path, _title(spec, shard, kind))
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


def _notes(composed: Settings) -> list[str]:
    """Settings that say nothing about one layer on one rank."""
    idle = {k for k in composed.given if k not in _MATTERS and not k.startswith("model.")}
    return [f"{key} does not change the work of a layer." for key in sorted(idle)]
