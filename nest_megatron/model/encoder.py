"""An encoder of images in front of a language model's first layer, and the projector behind it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from nest_megatron.errors import UserInputError

_MAY_BE_ZERO = ("hidden_dropout", "attention_dropout", "num_class_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSpec:
    """A transformer over the patches of each image, which a two-layer MLP makes tokens of.

    The first pipeline rank has it beside the embedding. Every context-parallel rank runs all of it.

    Args:
        num_patches: of one image.
        num_class_tokens: learned tokens that the layers see beside the patches.
        num_projected_tokens: of one image, that the projector hands to the language model.
        num_images: in each sequence.
        patch_features: numbers in a patch, over its pixels and colours.
        projector_ffn_hidden_size: inner size of the projector, as the language model's MLP is.
        norm_before: a norm between the patch embedding and the layers.
        frozen: its weights are not trained; those of the projector are.
        is_split: over the tensor-parallel ranks, without sequence parallelism; else whole on each.

    Raises:
        UserInputError: if a size is not positive.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int | None = None
    kv_channels: int | None = None
    num_patches: int
    num_class_tokens: int = 0
    num_projected_tokens: int
    num_images: int = 1
    patch_features: int
    projector_ffn_hidden_size: int
    norm_before: bool = False
    normalization: str = "LayerNorm"
    activation: str = "gelu"
    gated_linear_unit: bool = False
    add_bias_linear: bool = True
    add_qkv_bias: bool = True
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    frozen: bool = False
    is_split: bool = True

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            is_size = isinstance(value, int) and not isinstance(value, bool)
            if is_size and value < 1 and field.name not in _MAY_BE_ZERO:
                limit, fix = "it must be at least 1", "Correct the encoder's description."
                raise UserInputError(f"vision.{field.name}", value=value, limit=limit, fix=fix)

    @property
    def num_tokens(self) -> int:
        """Tokens of one image in the encoder's layers."""
        return self.num_patches + self.num_class_tokens
