"""From a row of measurements to the job that it describes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field, replace
from typing import Any

from nest_megatron.cluster.records import Cluster, Precision
from nest_megatron.cost_model.execution_flags import execution_of
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.cost_model.targets import Target
from nest_megatron.errors import UserInputError
from nest_megatron.layout.dims import ParallelDims
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.recompute import (
    FULL_RECOMPUTE,
    NO_RECOMPUTE,
    Recompute,
    RecomputeModule,
    selective_recompute,
)
from nest_megatron.layout.stage_layout import StagePartition
from nest_megatron.layout.zero import STRATEGIES, ZeroStage
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.plain import frozen
from nest_megatron.validation.finetuning import fine_tuning, with_known_cells, with_packs
from nest_megatron.validation.frameworks import rule_of
from nest_megatron.validation.machines import machine_of
from nest_megatron.validation.models import MTP_ASSUMED, ModelBook, ModelMatch
from nest_megatron.validation.row_settings import (
    FORMATS,
    NO_SETTINGS,
    TRAITS,
    WORDS,
    balanced_stages,
    partition_of,
    planned_grids,
    possible_grids,
    settings_of,
    stated_in,
)
from nest_megatron.validation.rows import RefusedRowError, Row, whole, word


@frozen
class RowJob:
    """A job that somebody measured, ready for the cost model.

    Args:
        grids: what the job may have been; more than one where the row leaves out the micro batch or
            the recomputation. The fastest that fits in memory is taken, as whoever published the
            run will have done.
        target: whose defaults fill in what the row leaves out.
        flags: what the row says by Megatron's names, over those defaults.
        assumptions: what the row does not say and was taken instead.
        partition: the stages where the row names them.
        pipeline_runs: how often a pipeline fills and drains in a step: PyTorch's schedules run over
            the micro batches of one local batch, Megatron's over those of a step.
    """

    spec: TransformerSpec
    cluster: Cluster
    grids: tuple[PartialLayout, ...]
    settings: CostSettings
    target: Target
    flags: Mapping[str, Any] = field(default_factory=dict)
    assumptions: tuple[str, ...] = ()
    partition: StagePartition | None = None
    pipeline_runs: int = 1


def job_of(row: Row, book: ModelBook, *, as_planned: bool = False) -> RowJob:
    """Read a row.

    Args:
        as_planned: the layout, the batch and the number format are the row's; everything else is
            what the planner would assume or choose for that framework, release and device.

    Raises:
        RefusedRowError: with the reason, if the row says too little or something impossible.
    """
    row, known = with_known_cells(row)
    rule, tuned = rule_of(row.get("framework", ""), row.get("gpu", "")), fine_tuning(row)
    match = _as_built(book.spec(row), rule.target)
    spec = replace(match.spec, adapters=tuned.adapters)
    row = {**row, **tuned.columns}
    gpus = whole(row, "n_gpus")
    if not gpus:
        raise RefusedRowError("number of GPUs not stated")
    recipe = NO_SETTINGS if as_planned else settings_of(row)
    words = {} if as_planned else {**tuned.words, **stated_in(row, WORDS)}
    is_core_fsdp = rule.target.fitted == "megatron_core" and _is_sharded(row)
    stated = {
        # with Megatron-FSDP, as its guide recommends and its developers' runs do: Megatron-LM
        # docs/discussions/megatron-fsdp-user-guide, "Recommended Configurations"
        **({"grad_reduce_in_bf16": True} if is_core_fsdp else {}),
        **recipe.flags,
        **tuned.own,
        **stated_in(row, FORMATS),
        **words,
    }
    fused = rule.target.flags(row.get("gpu", ""), Precision.BF16).get("attention_backend")
    machine = machine_of(
        row.get("gpu", ""),
        gpus,
        whole(row, "gpus_per_node"),
        row.get("network", ""),
        flash_attention=fused != "unfused",
        inside=max(whole(row, column) or 1 for column in ("tp", "cp", "ep")),
    )
    precision, name = _precision(row, machine.cluster), machine.cluster.accelerator.name
    flags = rule.target.flags(name, precision, stated, spec)
    notes = [*known, *match.assumptions, *machine.assumptions, f"defaults of {rule.target.name}"]
    notes += [tuned.assumption] if tuned.assumption else []
    try:
        dims = _dims(row, spec, gpus, flags, notes)
        grid = _grid(row, dims, flags, notes, split=rule.splits_local_batch)
        if as_planned:
            grids = tuple(planned_grids(row, spec, grid, precision))
        else:
            unsaid = rule.target.flags(name, precision, words, spec)
            grids = tuple(possible_grids(row, spec, grid, unsaid, recipe))
    except UserInputError as error:
        raise RefusedRowError("layout is impossible", str(error)) from error
    settings = rule.target.settings(
        name,
        precision,
        stated,
        spec,
        **rule.kernels(name),
        **stated_in(row, TRAITS),
    )
    settings, packs = with_packs(row, settings, spec.seq_length)
    dims = grid.dims
    partition = partition_of(row, spec, dims) if recipe.certain else None
    if rule.balances_weights and dims.virtual_pipeline_model_parallel_size == 1:
        partition = balanced_stages(spec, dims.pipeline_model_parallel_size)
    return RowJob(
        spec=spec,
        cluster=machine.cluster,
        grids=grids,
        settings=settings,
        target=rule.target,
        flags=flags,
        assumptions=(*notes, *packs),
        partition=partition,
        pipeline_runs=_pipeline_runs(row, grid) if rule.splits_local_batch else 1,
    )


def _as_built(match: ModelMatch, target: Target) -> ModelMatch:
    """A model as the framework builds it: on PyTorch's FSDP2 none has multi-token prediction.

    NeMo AutoModel's Nemotron 3 alone has it. Source: NeMo AutoModel nemo_automodel/components/
    models/deepseek_v3/model.py, nemotron_v3/mtp.py.
    """
    builds = not target.cost.get("torch_fsdp2") or match.spec.hybrid_layer_pattern
    if MTP_ASSUMED not in match.assumptions or builds:
        return match
    notes = tuple(note for note in match.assumptions if note != MTP_ASSUMED)
    note = f"{target.framework} builds no multi-token prediction"
    return ModelMatch(spec=match.spec.without_mtp(), assumptions=(*notes, note))


def _grid(
    row: Row, dims: ParallelDims, flags: Mapping[str, Any], notes: list[str], *, split: bool
) -> PartialLayout:
    batch, micro = _batch(row, dims, notes, split=split)
    microbatches = batch // (micro * dims.data_parallel_size)
    is_interleaved = dims.virtual_pipeline_model_parallel_size > 1
    in_rounds = microbatches % dims.pipeline_model_parallel_size == 0
    if whole(row, "vp") is None and is_interleaved and not in_rounds:
        notes.append(f"no virtual stages: {microbatches} micro batches make no whole rounds")
        dims = replace(dims, virtual_pipeline_model_parallel_size=1)
    said = whole(row, "seq_parallel")
    sequence_parallel = flags.get("sequence_parallel") if said is None else said
    return PartialLayout(
        dims=dims,
        global_batch_size=batch,
        micro_batch_size=micro,
        sequence_parallel=bool(sequence_parallel) and dims.tensor_model_parallel_size > 1,
        recompute=_recompute(row, notes),
        zero=_zero(row, flags),
        execution=execution_of(flags),
    )


def _dims(
    row: Row, spec: TransformerSpec, gpus: int, flags: Mapping[str, Any], notes: list[str]
) -> ParallelDims:
    tp, pp = whole(row, "tp"), whole(row, "pp")
    if not tp or not pp:
        raise RefusedRowError("layout not stated", f"tp={row.get('tp')!r} pp={row.get('pp')!r}")
    ep, etp = whole(row, "ep") or 1, whole(row, "etp") or None
    if etp is None:
        etp = tp if ep == 1 else flags.get("expert_tensor_parallel_size") or tp
        if ep > 1:
            notes.append(f"expert-tensor size {etp}")
    if (gpus // pp) % (ep * etp):
        etp = 1
    return dims_of(row, gpus, virtual=_virtual(row, spec, pp, flags, notes), etp=etp)


def dims_of(row: Row, gpus: int, *, virtual: int, etp: int | None = None) -> ParallelDims:
    """The degrees of a row; the expert-tensor size is the tensor size by default."""
    tp, pp, cp, ep = (whole(row, column) or 1 for column in ("tp", "pp", "cp", "ep"))
    replicas, rest = divmod(gpus, tp * pp * cp)
    if rest or not replicas:
        product = f"tp*pp*cp = {tp * pp * cp} does not divide {gpus} GPUs"
        raise RefusedRowError("layout does not multiply out to the GPUs", product)
    return ParallelDims(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=virtual,
        context_parallel_size=cp,
        data_parallel_size=replicas,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp or tp,
    )


def _virtual(
    row: Row, spec: TransformerSpec, pp: int, flags: Mapping[str, Any], notes: list[str]
) -> int:
    said = whole(row, "vp")
    if pp == 1:
        return 1
    interleaves = flags.get("num_layers_per_virtual_pipeline_stage") == 1
    if said is None and interleaves and spec.num_layers % pp == 0:
        notes.append("one layer in each virtual stage")
        return spec.num_layers // pp
    return max(1, said or 1)


def _pipeline_runs(row: Row, grid: PartialLayout) -> int:
    """Local batches in a step, of a framework whose pipeline runs over one at a time."""
    named = re.search(r"\bLBS (\d+)", row.get("ambiguity", ""))
    local = int(named[1]) if named else whole(row, "mbs")
    batch = grid.global_batch_size // grid.dims.data_parallel_size
    if grid.dims.pipeline_model_parallel_size == 1 or not local or batch % local:
        return 1
    return batch // local


def _batch(row: Row, dims: ParallelDims, notes: list[str], *, split: bool) -> tuple[int, int]:
    """Sequences of a step and of a micro batch, which a pipeline may ``split`` over its ranks."""
    batch, micro, steps = whole(row, "gbs"), whole(row, "mbs"), whole(row, "ga")
    replicas, ranks = dims.data_parallel_size, dims.pipeline_model_parallel_size
    if micro and ranks > 1 and split:
        micro = max(1, micro // ranks)
        notes.append(f"micro batch of {micro}: the local batch over the pipeline's ranks")
    if not micro:
        if batch and steps and batch % (steps * replicas) == 0:
            micro = batch // (steps * replicas)
        else:
            micro = 1
            notes.append("the fastest micro batch that fits")
    if not batch:
        if not steps:
            if row.get("iter_time_s", "").strip():
                detail = "a step's time says nothing without it"
                raise RefusedRowError("global batch not stated", detail)
            steps = 8 * ranks if ranks > 1 else 1
            notes.append(f"{steps} micro batches for each replica")
        batch = micro * replicas * steps
    if batch % (micro * replicas):
        rounded = max(1, round(batch / (micro * replicas))) * micro * replicas
        if abs(rounded / batch - 1) > 0.05:
            detail = f"{batch} sequences over {replicas} replicas by {micro}"
            raise RefusedRowError("batch does not divide over the replicas", detail)
        notes.append(f"global batch {rounded} for {batch}")
        batch = rounded
    return batch, micro


def _zero(row: Row, flags: Mapping[str, Any]) -> ZeroStage:
    said, weights = whole(row, "zero"), STRATEGIES[ZeroStage.WEIGHTS]
    if said is not None:
        return ZeroStage(min(said, 3))
    if _is_sharded(row) or flags.get("data_parallel_sharding_strategy") == weights:
        return ZeroStage.WEIGHTS
    shards = flags.get("use_distributed_optimizer")
    return ZeroStage.OPTIMIZER if shards else ZeroStage.NONE


def _is_sharded(row: Row) -> bool:
    return word(row, "fsdp") not in {"", "0", "/", "no"}


#: What rows call modules that are recomputed, where Megatron has another name.
_MODULES = {
    **{str(module): module for module in RecomputeModule},
    "norm": RecomputeModule.LAYERNORM,
    "act": RecomputeModule.MOE_ACT,
    "up_proj": RecomputeModule.MLA_UP_PROJ,
    "shared_expert": RecomputeModule.SHARED_EXPERTS,
}


def _recompute(row: Row, notes: list[str]) -> Recompute:
    text = word(row, "recompute")
    if not text or text.startswith(("none", "not stated")):
        if not text.startswith("none") or "not stated" in text:
            notes.append("no recomputation")
        return NO_RECOMPUTE
    if text.startswith("full"):
        return FULL_RECOMPUTE
    if "offload" in text:
        raise RefusedRowError("activations moved to the host", row["recompute"])
    words = [word for word in re.split(r"[\s,()\[\]+]+", text) if word in _MODULES]
    if "torchtitan" in row.get("framework", "").lower():
        words = ["mlp"]
        notes.append("every second product is recomputed, taken as the MLP")
    if not words:
        words = ["core_attn"]
        notes.append("core attention recomputed")
    return selective_recompute({_MODULES[word] for word in words})


#: What a number format is called; ``None`` for what is not modelled. The first that occurs counts.
_PRECISIONS = {
    r"nvfp4": Precision.NVFP4,
    r"fp4": None,
    r"fp8": Precision.FP8,
    r"fp16": Precision.FP16,
    r"bf16|^$": Precision.BF16,
    r"^(fp32|tf32|float32)$": Precision.FP32,
}


def _precision(row: Row, cluster: Cluster) -> Precision:
    text = word(row, "precision")
    wanted = next((_PRECISIONS[each] for each in _PRECISIONS if re.search(each, text)), None)
    if wanted is None:
        raise RefusedRowError("number format is not modelled", row["precision"])
    if cluster.accelerator.supports(wanted):
        return wanted
    if wanted is Precision.BF16 and cluster.accelerator.supports(Precision.FP16):
        return Precision.FP16
    raise RefusedRowError("GPU lacks the number format", f"{wanted} on {row.get('gpu')}")
