"""The operator graph of one unit, read from the modules that megatron-core itself builds.

The modules run under fake tensors in a process group whose other ranks do not exist: shapes,
storages and communication are real, numbers are not, and no memory is used.

Extracted layers are kept in files by everything that they depend on. A file is found again without
torch: versions are read from the installed packages' metadata. Two processes that extract the same
layer write the same file, whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nest_megatron.documents import read_json
from nest_megatron.errors import UserInputError
from nest_megatron.files import expanded, user_folder, write_text
from nest_megatron.layout.recompute import (
    FULL_RECOMPUTE,
    NO_RECOMPUTE,
    Recompute,
    RecomputeModule,
    selective_recompute,
)
from nest_megatron.megatron_core.stage import Where, staged
from nest_megatron.megatron_core.units import build
from nest_megatron.model.block_parameters import ParameterCount
from nest_megatron.model.execution import Implementation
from nest_megatron.model.graph import (
    Group,
    LayerCollective,
    LayerGraph,
    Operator,
    OperatorKind,
    Part,
)
from nest_megatron.model.layer_pattern import LayerBlock, LayerKind
from nest_megatron.model.parameters import one_layer
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import ModelFamily, TransformerSpec
from nest_megatron.packages import installed_version, is_installed
from nest_megatron.plain import from_plain, frozen, to_plain
from nest_megatron.version import __version__

if TYPE_CHECKING:
    from nest_megatron.megatron_core.recorder import Record, Work


def extract_layer(
    spec: TransformerSpec,
    kind: LayerKind,
    shard: LayerShard,
    *,
    implementation: Implementation = Implementation.LOCAL,
    recompute: Iterable[Recompute] | None = None,
) -> ExtractedLayer:
    """Build one unit for one rank and record what it does (``cached_layer`` asks once only).

    Args:
        recompute: settings to try besides none; all of ``recompute_settings`` if not given.
        shard: how the layer is divided; with ``flash_attention`` attention keeps no scores, without
            it is megatron-core's own, in two GEMMs.

    Raises:
        UserInputError: for what these modules cannot be built for, naming it.
    """
    for refusal in _refusals(spec, kind, shard, implementation):
        raise UserInputError(*refusal)
    record, parameters, groups = _recorded(spec, kind, shard, NO_RECOMPUTE, implementation)
    settings = recompute_settings(spec, kind) if recompute is None else recompute
    variants = {}
    for setting in settings:
        again, *_ = _recorded(spec, kind, shard, setting, implementation)
        variants[setting.label()] = RecomputedLayer(
            saved_bytes=again.input_bytes + sum(again.saved.values()),
            recomputed_flops=sum(work.flops for work in again.recomputed.values()),
            recomputed_bytes_moved=sum(work.bytes_moved for work in again.recomputed.values()),
        )
    part = functools.partial(part_of, kind=kind, latent_attention=spec.multi_latent_attention)
    saved: defaultdict[Part, float] = defaultdict(float)
    for path, num_bytes in record.saved.items():
        saved[part(path)] += num_bytes
    collectives = tuple(
        LayerCollective(
            name=f"{operator_name(call.path)}.{call.kind}",
            part=part(call.path),
            kind=call.kind,
            group=groups.get(call.group, Group.EXPERT),
            message_bytes=float(call.message_bytes),
            backward=call.backward,
            hidden_under=operator_name(call.path) if call.is_async else "",
            num_calls=count,
        )
        for call, count in Counter(record.calls).items()
    )
    return ExtractedLayer(
        graph=LayerGraph(
            operators=tuple(_operators(record, part)),
            collectives=collectives,
            input_bytes=record.input_bytes,
            saved_bytes=tuple(saved.items()),
        ),
        parameters=parameters,
        recompute=variants,
        provenance={
            "megatron_core": importlib.metadata.version("megatron-core"),
            "torch": importlib.metadata.version("torch"),
            "implementation": implementation.value,
            "attention": "flash" if shard.flash_attention else "unfused",
        },
    )


def recompute_settings(spec: TransformerSpec, kind: LayerKind) -> tuple[Recompute, ...]:
    """The settings that make a difference to a layer: each module by itself, and all of it.

    The MLP of a layer with linear biases is left out: with it the backward pass of megatron-core's
    local layers calls itself without end (0.16.1).
    """
    if not kind.is_layer or kind is LayerKind.MAMBA:
        return ()
    modules = [RecomputeModule.CORE_ATTN, RecomputeModule.LAYERNORM]
    if spec.multi_latent_attention:
        modules.append(RecomputeModule.MLA_UP_PROJ)
    if kind.has_mlp:
        modules += [] if spec.add_bias_linear else [RecomputeModule.MLP]
    if kind.has_experts:
        modules.append(RecomputeModule.MOE)
        if spec.moe_shared_expert_intermediate_size:
            modules.append(RecomputeModule.SHARED_EXPERTS)
    return (*(selective_recompute([module]) for module in modules), FULL_RECOMPUTE)


#: Blocks whose kernels are not megatron-core's own (``scans``).
_SCANS = frozenset({LayerBlock.GATED_DELTA_NET, LayerBlock.MAMBA})


def _refusals(
    spec: TransformerSpec, kind: LayerKind, shard: LayerShard, implementation: Implementation
) -> Iterator[tuple[str, object, str, str]]:
    """What these modules cannot be built for: the setting, its value, the limit, the fix."""
    tp, cp = shard.tensor_model_parallel_size, shard.context_parallel_size
    groups = min(
        (b.size for b in kind.blocks if b.base is LayerBlock.ATTENTION and b.size),
        default=spec.query_groups,
    )
    if kind.has_experts and not spec.is_moe:
        yield "layer", kind.value, f"{spec.name} has no experts", "Use dense."
    if kind is LayerKind.MTP and not spec.num_mtp_layers:
        yield "layer", kind.value, f"{spec.name} has no MTP layers", "Use dense."
    stacks = (LayerKind.ENCODER, LayerKind.CROSS)
    if (spec.family is ModelFamily.T5) is not (kind in stacks) or spec.family is ModelFamily.BERT:
        limit = "only layers of GPT- and T5-like models are built from megatron-core's here"
        fix = "Use --closed-form, or --module for a model of your own."
        yield "model", spec.name, limit, fix
    kinds = spec.mtp_layer_kinds if kind is LayerKind.MTP else (kind,)
    blocks = {block for each in kinds for block in each.blocks}
    scans = bool(_SCANS.intersection(blocks))
    if spec.experimental_attention_variant == "dsa" or LayerBlock.CHUNKED_ATTENTION in blocks:
        limit = "chunked and sparse attention are not built here"
        yield "layer", kind.value, limit, "Use --closed-form."
    if kind is LayerKind.MAMBA and not is_installed("einops"):
        limit = "megatron-core's Mamba layers import einops, which is not installed"
        yield "layer", kind.value, limit, "Run pip install einops, or use --closed-form."
    if kind is LayerKind.MTP and scans:
        limit = "MTP layers of Mamba layers or gated delta nets are not built here"
        yield "layer", kind.value, limit, "Use --closed-form."
    if groups < tp and not spec.multi_latent_attention and not scans:
        limit = "megatron-core's local attention needs a query group for each rank "
        fix = f"Use at most {groups}, or --closed-form."
        yield "parallel.tensor_model_parallel_size", tp, f"{limit}({groups} groups)", fix
    if scans and cp > 1:
        limit = "Mamba layers and gated delta nets are built for one context rank here"
        yield "parallel.context_parallel_size", cp, limit, "Use 1, or --closed-form."
    if cp > 1 and not shard.flash_attention:
        limit = "megatron-core runs context parallelism with fused attention alone"
        yield "parallel.context_parallel_size", cp, limit, "Use 1, or fused attention."
    if implementation is Implementation.TRANSFORMER_ENGINE:
        limit = "Transformer Engine's kernels cannot be followed without running them"
        fix = "Use local; --closed-form prints the fused form."
        yield "--implementation", implementation.value, limit, fix


def _recorded(
    spec: TransformerSpec,
    kind: LayerKind,
    shard: LayerShard,
    recompute: Recompute,
    implementation: Implementation,
) -> tuple[Record, ParameterCount, Mapping[str, Group]]:
    """Build the unit and run it once under the recorder; its groups by torch's names."""
    from megatron.core import parallel_state
    from torch._subclasses.fake_tensor import FakeTensorMode

    from nest_megatron.megatron_core.recorder import record
    from nest_megatron.megatron_core.shapes import CONTEXT_GROUP

    with (
        staged(
            spec,
            kind,
            shard,
            where=Where.SHAPES,
            implementation=implementation,
            recompute=recompute,
        ) as layers,
        FakeTensorMode(),
    ):
        unit = build(layers, kind, recompute=recompute)
        inner = one_layer(spec, kind)
        share = inner.moe_router_topk / inner.num_experts if inner.num_experts else 1.0
        recorded = record(unit.module, unit.forward, unit.inputs(), selected_share=share)
        counts: Counter[bool] = Counter()
        for name, parameter in unit.module.named_parameters():
            counts[".experts." in f".{name}"] += parameter.numel()
        groups = {}
        for group, name in _GROUPS.items():
            found = getattr(parallel_state, f"get_{name}_parallel_group")(check_initialized=False)
            if found is not None:
                groups[found.group_name] = group
        groups[CONTEXT_GROUP] = Group.CONTEXT
        return recorded, ParameterCount(dense=counts[False], expert=counts[True]), groups


