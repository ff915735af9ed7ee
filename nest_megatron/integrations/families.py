"""Families whose layers a framework builds by code of its own: what they are, what that code needs.

Everything else of a family's configuration is read as of any other model (``recipe.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nest_megatron.config.job import Requirement
from nest_megatron.integrations.architecture import layer_builder, unplannable
from nest_megatron.integrations.fields import class_names, value_or
from nest_megatron.model.encoder import EncoderSpec
from nest_megatron.model.heterogeneous import read_heterogeneous_layers
from nest_megatron.model.hugging_face import read_vision_config
from nest_megatron.model.layer_pattern import pattern_from_ratios
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.model.variant import ModelVariant, NormPlacement


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family of models.

    Args:
        fields: of a ``TransformerSpec``, by Megatron's names, from a configuration: those that the
            family spells otherwise, or that its code fixes.
        ones: the degrees that its code takes only as 1, and why.
        cuts_chunks: they are so only where its attention is cut into chunks.
        packs: its attention takes packed sequences.
        recomputes_layers: whole layers can be recomputed.
        keeps_scores: its attention is ``DotProductAttention``, which is not fused.
    """

    fields: Callable[[Any], dict[str, Any]] = lambda _: {}
    ones: Mapping[str, str] = field(default_factory=dict)
    cuts_chunks: bool = False
    packs: bool = True
    recomputes_layers: bool = True
    keeps_scores: bool = False

    def requirements(self, name: str, spec: TransformerSpec) -> dict[str, Requirement]:
        """The degrees that its code fixes for a model, whose configuration's class is named."""
        if self.cuts_chunks and spec.attention_chunk_size is None:
            return {}
        fix = "plan another model"
        return {
            degree: Requirement(value=1, reason=why, fix=fix, who=name)
            for degree, why in self.ones.items()
        }


def family_of(config: Any) -> Family:
    """The family of a model's configuration; one without fields for megatron-core's own layers."""
    builder = layer_builder(value_or(config, "transformer_layer_spec"))
    names = (builder, *class_names(config))
    return next((FAMILIES[name] for name in names if name in FAMILIES), Family())


def _hybrid(config: Any) -> dict[str, Any]:
    """A pattern, or the shares that make one; 0.16.1 has no MTP layers there.

    Source: ``HybridModelProvider.finalize`` of Megatron-Bridge 0.6.
    """
    found = (value_or(config, f"hybrid_{name}_pattern") for name in ("layer", "override"))
    pattern = next(filter(None, found), "")
    if not pattern:
        shares = (value_or(config, f"hybrid_{name}_ratio", 0.0) for name in ("attention", "mlp"))
        pattern = pattern_from_ratios(config.num_layers, *shares)
    pattern = pattern.replace("|", "")
    main, predictors = pattern.partition("/")[0], value_or(config, "mtp_num_layers", 0)
    if (depth := value_or(config, "mtp_hybrid_override_pattern")) is not None:
        pattern = "/".join((main, *(depth,) * predictors))
    return {
        "hybrid_layer_pattern": pattern,
        "num_layers": len(main),
        "mtp_num_layers": predictors or None,
    }


def _nemotron_h(config: Any) -> dict[str, Any]:
    """NeMo writes the squared ReLU of these models as a function without a name."""
    function = value_or(config, "activation_func")
    own = getattr(function, "__qualname__", "").startswith("NemotronHConfigBase.")
    return _hybrid(config) | ({"activation": "squared_relu"} if own else {})


def _heterogeneous(config: Any) -> dict[str, Any]:
    """The layers of ``block_configs``, which the text in a configuration or its file holds."""
    builder = layer_builder(value_or(config, "transformer_layer_spec"))
    if builder not in _HETEROGENEOUS_LAYERS:
        raise unplannable(
            "model.transformer_layer_spec",
            builder,
            f"only {' and '.join(_HETEROGENEOUS_LAYERS)} build heterogeneous layers",
        )
    names = ("heterogeneous_layers_config_encoded_json", "heterogeneous_layers_config_path")
    text, path = (value_or(config, name) for name in names)
    heads = config.num_attention_heads
    layers = read_heterogeneous_layers(
        text,
        path,
        "model.{}".format,
        hidden_size=config.hidden_size,
        num_attention_heads=heads,
        num_query_groups=value_or(config, "num_query_groups") or heads,
        ffn_hidden_size=value_or(config, "ffn_hidden_size") or 4 * config.hidden_size,
    )
    return {"heterogeneous_layers": layers}


def _exaone_moe(config: Any) -> dict[str, Any]:
    """0.7 states a window for each layer, beside the one of them all."""
    windows = sorted({*value_or(config, "sliding_windows", ())} - {0})
    if len(windows) > 1:
        raise unplannable(
            "model.sliding_windows", windows, "windows of several sizes are not supported"
        )
    return {"variant": ModelVariant(dense_mtp=True)}


def _gemma2(config: Any) -> dict[str, Any]:
    """Windows are masks over the whole square of scores, and save nothing."""
    variant = ModelVariant(
        norm_placement=NormPlacement.SANDWICH,
        attn_logit_softcapping=value_or(config, "attn_logit_softcapping", 0.0) or None,
        final_logit_softcapping=value_or(config, "final_logit_softcapping", 0.0) or None,
    )
    return {"variant": variant, "window_size": None}


