"""From Megatron's arguments to a model and a job.

Only what the user decided is read; what Megatron would derive (``ffn_hidden_size``, heads, kinds of
layers) follows its own default rules. Models that this planner does not support are refused by
name.

Source: ``megatron.training.arguments.validate_args`` and ``core_transformer_config_from_args``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from pathlib import PurePath
from types import MappingProxyType
from typing import Any

from nest_megatron.cluster.records import Precision
from nest_megatron.config.job import Job, ReadCommand
from nest_megatron.cost_model.execution_flags import time_notes
from nest_megatron.cost_model.memory_flags import memory_flags
from nest_megatron.cost_model.target_defaults import target_named
from nest_megatron.errors import UnplannableModelError, UserInputError
from nest_megatron.integrations.architecture import REFUSED, unpriced
from nest_megatron.integrations.megatron_lm.layout_arguments import PARALLEL_ARGUMENTS
from nest_megatron.integrations.megatron_lm.optimizer_rules import require_optimizer
from nest_megatron.model.arguments import spec_from_arguments
from nest_megatron.model.spec import ModelFamily, TransformerSpec
from nest_megatron.parallel.cuda_graphs import cuda_graphs
from nest_megatron.parallel.knobs import closed_fields
from nest_megatron.parallel.plan import STRATEGIES
from nest_megatron.parallel.recompute import (
    Recompute,
    RecomputeGranularity,
    RecomputeMethod,
    selective_recompute,
)
from nest_megatron.parallel.zero import DataParallelSharding, ZeroStage

#: What must be off, beside the fields of the model's configuration.
_REFUSED_ARGUMENTS = {
    **REFUSED,
    "yaml_cfg": "its --yaml-cfg path fails in Megatron's own parser",
    "retro_add_retriever": "retrieval models have an encoder",
    "perform_rl_step": "an RL step is generation as well as training",
    "decoder_num_layers": "encoder-decoder models have two stacks",
    "step_batch_size_schedule": "a batch that grows by a schedule is not supported",
    "use_checkpoint_args": "the model's shape would come from a checkpoint; give the model's flags",
    "use_legacy_models": "legacy models have another code path",
}
_REFUSED_SCRIPTS = ("t5", "vlm", "vision", "ict", "retro", "mamba", "hybrid", "multimodal", "rl")
_TOKENIZER_ROWS = {
    "GPT2BPETokenizer": 50_257,
    "Llama2Tokenizer": 32_000,
    "BertWordPieceLowerCase": 30_522,
    "BertWordPieceCase": 28_996,
}
_DEFAULT_TOKENIZERS = {
    ModelFamily.GPT: "GPT2BPETokenizer",
    ModelFamily.BERT: "BertWordPieceLowerCase",
}
_STRATEGIES = {strategy: zero for zero, strategy in STRATEGIES.items()}


def read_job(command: ReadCommand, *, vocab_size: int | None = None) -> Job:
    """The job of a command that was read by ``parser.read_command``.

    Args:
        vocab_size: vocabulary of the tokenizer, where the command does not say it.

    Raises:
        UnplannableModelError: for a model that this planner does not support.
        UserInputError: if the command lacks a size, or its sizes contradict each other.
    """
    require_optimizer(command.values, command.version)
    return job_of(command, command.values, vocab_size=vocab_size)


def job_of(
    command: ReadCommand, values: Mapping[str, Any], *, vocab_size: int | None = None
) -> Job:
    """As ``read_job``, from ``vars()`` of the Namespace that Megatron itself parsed.

    Args:
        values: what stands for those of the command.
    """
    job = job_from_values(
        values,
        explicit=command.explicit,
        script=command.script,
        version=command.version,
        vocab_size=vocab_size,
    )
    return dataclasses.replace(
        job,
        num_gpus=command.world_size,
        command=command,
        passthrough=command.unknown,
        notes=(*command.notes, *job.notes),
    )


def job_from_values(
    values: Mapping[str, Any],
    *,
    explicit: Collection[str],
    script: str = "",
    version: str = "0.16.1",
    vocab_size: int | None = None,
) -> Job:
    """A job from Megatron's arguments by destination.

    Args:
        explicit: those that the user sets.
    """
    refuse_unplannable(values, script)
    _require_degrees(values)
    spec, assumed = _spec(values, script, vocab_size)
    precision = _precision(values)
    params = next((name for name in ("bf16", "fp16") if values.get(name)), "fp32")
    flags = memory_flags({**values, **_unsaid(values, explicit), "params_dtype": params})
    return Job(
        spec=spec,
        version=version,
        target=target_named(f"megatron_lm_{version}"),
        script=script,
        global_batch_size=values.get("global_batch_size"),
        batch_unit=_batch_unit(values),
        micro_batch_size=values.get("micro_batch_size"),
        precision=precision,
        fp8_recipe=values.get("fp8_recipe") or "delayed",
        transformer_impl=values.get("transformer_impl") or "transformer_engine",
        fixed=MappingProxyType({k: values.get(k) for k in PARALLEL_ARGUMENTS if k in explicit}),
        recompute=read_recompute(values),
        zero=read_zero(values),
        sharding=_sharding(values),
        graphs=cuda_graphs(values),
        capturable=not any(map(values.get, _OTHER_SHAPES)),
        closed=closed_fields(values.get("deterministic_mode"), packs=any(map(values.get, _PACKED))),
        counts_on_host=any(map(values.get, _COUNTED_ON_HOST)),
        ckpt_format=values.get("ckpt_format") if "ckpt_format" in explicit else None,
        save_interval=values.get("save_interval") if values.get("save") else None,
        memory_flags=flags,
        use_distributed_optimizer=bool(values.get("use_distributed_optimizer")),
        notes=(*assumed, *_job_notes(values), *time_notes(flags)),
    )


#: Arguments of jobs whose steps differ in shape (packed sequences, growing batches), or whose
#: layers are not Megatron's own.
_PACKED = ("sft", "hybrid_context_parallel")
_OTHER_SHAPES = (*_PACKED, "rampup_batch_size", "spec")
#: Arguments with which the host waits for numbers of tokens (0.16.1 tc:1771).
_COUNTED_ON_HOST = (
    "moe_expert_capacity_factor",
    "moe_router_padding_for_fp8",
    "moe_router_padding_for_quantization",
)


def _unsaid(values: Mapping[str, Any], explicit: Collection[str]) -> dict[str, None]:
    """Defaults of Megatron that a plan's command replaces where the user names nothing."""
    name = "moe_token_dispatcher_type"
    return {} if name in explicit or values.get(name) != "allgather" else {name: None}