#: Groups by megatron-core's names; of equal ones the last counts.
_GROUPS = {
    Group.EXPERT_TENSOR: "expert_tensor",
    Group.EXPERT: "expert_model",
    Group.CONTEXT: "context",
    Group.TENSOR: "tensor_model",
}


def _operators(record: Record, part: Callable[[str], Part]) -> list[Operator]:
    """One operator for each module and kind, in order of their first kernel."""
    merged: dict[tuple[str, OperatorKind, Part], Work] = {}
    for (path, kind), work in record.work.items():
        key = (operator_name(path), kind, part(path))
        merged[key] = merged[key].plus(work) if key in merged else work
    return [
        Operator(name=name, part=where, kind=kind, **dataclasses.asdict(work))
        for (name, kind, where), work in merged.items()
    ]


@frozen
class RecomputedLayer:
    """What a recompute setting makes of a layer.

    Args:
        saved_bytes: from the forward to the backward pass, the layer's input included.
        recomputed_flops, recomputed_bytes_moved: of the GEMMs, and of all, that is recomputed.
    """

    saved_bytes: float
    recomputed_flops: float
    recomputed_bytes_moved: float


@frozen
class ExtractedLayer:
    """One unit as megatron-core builds and runs it on one rank.

    Args:
        recompute: by the setting's label; a setting that these modules cannot run is absent.
        provenance: versions, implementation and what was replaced.
    """

    graph: LayerGraph
    parameters: ParameterCount
    recompute: Mapping[str, RecomputedLayer]
    provenance: Mapping[str, str]


