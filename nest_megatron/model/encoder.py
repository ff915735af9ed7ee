"""Parts of few models: an encoder of images with its projector, and adapters (LoRA, DoRA).

Source of adapters: ``megatron.bridge.peft`` 0.3.1 and ``nemo.collections.llm.peft`` 2.7.3.
"""

from __future__ import annotations

import dataclasses
import re

from nest_megatron.errors import UserInputError, require_at_least
from nest_megatron.plain import Name, frozen, set_field

_MAY_BE_ZERO = ("num_class_tokens", "num_position_embeddings", "deepstack_layers", "num_images")


@frozen
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
            if type(value) is int and field.name not in _MAY_BE_ZERO:
                fix = "Correct the encoder's description."
                require_at_least(f"vision.{field.name}", value, 1, fix)

    @property
    def num_tokens(self) -> int:
        """Tokens of one image in the encoder's layers."""
        return self.num_patches + self.num_class_tokens

    @property
    def num_positions(self) -> int:
        """Rows of its position embedding; 0 where positions are rotations."""
        rows = self.num_position_embeddings
        return self.num_tokens if rows is None else rows

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


class PeftScheme(Name):
    """How adapters change a product: added to it, or to its direction alone (DoRA).

    Canonical LoRA has adapters of their own for queries, keys, values, gate and up projection.
    """

    LORA = "lora"
    DORA = "dora"
    CANONICAL_LORA = "canonical_lora"


_JOINT = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
#: Module -> the projections in it that canonical LoRA adapts one by one.
PROJECTIONS = {
    "linear_qkv": ("linear_q", "linear_k", "linear_v"),
    "linear_fc1": ("linear_fc1_up", "linear_fc1_gate"),
}
_LATENT = (
    "linear_q_proj",
    "linear_q_down_proj",
    "linear_q_up_proj",
    "linear_kv_down_proj",
    "linear_kv_up_proj",
)
_OF_MIXERS = ("in_proj", "out_proj")
#: Grouped products of experts, whose adapters the experts of a rank share.
EXPERTS = ("mlp.experts.linear_fc1", "mlp.experts.linear_fc2")
#: Modules whose adapters are priced.
MODULES = (*_JOINT, *_LATENT, *_OF_MIXERS, "output_layer")


def _one_by_one(modules: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(one for name in modules for one in PROJECTIONS.get(name, (name,)))


_DEFAULTS = {
    PeftScheme.LORA: _JOINT,
    PeftScheme.DORA: _JOINT,
    PeftScheme.CANONICAL_LORA: _one_by_one(_JOINT),
}
_POSITIONS = ("pre", "post")


@frozen
class Adapters:
    """Low-rank adapters on linear modules of every layer; all other weights are frozen.

    Args:
        target_modules: names of modules, or patterns of whole names with ``*``; empty: the scheme's
            own default, attention and MLP.
        dim: the rank.
        dropout: share of what adapters see, or put out, that is dropped.
        dropout_position: ``pre`` (what they see) or ``post``.
        a2a_experimental: outputs of row-parallel adapters go to their ranks by an all-to-all, where
            the sequence is divided over the tensor ranks.

    Raises:
        UserInputError: for what is impossible or not priced, naming the field.
    """

    scheme: PeftScheme = PeftScheme.LORA
    target_modules: tuple[str, ...] = ()
    dim: int = 32
    dropout: float = 0.0
    dropout_position: str = "pre"
    a2a_experimental: bool = False

    def __post_init__(self) -> None:
        if not self.target_modules:
            set_field(self, "target_modules", _DEFAULTS[self.scheme])
        if type(self.dim) is not int or not 1 <= self.dim <= 1_000_000:
            raise _wrong("dim", self.dim, "it must be a whole number of at least 1")
        if not 0.0 <= self.dropout < 1.0:
            raise _wrong("dropout", self.dropout, "it must be at least 0 and below 1")
        if self.dropout_position not in _POSITIONS:
            raise _wrong(
                "dropout_position",
                self.dropout_position,
                f"it must be one of {', '.join(_POSITIONS)}",
            )
        if self.scheme is PeftScheme.DORA and self.dropout:
            raise _wrong(
                "dropout",
                self.dropout,
                "with DoRA the frozen products run twice, which is not priced",
                "Set it to 0.",
            )
        self._check_targets()

    def _check_targets(self) -> None:
        separate = self.scheme is PeftScheme.CANONICAL_LORA
        known = _one_by_one(MODULES) if separate else MODULES
        for target in self.target_modules:
            name = target.rpartition(".")[2]
            if "*" not in name and name not in known:
                raise _wrong(
                    "target_modules",
                    target,
                    f"adapters of {self.scheme} are priced on {', '.join(known)}",
                    "Leave it out.",
                )
        for names in PROJECTIONS.values():
            named = [t for t in self.target_modules if t.rpartition(".")[2] in names]
            if separate and named and len({t.rpartition(".")[2] for t in named}) < len(names):
                raise _wrong(
                    "target_modules",
                    named[0],
                    f"the frameworks run all of {', '.join(names)} or none",
                    "Name them all.",
                )

    def adapts(self, path: str, num_layers: int) -> bool:
        """Whether a module has an adapter, in all decoder layers or in none.

        Args:
            path: of the module in a layer (``self_attention.linear_qkv``).

        Raises:
            UserInputError: for a pattern that holds in some layers alone.

        Source: ``ModuleMatcher.match``: a name is compared, a pattern against the whole name.
        """
        name = path.rpartition(".")[2]
        return any(t == name or _holds(t, path, num_layers) for t in self.target_modules)

    def require_experts(self, num_layers: int) -> None:
        """Refuse what cannot be in a model with experts: DoRA on their products."""
        for path in EXPERTS:
            if self.scheme is PeftScheme.DORA and self.adapts(path, num_layers):
                raise _wrong(
                    "target_modules",
                    " ".join(self.target_modules),
                    f"DoRA takes the norm of one weight, and {path} has one for each expert",
                    "Name linear_qkv and linear_proj alone.",
                )

    def words(self) -> str:
        """In a few words for people.

        >>> Adapters(target_modules=("linear_qkv",), dim=16).words()
        'lora of rank 16 on linear_qkv'
        """
        return f"{self.scheme} of rank {self.dim} on {', '.join(self.target_modules)}"


def _holds(pattern: str, path: str, num_layers: int) -> bool:
    if "*" not in pattern and "." not in pattern:
        return False
    regex = re.compile(".*".join(map(re.escape, pattern.split("*"))))
    if path == "output_layer":
        return regex.fullmatch(path) is not None
    found = {bool(regex.fullmatch(f"decoder.layers.{i}.{path}")) for i in range(num_layers)}
    if len(found) > 1:
        raise _wrong(
            "target_modules",
            pattern,
            f"it adapts {path} in some layers alone, and layers are priced alike",
            "Name modules of all layers.",
        )
    return found == {True}


def _wrong(field: str, value: object, limit: str, fix: str = "Correct it.") -> UserInputError:
    return UserInputError(f"peft.{field}", value, limit, fix)
