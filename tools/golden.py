"""Jobs of Megatron-LM's functional tests, whose golden values carry peak memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nest_megatron.cluster.records import Accelerator, Precision
from nest_megatron.cost_model.execution_flags import execution_of
from nest_megatron.cost_model.features import SCANNED
from nest_megatron.cost_model.memory_flags import memory_flags
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.errors import UserInputError
from nest_megatron.layout.dims import ParallelDims
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.recompute import (
    NO_RECOMPUTE,
    Recompute,
    RecomputeGranularity,
    RecomputeMethod,
    selective_recompute,
)
from nest_megatron.layout.stage_layout import (
    StagePartition,
    expand_layout,
    parse_layout,
    uniform_partition,
)
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.model.catalogue import SAME_NAMES, spec_from_arguments
from nest_megatron.model.execution import Execution
from nest_megatron.model.spec import ModelFamily, TransformerSpec
from nest_megatron.units import Bytes
from nest_megatron.validation.assess import Predictor
from nest_megatron.validation.frameworks import MEGATRON_CORE
from nest_megatron.validation.job import RowJob, dims_of
from nest_megatron.validation.machines import machine_of
from nest_megatron.validation.model_names import HYBRID
from nest_megatron.validation.models import BERT_VOCAB, GPT2_VOCAB, ModelMatch
from nest_megatron.validation.outcome import RowOutcome
from nest_megatron.validation.rows import RefusedRowError, Row, number, whole

#: What the tests run on where a row does not say.
_USUAL_GPU, _USUAL_GPUS = "A100", 8
#: Release tests train real models.
_RELEASE_GPUS = 256

_PRECISIONS = {"bf16": Precision.BF16, "fp16": Precision.FP16}
_SWITCHES = {"True": True, "False": False}


def predicted_row(row: Row, predictor: Predictor) -> RowOutcome:
    """A row with its predicted peak; a test's arguments state every setting, as a plan keeps them.

    Raises:
        RefusedRowError: as ``golden_job``, and for a row without a peak.
    """
    job = golden_job(row)
    prediction = predictor.predict(job)
    gib = number(row, "mem_max_allocated_gib")
    if not gib:
        raise RefusedRowError("no memory measured", "mem_max_allocated_gib is empty")
    workspaces = workspace_bytes(
        job.cluster.accelerator,
        deterministic=row.get("deterministic") == "1",
        engine=not is_local(row),
        grouped="moe-grouped-gemm=True" in row.get("extra_args", ""),
    )
    return RowOutcome(
        row=row,
        predicted_bytes=prediction.stage_memory[-1] + workspaces,
        measured_bytes=round(gib * 2**30),
        needed_bytes=max(prediction.stage_memory),
        device_bytes=job.cluster.accelerator.memory_bytes,
        fits=prediction.fits,
        is_moe=job.spec.is_moe,
        has_scans=not SCANNED.isdisjoint(job.spec.blocks),
        zero=prediction.layout.zero,
        assumptions=job.assumptions,
    )


_MIB = 2**20
#: Workspaces of cuBLAS that PyTorch holds: one for the forward and one for the backward thread.
_CUBLAS_HANDLES = 2
#: ``CUBLAS_WORKSPACE_CONFIG=:4096:8``, and what PyTorch takes without it on Hopper.
_CUBLAS_LARGE = 32 * _MIB
#: ``:4096:2:16:8``, what PyTorch takes on every other GPU.
_CUBLAS_SMALL = 8 * _MIB + 128 * 1024
#: Workspace of Transformer Engine, from Hopper on and before (``get_cublas_workspace_size_bytes``).
_ENGINE_LARGE, _ENGINE_SMALL = 32 * _MIB, 4 * _MIB
#: Streams of Transformer Engine's grouped GEMMs.
_GROUPED_STREAMS = 4
_BEFORE_HOPPER = ("v100", "a100", "a800", "mi")


def workspace_bytes(
    accelerator: Accelerator, *, deterministic: bool, engine: bool = True, grouped: bool = False
) -> Bytes:
    """What libraries take from PyTorch's allocator and keep.

    Args:
        deterministic: ``CUBLAS_WORKSPACE_CONFIG`` is set as deterministic runs set it.
        engine: layers are Transformer Engine's; Megatron's own take another handle of cuBLAS.
        grouped: experts run as grouped GEMMs, on streams with a workspace each.
    """
    name = accelerator.name.lower()
    hopper = name.startswith(("h100", "h20", "h800", "gh200"))
    cublas = _CUBLAS_LARGE if deterministic or hopper else _CUBLAS_SMALL
    large = not name.startswith(_BEFORE_HOPPER)
    if not engine:
        return (_CUBLAS_HANDLES + 1) * cublas
    own = _ENGINE_LARGE if large else _ENGINE_SMALL
    return _CUBLAS_HANDLES * cublas + own * (1 + _GROUPED_STREAMS * grouped)


def golden_job(row: Row) -> RowJob:
    """Read a row of golden values.

    Raises:
        RefusedRowError: with the reason, if the row says too little or something impossible.
    """
    match = shape_of_test(row)
    flags = _flags_of(row.get("extra_args", ""))
    if "distill" in row.get("test_case", ""):
        raise RefusedRowError("a teacher model beside the trained one", row["test_case"])
    gpus, per_node, notes = _gpus(row)
    machine = machine_of(
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
    layout, stages = row.get("pp_layout", ""), whole(row, "pp") or 1
    if layout and "=" not in layout:
        return max(1, len(expand_layout(layout)) // stages)
    return (whole(row, "vp") or 1) if stages > 1 else 1


def _grid(
    row: Row, dims: ParallelDims, flags: Mapping[str, str], notes: list[str]
) -> PartialLayout:
    micro = whole(row, "mbs") or 1
    return PartialLayout(
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


#: The collection cuts a row's flags at this many characters.
_FLAGS_CUT = 900
#: Vocabulary of ``nemotron_2_256k.model``, the tokenizer of the release tests.
_RELEASE_VOCAB = 256_000
_REFUSED: Mapping[str, str] = {
    "t5": "encoder and decoder",
    "hybrid": HYBRID,
    "mamba": HYBRID,
    "mimo": "more than a language model",
    "multimodal": "more than a language model",
}
#: Flags that are read; what columns state (``max_position_embeddings`` with ``seq``) is not.
_KNOWN = {*SAME_NAMES, "moe_shared_expert_intermediate_size", "moe_router_enable_expert_bias"}
_KNOWN |= {"apply_layernorm_1p"}
_KNOWN -= {"max_position_embeddings", "add_bias_linear"}
_REAL = ("layernorm_epsilon", "rotary_percent", "hidden_dropout", "attention_dropout")


def shape_of_test(row: Mapping[str, str]) -> ModelMatch:
    """The model of a functional test; Megatron's defaults stand where no flag is carried.

    Args:
        row: a row with ``family``, ``layers``, ``hidden``, ``ffn``, ``heads``, ``kv_groups``,
            ``swiglu``, ``experts``, ``topk``, ``moe_ffn``, ``moe_layer_freq``, ``mla``,
            ``mtp_layers``, ``seq``, ``vocab``, ``test_case`` and ``extra_args``.
    """
    flags = _flags_of(row.get("extra_args", ""))
    _refuse_family(row, flags)
    style, notes = _style(row, flags)
    arguments = {**_arguments(row), **style, **_typed(flags)}
    if arguments["multi_latent_attention"]:
        arguments["group_query_attention"] = False
    fields = {name: arguments.pop(name) for name in _FIELDS if name in arguments}
    try:
        spec = spec_from_arguments(
            arguments,
            spelled=str,
            name=row.get("test_case") or "megatron_test",
            num_layers=whole(row, "layers"),
            hidden_size=whole(row, "hidden"),
            seq_length=whole(row, "seq"),
            family=ModelFamily.BERT if row.get("family") == "bert" else ModelFamily.GPT,
            source=f"{row.get('repo', '')} {row.get('path', '')}".strip(),
            **fields,
        )
    except UserInputError as error:
        raise RefusedRowError("impossible shape", str(error)) from error
    return ModelMatch(spec=spec, assumptions=notes)


#: Fields of the spec that no argument of Megatron names.
_FIELDS = ("vocab_size", "activation", "gated_linear_unit")


def _flags_of(text: str) -> dict[str, str]:
    """Megatron's flags of a row, spelled as fields; the last may be cut and is then left out.

    >>> _flags_of("kv-channels=128 offload-modules=[a b] swiglu=True moe-")
    {'kv_channels': '128', 'offload_modules': '[a b]', 'swiglu': 'True'}
    """
    whole_text = text if len(text) < _FLAGS_CUT else text.rpartition(" ")[0]
    pairs = re.findall(r"([\w-]+)=(\[[^\]]*\]|\S+)", whole_text)
    return {key.replace("-", "_"): value for key, value in pairs}


def _refuse_family(row: Mapping[str, str], flags: Mapping[str, str]) -> None:
    family, test = row.get("family", ""), row.get("test_case", "")
    for start, reason in _REFUSED.items():
        if family.startswith(start):
            raise RefusedRowError(reason, f"{family}: {test}")
    if any(flag.startswith(("hybrid", "mamba")) for flag in flags):
        raise RefusedRowError(HYBRID, f"{family}: {test}")
    if any(flag.startswith("heterogeneous") for flag in flags):
        raise RefusedRowError("layers of different shapes", test)
    if not all(whole(row, column) for column in ("layers", "hidden", "heads", "seq")):
        raise RefusedRowError("shape not stated", test)


def _arguments(row: Mapping[str, str]) -> dict[str, Any]:
    return {
        "ffn_hidden_size": whole(row, "ffn"),
        "num_attention_heads": whole(row, "heads"),
        "group_query_attention": True,
        "num_query_groups": whole(row, "kv_groups"),
        "max_position_embeddings": whole(row, "seq"),
        "mtp_num_layers": whole(row, "mtp_layers"),
        "multi_latent_attention": row.get("mla") == "1",
        "swiglu": row.get("swiglu") == "1",
        "num_experts": whole(row, "experts"),
        "moe_router_topk": whole(row, "topk") or 2,
        "moe_ffn_hidden_size": whole(row, "moe_ffn"),
        "moe_layer_freq": row.get("moe_layer_freq") or None,
    }


def _typed(flags: Mapping[str, str]) -> dict[str, Any]:
    """Flags that a reader of shapes knows, as the values that Megatron makes of them."""
    known = {name: text for name, text in flags.items() if name in _KNOWN}
    found: dict[str, Any] = {
        name: _SWITCHES.get(text, int(text) if re.fullmatch(r"\d{1,18}", text) else text)
        for name, text in known.items()
    }
    found |= {name: float(flags[name]) for name in _REAL if name in flags}
    if flags.get("disable_bias_linear") == "True":
        found["add_bias_linear"] = False
    if flags.get("squared_relu") == "True":
        found["activation"] = "squared_relu"
    return found


def _style(
    row: Mapping[str, str], flags: Mapping[str, str]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    release, bert = "release" in row.get("test_case", ""), row.get("family") == "bert"
    style: dict[str, Any] = {"vocab_size": whole(row, "vocab")}
    notes = []
    if style["vocab_size"] is None:
        style["vocab_size"] = BERT_VOCAB if bert else _RELEASE_VOCAB if release else GPT2_VOCAB
        notes.append(f"a vocabulary of {style['vocab_size']}")
    if row.get("swiglu") == "1" or flags.get("swiglu") == "True":
        style |= {"activation": "silu", "gated_linear_unit": True}
    elif release and not row.get("experts") and whole(row, "hidden") == 6144:
        style |= {"activation": "squared_relu", "apply_layernorm_1p": True, "rotary_percent": 0.5}
        notes.append("the release test of 15B trains a Nemotron: squared ReLU, layernorm 1p")
    without, note = _dropout(row, flags, release=release)
    ranks, cut = _cut_flags(row, flags)
    return style | without | ranks, (*notes, note, *([cut] if cut else []))


def _dropout(
    row: Mapping[str, str], flags: Mapping[str, str], *, release: bool
) -> tuple[dict[str, Any], str]:
    """Rows do not carry the flags of dropout.

    The tests of newer models set it to 0, and those of context parallelism without deterministic
    kernels.
    """
    newer = release or flags.get("normalization") == "RMSNorm" or bool(row.get("mtp_layers"))
    newer = newer or (row.get("cp") not in ("", "1", None) and row.get("deterministic") == "0")
    if newer:
        return {"hidden_dropout": 0.0, "attention_dropout": 0.0}, "no dropout"
    return {}, "Megatron's dropout of 0.1"


def _cut_flags(row: Mapping[str, str], flags: Mapping[str, str]) -> tuple[dict[str, Any], str]:
    """The tests' ranks of latent attention, where the row's flags end before them."""
    if len(row.get("extra_args", "")) < _FLAGS_CUT:
        return {}, ""
    if row.get("mla") != "1" or "kv_lora_rank" in flags:
        return {}, "flags beyond 900 characters are not known"
    hidden = whole(row, "hidden") or 0
    q, kv = (1536, 512) if hidden >= 1024 else (256, 128)
    note = f"flags beyond 900 characters are not known: latent attention of ranks {q} and {kv}"
    return {"q_lora_rank": q, "kv_lora_rank": kv}, note
