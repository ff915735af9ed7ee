"""Models that see images: what ``pretrain_vlm.py`` builds in front of a language model.

One image a sequence, the encoder and the projector of the language model's own sizes and on the
first pipeline rank; all patches become tokens of the language model.

Source: ``model_provider`` and ``add_vlm_extra_args`` of ``pretrain_vlm.py`` (0.16.1, 0.20).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from nest_megatron.cluster.records import Precision
from nest_megatron.errors import UnplannableModelError
from nest_megatron.integrations.megatron_lm.layout_arguments import flag_error
from nest_megatron.model.encoder import EncoderSpec
from nest_megatron.model.spec import TransformerSpec

_SWITCHES = ("freeze_LM", "freeze_ViT", "disable_vision_class_token")
_LENGTH = "dataloader_seq_length"
_COLOURS = 3


def script_arguments(unknown: Iterable[str]) -> dict[str, Any]:
    """The script's own arguments by destination, from words that Megatron's parser left over."""
    words = [*unknown, ""]
    found: dict[str, Any] = {}
    for word, following in pairwise(words):
        flag, _, value = word.partition("=")
        dest = flag.removeprefix("--").replace("-", "_")
        if dest in _SWITCHES:
            found[dest] = True
        elif dest == _LENGTH:
            found[dest] = int(value or following)
    return found


def with_images(
    spec: TransformerSpec, values: Mapping[str, Any], precision: Precision
) -> TransformerSpec:
    """A language model with the encoder that the script puts in front of it.

    Raises:
        UnplannableModelError: for a language model that is not trained, or layers in 8 or 4 bits.
        UserInputError: if the patches do not divide the image.
    """
    if precision.is_quantized:
        raise UnplannableModelError(
            "precision",
            precision.value,
            "an encoder of images is priced in 16 bits",
            "Use --bf16 alone.",
        )
    if values.get("freeze_LM"):
        raise UnplannableModelError(
            "--freeze-LM",
            True,
            "only its encoder or projector would be trained",
            "Launch without nest.",
        )
    height, width, patch = (values[name] for name in ("img_h", "img_w", "patch_dim"))
    for name, size in (("img_h", height), ("img_w", width)):
        if size % patch:
            raise flag_error(
                name, size, f"it must be a multiple of --patch-dim ({patch})", "Use whole patches."
            )
    patches = height // patch * (width // patch)
    tokens = patches + (not values.get("disable_vision_class_token"))
    text = values.get(_LENGTH) or spec.seq_length
    shared = {each.name for each in dataclasses.fields(EncoderSpec)} - {"num_layers"}
    shared &= {each.name for each in dataclasses.fields(spec)}
    stated = values.get("encoder_num_layers") or values.get("num_layers")
    return dataclasses.replace(
        spec,
        num_layers=values.get("decoder_num_layers") or spec.num_layers,
        seq_length=text + tokens,
        max_position_embeddings=max(spec.max_position_embeddings or 0, text + tokens),
        untie_embeddings_and_output_weights=True,  # LLaVAModel's default, which the script leaves
        vision=EncoderSpec(
            **{name: getattr(spec, name) for name in shared},
            num_layers=stated or spec.num_layers,
            num_patches=patches,
            num_class_tokens=1,
            num_projected_tokens=tokens,
            patch_features=_COLOURS * patch * patch,
            projector_ffn_hidden_size=spec.ffn_hidden_size,
            norm_before=True,
            frozen=bool(values.get("freeze_ViT")),
        ),
    )
