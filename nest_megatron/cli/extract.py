"""``extract``: the layers of a model of the catalogue; a module of the user's own is next door."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from nest_megatron.config.compose import Composed, compose
from nest_megatron.config.job import Job
from nest_megatron.config.overrides import parse, refuse_sweeps
from nest_megatron.config.target import read_settings
from nest_megatron.errors import OK, UserInputError
from nest_megatron.files import check_output
from nest_megatron.integrations.megatron_lm.command_request import read_model
from nest_megatron.megatron_core import cache
from nest_megatron.model.graph import LayerGraph
from nest_megatron.model.implementation import Implementation
from nest_megatron.model.operators import layer_graph
from nest_megatron.model.parameters import ParameterCount, unit_parameters
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import LayerKind, TransformerSpec
from nest_megatron.packages import install_command
from nest_megatron.parallel.degree_rules import DEGREE_RULES, violations
from nest_megatron.parallel.dims import ParallelDims
from nest_megatron.parallel.rules import LaunchRequest
from nest_megatron.plain import to_plain
from nest_megatron.report.console import say, show, show_json

_CLOSED_FORM = "closed form, Transformer Engine's layers"
#: Settings that change what one rank does in a layer.
_DEGREES = (
    "tensor_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
_MATTERS = (
    *(f"parallel.{name}" for name in (*_DEGREES, "sequence_parallel")),
    "train.micro_batch_size",
    "train.seq_length",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    """One kind of layer, from whichever source.

    Args:
        count: how many the model has.
        recompute: bytes kept under each setting that was tried.
    """

    kind: LayerKind
    count: int
    graph: LayerGraph
    parameters: ParameterCount
    recompute: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, str] = field(default_factory=dict)


def run_extract(
    *,
    overrides: Sequence[str],
    layer: str,
    implementation: str,
    unfused: bool,
    closed_form: bool,
    from_command: str | None,
    megatron_version: str,
    module: str | None,
    inputs: Sequence[str],
    dtypes: Sequence[str],
    draw: Path | None,
    config_dir: Path | None,
    as_json: bool,
) -> int:
    """Print, and draw, the work of a model's layers or of a module's chain."""
    check_drawing(draw)
    if module is not None:
        from nest_megatron.cli.extract_module import run_module

        _refuse_both(overrides, closed_form=closed_form)
        return run_module(module, inputs, dtypes, draw, as_json=as_json)
    if inputs or dtypes:
        option = "--input" if inputs else "--dtype"
        raise UserInputError(
            option,
            value=", ".join(inputs or dtypes),
            limit="it goes with --module",
            fix="Add --module, or leave it out: a model's own sizes are train.micro_batch_size "
            "and train.seq_length.",
        )
    settings = parse(overrides, config_dir)
    refuse_sweeps(settings)
    composed = compose(settings, config_dir)
    text = sys.stdin.read() if from_command == "-" else from_command
    spec, flags = read_model(composed, text, megatron_version)
    read_settings(composed.config, Job(spec=spec))  # refuses what the cost model would
    shard = dataclasses.replace(read_shard(composed, spec, flags), flash_attention=not unfused)
    shown = [
        _closed_form(spec, kind, shard)
        if closed_form
        else _from_megatron(spec, kind, shard, implementation)
        for kind in _kinds(spec, layer)
    ]
    written = _draw(draw, spec, shard, shown)
    if as_json:
        show_json(_document(composed, spec, shard, shown, written))
    else:
        _print(composed, spec, shard, shown)
        for path in written:
            say(f"Wrote {path}.")
    return OK


def _refuse_both(overrides: Sequence[str], *, closed_form: bool) -> None:
    if overrides or closed_form:
        raise UserInputError(
            "--module",
            value=" ".join(overrides) or "--closed-form",
            limit="a module of your own has no settings and no formulas",
            fix="Leave them out; what --module names builds the model as you want it.",
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


def read_shard(
    composed: Composed, spec: TransformerSpec, flags: Mapping[str, Any] = MappingProxyType({})
) -> LayerShard:
    """How the configuration divides a layer; what is not given is Megatron's default.

    Args:
        flags: a command's, which count where the configuration says nothing.

    Raises:
        UserInputError: for degrees that Megatron does not build this model with.
    """
    parallel, train = composed.config.parallel, composed.config.train
    given = {name: _first(getattr(parallel, name), flags.get(name)) for name in _DEGREES}
    degrees = {name: 1 if value is None else value for name, value in given.items()}
    tp = degrees["tensor_model_parallel_size"]
    if spec.num_experts is not None and given["expert_tensor_parallel_size"] is None:
        degrees["expert_tensor_parallel_size"] = tp  # Megatron's own default
    sequence_parallel = parallel.sequence_parallel
    if sequence_parallel is None:
        sequence_parallel = flags.get("sequence_parallel", tp > 1) and tp > 1
    micro_batch_size = train.micro_batch_size
    if micro_batch_size is None:
        micro_batch_size = flags.get("micro_batch_size") or 1
    shard = LayerShard(
        tensor_model_parallel_size=tp,
        context_parallel_size=degrees["context_parallel_size"],
        expert_model_parallel_size=degrees["expert_model_parallel_size"],
        expert_tensor_parallel_size=degrees["expert_tensor_parallel_size"],
        micro_batch_size=micro_batch_size,
        sequence_parallel=sequence_parallel,
    )
    _check(spec, shard)
    return shard


def _first(given: int | None, otherwise: int | None) -> int | None:
    return otherwise if given is None else given


def _check(spec: TransformerSpec, shard: LayerShard) -> None:
    """Megatron's rules on degrees, on the smallest grid that holds them."""
    if shard.micro_batch_size < 1:
        raise UserInputError(
            "train.micro_batch_size",
            value=shard.micro_batch_size,
            limit="it must be a whole number of at least 1",
            fix="Give the sequences of one micro batch.",
        )
    degrees = {name: getattr(shard, name) for name in _DEGREES}
    for name, value in degrees.items():
        if value < 1:
            ParallelDims(**{name: value})  # says what is wrong with it
    experts = shard.expert_model_parallel_size * shard.expert_tensor_parallel_size
    ranks = shard.tensor_model_parallel_size * shard.context_parallel_size
    replicas = experts // math.gcd(experts, ranks)
    request = LaunchRequest(
        spec=spec,
        dims=ParallelDims(**degrees, data_parallel_size=replicas),
        micro_batch_size=shard.micro_batch_size,
        global_batch_size=shard.micro_batch_size * replicas,
        sequence_parallel=shard.sequence_parallel,
        moe_grouped_gemm=spec.is_moe,
    )
    for _, broken in violations(request, DEGREE_RULES):
        raise UserInputError(broken.what, value=broken.value, limit=broken.limit, fix=broken.fix)


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


def require_megatron(command: str = "extract") -> None:
    """Refuse to go on without megatron-core.

    Raises:
        UserInputError: naming what to install, and what works without.
    """
    for name, package in (("torch", "torch"), ("megatron.core", "megatron-core")):
        if not _is_installed(name):
            raise UserInputError(
                command,
                value=None,
                limit=f"layers are built by megatron-core, and {package} is not installed",
                fix=install_command("megatron")
                + (
                    ", or add --closed-form to see the formulas that the planner uses."
                    if command == "extract"
                    else "."
                ),
            )


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # its parent is missing, or its import is blocked
        return False


def _draw(
    draw: Path | None, spec: TransformerSpec, shard: LayerShard, shown: Sequence[_Shown]
) -> list[Path]:
    if draw is None:
        return []
    from nest_megatron.cli.command_kinds import forced
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