#: Patterns of module paths inside a decoder layer; the first that matches counts.
_PATTERNS: tuple[tuple[str, Part], ...] = (
    (r"input_layernorm", Part.INPUT_NORM),
    (r"(self|cross)_attention\.core_attention", Part.CORE_ATTENTION),
    (r"(self|cross)_attention\.linear_proj", Part.PROJECTION),
    (r"pre_cross_attn_layernorm", Part.RESIDUAL),
    (r"cross_attention", Part.QKV),
    (r"self_attention\.(linear_(q|kv)_down_proj|kv_layernorm)", Part.MLA_DOWN),
    (r"self_attention\.linear_(q|kv)_up_proj|self_attention\.linear_q_proj", Part.MLA_UP),
    (r"self_attention", Part.QKV),
    (r"pre_mlp_layernorm", Part.MLP_NORM),
    (r"mlp\.(router|fc[12]_latent_proj)", Part.ROUTER),
    (r"mlp\.shared_experts", Part.SHARED_EXPERTS),
    (r"mlp\.experts\.(local_experts\.\d+$|activation)", Part.EXPERT_ACTIVATION),
    (r"mlp\.experts", Part.EXPERTS),
)
_MIXER = re.compile(r"input_layernorm|self_attention")
_INSIDE_MTP = re.compile(r"(transformer_layer|mtp_model_layer)\.?")  # 0.16, and since


