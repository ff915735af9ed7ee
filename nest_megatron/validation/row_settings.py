"""Settings of the recipes behind rows of measurements, and what a job may have been without them.

``row_settings.csv`` next to a file names rows of throughput (``row_id``), how sure its values are
(``confidence``, ``layout_matches``), and what the recipe set, in columns that become arguments of
Megatron here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from itertools import accumulate
from types import MappingProxyType
from typing import Any

from nest_megatron.cluster.records import Precision
from nest_megatron.cost_model.execution_flags import execution_of
from nest_megatron.errors import UserInputError
from nest_megatron.layout.dims import ParallelDims
from nest_megatron.layout.execution_rules import allowed_execution
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.recompute import (
    FULL_RECOMPUTE,
    NO_RECOMPUTE,
    Recompute,
    RecomputeGranularity,
    RecomputeMethod,
    RecomputeModule,
    selective_recompute,
)
from nest_megatron.layout.rulebook.execution import allows_recompute
from nest_megatron.layout.rulebook.facts import LaunchRequest
from nest_megatron.layout.stage_layout import StagePartition, parse_layout, uniform_partition
from nest_megatron.layout.zero import STRATEGIES, ZeroStage
from nest_megatron.model.execution import GraphImpl
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.plain import frozen
from nest_megatron.solver.space import recompute_settings
from nest_megatron.validation.rows import (
    SETTING,
    RefusedRowError,
    Row,
    number,
    ran_out_of_memory,
    word,
)

_EXACT = "exact"
#: What a row and its recipe may differ in and still be laid over GPUs alike: the length of a step.
_SCALE = {"gbs", "n_gpus", "gpus"}


@frozen
class RowSettings:
    """What the recipe of a row set.

    Args:
        certain: read from the recipe of the row's release and layout, whatever its batch and
            its number of GPUs. Otherwise its recomputation and its execution are one more thing
            that the run may have been.
        flags: by Megatron's names.
        recompute: ``None`` where the recipe does not say.
    """

    certain: bool = False
    flags: Mapping[str, Any] = field(default_factory=dict)
    recompute: Recompute | None = None


NO_SETTINGS = RowSettings()


def settings_of(row: Row) -> RowSettings:
    """The settings that were joined to a row."""
    said = {
        name.removeprefix(SETTING): text.strip()
        for name, text in row.items()
        if name.startswith(SETTING) and text.strip()
    }
    if not said:
        return NO_SETTINGS
    try:
        return RowSettings(
            certain=said["confidence"] == _EXACT and _matches(said.get("layout_matches", "")),
            flags=MappingProxyType(dict(_flags(said))),
            recompute=_recompute(said),
        )
    except ValueError as error:
        raise RefusedRowError("a setting of its recipe cannot be read", str(error)) from error


def _matches(layout: str) -> bool:
    """Whether a recipe's layout is the row's, by what the file says that they differ in.

    >>> _matches("yes (4 fields)"), _matches("MISMATCH gbs:row=4096,recipe=2048")
    (True, True)
    >>> _matches("MISMATCH tp:row=2,recipe=1 gbs:row=512,recipe=32"), _matches("row has no layout")
    (False, False)
    """
    differing = set(re.findall(r"(\w+):row=", layout))
    return layout.startswith("yes") or (bool(differing) and differing <= _SCALE)


def partition_of(row: Row, spec: TransformerSpec, dims: ParallelDims) -> StagePartition | None:
    """The stages that a recipe names, where they are those of the row's layout."""
    pp, vpp = dims.pipeline_model_parallel_size, dims.virtual_pipeline_model_parallel_size
    text = row.get(f"{SETTING}pipeline_layout", "")
    try:
        if text:
            found = parse_layout(text, spec, pp)
            return found if found.num_chunks == pp * vpp else None
        first, last = _ends(row.get(f"{SETTING}layers_first_last_pp_stage", ""))
        accounts = row.get(f"{SETTING}account_embedding_loss_in_pp_split", "") == "true/true"
        if pp == 1 or not (first or last or accounts):
            return None
        return uniform_partition(
            spec,
            pp,
            vpp,
            first=first,
            last=last,
            account_embedding=accounts,
            account_loss=accounts,
        )
    except UserInputError:  # the recipe's model or layout is another one
        return None


