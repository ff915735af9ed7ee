"""A Hugging Face ``config.json``, already parsed, as a ``TransformerSpec``."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from nest_megatron.errors import UnplannableModelError
from nest_megatron.model import hugging_face_dense as dense
from nest_megatron.model import hugging_face_experts as experts
from nest_megatron.model import hugging_face_gpt as gpt
from nest_megatron.model import hugging_face_hybrids as hybrids
from nest_megatron.model.catalogue import spec_from_mapping
from nest_megatron.model.hugging_face_fields import ConfigFields, model_types
from nest_megatron.model.hugging_face_parts import Shape
from nest_megatron.model.hugging_face_vision import read_vision_config
from nest_megatron.model.spec import TransformerSpec

Config = Mapping[str, object]

#: Sequence length taken when the caller gives none and the model allows more.
DEFAULT_SEQ_LENGTH = 8192

#: The text model's type where a model of text and images names it otherwise than the plain one.
_TEXT_TYPES: Mapping[str, str] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), "qwen2"),
    "gemma3": "gemma3_text",
    "llama4": "llama4_text",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
_OF_ENCODERS = ("vision_config", "vision_tower", "audio_config")
_OF_FLAT_FILES = (
    *("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
    *("vision_token_id",),
)
#: Words in a ``model_type``, and why such a model cannot be planned; the first one counts.
_REFUSED: tuple[tuple[str, str], ...] = (
    ("gemma3n_text", "its embeddings in every layer are not supported"),
    ("mamba rwkv xlstm recurrent_gemma", "it is a state-space or recurrent model"),
    (
        "jamba zamba bamba nemotron_h falcon_h1 hybrid qwen3_next qwen3_5 kimi_linear minimax lfm2",
        "it mixes attention with state-space, linear-attention or convolution layers",
    ),
    ("t5 bart pegasus marian whisper encoder-decoder m2m", "it is an encoder-decoder model"),
    (
        "vit clip siglip llava vision _vl mllama pixtral paligemma omni",
        "it is a vision or multimodal model whose text model is not known",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceModel:
    """A configuration as it was read.

    Args:
        unread: keys that may say more of the model and are not read.
        notes: what the file does not say or what of it is left out, in sentences.
    """

    spec: TransformerSpec
    unread: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def supported_model_types() -> tuple[str, ...]:
    """The ``model_type`` values that can be read, sorted."""
    return tuple(sorted(_READERS))


def reader_of(model_type: str) -> Callable[[ConfigFields], Shape]:
    """The reader of a type, whose docstring says what the type is."""
    return _READERS[model_type]


def read_hf_model(mapping: Config, name: str, *, seq_length: int | None = None) -> HuggingFaceModel:
    """The model of a Hugging Face configuration.

    Args:
        mapping: the parsed ``config.json``.
        name: what to call the model.
        seq_length: in training; by default the smaller of the model's longest context and
            ``DEFAULT_SEQ_LENGTH``.

    Raises:
        UnplannableModelError: for an architecture that is not supported, or a field that describes
            a part of the model and is not read.
        UserInputError: if a field is misspelt or has an impossible value.

    Source: the configuration classes of ``transformers`` and the layers they build
    (``docs/hugging_face.md``).
    """
    text, notes = _text_model(mapping, name)
    own_type, text["model_type"] = text.get("model_type"), _plain_type(text.get("model_type"))
    model_type = _model_type(text, name)
    # a class of another name has defaults of its own, which are not known here
    fields = ConfigFields(text, name, model_type if own_type == model_type else "")
    shape = {"name": name, **_READERS[model_type](fields)}
    longest = shape.pop("longest", None) or shape["max_position_embeddings"]
    shape["seq_length"] = seq_length or min(longest, DEFAULT_SEQ_LENGTH)
    if (vision := _encoder(mapping, name)) is not None:
        shape["vision"] = vision
    shape["source"] = f"Hugging Face config.json, model_type {model_type}"
    unread = fields.unread()
    if fields.assumed:
        taken = ", ".join(f"{key} {value}" for key, value in fields.assumed.items())
        notes += (f"{name}: not in config.json, so transformers' own default: {taken}.",)
    own, pattern = text.get("num_hidden_layers"), shape.get("hybrid_layer_pattern")
    if pattern and own not in (None, shape["num_layers"]):
        count = shape["num_layers"]
        notes += (f"{name}: its {own} layers are {count} of Megatron's hybrid_layer_pattern.",)
    return HuggingFaceModel(spec=spec_from_mapping(shape), unread=unread, notes=notes)


def _plain_type(model_type: object) -> object:
    return _TEXT_TYPES.get(model_type, model_type) if isinstance(model_type, str) else model_type


def _text_model(mapping: Config, name: str) -> tuple[dict[str, object], tuple[str, ...]]:
    """The text model of a configuration, and a note if it has more."""
    whole, text = mapping.get("model_type"), dict(mapping)
    inner = mapping.get("text_config")
    if isinstance(inner, Mapping):
        outer = mapping.get("tie_word_embeddings")
        tied = {} if outer is None else {"tie_word_embeddings": outer}
        text = {"model_type": _plain_type(whole), **tied, **inner}
    elif isinstance(whole, str) and whole not in _TEXT_TYPES and whole in _READERS:
        return text, ()
    for key in (*_OF_ENCODERS, *_OF_FLAT_FILES):
        text.pop(key, None)
    if whole in ("gemma3", "llama4"):
        text["model_type"] = _plain_type(whole)
    elif _plain_type(text.get("model_type")) != text.get("model_type"):
        text.setdefault("tie_word_embeddings", False)
    if _encoder(mapping, name) is not None:
        return text, ()
    if not any(mapping.get(key) is not None for key in _OF_ENCODERS):
        return text, ()
    note = f"{name}: the text model alone is read; the encoder of model_type {whole} is not."
    return text, (note,)


def _encoder(mapping: Config, name: str) -> Shape | None:
    """What its encoder of images is, where the file describes one that is known."""
    vision, model_type = mapping.get("vision_config"), mapping.get("model_type")
    if not isinstance(vision, Mapping) or not vision:
        return None
    return read_vision_config(vision, name, str(model_type))


def _model_type(mapping: Config, name: str) -> str:
    model_type = mapping.get("model_type")
    if not isinstance(model_type, str) or model_type not in _READERS:
        raise _unplannable(name, model_type, _why_unknown(str(model_type)))
    contents = {
        "it is an encoder-decoder model": mapping.get("is_encoder_decoder"),
        "it has a vision tower": mapping.get("vision_config") is not None,
        "it has cross-attention": mapping.get("add_cross_attention"),
    }
    for reason, refused in contents.items():
        if refused:
            raise _unplannable(name, model_type, reason)
    return model_type


def _why_unknown(model_type: str) -> str:
    for words, why in _REFUSED:
        if any(word in model_type for word in words.split()):
            return why
    close = difflib.get_close_matches(model_type, _READERS, n=1, cutoff=0.75)
    hint = f" (the nearest name: {close[0]})" if close else ""
    return f"this architecture is not supported{hint}"


def _unplannable(name: str, value: object, reason: str) -> UnplannableModelError:
    fix = f"Supported: {', '.join(supported_model_types())}."
    return UnplannableModelError(f"model {name}: model_type", value=value, limit=reason, fix=fix)


#: Readers by ``model_type``, which each is named after.
_READERS: Mapping[str, Callable[[ConfigFields], Shape]] = {
    name: read
    for module in (dense, experts, gpt, hybrids)
    for name, read in vars(module).items()
    if name in model_types()
} | {"chatglm": dense.chatglm, "minimax_m2": experts.minimax_m2, "nemotron_h": hybrids.nemotron_h}
