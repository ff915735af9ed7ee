"""The ``vision_config`` of a Hugging Face configuration as an ``EncoderSpec``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nest_megatron.model.hugging_face_fields import ConfigFields
from nest_megatron.model.hugging_face_parts import Shape, activation

#: Rotations, starting values and names of old files: no weight and no work depends on them.
_WEIGHTLESS = ("in_chans", "initializer_range", "spatial_patch_size", "tokens_per_second")


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """A ``vision_config`` as it was read.

    Args:
        shape: the fields of an ``EncoderSpec``, without its images.
        unread, unused: keys that are set and not read, and those that change nothing.
    """

    shape: Shape
    unread: tuple[str, ...]
    unused: tuple[str, ...]


def read_vision_config(
    config: Mapping[str, object], name: str, model_type: str
) -> VisionConfig | None:
    """What a ``vision_config`` says; ``None`` if the type is not known.

    Args:
        config: ``vision_config``, already parsed.
        name: of the model, for errors.
        model_type: of the whole model.

    Raises:
        UserInputError, UnplannableModelError: as ``hugging_face.read_hf_model`` does.
    """
    reader = _READERS.get(model_type)
    if reader is None:
        return None
    fields = ConfigFields(config, f"{name}: vision_config")
    shape = reader(fields)
    fields.weightless(*_WEIGHTLESS)
    return VisionConfig(shape=shape, unread=fields.unread(), unused=fields.unused())


def _qwen_vl(f: ConfigFields, act: str) -> Shape:
    """What the encoders of Qwen-VL share; images have any size and patches of several frames."""
    hidden, merge = f.whole("hidden_size"), f.whole("spatial_merge_size", 2)
    patch, frames = f.whole("patch_size"), f.whole("temporal_patch_size", 2)
    f.weightless("out_hidden_size")  # the language model's
    return {
        "num_layers": f.whole("depth"),
        "hidden_size": hidden,
        "ffn_hidden_size": f.whole("intermediate_size"),
        "num_attention_heads": f.whole("num_heads"),
        "num_patches": merge**2,
        "num_projected_tokens": 1,
        "num_images": 0,
        "patch_features": f.whole("in_channels", 3) * frames * patch**2,
        "projector_ffn_hidden_size": hidden * merge**2,
        "spatial_merge_size": merge,
        "activation": activation(f, default=act),
        "is_split": False,
    }


def qwen2_5_vl(f: ConfigFields) -> Shape:
    """RMSNorm and SwiGLU, positions by rotation, attention inside windows in most layers.

    Source: ``Qwen2_5_VisionTransformerPretrainedModel``; its defaults are transformers' own.
    """
    shape = _qwen_vl(f, "silu")
    whole = f.items("fullatt_block_indexes", "numbers")
    # windows are whole tokens of the language model
    tokens = f.whole("window_size", 112) // f.whole("patch_size") // shape["spatial_merge_size"]
    return shape | {
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "patch_bias": False,
        "num_position_embeddings": 0,
        "window_patches": (tokens * shape["spatial_merge_size"]) ** 2,
        "num_full_attention_layers": len((7, 15, 23, 31) if whole is None else whole),
    }


def qwen3_vl(f: ConfigFields) -> Shape:
    """LayerNorm and GELU, learned positions, projectors for the language model's first layers.

    Source: ``Qwen3VLVisionModel``; its defaults are transformers' own.
    """
    layers = f.items("deepstack_visual_indexes", "numbers")
    return _qwen_vl(f, "gelu_pytorch_tanh") | {
        "num_position_embeddings": f.whole("num_position_embeddings", 2304),
        "deepstack_layers": len((8, 16, 24) if layers is None else layers),
    }


_READERS: Mapping[str, Callable[[ConfigFields], dict[str, Any]]] = {
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
    "qwen3_vl_moe": qwen3_vl,
}
