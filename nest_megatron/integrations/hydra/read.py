"""An application's fields as a model and a job: Megatron's names, or those of NeMo 1.

Source: ``MegatronGPTModel.build_transformer_config`` and
``MegatronBaseModel.build_transformer_config`` of NeMo 2.0.0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from nest_megatron.config.compose import Composed
from nest_megatron.config.job import Job
from nest_megatron.config.request import read_spec, with_seq_length
from nest_megatron.cost_model.memory_flags import READ
from nest_megatron.errors import UnplannableModelError, UserInputError
from nest_megatron.integrations.architecture import CLASSIFIED, REFUSED
from nest_megatron.integrations.hydra.assumed import assumptions, require_known_fields
from nest_megatron.integrations.hydra.view import SPELLINGS, AppView
from nest_megatron.integrations.megatron_lm.read import job_from_values
from nest_megatron.model.arguments import EXPERT_NAMES, SAME_NAMES
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.parallel.plan import ParallelChoice

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
_NORMALIZATIONS = {
    "layernorm": "LayerNorm",
    "layernorm1p": "LayerNorm",
    "low_precision_layernorm": "LayerNorm",
    "rmsnorm": "RMSNorm",
}
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
}
#: What is read of an application whose model is named.
_OF_THE_JOB = (
    "global_batch_size",
    "rampup_batch_size",
    *READ,
)
_OF_THE_MODEL = tuple(name for name in _NAMES if name not in READ)
#: Whatever ``nest.fields`` may give a place.
_KNOWN = frozenset(
    (
        *_NAMES,
        *_RENAMED,
        *_REFUSED,
        *CLASSIFIED,
        *(field.name for field in dataclasses.fields(ParallelChoice)),
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
#: Lightning's word -> the switch of Megatron; single precision has none.
_PRECISIONS: Mapping[str, dict[str, bool]] = {
    "bf16": {"bf16": True},
    "16": {"fp16": True},
    "fp16": {"fp16": True},
    "32": {},
    "fp32": {},
}


def read_app(view: AppView, composed: Composed) -> Job:
    """The job of an application.

    Args:
        composed: the planning job's settings; a model named there is the application's.

    Raises:
        UnplannableModelError: for a model that this planner does not support.
        UserInputError: if a size is missing or impossible, naming where it could lie.
    """
    require_known_fields(view, _KNOWN, _OF_THE_MODEL)
    _refuse_unplannable(view)
    values = _values(view)
    if composed.config.train.global_batch_size is None:
        _require(values, "global_batch_size", view)
    if composed.config.model is not None:
        return _named(read_spec(composed.config), values)
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
        notes=(*job.notes, *assumptions(view, _KNOWN)),
    )


def _named(spec: TransformerSpec, values: Mapping[str, Any]) -> Job:
    """A model of the catalogue with the application's batch, sequence and number format."""
    spec = with_seq_length(spec, values.get("seq_length"))
    own = {name: values[name] for name in _OF_THE_JOB if name in values}
    job = job_from_values({**own, **_least_shape(spec)}, explicit=())
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
    """What NeMo says in words of its own."""
    values: dict[str, Any] = dict(_precision(view))
    norm, activation = view.value("normalization"), view.value("activation")
    if isinstance(norm, str) and norm.lower() in _NORMALIZATIONS:
        values["normalization"] = _NORMALIZATIONS[norm.lower()]
        values["apply_layernorm_1p"] = norm.lower() == "layernorm1p"
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
    kind = str(stated).removesuffix("-mixed").removesuffix("-true")
    if kind not in _PRECISIONS:
        raise UserInputError(
            "trainer.precision",
            value=stated,
            limit="number formats of training are bf16, fp16 and 32",
            fix="Use bf16 or bf16-mixed.",
        )
    return _PRECISIONS[kind]


def _activation(name: str) -> tuple[str, dict[str, Any]]:
    if name not in _ACTIVATIONS:
        raise UnplannableModelError(
            "model.activation",
            value=name,
            limit=f"supported are {', '.join(_ACTIVATIONS)}",
            fix="Launch this job without nest.",
        )
    return _ACTIVATIONS[name]


def _refuse_unplannable(view: AppView) -> None:
    for name, reason in {**REFUSED, **_REFUSED}.items():
        value = view.value(name)
        if value:
            raise UnplannableModelError(
                f"{view.settings.root}.{name}",
                value=value if isinstance(value, int | str) else name,
                limit=reason,
                fix="Launch this job without nest.",
            )
    if view.value("mcore_gpt") is False:
        raise UnplannableModelError(
            f"{view.settings.root}.mcore_gpt",
            value=False,
            limit="NeMo's own layers are not supported, only megatron-core's",
            fix="Set it to true, or launch this job without nest.",
        )


def _least_shape(spec: TransformerSpec) -> dict[str, Any]:
    """As much of a named model as a job needs to be read."""
    names = ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "seq_length")
    return {**{name: getattr(spec, name) for name in names}, "padded_vocab_size": spec.vocab_size}


def _require(values: Mapping[str, Any], name: str, view: AppView) -> None:
    if values.get(name) is None:
        root = view.settings.root
        raise UserInputError(
            name,
            value=None,
            limit=f"the application has no {root}.{name}" if root else "the application has none",
            fix=f"Say where it lies, +nest.fields.{name}=PATH"
            + ("." if name == "global_batch_size" else ", or name the model, nest.model=NAME."),
        )
