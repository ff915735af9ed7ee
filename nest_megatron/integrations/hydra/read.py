"""An application's fields as a model and a job: Megatron's names, or those of NeMo 1.

Source: ``MegatronGPTModel.build_transformer_config`` and
``MegatronBaseModel.build_transformer_config`` of NeMo 2.0.0.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from nest_megatron.cluster.records import Precision
from nest_megatron.config.catalogue import read_spec, with_seq_length
from nest_megatron.config.compose import Settings
from nest_megatron.config.job import Job
from nest_megatron.config.overrides import leaves, value_text
from nest_megatron.cost_model.memory_flags import READ
from nest_megatron.errors import UserInputError, nearest
from nest_megatron.integrations.architecture import CLASSIFIED, OF_FAMILIES, REFUSED, unplannable
from nest_megatron.integrations.hydra.view import SPELLINGS, AppView, has_path, raw_value
from nest_megatron.integrations.megatron_lm.read import job_from_values
from nest_megatron.integrations.recipe import lightning_precision
from nest_megatron.layout.layout import LAYOUT_ARGUMENTS
from nest_megatron.model.arguments import EXPERT_NAMES, LINEAR_NAMES, SAME_NAMES
from nest_megatron.model.spec import TransformerSpec

#: Megatron's names, by which any application may have its fields.
_NAMES = (
    *SAME_NAMES,
    *EXPERT_NAMES,
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "seq_length",
    "vocab_size",
    "padded_vocab_size",
    "tokenizer_type",
    "window_size",
    "window_attn_skip_freq",
    "swiglu",
    "squared_relu",
    "quick_geglu",
    "num_experts",
    "moe_layer_freq",
    "mtp_num_layers",
    *LINEAR_NAMES,
    "experimental_attention_variant",
    "linear_attention_freq",
    "no_rope_freq",
    "is_hybrid_model",
    "hybrid_override_pattern",
    "hybrid_attention_ratio",
    "hybrid_mlp_ratio",
    "global_batch_size",
    "rampup_batch_size",
    *READ,
)
#: NeMo's name -> Megatron's, where only the name differs.
_RENAMED = {
    "encoder_seq_length": "seq_length",
    "override_vocab_size": "padded_vocab_size",
    "rotary_percentage": "rotary_percent",
    "num_moe_experts": "num_experts",
    "bias": "add_bias_linear",
    "qkv_bias": "add_qkv_bias",
    "fp8_params": "fp8_param_gather",
    "ub_tp_comm_overlap": "tp_comm_overlap",
}
_LAYERNORMS = ("layernorm", "layernorm1p", "low_precision_layernorm")
#: NeMo's activations: what Megatron is told, and what the model has where Megatron has no flag.
_ACTIVATIONS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "gelu": ("", {}),
    "swiglu": ("swiglu", {}),
    "fast-swiglu": ("swiglu", {}),
    "squared-relu": ("squared_relu", {}),
    "geglu": ("", {"activation": "gelu", "gated_linear_unit": True}),
    "fast-geglu": ("", {"activation": "gelu", "gated_linear_unit": True}),
}
_REFUSED: Mapping[str, str] = {
    "fsdp": "torch's FSDP is not supported",
    "num_micro_batches_with_partial_activation_checkpoints": "recomputation that changes from "
    "micro batch to micro batch is not supported",
    "activations_checkpoint_layers_per_pipeline": "recomputation that changes from stage to stage "
    "is not supported",
    "drop_layers": "layers that are left out are not supported",
    "encoder": "encoder-decoder models have two stacks",
    "decoder": "encoder-decoder models have two stacks",
    "hyena": "convolution layers are not supported",
    "step_batch_size_schedule": "a schedule of batch sizes is not read of an application",
}
#: What is read of an application whose model is named.
_OF_THE_JOB = ("global_batch_size", "rampup_batch_size", *READ)
_OF_THE_MODEL = tuple(name for name in _NAMES if name not in READ)
#: Whatever ``nest.fields`` may give a place.
_KNOWN = frozenset(
    (
        *_NAMES,
        *_RENAMED,
        *_REFUSED,
        *CLASSIFIED,
        *LAYOUT_ARGUMENTS,
        *(name for names in SPELLINGS.values() for name in names),
        "activation",
        "data_parallel_size",
        "mcore_gpt",
        "micro_batch_size",
        "num_gpus",
        "optim",
        "precision",
        "share_embeddings_and_output_weights",
        "tokenizer",
        "use_tp_pp_dp_mapping",
    )
)
#: Likeness from which a field of the model is taken for another that is misspelt.
_NEARLY = 0.9
#: Ends of the paths of fields that make another job of it, or leave it less memory.
_OTHER_JOB = re.compile(
    r"offload(ing)?(_\w+)?$|lora[._](rank|dim|r)$|dynamic_(bsz|batch(_size|es)?)$|"
    r"memory_(utili[sz]ation|fraction|share|limit)$|mem_fraction(_static)?$"
)
#: Any of these names says it -> what Megatron does where none does.
_ASSUMED: Mapping[tuple[str, ...], str] = {
    ("position_embedding_type",): "learned positions",
    (
        "untie_embeddings_and_output_weights",
        "share_embeddings_and_output_weights",
    ): "embeddings shared with the output",
    ("normalization",): "LayerNorm",
    ("add_bias_linear", "bias"): "biases in linear layers",
    ("activation", "swiglu", "squared_relu", "quick_geglu"): "GELU without a gate",
    ("ffn_hidden_size",): "a feed-forward size of 4 times the hidden size, or of two thirds of it "
    "with a gate",
    ("num_query_groups",): "as many key-value heads as heads",
    ("hidden_dropout",): "a dropout of 0.1",
    ("precision", "bf16", "fp16"): "bf16",
}


def read_app(view: AppView, composed: Settings) -> Job:
    """The job of an application.

    Args:
        composed: the planning job's settings; a model named there is the application's.

    Raises:
        UnplannableModelError: for a model that this planner does not support.
        UserInputError: if a size is missing or impossible, naming where it could lie.
    """
    _require_known_fields(view)
    _refuse_unplannable(view)
    values = _values(view)
    if composed.train.global_batch_size is None:
        _require(values, "global_batch_size", view)
    if composed.model is not None:
        job = _named(read_spec(composed), values)
        own = composed.train.seq_length is None and values.get("seq_length") is None
        asked = [_unsaid_length(job.spec, view)] if own else []
        return dataclasses.replace(job, notes=(*job.notes, *asked, *_unread_notes(view)))
    for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length"):
        _require(values, name, view)
    job = job_from_values(values, explicit=())
    name = str(view.at("name") or "model")
    activation = view.value("activation")
    beyond_flags = {} if activation is None else _activation(activation)[1]
    source = "a Hydra application"
    return dataclasses.replace(
        job,
        spec=dataclasses.replace(job.spec, **beyond_flags, name=name, source=source),
        notes=(*job.notes, *_assumptions(view)),
    )


def _named(spec: TransformerSpec, values: Mapping[str, Any]) -> Job:
    """A model of the catalogue with the application's batch, sequence and number format."""
    spec = with_seq_length(spec, values.get("seq_length"))
    own = {name: values[name] for name in _OF_THE_JOB if name in values}
    sizes = ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "seq_length")
    shape = {name: getattr(spec, name) for name in sizes}  # as much as a job needs to be read
    shape["padded_vocab_size"] = spec.vocab_size
    job = job_from_values({**own, **shape}, explicit=())
    return dataclasses.replace(job, spec=spec)


