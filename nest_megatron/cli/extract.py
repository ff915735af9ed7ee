"""``nest-megatron extract``: the work of a model's layers, or of a module of the user's own."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from nest_megatron.cli.command_kinds import FOLDER, NEXT, OUTPUT, Command, forced, json_option
from nest_megatron.cli.complete import complete_override
from nest_megatron.config.compose import Composed, compose
from nest_megatron.config.job import Job
from nest_megatron.config.overrides import parse, refuse_sweeps
from nest_megatron.config.shard import DEGREES, read_shard
from nest_megatron.config.target import read_settings
from nest_megatron.errors import OK, UserInputError
from nest_megatron.files import check_output
from nest_megatron.integrations.megatron_lm.command_request import read_model
from nest_megatron.megatron_core import cache
from nest_megatron.megatron_core.chain import extract_chain, require_torch
from nest_megatron.megatron_core.installed import require_megatron
from nest_megatron.megatron_core.user_module import build, read_inputs
from nest_megatron.model.graph import LayerGraph
from nest_megatron.model.implementation import Implementation
from nest_megatron.model.operators import layer_graph
from nest_megatron.model.parameters import ParameterCount, unit_parameters
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import LayerKind, TransformerSpec
from nest_megatron.plain import to_plain
from nest_megatron.report.console import say, show, show_json


@click.command(
    cls=Command,
    examples=(
        "nest-megatron extract model=llama3_70b parallel.tensor_model_parallel_size=8",
        "nest-megatron extract model=deepseek_v3 parallel.tensor_model_parallel_size=8"
        + NEXT
        + "parallel.expert_model_parallel_size=8 parallel.expert_tensor_parallel_size=1"
        + NEXT
        + "--layer moe --closed-form --draw moe.svg",
        "nest-megatron extract --from 'pretrain_gpt.py <your flags>' --unfused",
        "nest-megatron extract --module my_model:build --input 1,2048 --dtype int64"
        + NEXT
        + "--draw chain.svg",
    ),
)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=complete_override)
@click.option(
    "--layer",
    type=click.Choice(["all", "embedding", "dense", "moe", "mtp", "head"]),
    default="all",
    show_default=True,
    help="Which layer of the model; all is one of each kind.",
)
@click.option(
    "--implementation",
    type=click.Choice(["local", "transformer_engine"]),
    default="local",
    show_default=True,
    help="Megatron's --transformer-impl: whose layers are built.",
)
@click.option(
    "--unfused",
    is_flag=True,
    help="Attention in two GEMMs, which keeps its scores; fused attention keeps none.",
)
@click.option(
    "--from",
    "from_command",
    metavar="COMMAND",
    help="Your own Megatron-LM command, in quotes, instead of model; - reads standard input.",
)
@click.option(
    "--megatron-version",
    metavar="RELEASE",
    default="0.16.1",
    show_default=True,
    help="With --from: the release whose flags the command uses (0.16.1 or 0.20).",
)
@click.option(
    "--closed-form",
    is_flag=True,
    help="Print the formulas that the planner uses (Transformer Engine's layers); needs no torch.",
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
    help="With --module: the shape of an input; as often as there are inputs.",
)
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    metavar="TYPE",
    help="With --module: number type, one for all inputs or one each (float32 if not given).",
)
@click.option(
    "--draw", type=OUTPUT, help="Write a picture: .svg or .png, one for each layer that is printed."
)
@click.option("--config-dir", type=FOLDER, help="A folder with your own model/ files.")
@json_option
def extract(**options: Any) -> int:
    """Show the work of one layer on one rank, as megatron-core's own modules do it.

    Operators with their FLOPs and traffic, collectives with their groups, and bytes of saved
    activations, forward and backward; no GPU is needed. With --module, any PyTorch model is
    traced with torch.fx into its chain of blocks, without memory for its weights.
    """
    return run_extract(_Options(**options))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """What the command line says; each field is an option's name."""

    overrides: Sequence[str]
    layer: str
    implementation: str
    unfused: bool
    closed_form: bool
    from_command: str | None
    megatron_version: str
    module: str | None
    inputs: Sequence[str]
    dtypes: Sequence[str]
    draw: Path | None
    config_dir: Path | None
    as_json: bool