def _gemma3(config: Any) -> dict[str, Any]:
    """Of ``interleaved_attn_pattern`` layers the last ones attend in full; 1B has no image tower.

    Source: ``Gemma3TEDotProductAttention`` of both frameworks.
    """
    local, full = value_or(config, "interleaved_attn_pattern", (5, 1))
    if full != 1:
        raise unplannable(
            "model.interleaved_attn_pattern",
            (local, full),
            "after the layers with a window there must be one without",
        )
    if value_or(config, "is_vision_language", False):
        raise unplannable("model.is_vision_language", True, "its masks are not supported")
    return {
        "variant": ModelVariant(norm_placement=NormPlacement.SANDWICH),
        "qk_layernorm": True,
        "window_size": (value_or(config, "window_size", 512), 0),
        "window_attn_skip_freq": local + full,
        "rotary_base": max(value_or(config, "rotary_base", (10_000, 1_000_000))),
    }


def _qwen_vl(config: Any) -> dict[str, Any]:
    """An encoder of transformers' own, whole on every rank of the first stage.

    Rotations over time, height and width are as many as those of a text.

    Source: ``Qwen25VLModel`` and ``Qwen3VLModel`` of Megatron-Bridge.
    """
    if value_or(config, "freeze_language_model", False):
        raise unplannable(
            "model.freeze_language_model", True, "only its encoder or projector would be trained"
        )
    vision = config.vision_config
    fields = vision.to_dict() if hasattr(vision, "to_dict") else vars(vision)
    kind = str(fields.get("model_type")).removesuffix("_vision")  # as transformers 5 has it
    read = read_vision_config(fields, class_names(config)[0], kind)
    if read is None:
        raise unplannable(
            "model.vision_config", fields.get("model_type"), "no such encoder of images is known"
        )
    encoder = EncoderSpec(
        **read.shape,
        frozen=value_or(config, "freeze_vision_model", False),
        projector_frozen=value_or(config, "freeze_vision_projection", False),
    )
    return {"position_embedding_type": "rope", "vision": encoder}


_WHOLE_SCORES = "its attention keeps all scores and splits no sequence"
_HETEROGENEOUS_LAYERS = ("heterogeneous_layer_spec", "get_gpt_heterogeneous_layer_spec")
_GEMMA2 = Family(
    fields=_gemma2,
    ones={"context_parallel_size": _WHOLE_SCORES},
    packs=False,
)
_WHOLE_SEQUENCES = {"context_parallel_size": "its forward pass splits no sequence"}
_QWEN3_VL = Family(
    fields=_qwen_vl,
    ones={
        **_WHOLE_SEQUENCES,
        "virtual_pipeline_model_parallel_size": "its layers are not told their virtual stage",
    },
)

#: Base class of a family's configurations in NeMo or Megatron-Bridge, or the function that builds
#: its layers -> the family.
FAMILIES: dict[str | None, Family] = {
    "ExaoneMoeModelProvider": Family(fields=_exaone_moe),
    "exaone4_layer_spec": Family(
        fields=lambda _: {"variant": ModelVariant(norm_placement=NormPlacement.POST)},
        ones={"context_parallel_size": _WHOLE_SCORES},
        packs=False,
        keeps_scores=True,
    ),
    "HybridModelProvider": Family(
        fields=_hybrid,
        ones={"virtual_pipeline_model_parallel_size": "its provide refuses virtual stages"},
    ),
    "MambaModelProvider": Family(fields=_hybrid),
    "NemotronHConfigBase": Family(fields=_nemotron_h),
    "SSMConfig": Family(fields=_hybrid),
    "HeterogeneousTransformerConfig": Family(
        fields=_heterogeneous,
        ones={"virtual_pipeline_model_parallel_size": "its layers are built for one stage a rank"},
    ),
    "Gemma2Config": _GEMMA2,
    "Gemma2ModelProvider": _GEMMA2,
    "Gemma3Config": Family(
        fields=_gemma3,
        ones={
            "context_parallel_size": "its configure_model refuses context parallelism",
            "virtual_pipeline_model_parallel_size": "its configure_model refuses virtual stages",
        },
    ),
    # its rotary embedding is a pair of tensors, which CheckpointFunction does not save
    "Gemma3ModelProvider": Family(fields=_gemma3, recomputes_layers=False),
    "OlMoEModelProvider": Family(
        fields=lambda _: {"variant": ModelVariant(qk_norm_full_width=True)},
        ones={
            "tensor_model_parallel_size": "its norms of queries and keys are as wide as all heads "
            "on every rank"
        },
    ),
    "Qwen25VLModelProvider": Family(fields=_qwen_vl, ones=_WHOLE_SEQUENCES),
    "Qwen3VLModelProvider": _QWEN3_VL,
    "Qwen3VLMoEModelProvider": _QWEN3_VL,
    "Llama4Config": Family(
        # on every layer, rotated or not (``Llama4SelfAttention.forward`` of ``llama4_utils``)
        fields=lambda config: {"attention_chunk_size": value_or(config, "attention_chunk_size")},
        ones={
            "context_parallel_size": "its chunks are cut from the part of a sequence that one rank "
            "holds"
        },
        cuts_chunks=True,
    ),
}