def balanced_stages(spec: TransformerSpec, num_stages: int) -> StagePartition | None:
    """The stages of nanotron: each ends with the unit that lifts all so far above their share.

    Weights count, of layers and of the head. ``None`` where fewer stages come out, which it cannot
    train.

    Source: nanotron src/nanotron/models/base.py ``build_model``, llama.py
    ``get_block_compute_costs`` @01de8d9.
    """
    layer = 4 * spec.hidden_size + 3 * spec.ffn_hidden_size
    costs = (0, *(layer for _ in range(spec.num_layers)), spec.vocab_size)
    sums = tuple(accumulate(costs))
    cuts = [0]
    for unit, cost in enumerate(sums):
        if cost * num_stages > sums[-1] * len(cuts):
            cuts.append(unit + 1)
    if len(cuts) != num_stages:
        return None
    return StagePartition(boundaries=(*cuts, len(costs)), pipeline_model_parallel_size=num_stages)


def _ends(text: str) -> tuple[int | None, int | None]:
    """Layers of the first and the last stage.

    >>> _ends("17/23"), _ends("-/4"), _ends("")
    ((17, 23), (None, 4), (None, None))
    """
    first, _, last = text.partition("/")
    return (int(first) if first.isdigit() else None, int(last) if last.isdigit() else None)


def _switch(text: str) -> bool:
    return text == "true"


def _words(text: str) -> tuple[str, ...]:
    return () if text in ("none", "(empty list)") else tuple(re.split(r"[|,+ ]+", text))


def _graph_impl(text: str) -> str:
    return GraphImpl({"enable_cuda_graph": "local"}.get(text, text)).value


#: How a column's text is read; the column is named as the argument of Megatron, or as below.
_READ: Mapping[str, Callable[[str], Any]] = {
    "cuda_graph_impl": _graph_impl,
    "cuda_graph_scope": _words,
    "moe_capacity_factor": float,
    **dict.fromkeys(
        (
            *("cpu_offload_activation_layers", "moe_hybridep_num_sms", "etp"),
            "num_distributed_optimizer_instances",
        ),
        int,
    ),
    **dict.fromkeys(
        (
            *("moe_token_dispatcher", "moe_flex_backend", "fp8_recipe", "cp_comm_type"),
            *("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"),
            "cross_entropy_impl",
        ),
        str,
    ),
    **dict.fromkeys(
        (
            *("overlap_moe_expert_parallel_comm", "delay_wgrad_compute", "tp_comm_overlap"),
            *("moe_shared_expert_overlap", "fp8_param_gather", "fp8_attention"),
            *("first_last_layers_bf16", "precision_aware_optimizer", "optimizer_cpu_offload"),
            *("moe_pad_to_capacity", "moe_permute_fusion", "moe_router_fusion", "te_op_fuser"),
            *("paged_stash", "cross_entropy_fusion"),
        ),
        _switch,
    ),
}
_ARGUMENTS = {
    "cpu_offload_activation_layers": "cpu_offloading_num_layers",
    "moe_token_dispatcher": "moe_token_dispatcher_type",
    "moe_flex_backend": "moe_flex_dispatcher_backend",
    "fp8_attention": "fp8_dot_product_attention",
    "precision_aware_optimizer": "use_precision_aware_optimizer",
    "moe_capacity_factor": "moe_expert_capacity_factor",
    "moe_pad_to_capacity": "moe_pad_expert_input_to_capacity",
    "te_op_fuser": "use_transformer_engine_op_fuser",
    "paged_stash": "moe_paged_stash",
    "cross_entropy_fusion": "cross_entropy_loss_fusion",
    "cross_entropy_impl": "cross_entropy_fusion_impl",
    "etp": "expert_tensor_parallel_size",
}

