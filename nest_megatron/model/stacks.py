"""The models that a model is made of: an encoder, a decoder, and layers of one size."""

from __future__ import annotations

import dataclasses
import functools

from nest_megatron.model.encoder import EncoderSpec
from nest_megatron.model.layer_pattern import LayerBlock
from nest_megatron.model.spec import ModelFamily, TransformerSpec


def encoder_of(spec: TransformerSpec) -> TransformerSpec:
    """The first stack of a T5-like model, or of images, as a model that attends both ways."""
    if spec.vision is not None:
        return _image_encoder(spec.name, spec.vision)
    assert spec.encoder_num_layers is not None
    return dataclasses.replace(
        spec,
        family=ModelFamily.BERT,
        num_layers=spec.encoder_num_layers,
        encoder_num_layers=None,
        decoder_seq_length=None,
    )


@functools.lru_cache(maxsize=256)
def _image_encoder(name: str, vision: EncoderSpec) -> TransformerSpec:
    same = {field.name for field in dataclasses.fields(TransformerSpec)} - {"vision"}
    shared = {
        field.name: getattr(vision, field.name)
        for field in dataclasses.fields(vision)
        if field.name in same
    }
    return TransformerSpec(
        **shared,
        name=f"{name}: encoder",
        family=ModelFamily.BERT,
        seq_length=vision.num_tokens,
        vocab_size=1,
        position_embedding_type="learned_absolute",
    )


def decoder_of(spec: TransformerSpec) -> TransformerSpec:
    """The second stack of a T5-like model by itself; of others the model."""
    if spec.decoder_seq_length is None:
        return spec
    return dataclasses.replace(
        spec,
        family=ModelFamily.GPT,
        seq_length=spec.decoder_seq_length,
        encoder_num_layers=None,
        decoder_seq_length=None,
    )


def sized(spec: TransformerSpec, block: LayerBlock) -> TransformerSpec:
    """The model whose layers all have the size that a block has for itself."""
    return spec if block.size is None else _sized(spec, block)


@functools.lru_cache(maxsize=256)
def _sized(spec: TransformerSpec, block: LayerBlock) -> TransformerSpec:
    assert block.size is not None
    if block.base is LayerBlock.DENSE:
        return dataclasses.replace(spec, ffn_hidden_size=block.size, heterogeneous_layers=())
    return dataclasses.replace(spec, num_query_groups=block.size, heterogeneous_layers=())