def _values(view: AppView) -> dict[str, Any]:
    """The application's fields as Megatron's arguments; what it does not have is left out."""
    values = {name: view.value(name) for name in _NAMES}
    for theirs, ours in _RENAMED.items():
        if values.get(ours) is None:
            values[ours] = view.value(theirs)
    values |= _translated(view)
    values = {name: value for name, value in values.items() if value is not None}
    values["group_query_attention"] = "num_query_groups" in values
    return values


def _translated(view: AppView) -> dict[str, Any]:
    values: dict[str, Any] = dict(_precision(view))
    norm, activation = str(view.value("normalization")).lower(), view.value("activation")
    if norm in (*_LAYERNORMS, "rmsnorm"):
        values["normalization"] = "RMSNorm" if norm == "rmsnorm" else "LayerNorm"
        values["apply_layernorm_1p"] = norm == "layernorm1p"
    if activation is not None:
        flag, _ = _activation(activation)
        values |= {flag: True} if flag else {}
    shared = view.value("share_embeddings_and_output_weights")
    if shared is not None:
        values["untie_embeddings_and_output_weights"] = not shared
    tokenizer = view.value("tokenizer")
    if isinstance(tokenizer, Mapping) and view.value("tokenizer_type") is None:
        values["tokenizer_type"] = tokenizer.get("type")
    optimizer = view.value("optim")
    if isinstance(optimizer, Mapping) and view.value("use_distributed_optimizer") is None:
        values["use_distributed_optimizer"] = "dist" in str(optimizer.get("name"))
    return values


def _precision(view: AppView) -> Mapping[str, bool]:
    """The number format, from Lightning's ``trainer.precision`` and NeMo's ``model.fp8``."""
    if view.value("bf16") or view.value("fp16"):
        return {}
    stated = view.value("precision") or view.at("trainer.precision")
    if stated is None:
        return {"bf16": True}
    kind = lightning_precision(stated, "trainer.precision")
    return {} if kind is Precision.FP32 else {kind.value: True}  # which has no switch