#: Columns that are read, besides those that say of which row, and how surely.
COLUMNS = (
    "recompute_granularity",
    "recompute_modules",
    "recompute_method",
    "recompute_num_layers",
    *_READ,
    "grad_reduce_in_fp32",
    "optimizer",
    "fine_grained_offload_modules",
    "fsdp",
    "fsdp_options",
    "pipeline_layout",
    "layers_first_last_pp_stage",
    "account_embedding_loss_in_pp_split",
)


def _flags(said: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    for column, read in _READ.items():
        if column in said:
            yield _ARGUMENTS.get(column, column), read(said[column])
    if "grad_reduce_in_fp32" in said:
        wide = _switch(said["grad_reduce_in_fp32"])
        yield "accumulate_allreduce_grads_in_fp32", wide
        yield "grad_reduce_in_bf16", not wide
    if said.get("optimizer") == "dist_muon":
        yield "optimizer", "dist_muon"
    modules = _words(said.get("fine_grained_offload_modules", "none"))
    if modules:
        yield "fine_grained_activation_offloading", True
        yield "offload_modules", modules
    if said.get("fsdp") == "megatron_fsdp":
        yield "data_parallel_sharding_strategy", STRATEGIES[ZeroStage.WEIGHTS]
        yield (
            "keep_fp8_transpose_cache",
            "keep_fp8_transpose_cache=true" in said.get("fsdp_options", ""),
        )


def _recompute(said: Mapping[str, str]) -> Recompute | None:
    granularity = said.get("recompute_granularity")
    if granularity == "full":
        return Recompute(
            granularity=RecomputeGranularity.FULL,
            method=RecomputeMethod(said.get("recompute_method", "uniform")),
            num_layers=int(said.get("recompute_num_layers", 1)),
        )
    if granularity not in ("none", "selective"):
        return None
    named = _words(said.get("recompute_modules", "core_attn")) if granularity != "none" else ()
    known = [name for name in named if name in tuple(RecomputeModule)]
    return selective_recompute(known) if known else NO_RECOMPUTE


#: Columns, what they may say in words, and the settings that it means.
Said = tuple[str, str, Mapping[str, object]]

#: The execution of layers, which a plan chooses.
WORDS: tuple[Said, ...] = tuple(
    ("section ambiguity", pattern, flags)
    for pattern, flags in (
        (
            r"\bdeepep\b(?! row)",
            {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "deepep"},
        ),
        (
            r"\bhybridep\b(?! off)",
            {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"},
        ),
        (
            r"\ba2a\b|\balltoall\b|nccl all-to-all|all-to-all dispatcher",
            {"moe_token_dispatcher_type": "alltoall"},
        ),
        (
            r"\b1f1b overlap|(?<!no )\bep overlap(?! off)",
            {"overlap_moe_expert_parallel_comm": True},
        ),
        (r"\bno ep overlap|\bep overlap off", {"overlap_moe_expert_parallel_comm": False}),
        (r"permute fusion disabled", {"moe_permute_fusion": False}),
        (r"\b(partial|te-scoped) (cg|cuda graph)", {"cuda_graph_impl": "transformer_engine"}),
        # of which kind it does not say: by modules
        (r"; cuda graphs,", {"cuda_graph_impl": "transformer_engine"}),
        # a guide's steps, of which each adds one thing to those before it
        (r"; baseline;", {"moe_permute_fusion": False}),
        (r"; baseline;|\+ permute kernel", {"moe_router_fusion": False}),
        (r"\bfull cg\b", {"cuda_graph_impl": "full_iteration"}),
        (r"\bno cuda graph", {"cuda_graph_impl": "none"}),
    )
)
#: Number formats, which a plan keeps: recipes of fp8, and Adam's moments in 16 bits.
FORMATS: tuple[Said, ...] = (
    ("precision", r"mxfp8|fp8[-_ ]mx\b", {"fp8_recipe": "mxfp8"}),
    ("precision", r"fp8[-_ ]cs\b", {"fp8_recipe": "tensorwise"}),
    ("precision", r"fp8[-_ ]ds\b", {"fp8_recipe": "delayed"}),
    ("precision", r"fp8[-_ ]sc\b", {"fp8_recipe": "blockwise"}),
    (
        "optimizer",
        r"\bbf16 (states|moments)",
        {
            "use_precision_aware_optimizer": True,
            "exp_avg_dtype": "bf16",
            "exp_avg_sq_dtype": "bf16",
        },
    ),
)
#: Settings of the cost model. Frozen weights have no use of 16-bit ones where they are in fp8, and
#: recipes do without the cache of their transposes (NeMo:
#: ``scripts/performance/llm/mlperf_lora_llama2_70b.py``).
TRAITS: tuple[Said, ...] = (
    (
        "task model",
        r"lora",
        {"fp8_weights": True, "fp8_transpose_cache": False},
    ),
    ("recompute", r"^full.*offload", {"offloads_layer_inputs": True}),
    # DeepSpeed's BF16_Optimizer accumulates all of a rank's gradients in float32 beside the 16-bit
    # ones and reduces these; ZeRO-1 divides the states alone (deepspeed/runtime/bf16_optimizer.py
    # ``_setup_for_real_optimizer``, pipe/engine.py ``_exec_backward_pass``).
    (
        "framework precision",
        r"megatron-?deepspeed.*; bf16",
        {"gradient_bytes": 4, "keeps_narrow_gradients": True, "optimizer_bytes": 12},
    ),
    # Transformer Engine's; measured peaks are those of Megatron's
    ("ambiguity", r"\bfused cross entropy", {"loss_traffic_bytes": 10}),
)


def stated_in(row: Row, table: Sequence[Said]) -> dict[str, object]:
    """Settings that a row names in words."""
    found: dict[str, object] = {}
    for columns, words, settings in table:
        text = "; ".join(row.get(column, "") for column in columns.split())
        if re.search(words, text, re.IGNORECASE):
            found |= settings
    return found


_MICRO_BATCHES = (1, 2, 4, 8)

_MODULES = RecomputeModule
#: Modules that recipes recompute, from little to much.
_EXPERTS = (
    (_MODULES.MOE_ACT,),
    (_MODULES.MOE_ACT, _MODULES.LAYERNORM),
    (_MODULES.LAYERNORM, _MODULES.MOE),
)
_LATENT = (
    (_MODULES.MLA_UP_PROJ,),
    (_MODULES.MOE_ACT, _MODULES.LAYERNORM, _MODULES.MLA_UP_PROJ),
    (_MODULES.LAYERNORM, _MODULES.MLA_UP_PROJ, _MODULES.MLP, _MODULES.MOE),
)


def possible_grids(
    row: Row,
    spec: TransformerSpec,
    grid: PartialLayout,
    defaults: Mapping[str, Any],
    recipe: RowSettings = NO_SETTINGS,
) -> Iterator[PartialLayout]:
    """The grid as the row and its recipe state it, or one for each thing that it may have been.

    Args:
        grid: micro batch, recomputation and execution as stated, or their defaults.
        defaults: of the row's target, and what the row states over them, by Megatron's names;
            ``recompute_granularity`` among them says that dense models run without recomputation.
        recipe: one more thing that the run may have been where it is not certain.
    """
    recomputes = _recomputes(
        row, spec, grid, recipe, keeps_dense="recompute_granularity" in defaults
    )
    usual = replace(grid, execution=execution_of(defaults))
    for size in _micro_batches(row, grid):
        for recompute in recomputes:
            for each in dict.fromkeys((grid,) if recipe.certain else (grid, usual)):
                found = replace(each, micro_batch_size=size, recompute=recompute)
                yield found if recipe.certain else _as_it_runs(found)


def planned_grids(
    row: Row, spec: TransformerSpec, grid: PartialLayout, precision: Precision
) -> Iterator[PartialLayout]:
    """The grid as a search would finish it: every recomputation and micro batch that are unstated.

    What a row states is fixed, as in a plan for a user who set it: its time is that of a run that
    recomputed so much.
    """
    settings: tuple[Recompute, ...] = (grid.recompute,)
    is_selective = _leaves_modules_out(row, spec)
    if not ran_out_of_memory(row) and (is_selective or not states_recompute(row)):
        layers = -(-spec.num_layers // grid.dims.num_chunks)
        settings = tuple(
            recompute
            for recompute in recompute_settings(spec, layers)
            if allows_recompute(
                LaunchRequest.of(
                    spec,
                    replace(grid, recompute=recompute),
                    precision=precision,
                    version="0.20",  # the newest release
                )
            )
            and (not is_selective or recompute.granularity is RecomputeGranularity.SELECTIVE)
        ) or (grid.recompute,)
    for size in _micro_batches(row, grid):
        for recompute in settings:
            found = replace(grid, micro_batch_size=size, recompute=recompute)
            yield _as_it_runs(found)


def _as_it_runs(grid: PartialLayout) -> PartialLayout:
    return replace(grid, execution=allowed_execution(grid.execution, grid))


#: A setting of recomputation, or a module that is recomputed.
_SETTING = re.compile(r"none|full|selective|per-op|offload|attn|norm|act\b|mlp|moe|expert|up_proj")


def states_recompute(row: Row) -> bool:
    """Whether a row says what is recomputed."""
    said = word(row, "recompute")
    return bool(_SETTING.search(said)) and not said.startswith("not stated")


def _leaves_modules_out(row: Row, spec: TransformerSpec) -> bool:
    """Whether a row says that something is recomputed of a model with experts, and not what.

    Of one without experts it is core attention, Megatron's default; the recipes of experts name
    other modules.
    """
    return spec.is_moe and word(row, "recompute") == "selective"


def _micro_batches(row: Row, grid: PartialLayout) -> tuple[int, ...]:
    if number(row, "mbs") or number(row, "ga"):
        return (grid.micro_batch_size,)
    dims, batch = grid.dims, grid.global_batch_size
    p, v = dims.pipeline_model_parallel_size, dims.virtual_pipeline_model_parallel_size
    sizes = tuple(
        size
        for size in _MICRO_BATCHES
        if batch % (size * dims.data_parallel_size) == 0
        and (v == 1 or batch // (size * dims.data_parallel_size) % p == 0)
    )
    return sizes or (grid.micro_batch_size,)


def _recomputes(
    row: Row, spec: TransformerSpec, grid: PartialLayout, recipe: RowSettings, *, keeps_dense: bool
) -> tuple[Recompute, ...]:
    is_selective = _leaves_modules_out(row, spec)
    if states_recompute(row) and not is_selective:
        return (grid.recompute,)
    if recipe.recompute is not None and (recipe.certain or ran_out_of_memory(row)):
        return (recipe.recompute,)
    # A run that ended out of memory did not look for a setting that fits.
    if ran_out_of_memory(row):
        return (grid.recompute,)
    named = () if recipe.recompute is None else (recipe.recompute,)
    if not spec.is_moe and keeps_dense:
        return tuple(dict.fromkeys((NO_RECOMPUTE, *named)))
    modules = (*_EXPERTS, *(_LATENT if spec.multi_latent_attention else ()))
    some = tuple(map(selective_recompute, modules))
    usual = (grid.recompute, *some) if is_selective else (NO_RECOMPUTE, *some, FULL_RECOMPUTE)
    return tuple(dict.fromkeys((*usual, *named)))
