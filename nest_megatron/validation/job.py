"""From a row of measurements to the job that it describes."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field

from nest_megatron.cluster.records import Cluster, Precision
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.errors import UserInputError
from nest_megatron.model.execution import Execution, FlexBackend, TokenDispatcher
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.parallel.dims import ParallelDims
from nest_megatron.parallel.grid import Grid
from nest_megatron.parallel.partition import StagePartition
from nest_megatron.parallel.recompute import (
    FULL_RECOMPUTE,
    NO_RECOMPUTE,
    Recompute,
    RecomputeModule,
    selective_recompute,
)
from nest_megatron.parallel.zero import ZeroStage
from nest_megatron.validation.frameworks import Habits, habits_of
from nest_megatron.validation.machines import machine_of_runs
from nest_megatron.validation.models import ModelBook
from nest_megatron.validation.possible import possible_grids
from nest_megatron.validation.refusal import RefusedRowError
from nest_megatron.validation.rows import Row, whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job that somebody measured, ready for the cost model.

    Args:
        grids: what the job may have been; more than one where the row leaves out the micro batch or
            the recomputation. The fastest that fits in memory is taken, as whoever published the
            run will have done.
        habits: whose habits fill in what the row leaves out.
        assumptions: what the row does not say and was taken instead.
        partition: the stages where the row names them.
    """

    spec: TransformerSpec
    cluster: Cluster
    grids: tuple[Grid, ...]
    settings: CostSettings
    habits: str = ""
    assumptions: tuple[str, ...] = field(default=())
    partition: StagePartition | None = None


def job_of(row: Row, book: ModelBook, *, as_planned: bool = False) -> Job:
    """Read a row.

    Args:
        as_planned: what the row says of settings that the planner assumes or chooses is left out.

    Raises:
        RefusedRowError: with the reason, if the row says too little or something impossible.
    """
    del as_planned
    match = book.spec(row)
    gpus = whole(row, "n_gpus")
    if not gpus:
        raise RefusedRowError("number of GPUs not stated")
    habits = habits_of(row.get("framework", ""), row.get("gpu", ""))
    per_node, network = whole(row, "gpus_per_node"), row.get("network", "")
    place = machine_of_runs(
        row.get("gpu", ""), gpus, per_node, network, flash_attention=habits.flash_attention
    )
    notes = [*match.assumptions, *place.assumptions, f"habits of {habits.name}"]
    try:
        grid = _grid(row, match.spec, gpus, habits, notes)
        grids = tuple(possible_grids(row, match.spec, grid, keeps_dense=habits.keeps_dense))
    except UserInputError as error:
        raise RefusedRowError("layout is impossible", str(error)) from error
    special = {**_task(row), **_offload(row)}
    settings = habits.settings(precision=_precision(row, place.cluster), **special)
    return Job(
        spec=match.spec,
        cluster=place.cluster,
        grids=grids,
        settings=settings,
        habits=habits.name,
        assumptions=tuple(notes),
    )


def _grid(row: Row, spec: TransformerSpec, gpus: int, habits: Habits, notes: list[str]) -> Grid:
    dims = _dims(row, spec, gpus, habits, notes)
    batch, micro = _batch(row, dims, habits, notes)
    return Grid(
        dims=dims,
        global_batch_size=batch,
        micro_batch_size=micro,
        sequence_parallel=_sequence_parallel(row, dims, habits),
        recompute=_recompute(row, dims, notes),
        zero=_zero(row, habits),
        execution=_execution(row, habits),
    )


def _dims(
    row: Row, spec: TransformerSpec, gpus: int, habits: Habits, notes: list[str]
) -> ParallelDims:
    tp, pp = whole(row, "tp"), whole(row, "pp")
    if not tp or not pp:
        raise RefusedRowError("layout not stated", f"tp={row.get('tp')!r} pp={row.get('pp')!r}")
    cp = whole(row, "cp") or 1
    replicas = replicas_of(gpus, tp * pp * cp)
    ep, etp = whole(row, "ep") or 1, whole(row, "etp") or None
    if etp is None:
        etp = tp if habits.experts_follow_tensor or ep == 1 else 1
        if ep > 1:
            notes.append(f"expert-tensor size {etp}")
    if (tp * cp * replicas) % (ep * etp):
        etp = 1
    return ParallelDims(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=_virtual(row, spec, pp, habits, notes),
        context_parallel_size=cp,
        data_parallel_size=replicas,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )


def replicas_of(gpus: int, model_parallel: int) -> int:
    """How many replicas of so many ranks (TP x PP x CP) the GPUs hold.

    Raises:
        RefusedRowError: if they hold no whole number of them.
    """
    replicas, rest = divmod(gpus, model_parallel)
    if rest or not replicas:
        product = f"tp*pp*cp = {model_parallel} does not divide {gpus} GPUs"
        raise RefusedRowError("layout does not multiply out to the GPUs", product)
    return replicas


def _virtual(row: Row, spec: TransformerSpec, pp: int, habits: Habits, notes: list[str]) -> int:
    given = whole(row, "vp")
    if pp == 1:
        return 1
    if given is None and habits.interleaves and spec.num_layers % pp == 0:
        notes.append("one layer in each virtual stage")
        return spec.num_layers // pp
    return max(1, given or 1)


