"""An encoder of images in front of a language model's first layer, and the projector behind it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from nest_megatron.errors import UserInputError

_MAY_BE_ZERO = ("num_class_tokens", "num_position_embeddings", "deepstack_layers", "num_images")


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSpec:
    """A transformer over the patches of each image, which a two-layer MLP makes tokens of.

    The first pipeline rank has it beside the embedding. Every context-parallel rank runs all of it.
    Its modules are megatron-core's, or with ``spatial_merge_size`` those of transformers' Qwen-VL.

    Args:
        num_patches: of one image.
        num_class_tokens: learned tokens that the layers see beside the patches.
        num_projected_tokens: of one image, that the projector hands to the language model.
        num_images: in each sequence; 0 where nothing says it yet (``with_images``).
        patch_features: numbers in a patch, over its pixels and colours.
        projector_ffn_hidden_size: inner size of the projector, as the language model's MLP is.
        norm_before: a norm between the patch embedding and the layers.
        patch_bias: the patch embedding has a bias, where no norm follows.
        num_position_embeddings: learned positions; by default one for each token of an image.
        spatial_merge_size: the patches along each side that the projector makes one token of.
        window_patches: attention of all but ``num_full_attention_layers`` layers stays inside
            windows of so many patches.
        deepstack_layers: first layers of the language model, to each of which a projector of its
            own adds features of the encoder.
        frozen: its weights are not trained.
        projector_frozen: neither are those of the projector.
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
    patch_bias: bool = True
    num_position_embeddings: int | None = None
    spatial_merge_size: int | None = None
    window_patches: int | None = None
    num_full_attention_layers: int | None = None
    deepstack_layers: int = 0
    normalization: str = "LayerNorm"
    activation: str = "gelu"
    gated_linear_unit: bool = False
    add_bias_linear: bool = True
    add_qkv_bias: bool = True
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    frozen: bool = False
    projector_frozen: bool = False
    is_split: bool = True

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            is_size = isinstance(value, int) and not isinstance(value, bool)
            if is_size and value < 1 and field.name not in _MAY_BE_ZERO:
                limit, fix = "it must be at least 1", "Correct the encoder's description."
                raise UserInputError(f"vision.{field.name}", value, limit, fix)

    @property
    def num_tokens(self) -> int:
        """Tokens of one image in the encoder's layers."""
        return self.num_patches + self.num_class_tokens

    @property
    def num_positions(self) -> int:
        """Rows of its position embedding; 0 where positions are rotations."""
        given = self.num_position_embeddings
        return self.num_tokens if given is None else given

    @property
    def has_any_size(self) -> bool:
        """Whether an image has as many patches as its size gives, not always the same."""
        return self.spatial_merge_size is not None

    def with_images(self, tokens: int, images: int) -> EncoderSpec:
        """The same encoder on so many images a sequence, which have ``tokens`` tokens together."""
        if self.spatial_merge_size is None:
            return dataclasses.replace(self, num_images=images)
        each = -(-tokens // images)
        patches = each * self.spatial_merge_size**2
        return dataclasses.replace(
            self, num_images=images, num_projected_tokens=each, num_patches=patches
        )

    def with_images_of(self, other: EncoderSpec | None) -> EncoderSpec:
        """The same encoder on the images of another, where nothing says which it sees."""
        if self.num_images or other is None:
            return self
        return self.with_images(other.num_projected_tokens * other.num_images, other.num_images)