def _activation(name: str) -> tuple[str, dict[str, Any]]:
    if name not in _ACTIVATIONS:
        raise unplannable("model.activation", name, f"supported are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _refuse_unplannable(view: AppView) -> None:
    mapped = view.settings.fields.values()
    unread = (n for n in OF_FAMILIES - {*_NAMES} if view.own_path(n) not in mapped)
    of_families = dict.fromkeys(sorted(unread), "it is not read of an application")
    for name, reason in {**of_families, **REFUSED, **_REFUSED}.items():
        if value := view.value(name):
            shown = value if isinstance(value, int | str) else name
            raise unplannable(f"{view.settings.root}.{name}", shown, reason)
    for path in ("peft", view.own_path("peft")):
        if (value := view.at(path)) and _scheme(value) not in (None, "none"):
            raise unplannable(path, _scheme(value), "adapters of an application are not read")
    if view.value("mcore_gpt") is False:
        lacking = "NeMo's own layers are not supported, only megatron-core's"
        raise unplannable(f"{view.settings.root}.mcore_gpt", False, lacking)


def _scheme(peft: Any) -> Any:
    """What an application calls its adapters: NeMo 1 and Megatron-Bridge each in their own way."""
    if not isinstance(peft, Mapping):
        return peft
    names = ("peft_scheme", "scheme", "_target_")
    return next((peft[name] for name in names if peft.get(name) is not None), None)


def _require(values: Mapping[str, Any], name: str, view: AppView) -> None:
    if values.get(name) is None:
        fix = f"Say where it lies, +nest.fields.{name}=PATH"
        fix += "." if name == "global_batch_size" else ", or name the model, nest.model=NAME."
        limit = f"the application has no {view.own_path(name)}"
        raise UserInputError(name, None, limit, fix)


def _require_known_fields(view: AppView) -> None:
    """Refuse names in ``nest.fields`` that nothing reads, and misspelt fields of the model."""
    for name, path in view.settings.fields.items():
        if name not in _KNOWN:
            limit = "a plan neither reads nor sets such a field"
            fix = nearest(name, _KNOWN)
            raise UserInputError(f"nest.fields.{name}", path, limit, fix)
    unsaid = [name for name in _OF_THE_MODEL if not _is_said(view, name)]
    for name in _node(view, view.settings.root):
        close = difflib.get_close_matches(name, unsaid, n=1, cutoff=_NEARLY)
        if close and name not in _KNOWN:
            path, limit = (
                view.own_path(name),
                f"there is no such field, and {close[0]} is not given",
            )
            fix = f"Write {close[0]}, or say where it lies: +nest.fields.{close[0]}=PATH."
            raise UserInputError(path, view.at(path), limit, fix)


def _assumptions(view: AppView) -> Iterator[str]:
    """What was assumed of the model, and what beside its fields was not read, as notes."""
    unsaid = [
        f"{names[0]} ({default})"
        for names, default in _ASSUMED.items()
        if not any(_is_said(view, name) for name in names)
        and (names[0] != "precision" or view.at("trainer.precision") is None)
    ]
    if unsaid:
        listed = ", ".join(unsaid)
        yield (
            f"The application leaves these open, and in brackets is what is assumed: {listed}. "
            "+nest.fields.NAME=PATH says where one lies."
        )
    yield from _unread_notes(view)


def _unsaid_length(spec: TransformerSpec, view: AppView) -> str:
    return (
        f"The application has no {view.own_path('seq_length')}: sequences of {spec.seq_length:,} "
        f"tokens are planned, as {spec.name} has them. +nest.fields.seq_length=PATH says where it "
        "lies, +nest.overrides.train.seq_length=N what it is."
    )


def _unread_notes(view: AppView) -> Iterator[str]:
    if unread := sorted(_beside(view)):
        yield f"Fields beside those of the model that are not read: {', '.join(unread)}."
    if others := sorted(_of_another_job(view)):
        yield (
            "Fields that are not read, though with them the job has other work or less memory: "
            f"{', '.join(others)}. It is planned without; +nest.overrides.memory.margin=0.3 keeps "
            "30 % of the memory free."
        )


def _of_another_job(view: AppView) -> Iterator[str]:
    """Fields that are set anywhere, change the job, and that nothing reads."""
    read = {*view.settings.fields.values(), *map(view.own_path, _KNOWN)}
    for path, _ in leaves(view.raw):
        if path.startswith("nest.") or path in read or not _OTHER_JOB.search(path):
            continue
        if (value := view.at(path)) not in (None, False, 0, "", "none", "null"):
            yield f"{path}={value_text(value)}"


def _is_said(view: AppView, name: str) -> bool:
    return name in view.settings.fields or has_path(view.raw, view.own_path(name))


def _node(view: AppView, path: str) -> Mapping[str, Any]:
    node = raw_value(view.raw, path) if path else view.raw
    return node if isinstance(node, Mapping) else {}


def _beside(view: AppView) -> Iterator[str]:
    """Fields that are set in the nodes that ``nest.fields`` names, and that nothing reads."""
    mapped = set(view.settings.fields.values())
    for parent in {path.rpartition(".")[0] for path in mapped}:
        for name, value in _node(view, parent).items():
            path = f"{parent}.{name}" if parent else str(name)
            is_read = path in mapped or (parent == view.settings.root and name in _KNOWN)
            if not is_read and isinstance(value, bool | int | float | str) and value is not False:
                yield path
