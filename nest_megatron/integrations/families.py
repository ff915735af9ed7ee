"""Families whose layers a framework builds by code of its own: what they are, what that code needs.

Everything else of a family's configuration is read as of any other model (``recipe.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from nest_megatron.config.job import Requirement
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.architecture import layer_builder, unplannable
from nest_megatron.integrations.fields import class_names, value_or
from nest_megatron.model.encoder import EncoderSpec
from nest_megatron.model.heterogeneous import read_heterogeneous_layers
from nest_megatron.model.hugging_face_vision import read_vision_config
from nest_megatron.model.layer_pattern import pattern_from_ratios
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.model.variant import ModelVariant, NormPlacement

_CONTEXT = "context_parallel_size"
_VIRTUAL = "virtual_pipeline_model_parallel_size"
_TENSOR = "tensor_model_parallel_size"


def _nothing(_: Any, __: int) -> dict[str, Any]:
    return {}


def _no_needs(_: TransformerSpec) -> Mapping[str, str]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family of models.

    Args:
        fields: of a ``TransformerSpec``, by Megatron's names, from a configuration and the tokens
            of a sample: those that the family spells otherwise, or that its code fixes.
        ones: the degrees that its code takes only as 1, and why, for a model of it.
        packs: its attention takes packed sequences.
        recomputes_layers: whole layers can be recomputed.
    """

    fields: Callable[[Any, int], dict[str, Any]] = _nothing
    ones: Callable[[TransformerSpec], Mapping[str, str]] = _no_needs
    packs: bool = True
    recomputes_layers: bool = True


def family_fields(config: Any, seq_length: int) -> dict[str, Any]:
    """What a configuration's family says of its layers; nothing for megatron-core's own."""
    family = _family(config)
    return {} if family is None else family.fields(config, seq_length)


def family_requirements(config: Any, spec: TransformerSpec) -> dict[str, Requirement]:
    """The degrees that the code of a configuration's family fixes."""
    family = _family(config)
    ones = {} if family is None else family.ones(spec)
    fix = "plan another model"
    return {
        name: Requirement(value=1, reason=why, fix=fix, who=class_names(config)[0])
        for name, why in ones.items()
    }


def recomputes_layers(config: Any) -> bool:
    """Whether the code of a configuration's family can recompute whole layers."""
    family = _family(config)
    return family is None or family.recomputes_layers


def refuse_packs(config: Any, where: str, size: int | None) -> None:
    """Raise for packs of ``size`` tokens where the code of a configuration's family takes none."""
    family = _family(config)
    if size is not None and family is not None and not family.packs:
        limit = f"the attention of {class_names(config)[0]} takes no packed sequences"
        raise UserInputError(
            f"{where}: packed_sequence_size", size, limit, fix="Train without packing."
        )


def _family(config: Any) -> Family | None:
    return next((FAMILIES[name] for name in class_names(config) if name in FAMILIES), None)


def _llama4(config: Any, seq_length: int) -> dict[str, Any]:
    """NeMo cuts sequences that are longer than a chunk on every layer, rotated or not.

    Source: ``nemo.collections.llm.gpt.model.llama4_utils.Llama4SelfAttention.forward``.
    """
    chunk = value_or(config, "attention_chunk_size", seq_length)
    return {"attention_chunk_size": chunk if seq_length > chunk else None}


def _uncut(spec: TransformerSpec) -> Mapping[str, str]:
    why = "its chunks are cut from the part of a sequence that one rank holds"
    return {} if spec.attention_chunk_size is None else {_CONTEXT: why}


def _hybrid(config: Any, _: int) -> dict[str, Any]:
    """A pattern, or the shares that make one; 0.16.1 has no MTP layers there."""
    pattern = value_or(config, "hybrid_override_pattern", "")
    if not pattern:
        shares = (value_or(config, f"hybrid_{name}_ratio", 0.0) for name in ("attention", "mlp"))
        pattern = pattern_from_ratios(config.num_layers, *shares)
    return {"hybrid_layer_pattern": pattern}


def _nemotron_h(config: Any, seq_length: int) -> dict[str, Any]:
    """NeMo writes the squared ReLU of these models as a function without a name."""
    function = value_or(config, "activation_func", None)
    own = getattr(function, "__qualname__", "").startswith("NemotronHConfigBase.")
    return _hybrid(config, seq_length) | ({"activation": "squared_relu"} if own else {})


def _heterogeneous(config: Any, _: int) -> dict[str, Any]:
    """The layers of ``block_configs``, which the text in a configuration or its file holds."""
    builder = layer_builder(value_or(config, "transformer_layer_spec", None))
    if builder not in _HETEROGENEOUS_LAYERS:
        lacking = f"only {' and '.join(_HETEROGENEOUS_LAYERS)} build heterogeneous layers"
        raise unplannable("model.transformer_layer_spec", builder, lacking)
    names = ("heterogeneous_layers_config_encoded_json", "heterogeneous_layers_config_path")
    text, path = (value_or(config, name, None) for name in names)
    heads = config.num_attention_heads
    layers = read_heterogeneous_layers(
        text,
        path,
        "model.{}".format,
        hidden_size=config.hidden_size,
        num_attention_heads=heads,
        num_query_groups=value_or(config, "num_query_groups", None) or heads,
        ffn_hidden_size=value_or(config, "ffn_hidden_size", None) or 4 * config.hidden_size,
    )
    return {"heterogeneous_layers": layers}