def _batch(row: Row, dims: ParallelDims, habits: Habits, notes: list[str]) -> tuple[int, int]:
    """Sequences of a step and of a micro batch."""
    batch, micro, steps = whole(row, "gbs"), whole(row, "mbs"), whole(row, "ga")
    replicas, ranks = dims.data_parallel_size, dims.pipeline_model_parallel_size
    if micro and ranks > 1 and habits.splits_local_batch:
        micro = max(1, micro // ranks)
        notes.append(f"micro batch of {micro}: the local batch over the pipeline's ranks")
    if not micro:
        if batch and steps and batch % (steps * replicas) == 0:
            micro = batch // (steps * replicas)
        else:
            micro = 1
            notes.append("the fastest micro batch that fits")
    if not batch:
        batch = micro * replicas * (steps or _assumed_steps(row, ranks, notes))
    if batch % (micro * replicas):
        rounded = max(1, round(batch / (micro * replicas))) * micro * replicas
        if abs(rounded / batch - 1) > 0.05:
            detail = f"{batch} sequences over {replicas} replicas by {micro}"
            raise RefusedRowError("batch does not divide over the replicas", detail)
        notes.append(f"global batch {rounded} for {batch}")
        batch = rounded
    return batch, micro


def _assumed_steps(row: Row, ranks: int, notes: list[str]) -> int:
    """Micro batches of a replica where a row gives rates but no batch."""
    if row.get("iter_time_s", "").strip():
        raise RefusedRowError("global batch not stated", "a step's time says nothing without it")
    steps = 8 * ranks if ranks > 1 else 1
    notes.append(f"{steps} micro batches for each replica")
    return steps


def _sequence_parallel(row: Row, dims: ParallelDims, habits: Habits) -> bool:
    given = whole(row, "seq_parallel")
    wanted = habits.sequence_parallel if given is None else bool(given)
    return wanted and dims.tensor_model_parallel_size > 1


def _zero(row: Row, habits: Habits) -> ZeroStage:
    given = whole(row, "zero")
    if given is not None:
        return ZeroStage(min(given, 3))
    if row.get("fsdp", "").strip().lower() in {"", "0", "1", "/", "no"}:
        sharded = row.get("fsdp", "").strip() == "1"
        return ZeroStage.WEIGHTS if sharded else habits.zero
    return ZeroStage.WEIGHTS


_MODULES = {
    "core_attn": RecomputeModule.CORE_ATTN,
    "layernorm": RecomputeModule.LAYERNORM,
    "norm": RecomputeModule.LAYERNORM,
    "moe_act": RecomputeModule.MOE_ACT,
    "act": RecomputeModule.MOE_ACT,
    "mlp": RecomputeModule.MLP,
    "moe": RecomputeModule.MOE,
    "mla_up_proj": RecomputeModule.MLA_UP_PROJ,
    "up_proj": RecomputeModule.MLA_UP_PROJ,
    "shared_expert": RecomputeModule.SHARED_EXPERTS,
    "shared_experts": RecomputeModule.SHARED_EXPERTS,
}


def _recompute(row: Row, dims: ParallelDims, notes: list[str]) -> Recompute:
    text = row.get("recompute", "").strip().lower()
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
        notes.append("every second product is computed again, taken as the MLP")
    if not words:
        words = ["core_attn"]
        notes.append("core attention recomputed")
    return selective_recompute({_MODULES[word] for word in words})


def _precision(row: Row, cluster: Cluster) -> Precision:
    text = row.get("precision", "").strip().lower()
    if "fp4" in text:
        raise RefusedRowError("number format is not modelled", row["precision"])
    if "fp8" in text:
        wanted = Precision.FP8
    elif "fp16" in text:
        wanted = Precision.FP16
    elif "bf16" in text or not text:
        wanted = Precision.BF16
    else:
        raise RefusedRowError("number format is not modelled", row["precision"])
    if not cluster.accelerator.supports(wanted):
        if wanted is Precision.BF16 and cluster.accelerator.supports(Precision.FP16):
            return Precision.FP16
        raise RefusedRowError("GPU lacks the number format", f"{wanted} on {row.get('gpu')}")
    return wanted


def _execution(row: Row, habits: Habits) -> Execution:
    """What carries the work out, with the dispatcher of tokens that the row names."""
    named = re.search(r"deepep|hybridep", row.get("ambiguity", ""), re.IGNORECASE)
    if named is None:
        return habits.execution
    return dataclasses.replace(
        habits.execution,
        moe_token_dispatcher_type=TokenDispatcher.FLEX,
        moe_flex_dispatcher_backend=FlexBackend(named[0].lower()),
    )


def _offload(row: Row) -> dict[str, object]:
    """Full recomputation that keeps the inputs of layers on the host."""
    text = row.get("recompute", "").lower()
    return {"offloads_layer_inputs": True} if text.startswith("full") and "offload" in text else {}


def _task(row: Row) -> dict[str, object]:
    """Settings of tasks other than training all weights.

    Frozen weights have no use of 16-bit ones beside those in fp8, and recipes do without the cache
    of their transposes (NeMo: ``scripts/performance/llm/mlperf_lora_llama2_70b.py``).
    """
    lora = "lora" in (row.get("task", "") + row.get("model", "")).lower()
    if not lora:
        return {}
    return {"frozen_weights": True, "fp8_weights": True, "fp8_transpose_cache": False}
