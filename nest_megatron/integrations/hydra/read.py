"""An application's fields as a model and a job: Megatron's names, or those of NeMo 1.

Source: ``MegatronGPTModel.build_transformer_config`` and
``MegatronBaseModel.build_transformer_config`` of NeMo 2.0.0.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from nest_megatron.cluster.records import Precision
from nest_megatron.config.catalogue import read_spec, with_seq_length
from nest_megatron.config.compose import Settings
from nest_megatron.config.job import Job
from nest_megatron.config.overrides import leaves, value_text
from nest_megatron.cost_model.memory_flags import READ
from nest_megatron.errors import UserInputError, nearest
from nest_megatron.integrations.architecture import CLASSIFIED, OF_FAMILIES, REFUSED, unplannable
from nest_megatron.integrations.hydra.view import AppView, names_of, node_at
from nest_megatron.integrations.megatron_lm.read import job_from_values
from nest_megatron.integrations.recipe import SHAPE, lightning_precision
from nest_megatron.layout.layout import LAYOUT_ARGUMENTS

#: Megatron's names, by which any application may have its fields.
_NAMES = (
    *SHAPE,
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "seq_length",
    "vocab_size",
    "padded_vocab_size",
    "tokenizer_type",
    "swiglu",
    "squared_relu",
    "quick_geglu",
    "num_experts",
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
#: NeMo's activations -> Megatron's switch, of which it has none for ``geglu``.
_ACTIVATIONS = {
    "gelu": "gelu",
    "swiglu": "swiglu",
    "fast-swiglu": "swiglu",
    "squared-relu": "squared_relu",
    "geglu": "geglu",
    "fast-geglu": "geglu",
}
_REFUSED = {
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
_SIZES = ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "seq_length")
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
        *(name for item in LAYOUT_ARGUMENTS for name in names_of(item)),
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
_ASSUMED = {
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
        spec, unsaid = with_seq_length(read_spec(composed), values.get("seq_length")), []
        stated = {
            **{name: values[name] for name in _OF_THE_JOB if name in values},
            **{name: getattr(spec, name) for name in _SIZES},  # as a job needs to be read
            "padded_vocab_size": spec.vocab_size,
        }
        job = dataclasses.replace(job_from_values(stated, explicit=()), spec=spec)
        if composed.train.seq_length is None and values.get("seq_length") is None:
            unsaid.append(
                f"The application has no {view.own_path('seq_length')}: sequences of "
                f"{job.spec.seq_length:,} tokens are planned, as {job.spec.name} has them. "
                "+nest.fields.seq_length=PATH says where it lies, "
                "+nest.overrides.train.seq_length=N what it is."
            )
        return dataclasses.replace(job, notes=(*job.notes, *unsaid, *_unread_notes(view)))
    for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length"):
        _require(values, name, view)
    job = job_from_values(values, explicit=())
    gated: dict[str, Any] = (
        {"activation": "gelu", "gated_linear_unit": True} if "geglu" in values else {}
    )
    return dataclasses.replace(
        job,
        spec=dataclasses.replace(
            job.spec,
            **(gated if "geglu" in values else {}),
            name=str(view.at("name") or "model"),
            source="a Hydra application",
        ),
        notes=(*job.notes, *_assumptions(view)),
    )


def _values(view: AppView) -> dict[str, Any]:
    """The application's fields as Megatron's arguments; what it does not have is left out."""
    values = {name: view.value(name) for name in _NAMES}
    for theirs, ours in _RENAMED.items():
        if values.get(ours) is None:
            values[ours] = view.value(theirs)
    if not (view.value("bf16") or view.value("fp16")):
        stated = view.value("precision") or view.at("trainer.precision")
        kind = lightning_precision("bf16" if stated is None else stated, "trainer.precision")
        values[kind.value] = kind is not Precision.FP32 or None  # which has no switch
    norm, activation = str(view.value("normalization")).lower(), view.value("activation")
    if norm in (*_LAYERNORMS, "rmsnorm"):
        values["normalization"] = "RMSNorm" if norm == "rmsnorm" else "LayerNorm"
        values["apply_layernorm_1p"] = norm == "layernorm1p"
    if activation is not None:
        if activation not in _ACTIVATIONS:
            raise unplannable(
                "model.activation", activation, f"supported are {', '.join(_ACTIVATIONS)}"
            )
        values[_ACTIVATIONS[activation]] = True
    shared = view.value("share_embeddings_and_output_weights")
    if shared is not None:
        values["untie_embeddings_and_output_weights"] = not shared
    tokenizer = view.value("tokenizer")
    if isinstance(tokenizer, Mapping) and view.value("tokenizer_type") is None:
        values["tokenizer_type"] = tokenizer.get("type")
    optimizer = view.value("optim")
    if isinstance(optimizer, Mapping) and view.value("use_distributed_optimizer") is None:
        values["use_distributed_optimizer"] = "dist" in str(optimizer.get("name"))
    values = {name: value for name, value in values.items() if value is not None}
    values["group_query_attention"] = "num_query_groups" in values
    return values


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
        raise unplannable(
            f"{view.settings.root}.mcore_gpt",
            False,
            "NeMo's own layers are not supported, only megatron-core's",
        )


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
        raise UserInputError(name, None, f"the application has no {view.own_path(name)}", fix)


def _require_known_fields(view: AppView) -> None:
    """Refuse names in ``nest.fields`` that nothing reads, and misspelt fields of the model."""
    for name, path in view.settings.fields.items():
        if name not in _KNOWN:
            raise UserInputError(
                f"nest.fields.{name}",
                path,
                "a plan neither reads nor sets such a field",
                nearest(name, _KNOWN),
            )
    unsaid = [name for name in _OF_THE_MODEL if not _is_said(view, name)]
    for name in node_at(view.raw, view.settings.root):
        close = difflib.get_close_matches(name, unsaid, n=1, cutoff=_NEARLY)
        if close and name not in _KNOWN:
            path = view.own_path(name)
            raise UserInputError(
                path,
                view.at(path),
                f"there is no such field, and {close[0]} is not given",
                f"Write {close[0]}, or say where it lies: +nest.fields.{close[0]}=PATH.",
            )


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


def _unread_notes(view: AppView) -> Iterator[str]:
    mapped = set(view.settings.fields.values())
    if unread := sorted(_beside(view, mapped)):
        yield f"Fields beside those of the model that are not read: {', '.join(unread)}."
    read, set_elsewhere = {*mapped, *map(view.own_path, _KNOWN)}, []
    for path, _ in leaves(view.raw):
        if path.startswith("nest.") or path in read or not _OTHER_JOB.search(path):
            continue
        if (value := view.at(path)) not in (None, False, 0, "", "none", "null"):
            set_elsewhere.append(f"{path}={value_text(value)}")
    if set_elsewhere:
        yield (
            "Fields that are not read, though with them the job has other work or less memory: "
            f"{', '.join(sorted(set_elsewhere))}. It is planned without; "
            "+nest.overrides.memory.margin=0.3 keeps 30 % of the memory free."
        )


def _is_said(view: AppView, name: str) -> bool:
    return name in view.settings.fields or view.has(view.own_path(name))


def _beside(view: AppView, mapped: Collection[str]) -> Iterator[str]:
    """Fields that are set in the nodes that ``nest.fields`` names, and that nothing reads."""
    for parent in {path.rpartition(".")[0] for path in mapped}:
        for name, value in node_at(view.raw, parent).items():
            path = f"{parent}.{name}" if parent else str(name)
            is_read = path in mapped or (parent == view.settings.root and name in _KNOWN)
            if not is_read and isinstance(value, bool | int | float | str) and value is not False:
                yield path
