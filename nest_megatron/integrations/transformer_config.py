"""megatron-core's ``TransformerConfig``, and what NeMo and Megatron-Bridge add to it, as a model.

Fields are read by name from anything that has them: a built config, a provider, or the Fiddle
``Config`` that would build one. What is ``None`` there follows Megatron's own default rules.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from nest_megatron.errors import UnplannableModelError
from nest_megatron.integrations.architecture import refused_class, refused_field, refused_model
from nest_megatron.integrations.fields import class_names, shown, value_or
from nest_megatron.model.arguments import SAME_NAMES, spec_from_arguments
from nest_megatron.model.spec import ModelFamily, TransformerSpec

#: Name of an activation function -> the name in a ``TransformerSpec``.
_ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "fast_gelu": "gelu",
    "openai_gelu": "gelu",
    "gelu_impl": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "quick_gelu": "quick_gelu",
    "squared_relu": "squared_relu",
}

#: What else the configuration names as Megatron's arguments do.
_READ = (
    "num_attention_heads",
    "num_query_groups",
    "layernorm_zero_centered_gamma",
    "window_size",
    "window_attn_skip_freq",
    "mtp_num_layers",
    "moe_layer_freq",
    "moe_ffn_hidden_size",
    "moe_router_topk",
    "moe_shared_expert_intermediate_size",
    "moe_router_enable_expert_bias",
)
_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")

#: Pattern in a class's name -> what this planner lacks to plan such a model: a better reason for
#: families that are well known; any other that is not known is refused by ``architecture``.
_REFUSED_CLASSES: Mapping[str, str] = {
    "Mamba": "state-space layers are not supported",
    "^SSM": "state-space layers are not supported",
    "NemotronH": "state-space layers are not supported",
    "Hyena": "convolution layers are not supported",
    "^T5": "encoder-decoder models have two stacks",
    "Gemma2": "its extra norms and capped scores are not supported",
    "Gemma3": "its extra norms and two kinds of windows are not supported",
    "Llama4": "its chunked attention and two kinds of layers are not supported",
    "Qwen3Next": "linear-attention layers are not supported",
    "Heterogeneous": "every layer may have another shape",
    "VL(Model|Config|Provider|$)": "vision towers are not supported",
    "Vision": "vision towers are not supported",
    "Llava": "vision towers are not supported",
    "Neva": "vision towers are not supported",
    "Ministral3": "vision towers are not supported",
    "Omni": "multimodal models are not supported",
    "Audio": "multimodal models are not supported",
    "Diffusion": "diffusion models are not supported",
    "^DiT": "diffusion models are not supported",
    "Flux": "diffusion models are not supported",
    "Embedding": "embedding models have another head and another batch",
    "Reranker": "rerankers have another head and another batch",
}


def spec_from_transformer_config(
    config: Any, *, seq_length: int, vocab_size: int, vocab_is_padded: bool
) -> TransformerSpec:
    """Read the shape of a model.

    Args:
        seq_length: tokens of one training sample, which the data decides.
        vocab_size: rows of the embedding; before padding, unless ``vocab_is_padded``.

    Raises:
        UnplannableModelError: if this planner does not support such a model, naming what it lacks.
        UserInputError: if the shape is impossible.

    Source: ``megatron.core.transformer.transformer_config``, NeMo's ``GPTConfig``,
    Megatron-Bridge's ``GPTModelProvider``.
    """
    refuse_unplannable(config)
    kind = value_or(config, "position_embedding_type", "rope")
    longest = max(seq_length, value_or(config, "seq_length", 0))
    values = {
        **{name: value_or(config, name, None) for name in (*SAME_NAMES, *_READ)},
        "group_query_attention": True,
        "num_experts": value_or(config, "num_moe_experts", None),
        "position_embedding_type": kind,
        "max_position_embeddings": longest if kind == "learned_absolute" else None,
        "rotary_base": int(value_or(config, "rotary_base", 10_000)),
    }
    if not values["multi_latent_attention"]:
        values |= dict.fromkeys(_LATENT)
    return spec_from_arguments(
        values,
        "model.{}".format,
        name=class_names(config)[0],
        family=_family(config),
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=value_or(config, "ffn_hidden_size", 4 * config.hidden_size),
        seq_length=seq_length,
        vocab_size=vocab_size,
        vocab_is_padded=vocab_is_padded,
        activation=_activation(config),
        gated_linear_unit=value_or(config, "gated_linear_unit", False),
        untie_embeddings_and_output_weights=not value_or(
            config, "share_embeddings_and_output_weights", True
        ),
        source="the framework's own configuration",
    )


def refuse_unplannable(config: Any, *wrappers: Any) -> None:
    """Raise for models that this planner does not support.

    Args:
        wrappers: what holds the config, such as NeMo's model class; looked at by name.

    Raises:
        UnplannableModelError: naming the class or the field, and what is lacking.
    """
    names = [name for each in (*wrappers, config) for name in class_names(each)]
    for name in names:
        lacking = next(
            (why for part, why in _REFUSED_CLASSES.items() if re.search(part, name)), None
        )
        if lacking:
            raise _unplannable("model", name, lacking)
    classes = (refused_class(config), *map(refused_model, wrappers))
    for name, lacking in filter(None, classes):
        raise _unplannable("model", name, lacking)
    if (refused := refused_field(config)) is not None:
        name, value, lacking = refused
        raise _unplannable(f"model.{name}", shown(value), lacking)
    for field in ("num_layers", "hidden_size", "num_attention_heads"):
        if not value_or(config, field, 0):
            raise _unplannable(f"model.{field}", None, "its layers are not megatron-core's")


def refuse_adapters(adapters: Any, where: str) -> None:
    """Raise for a job that trains adapters beside frozen weights (LoRA and its like).

    Args:
        adapters: what the job states of them, or ``None``.
        where: the field that states it.

    Raises:
        UnplannableModelError: naming the field.
    """
    if adapters is not None:
        name = class_names(adapters)[0]
        raise _unplannable(where, name, "weights that are not trained are not supported")


def _family(config: Any) -> ModelFamily:
    bert = any("Bert" in name for name in class_names(config))
    return ModelFamily.BERT if bert else ModelFamily.GPT


def _activation(config: Any) -> str:
    function = value_or(config, "activation_func", None)
    if function is None:
        return "gelu"
    function = getattr(function, "func", function)  # functools.partial(gelu, approximate=...)
    name = function if isinstance(function, str) else getattr(function, "__name__", repr(function))
    if name not in _ACTIVATIONS:
        raise _unplannable(
            "model.activation_func", name, f"supported are {', '.join(sorted(_ACTIVATIONS))}"
        )
    return _ACTIVATIONS[name]


def _unplannable(what: str, value: object, limit: str) -> UnplannableModelError:
    return UnplannableModelError(
        what, value=value, limit=limit, fix="Launch this job without nest."
    )