_CLOSED_FORM = "closed form, Transformer Engine's layers"
_MATTERS = (
    *(f"parallel.{name}" for name in (*DEGREES, "sequence_parallel")),
    "train.micro_batch_size",
    "train.seq_length",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    """One kind of layer, from whichever source.

    Args:
        count: how many the model has.
        recompute: saved activations under each setting that was tried.
    """

    kind: LayerKind
    count: int
    graph: LayerGraph
    parameters: ParameterCount
    recompute: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, str] = field(default_factory=dict)


def run_extract(options: _Options) -> int:
    """Print, and draw, the work of a model's layers or of a module's chain."""
    check_drawing(options.draw)
    _refuse_mixed(options)
    if options.module is not None:
        return run_module(options.module, options)
    composed, spec, shard = _asked(options)
    shown = [
        _closed_form(spec, kind, shard)
        if options.closed_form
        else _from_megatron(spec, kind, shard, options.implementation)
        for kind in _kinds(spec, options.layer)
    ]
    written = _draw(options.draw, spec, shard, shown)
    if options.as_json:
        show_json(_document(composed, spec, shard, shown, written))
    else:
        _print(composed, spec, shard, shown)
        for path in written:
            say(f"Wrote {path}.")
    return OK


def _asked(options: _Options) -> tuple[Composed, TransformerSpec, LayerShard]:
    """The model whose layers are wanted, and how they are divided."""
    settings = parse(options.overrides, options.config_dir)
    refuse_sweeps(settings)
    composed = compose(settings, options.config_dir)
    text = sys.stdin.read() if options.from_command == "-" else options.from_command
    spec, flags = read_model(composed, text, options.megatron_version)
    read_settings(composed.config, Job(spec=spec))  # refuses what the cost model would
    shard = read_shard(composed, spec, flags)
    return composed, spec, dataclasses.replace(shard, flash_attention=not options.unfused)


def run_module(name: str, options: _Options) -> int:
    """Trace a module, print its chain, and draw it."""
    draw = options.draw
    shapes = read_inputs(options.inputs, options.dtypes)
    require_torch()
    graph = extract_chain(build(name), shapes)
    if draw is not None:
        from nest_megatron.report.chain_chart import draw_chain

        draw_chain(graph, draw)
    if options.as_json:
        pictures = [] if draw is None else [str(draw)]
        show_json({"module": name, "chain": to_plain(graph), "pictures": pictures})
        return OK
    from nest_megatron.report.operator_table import chain_report

    show(chain_report(graph))
    if draw is not None:
        say(f"Wrote {draw}.")
    return OK


def _refuse_mixed(options: _Options) -> None:
    """Refuse options of a module beside a model's, and the other way round."""
    if options.module is not None and (options.overrides or options.closed_form):
        raise UserInputError(
            "--module",
            value=" ".join(options.overrides) or "--closed-form",
            limit="a module of your own has no settings and no formulas",
            fix="Leave them out; what --module names builds the model as you want it.",
        )
    given = options.inputs or options.dtypes
    if options.module is None and given:
        raise UserInputError(
            "--input" if options.inputs else "--dtype",
            value=", ".join(given),
            limit="it goes with --module",
            fix="Add --module, or leave it out: a model's own sizes are train.micro_batch_size "
            "and train.seq_length.",
        )


def check_drawing(draw: Path | None) -> None:
    """Refuse a picture that cannot be written before the work, not after it.

    Raises:
        UserInputError: for another suffix, or a folder that is missing.
    """
    from nest_megatron.report.charts import check_suffix

    if draw is None:
        return
    check_suffix(draw, "--draw")
    folder = draw.expanduser().parent
    if not folder.is_dir():
        raise UserInputError(
            "--draw",
            value=str(draw),
            limit=f"there is no folder {folder}",
            fix=f"mkdir -p {folder}",
        )


def _kinds(spec: TransformerSpec, layer: str) -> list[LayerKind]:
    """The kinds of layer asked for, in the order of the model."""
    known = list(dict.fromkeys(spec.layer_kinds()))
    if layer == "all":
        return known
    kind = LayerKind(layer)
    if kind not in known:
        raise UserInputError(
            "--layer",
            value=layer,
            limit=f"{spec.name} has no such layer",
            fix=f"It has {', '.join(known)}.",
        )
    return [kind]