def _require_degrees(values: Mapping[str, Any]) -> None:
    """Refuse degrees below 1, which Megatron divides by before it checks them."""
    for name in (*PARALLEL_ARGUMENTS, "micro_batch_size", "global_batch_size"):
        value = values.get(name)
        if name.endswith("_size") and isinstance(value, int) and value < 1:
            raise UserInputError(
                _flag(name),
                value=value,
                limit="it must be at least 1",
                fix="Correct the flag, or leave it out.",
            )


def refuse_unplannable(values: Mapping[str, Any], script: str) -> None:
    """Raise for models that this planner does not support, naming the flag."""
    for name, reason in _REFUSED_ARGUMENTS.items():
        if values.get(name):
            raise UnplannableModelError(
                _flag(name),
                value=values[name],
                limit=reason,
                fix="Launch this job without nest.",
            )
    words = PurePath(script).stem.split("_")
    layer_spec = " ".join(map(str, values.get("spec") or ()))
    found = next((w for w in _REFUSED_SCRIPTS if w in words or f"{w}." in layer_spec), None)
    if found:
        raise UnplannableModelError(
            "training script",
            value=script if found in words else layer_spec,
            limit="only GPT- and BERT-like models are supported",
            fix="Launch this job without nest.",
        )


def _spec(
    values: Mapping[str, Any], script: str, vocab_size: int | None
) -> tuple[TransformerSpec, list[str]]:
    family = ModelFamily.BERT if "bert" in PurePath(script).stem else ModelFamily.GPT
    notes: list[str] = []
    activation, gated = _activation(values)
    rotary = {"position_embedding_type": "rope"}
    spec = spec_from_arguments(
        {**values, **(rotary if values.get("use_rotary_position_embeddings") else {})},
        _flag,
        name=PurePath(script).stem or family.value,
        family=family,
        num_layers=_required(values, "num_layers", "encoder_num_layers"),
        hidden_size=_required(values, "hidden_size"),
        num_attention_heads=_required(values, "num_attention_heads"),
        seq_length=_required(values, "seq_length", "encoder_seq_length"),
        vocab_size=vocab_size or _vocab_size(values, family, notes),
        vocab_is_padded=vocab_size is None and bool(values.get("padded_vocab_size")),
        activation=activation,
        gated_linear_unit=gated,
        source="Megatron-LM arguments",
    )
    return spec, notes


def _flag(name: str) -> str:
    """An argument as it is typed."""
    return f"--{name.replace('_', '-')}"


def _required(values: Mapping[str, Any], *names: str) -> int:
    for name in names:
        if values.get(name) is not None:
            return int(values[name])
    raise UserInputError(
        _flag(names[0]),
        value=None,
        limit="the model's shape needs it",
        fix="Add it to the command.",
    )


