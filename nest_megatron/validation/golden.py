"""Jobs of Megatron-LM's functional tests, whose golden values carry peak memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from nest_megatron.cluster.records import Precision
from nest_megatron.cost_model.execution_flags import execution_of
from nest_megatron.cost_model.memory_flags import memory_flags
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.errors import UserInputError
from nest_megatron.model.execution import Execution
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.parallel.dims import ParallelDims
from nest_megatron.parallel.grid import Grid
from nest_megatron.parallel.layout import expand_layout, parse_layout, uniform_partition
from nest_megatron.parallel.partition import StagePartition
from nest_megatron.parallel.recompute import (
    NO_RECOMPUTE,
    Recompute,
    RecomputeGranularity,
    RecomputeMethod,
    selective_recompute,
)
from nest_megatron.parallel.zero import ZeroStage
from nest_megatron.validation.frameworks import MEGATRON_CORE
from nest_megatron.validation.golden_models import flags_of
from nest_megatron.validation.job import RowJob, dims_of
from nest_megatron.validation.machines import machine_of_runs
from nest_megatron.validation.models import ModelBook
from nest_megatron.validation.rows import RefusedRowError, Row, whole

#: What the tests run on where a row does not say.
_USUAL_GPU, _USUAL_GPUS = "A100", 8
#: Release tests train real models.
_RELEASE_GPUS = 256

_PRECISIONS = {"bf16": Precision.BF16, "fp16": Precision.FP16}
_SWITCHES = {"True": True, "False": False}


def golden_job(row: Row, book: ModelBook) -> RowJob:
    """Read a row of golden values.

    Raises:
        RefusedRowError: with the reason, if the row says too little or something impossible.
    """
    match = book.golden_spec(row)
    flags = flags_of(row.get("extra_args", ""))
    if "distill" in row.get("test_case", ""):
        raise RefusedRowError("a teacher model beside the trained one", row["test_case"])
    gpus, per_node, notes = _gpus(row)
    machine = machine_of_runs(
        row.get("gpu") or _USUAL_GPU, gpus, per_node, "", flash_attention=not _keeps_scores(row)
    )
    try:
        dims = dims_of(row, gpus, virtual=_virtual(row), etp=whole(row, "etp"))
        grid = _grid(row, dims, flags, notes)
        partition = _partition(row, match.spec, grid.dims)
    except UserInputError as error:
        raise RefusedRowError("layout is impossible", str(error)) from error
    return RowJob(
        spec=match.spec,
        cluster=machine.cluster,
        grids=(grid,),
        settings=_settings(row, flags, machine.cluster.accelerator.name),
        target=MEGATRON_CORE,
        assumptions=(*match.assumptions, *notes),
        partition=partition,
    )


def is_local(row: Row) -> bool:
    """Whether layers are Megatron's own instead of Transformer Engine's.

    The tests say so in their names (``gpt3_mcore_tp..`` and ``gpt3_mcore_te_tp..``); context
    parallelism needs Transformer Engine whatever the name.
    """
    name = row.get("test_case", "")
    return name.startswith("gpt3_mcore_tp") and row.get("cp") in ("", "1", None)


#: The attention back end of the image for long-term support until this date.
_UNFUSED_UNTIL = "2025-10-21"


def _keeps_scores(row: Row) -> bool:
    """Whether attention is unfused.

    Without a word, Transformer Engine takes a fused back end. The tests of the image for long-term
    support asked for the unfused one until the autumn of 2025; their flags are those of today.
    """
    stated = row.get("attention_backend", "")
    if stated:
        return stated == "unfused"
    old = row.get("image") == "lts" and row.get("golden_date", "") <= _UNFUSED_UNTIL
    return is_local(row) or (old and row.get("deterministic") == "1")


def _gpus(row: Row) -> tuple[int, int | None, list[str]]:
    """GPUs of the test, GPUs of a node, and what was assumed."""
    notes = [] if row.get("gpu") else [f"an {_USUAL_GPU}"]
    gpus, per_node = whole(row, "n_gpus"), whole(row, "gpus_per_node")
    if not gpus:
        gpus = _RELEASE_GPUS if "release" in row.get("test_case", "") else _USUAL_GPUS
        notes.append(f"{gpus} GPUs")
    sequences, micro = whole(row, "gbs"), whole(row, "mbs") or 1
    tp, pp, cp = (whole(row, column) or 1 for column in ("tp", "pp", "cp"))
    if sequences and sequences % micro == 0 and gpus > (most := tp * pp * cp * sequences // micro):
        gpus, per_node = most, None
        notes.append(f"{gpus} GPUs, as many as the global batch has work for")
    return gpus, per_node, notes


def _virtual(row: Row) -> int:
    """Virtual stages of a rank: as stated, or as many as the layout cuts."""
    layout, stages = row.get("pp_layout", ""), whole(row, "pp") or 1
    if layout and "=" not in layout:
        return max(1, len(expand_layout(layout)) // stages)
    return (whole(row, "vp") or 1) if stages > 1 else 1


def _grid(row: Row, dims: ParallelDims, flags: Mapping[str, str], notes: list[str]) -> Grid:
    micro = whole(row, "mbs") or 1
    return Grid(
        dims=dims,
        global_batch_size=_batch(row, dims, micro, notes),
        micro_batch_size=micro,
        sequence_parallel=row.get("seq_parallel") == "1" and dims.tensor_model_parallel_size > 1,
        recompute=_recompute(row.get("recompute", "")),
        zero=_zero(row, flags),
        execution=_execution(row),
    )


def _execution(row: Row) -> Execution:
    """Of what carries layers out, what changes memory: graphs, and activations on the host."""
    stated = ",".join(row.get(column, "") for column in ("cuda_graph", "offload"))
    said: dict[str, object] = {}
    for name, words in re.findall(r"([\w-]+)=(\[[^]]*\]|[^,]*)", stated):
        value = words.strip("[]").split() if words.startswith("[") else words
        said[name.replace("-", "_")] = _SWITCHES.get(words, value)
    return execution_of(said)


def _batch(row: Row, dims: ParallelDims, micro: int, notes: list[str]) -> int:
    """Sequences of a step, in whole rounds of an interleaved pipeline."""
    stages, virtual = dims.pipeline_model_parallel_size, dims.virtual_pipeline_model_parallel_size
    together = micro * dims.data_parallel_size * (stages if virtual > 1 else 1)
    stated = whole(row, "gbs")
    if stated and stated % together == 0:
        return stated
    taken = together * (-(-stated // together) if stated else stages)
    notes.append(f"a global batch of {taken}" + (f" for {stated}" if stated else ""))
    return taken


def _zero(row: Row, flags: Mapping[str, str]) -> ZeroStage:
    if "use-megatron-fsdp=True" in row.get("zero_fsdp", ""):
        return {
            "optim": ZeroStage.OPTIMIZER,
            "optim_grads": ZeroStage.GRADIENTS,
            "optim_grads_params": ZeroStage.WEIGHTS,
        }.get(flags.get("data_parallel_sharding_strategy", ""), ZeroStage.WEIGHTS)
    return ZeroStage.OPTIMIZER if row.get("dist_optimizer") == "1" else ZeroStage.NONE


def _recompute(text: str) -> Recompute:
    """The recomputation of a row: ``none``, ``full:uniform1``, ``selective:[moe_act mlp]``."""
    kind, _, rest = text.partition(":")
    if kind == "full":
        found = re.fullmatch(r"(uniform|block)(\d+)", rest)
        method, layers = (found[1], int(found[2])) if found else ("uniform", 1)
        return Recompute(
            granularity=RecomputeGranularity.FULL,
            method=RecomputeMethod(method),
            num_layers=layers,
        )
    if kind != "selective":
        return NO_RECOMPUTE
    return selective_recompute(re.findall(r"\w+", rest) or ["core_attn"])


def _partition(row: Row, spec: TransformerSpec, dims: ParallelDims) -> StagePartition | None:
    """The stages that the row names, or ``None`` for Megatron's even ones."""
    text = row.get("pp_layout", "")
    p, v = dims.pipeline_model_parallel_size, dims.virtual_pipeline_model_parallel_size
    if not text:
        return None
    if "=" not in text:
        return parse_layout(text, spec, p)
    said = dict(part.split("=", 1) for part in text.split(","))
    first, last = (int(said.get(f"decoder-{e}-pipeline-num-layers", 0)) for e in ("first", "last"))
    return uniform_partition(
        spec,
        p,
        v,
        first=first or None,
        last=last or None,
        account_embedding=said.get("account-for-embedding-in-pipeline-split") == "True",
        account_loss=said.get("account-for-loss-in-pipeline-split") == "True",
    )


def _settings(row: Row, flags: Mapping[str, str], accelerator: str) -> CostSettings:
    """As a plan would be made for the test's flags."""
    text = row.get("precision", "")
    if text not in _PRECISIONS:
        raise RefusedRowError("number format is not modelled", text)
    precision = Precision.FP8 if row.get("fp8") else _PRECISIONS[text]
    said: dict[str, object] = {name: _SWITCHES.get(word, word) for name, word in flags.items()}
    said["use_distributed_optimizer"] = row.get("dist_optimizer") == "1"
    own = memory_flags({**said, "params_dtype": text})
    settings = MEGATRON_CORE.settings(accelerator, precision, own)
    # --defer-embedding-wgrad-compute, which tests name, keeps gradients of two micro batches
    if "defer_embedding_wgrad" not in row.get("test_case", ""):
        return settings
    traits = replace(settings.traits, loss_bytes=settings.traits.loss_bytes + 4)
    return replace(settings, traits=traits)