def _gemma2(config: Any, _: int) -> dict[str, Any]:
    """Windows are masks over the whole square of scores, and save nothing."""
    variant = ModelVariant(
        norm_placement=NormPlacement.SANDWICH,
        attn_logit_softcapping=value_or(config, "attn_logit_softcapping", 0.0) or None,
        final_logit_softcapping=value_or(config, "final_logit_softcapping", 0.0) or None,
    )
    return {"variant": variant, "window_size": None}


def _gemma3(config: Any, _: int) -> dict[str, Any]:
    """Of ``interleaved_attn_pattern`` layers the last ones attend in full; 1B has no image tower.

    Source: ``Gemma3TEDotProductAttention`` of both frameworks.
    """
    local, full = value_or(config, "interleaved_attn_pattern", (5, 1))
    if full != 1:
        lacking = "after the layers with a window there must be one without"
        raise unplannable("model.interleaved_attn_pattern", (local, full), lacking)
    if value_or(config, "is_vision_language", False):
        raise unplannable("model.is_vision_language", True, "its masks are not supported")
    return {
        "variant": ModelVariant(norm_placement=NormPlacement.SANDWICH),
        "qk_layernorm": True,
        "window_size": (value_or(config, "window_size", 512), 0),
        "window_attn_skip_freq": local + full,
        "rotary_base": max(value_or(config, "rotary_base", (10_000, 1_000_000))),
    }


def _olmoe(_: Any, __: int) -> dict[str, Any]:
    return {"variant": ModelVariant(qk_norm_full_width=True)}


def _qwen_vl(config: Any, _: int) -> dict[str, Any]:
    """An encoder of transformers' own, whole on every rank of the first stage.

    Rotations over time, height and width are as many as those of a text.

    Source: ``Qwen25VLModel`` and ``Qwen3VLModel`` of Megatron-Bridge.
    """
    if value_or(config, "freeze_language_model", False):
        lacking = "only its encoder or projector would be trained"
        raise unplannable("model.freeze_language_model", True, lacking)
    vision = config.vision_config
    fields = vision.to_dict() if hasattr(vision, "to_dict") else vars(vision)
    read = read_vision_config(fields, class_names(config)[0], str(fields.get("model_type")))
    if read is None:
        lacking = "no such encoder of images is known"
        raise unplannable("model.vision_config", fields.get("model_type"), lacking)
    encoder = EncoderSpec(
        **read.shape,
        frozen=value_or(config, "freeze_vision_model", False),
        projector_frozen=value_or(config, "freeze_vision_projection", False),
    )
    return {"position_embedding_type": "rope", "vision": encoder}


_SQUARE = {_CONTEXT: "its attention keeps all scores and splits no sequence"}
_OF_NEMO_GEMMA3 = {
    _CONTEXT: "its configure_model refuses context parallelism",
    _VIRTUAL: "its configure_model refuses virtual stages",
}
_ONE_STAGE = {_VIRTUAL: "its layers are built for one stage a rank"}
_HETEROGENEOUS_LAYERS = ("heterogeneous_layer_spec", "get_gpt_heterogeneous_layer_spec")
_GEMMA2 = Family(fields=_gemma2, ones=lambda _: _SQUARE, packs=False)
_WHOLE_NORMS = {_TENSOR: "its norms of queries and keys are as wide as all heads on every rank"}

_WHOLE_SEQUENCES = {_CONTEXT: "its forward pass splits no sequence"}
_OF_QWEN3_VL = {**_WHOLE_SEQUENCES, _VIRTUAL: "its layers are not told their virtual stage"}

#: Base class of a family's configurations in NeMo or Megatron-Bridge -> the family.
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "MambaModelProvider": Family(fields=_hybrid),
        "NemotronHConfigBase": Family(fields=_nemotron_h),
        "SSMConfig": Family(fields=_hybrid),
        "HeterogeneousTransformerConfig": Family(fields=_heterogeneous, ones=lambda _: _ONE_STAGE),
        "Gemma2Config": _GEMMA2,
        "Gemma2ModelProvider": _GEMMA2,
        "Gemma3Config": Family(fields=_gemma3, ones=lambda _: _OF_NEMO_GEMMA3),
        # its rotary embedding is a pair of tensors, which CheckpointFunction does not save
        "Gemma3ModelProvider": Family(fields=_gemma3, recomputes_layers=False),
        "OlMoEModelProvider": Family(fields=_olmoe, ones=lambda _: _WHOLE_NORMS),
        "Qwen25VLModelProvider": Family(fields=_qwen_vl, ones=lambda _: _WHOLE_SEQUENCES),
        "Qwen3VLModelProvider": Family(fields=_qwen_vl, ones=lambda _: _OF_QWEN3_VL),
        "Qwen3VLMoEModelProvider": Family(fields=_qwen_vl, ones=lambda _: _OF_QWEN3_VL),
        "Llama4Config": Family(fields=_llama4, ones=_uncut),
    }
)