def _closed_form(spec: TransformerSpec, kind: LayerKind, shard: LayerShard) -> _Shown:
    kinds = spec.layer_kinds()
    counts = unit_parameters(
        spec,
        shard.tensor_model_parallel_size,
        shard.expert_model_parallel_size,
        shard.expert_tensor_parallel_size,
        single_stage=False,
    )
    return _Shown(
        kind=kind,
        count=Counter(kinds)[kind],
        graph=layer_graph(spec, kind, shard),
        parameters=counts[kinds.index(kind)],
        provenance={"source": _CLOSED_FORM},
    )


def _from_megatron(
    spec: TransformerSpec, kind: LayerKind, shard: LayerShard, implementation: str
) -> _Shown:
    """One layer of megatron-core's; this is the only place that asks for it."""
    require_megatron()
    from nest_megatron.megatron_core.substitutes import quiet

    with quiet():
        found = cache.layer(spec, kind, shard, implementation=Implementation(implementation))
    return _Shown(
        kind=kind,
        count=Counter(spec.layer_kinds())[kind],
        graph=found.graph,
        parameters=found.parameters,
        recompute=found.recompute,
        provenance=found.provenance,
    )


def _draw(
    draw: Path | None, spec: TransformerSpec, shard: LayerShard, shown: Sequence[_Shown]
) -> list[Path]:
    if draw is None:
        return []
    from nest_megatron.report.layer_chart import draw_layer

    if len(shown) == 1:
        paths = [draw]
    else:
        paths = [draw.with_name(f"{draw.stem}-{s.kind.value}{draw.suffix}") for s in shown]
        for path in paths:
            check_output("--draw", path, force=forced())
    for each, path in zip(shown, paths, strict=True):
        draw_layer(each.graph, path, _title(spec, shard, each))
    return paths


def _title(spec: TransformerSpec, shard: LayerShard, each: _Shown) -> str:
    words = [f"TP {shard.tensor_model_parallel_size}"]
    degrees = {
        "CP": shard.context_parallel_size,
        "EP": shard.expert_model_parallel_size,
        "ETP": shard.expert_tensor_parallel_size if spec.is_moe else 1,
    }
    words += [f"{name} {size}" for name, size in degrees.items() if size > 1]
    words += ["SP"] if shard.sequence_parallel else []
    times = f" ({each.count} of them)" if each.count > 1 else ""
    batch = f"{shard.micro_batch_size} x {spec.seq_length:,} tokens"
    return f"{spec.name}, {each.kind.value} layer{times}: {' '.join(words)}, {batch}"


def _facts(each: _Shown) -> list[tuple[str, str]]:
    count = each.parameters
    facts = [("parameters", f"{count.total:,}")]
    if count.expert:
        facts.append(("of them in experts", f"{count.expert:,}"))
    facts += [(name.replace("_", " "), words) for name, words in each.provenance.items()]
    facts += [
        (f"kept with recompute {label}", f"{kept.saved_bytes / 2**20:,.1f} MiB")
        for label, kept in each.recompute.items()
    ]
    return facts


def _print(
    composed: Composed, spec: TransformerSpec, shard: LayerShard, shown: Sequence[_Shown]
) -> None:
    from nest_megatron.report.operator_table import layer_report
    from nest_megatron.report.terminal import notes_report

    for each in shown:
        show(layer_report(each.graph, _title(spec, shard, each), _facts(each)))
    notes = _notes(composed)
    if notes:
        show(notes_report(notes))


def _notes(composed: Composed) -> list[str]:
    """Settings that say nothing about one layer on one rank."""
    idle = sorted(
        key
        for key in composed.given
        if key not in _MATTERS and key != "model" and not key.startswith("model.")
    )
    return [f"{key} does not change the work of a layer." for key in idle]


def _document(
    composed: Composed,
    spec: TransformerSpec,
    shard: LayerShard,
    shown: Sequence[_Shown],
    written: Sequence[Path],
) -> dict[str, Any]:
    layers = [
        {
            **to_plain(each),
            "total_saved_bytes": each.graph.total_saved_bytes(),
            "parameters": {"dense": each.parameters.dense, "expert": each.parameters.expert},
        }
        for each in shown
    ]
    return {
        "model": spec.name,
        "shard": to_plain(shard),
        "layers": layers,
        "notes": _notes(composed),
        "pictures": [str(path) for path in written],
    }