def _vocab_size(values: Mapping[str, Any], family: ModelFamily, notes: list[str]) -> int:
    """Vocabulary rows before padding; the null tokenizer adds an end-of-document token."""
    if values.get("padded_vocab_size"):
        return int(values["padded_vocab_size"])
    given = values.get("vocab_size")
    tokenizer = values.get("tokenizer_type") or _DEFAULT_TOKENIZERS[family]
    if given is not None:
        return int(given) + (tokenizer == "NullTokenizer")
    if tokenizer in _TOKENIZER_ROWS:
        rows = _TOKENIZER_ROWS[tokenizer]
        notes.append(f"vocab_size is not given; {rows} is assumed from {tokenizer}.")
        return rows
    raise UserInputError(
        "--vocab-size",
        value=None,
        limit=f"it comes from the files of {tokenizer}, which are not read",
        fix="Add --vocab-size with the tokenizer's number of tokens.",
    )


def _activation(values: Mapping[str, Any]) -> tuple[str, bool]:
    if values.get("swiglu"):
        return "silu", True
    if values.get("squared_relu"):
        return "squared_relu", False
    if values.get("quick_geglu"):
        return "quick_gelu", True
    return "gelu", False


def _precision(values: Mapping[str, Any]) -> Precision:
    if values.get("fp16") and values.get("bf16"):
        raise UserInputError(
            "--fp16",
            value=True,
            limit="--bf16 is given as well, and Megatron takes one",
            fix="Drop one of the two.",
        )
    if values.get("fp8") and values.get("fp4"):
        raise UserInputError(
            "--fp4-format",
            value=values["fp4"],
            limit="--fp8-format is given as well, and Megatron takes one",
            fix="Drop one of the two.",
        )
    if values.get("fp8") or values.get("fp4"):
        return Precision.FP8 if values.get("fp8") else Precision.NVFP4
    if values.get("bf16"):
        return Precision.BF16
    return Precision.FP16 if values.get("fp16") else Precision.FP32


def read_recompute(values: Mapping[str, Any]) -> Recompute | None:
    """The user's recomputation, ``None`` if they said nothing of it."""
    granularity = values.get("recompute_granularity")
    if values.get("recompute_activations"):
        granularity = "selective"
    modules = list(values.get("recompute_modules") or ["core_attn"])
    if values.get("moe_layer_recompute"):
        granularity, modules = "selective", [*modules, "moe"]
    if granularity is None:
        return None
    if granularity == "full":
        method = values.get("recompute_method")
        return Recompute(
            granularity=RecomputeGranularity.FULL,
            method=RecomputeMethod(method) if method is not None else None,
            num_layers=values.get("recompute_num_layers"),
        )
    return selective_recompute(modules)


def read_zero(values: Mapping[str, Any]) -> ZeroStage | None:
    """The user's ZeRO stage, ``None`` if they said nothing of it."""
    if values.get("use_megatron_fsdp"):
        return _STRATEGIES[values.get("data_parallel_sharding_strategy") or "no_shard"]
    if values.get("use_torch_fsdp2"):
        return ZeroStage.WEIGHTS
    return ZeroStage.OPTIMIZER if values.get("use_distributed_optimizer") else None


def _sharding(values: Mapping[str, Any]) -> DataParallelSharding:
    if values.get("use_megatron_fsdp"):
        if values.get("megatron_fsdp_version") == 2:
            raise UserInputError(
                "--megatron-fsdp-version",
                value=2,
                limit="it takes neither the distributed optimizer nor tensor, pipeline or context "
                "parallelism, and is not planned",
                fix="Use version 1, or launch without nest.",
            )
        return DataParallelSharding.MEGATRON_FSDP
    if values.get("use_torch_fsdp2"):
        return DataParallelSharding.TORCH_FSDP2
    return DataParallelSharding.DDP


def _batch_unit(values: Mapping[str, Any]) -> int | None:
    """What the batches of a growing run have in common; each must divide over the replicas.

    Source: ``RampupBatchsizeNumMicroBatchesCalculator``.
    """
    growth, last = values.get("rampup_batch_size"), values.get("global_batch_size")
    if not growth:
        return None
    first, step = int(growth[0]), int(growth[1])
    return math.gcd(first, step, int(last or first))


def _job_notes(values: Mapping[str, Any]) -> list[str]:
    notes = []
    if unit := _batch_unit(values):
        notes.append(
            f"The batch grows in multiples of {unit}: only layouts are searched whose replicas and "
            "micro batches divide that; time is for the final size."
        )
    engine = _name(values.get("transformer_impl") or "transformer_engine")
    backend = _name(values.get("attention_backend") or "auto")
    if engine == "local" or backend in ("unfused", "local"):
        notes.append(
            "Attention is priced with its score matrices kept, as what you run keeps them."
        )
    if values.get("tp_comm_overlap"):
        notes.append("--tp-comm-overlap is kept but not priced; tensor parallelism will be faster.")
    return [*notes, *unpriced(values)]


def _name(value: object) -> str:
    """An enum's or a torch type's short name (at hook time Megatron has already converted it)."""
    return str(getattr(value, "name", value))