def part_of(path: str, kind: LayerKind, *, latent_attention: bool) -> Part:
    """The part that a module belongs to.

    >>> part_of("self_attention.linear_qkv", LayerKind.DENSE, latent_attention=False).value
    'qkv'
    >>> part_of("", LayerKind.DENSE, latent_attention=False).value
    'residual'
    """
    if kind is LayerKind.EMBEDDING:
        return Part.EMBEDDING
    if kind is LayerKind.HEAD:
        return Part.HEAD
    if kind in (LayerKind.MAMBA, LayerKind.LINEAR):
        return Part.SSM
    if LayerBlock.GATED_DELTA_NET in kind.blocks and _MIXER.match(path):
        return Part.SSM
    if kind is LayerKind.MTP:
        inside = _INSIDE_MTP.match(path)
        if not inside:
            return Part.MTP
        path = path[inside.end() :]
    if not path:
        return Part.RESIDUAL
    part = next((part for pattern, part in _PATTERNS if re.match(pattern, path)), None)
    if part is Part.QKV and latent_attention:
        return Part.MLA_DOWN if path.endswith("q_layernorm") else Part.MLA_UP
    if part is not None:
        return part
    return Part.MLP if kind.has_mlp else Part.DISPATCH


def operator_name(path: str) -> str:
    """The name of a module in tables: all experts of a rank are one.

    >>> operator_name("mlp.experts.local_experts.3.linear_fc1")
    'mlp.experts.local_experts.*.linear_fc1'
    """
    return re.sub(r"\.local_experts\.\d+", ".local_experts.*", path) or "layer"


#: A folder for the files, instead of the user's cache.
CACHE_VARIABLE = "NEST_MEGATRON_EXTRACT_CACHE"


def cached_layer(
    spec: TransformerSpec,
    kind: LayerKind,
    shard: LayerShard,
    *,
    implementation: Implementation = Implementation.LOCAL,
) -> ExtractedLayer:
    """A unit's graph as ``extract_layer`` records it, from its file where there is one.

    Raises:
        UserInputError: for what cannot be extracted, naming it.
    """
    path = cache_folder() / f"{fingerprint(spec, kind, shard, implementation)}.json"
    # a file that cannot be read is as good as none, and is written again
    with contextlib.suppress(UserInputError):
        return from_plain(ExtractedLayer, read_json(path, "extracted layer"))
    extracted = extract_layer(spec, kind, shard, implementation=implementation)
    # a cache that cannot be written is no reason to stop
    with contextlib.suppress(UserInputError, OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(_finite(to_plain(extracted)), indent=1))
    return extracted


def cache_folder() -> Path:
    """Where the files are."""
    own = os.environ.get(CACHE_VARIABLE)
    return expanded(Path(own), CACHE_VARIABLE) if own else user_folder("cache") / "extract"


def fingerprint(
    spec: TransformerSpec, kind: LayerKind, shard: LayerShard, implementation: Implementation
) -> str:
    """A name for everything that an extracted unit depends on.

    That is: the shape of the unit, how it is divided, the implementation, and the versions of
    megatron-core, torch and this package.
    """
    shape = to_plain(one_layer(spec, kind))
    del shape["name"], shape["source"]
    packages = ("megatron-core", "torch", "transformer-engine")
    words = {
        "kind": kind.value,
        "shape": shape,
        "shard": to_plain(shard),
        "implementation": implementation.value,
        "versions": {name: installed_version(name) for name in packages},
        "nest_megatron": __version__,
    }
    return hashlib.sha256(json.dumps(words, sort_keys=True).encode()).hexdigest()[:24]


def _finite(value: Any) -> Any:
    """Plain data without its infinite numbers, which are defaults and come back as such."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items() if item != math.inf}
    return [_finite(item) for item in value] if isinstance(value, list) else value
