"""A Hugging Face ``config.json``, already parsed, as a ``TransformerSpec``."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from typing import Any

from nest_megatron.errors import UnplannableModelError, UserInputError
from nest_megatron.model import hugging_face_dense as dense
from nest_megatron.model import hugging_face_experts as experts
from nest_megatron.model import hugging_face_hybrids as hybrids
from nest_megatron.model.catalogue import spec_from_mapping
from nest_megatron.model.hugging_face_fields import (
    UNSET,
    ConfigFields,
    Family,
    Shape,
    activation,
    is_harmless,
    joined,
    weightless_keys,
)
from nest_megatron.model.parameters import model_parameters
from nest_megatron.model.spec import OF_HUGGING_FACE, TransformerSpec
from nest_megatron.plain import frozen


@frozen
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
    reader = _VISION_READERS.get(model_type)
    if reader is None:
        return None
    fields = ConfigFields(config, f"{name}: vision_config")
    shape = reader(fields)
    fields.weightless(*weightless_keys("vision_config"))
    return VisionConfig(shape=shape, unread=fields.unread(), unused=fields.unused())


def _qwen_vl(f: ConfigFields, act: str) -> Shape:
    """What the encoders of Qwen-VL share; images have any size and patches of several frames."""
    hidden, merge = f.whole("hidden_size"), f.whole("spatial_merge_size", 2)
    frames = f.whole("temporal_patch_size", 2)
    return {
        "num_layers": f.whole("depth"),
        "hidden_size": hidden,
        "ffn_hidden_size": f.whole("intermediate_size"),
        "num_attention_heads": f.whole("num_heads"),
        "num_patches": merge**2,
        "num_projected_tokens": 1,
        "num_images": 0,
        "patch_features": f.whole("in_channels", 3) * frames * f.whole("patch_size") ** 2,
        "projector_ffn_hidden_size": hidden * merge**2,
        "spatial_merge_size": merge,
        **activation(default=act)(f),
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


_VISION_READERS: Mapping[str, Callable[[ConfigFields], dict[str, Any]]] = {
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
    "qwen3_vl_moe": qwen3_vl,
}

Config = Mapping[str, object]

#: What can be read, by ``model_type``: what it is, and the parts of its description.
FAMILIES: Mapping[str, Family] = {**dense.FAMILIES, **experts.FAMILIES, **hybrids.FAMILIES}

#: Sequence length taken when the caller gives none and the model allows more.
DEFAULT_SEQ_LENGTH = 8192

#: The type that is read where a model of text and images, or an equal one, names it otherwise.
OTHER_NAMES: Mapping[str, str] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), "qwen2"),
    **dict.fromkeys(("kimi_k2", "kimi_k25"), "deepseek_v3"),
    "gemma3": "gemma3_text",
    "llama4": "llama4_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
_OF_ENCODERS = ("vision_config", "vision_tower", "audio_config")
_OF_FLAT_FILES = (
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
    "vision_token_id",
)
#: Patterns of a ``model_type``, and what of such a model cannot be described; the first one counts.
REFUSED: tuple[tuple[str, str], ...] = (
    ("gemma3n", "its embeddings in every layer are not supported"),
    (
        "gemma4",
        "its layers that attend in full have heads of another size than those that slide "
        "(global_head_dim), and its small models embeddings in every layer",
    ),
    (
        "longcat",
        "each of its layers has two attentions and two MLPs beside its experts, of which some do "
        "nothing (zero_expert_num)",
    ),
    (
        "step3p",
        "its sliding layers have more heads than the others (attention_other_setting), and each "
        "head a gate (use_head_wise_attn_gate)",
    ),
    (
        "mimo_v2",
        "its values are smaller than its keys (v_head_dim) and its sliding layers have query "
        "groups of their own (swa_num_key_value_heads)",
    ),
    ("deepseek_v4", "its attention compresses tokens, which is not supported"),
    ("kimi_linear kimi_k3 bailing_hybrid", "its Kimi delta attention is not supported"),
    (
        "minimax_m3",
        "it attends to blocks of tokens that an indexer chooses, which is not supported",
    ),
    ("minimax$ minimax_text minimax_m1", "its linear (lightning) attention is not supported"),
    (
        "hf_olmo",
        "its keys (d_model, n_layers) are those of OLMo's first code; the file of the model whose "
        "name ends in -hf has those of transformers",
    ),
    ("jamba recurrent_gemma", "it mixes attention with recurrent layers that are not Mamba-2"),
    ("zamba", "it mixes attention, whose weights its layers share, with Mamba layers"),
    ("falcon_h1", "it mixes attention with Mamba in the same layer, side by side"),
    ("lfm2 lfm3", "it mixes attention with convolutions that are not supported"),
    ("mamba rwkv xlstm", "it is a state-space or recurrent model other than Mamba-2"),
    ("t5 bart pegasus marian whisper encoder-decoder m2m", "it is an encoder-decoder model"),
    (
        "vit clip siglip llava vision _vl mllama pixtral paligemma omni",
        "it is a vision or multimodal model whose text model is not known",
    ),
)
#: The family that others are renamed from most.
_USUAL = "llama"
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
)


@frozen
class HuggingFaceModel:
    """A configuration as it was read.

    Args:
        unread: keys that may say more of the model and are not read.
        notes: what the file does not say or what of it is left out, in sentences.
    """

    spec: TransformerSpec
    unread: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


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
    text, notes, outer = _text_model(mapping, name)
    own_type, text["model_type"] = text.get("model_type"), _plain_type(text.get("model_type"))
    model_type = _model_type(text, mapping, name)
    # a class of another name has defaults of its own, which are not known here
    fields = ConfigFields(text, name, model_type if own_type == model_type else "")
    fields.weightless(*weightless_keys(model_type))
    shape = {"name": name, **joined(fields, *FAMILIES[model_type][1])}
    longest = shape.pop("longest", None) or shape["max_position_embeddings"]
    shape["seq_length"] = seq_length or min(longest, DEFAULT_SEQ_LENGTH)
    shape["source"] = f"{OF_HUGGING_FACE}, model_type {model_type}"
    unread = (*fields.unread(), *(key for key in outer if not is_harmless(key)))
    unused = {*fields.unused(), *filter(is_harmless, outer)}
    if (encoder := _encoder(mapping, name)) is not None:
        shape["vision"] = encoder.shape
        unread += tuple(f"vision_config.{key}" for key in encoder.unread)
        unused |= {f"vision_config.{key}" for key in encoder.unused}
    if unused:
        words = ", ".join(sorted(unused))
        notes += (f"{name}: neither weights nor work depend on these of config.json: {words}.",)
    if fields.assumed:
        taken = ", ".join(f"{key} {value}" for key, value in fields.assumed.items())
        notes += (f"{name}: not in config.json, so transformers' own default: {taken}.",)
    notes += tuple(dict.fromkeys(fields.notes))
    own = text.get("num_hidden_layers")
    if shape.get("hybrid_layer_pattern") and own not in (None, shape["num_layers"]):
        count = shape["num_layers"]
        notes += (f"{name}: its {own} layers are {count} of Megatron's hybrid_layer_pattern.",)
    return HuggingFaceModel(spec=spec_from_mapping(shape), unread=unread, notes=notes)


def _plain_type(model_type: object) -> object:
    return OTHER_NAMES.get(model_type, model_type) if isinstance(model_type, str) else model_type


def _text_model(
    mapping: Config, name: str
) -> tuple[dict[str, object], tuple[str, ...], tuple[str, ...]]:
    """The text model of a configuration, a note if it has more, and keys around it that are set."""
    whole, text, outer = mapping.get("model_type"), dict(mapping), tuple[str, ...]()
    inner = mapping.get("text_config")
    if isinstance(inner, Mapping):
        own = ("text_config", "model_type", "tie_word_embeddings", *_OF_ENCODERS)
        outer = tuple(k for k, v in mapping.items() if k not in own and v not in UNSET)
        tied = mapping.get("tie_word_embeddings")
        known = {} if tied is None else {"tie_word_embeddings": tied}
        text = {"model_type": _plain_type(whole), **known, **inner}
    elif inner is not None:
        what, fix = f"model {name}: text_config", "Check that this is the model's own config.json."
        raise UserInputError(what, value=inner, limit="it must be a mapping of keys", fix=fix)
    elif isinstance(whole, str) and whole not in OTHER_NAMES and whole in FAMILIES:
        return text, (), ()
    for key in (*_OF_ENCODERS, *_OF_FLAT_FILES):
        text.pop(key, None)
    if whole in ("gemma3", "llama4"):
        text["model_type"] = _plain_type(whole)
    elif _plain_type(text.get("model_type")) != text.get("model_type"):
        text.setdefault("tie_word_embeddings", False)
    has_more = any(mapping.get(key) is not None for key in _OF_ENCODERS)
    if _encoder(mapping, name) is not None or not has_more:
        return text, (), outer
    note = f"{name}: the text model alone is read; the encoder of model_type {whole} is not."
    return text, (note,), outer


def _encoder(mapping: Config, name: str) -> VisionConfig | None:
    """Its encoder of images, where the file describes one that is known."""
    vision, model_type = mapping.get("vision_config"), mapping.get("model_type")
    if not isinstance(vision, Mapping) or not vision:
        return None
    return read_vision_config(vision, name, str(model_type))


def _model_type(text: Config, whole: Config, name: str) -> str:
    """The type of a text model that is read, as its reader is named.

    Args:
        whole: the file, which names the classes of the model.
    """
    model_type = text.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise _unplannable(name, model_type, _why_unknown(text, whole, str(model_type)))
    contents = {
        "it is an encoder-decoder model": text.get("is_encoder_decoder"),
        "it has a vision tower": text.get("vision_config") is not None,
        "it has cross-attention": text.get("add_cross_attention"),
    }
    for reason, refused in contents.items():
        if refused:
            raise _unplannable(name, model_type, reason)
    return model_type


def _why_unknown(text: Config, whole: Config, model_type: str) -> str:
    for words, why in REFUSED:
        if any(re.search(word, model_type) for word in words.split()):
            return why
    names = {name.removesuffix("_text"): name for name in FAMILIES}
    close = difflib.get_close_matches(model_type.removesuffix("_text"), names, n=1, cutoff=0.75)
    hint = f" (the nearest name: {names[close[0]]})" if close else ""
    return f"this architecture is not supported{hint}{_way_out(text, whole)}"


def _way_out(text: Config, whole: Config) -> str:
    """What a renamed model may be: the family that its classes name, or whose fields it has.

    It is never taken for that without the user's word.
    """
    for of in (text, whole):
        named = of.get("architectures")
        for name in named if isinstance(named, list) else ():
            # such as LlamaForCausalLM
            squeezed = str(name).removesuffix("ForCausalLM").removesuffix("LMHeadModel").lower()
            for known in FAMILIES:
                if known.replace("_", "") == squeezed:
                    return f"; architectures says {name}: if that is so, set model_type to {known}"
    if not {*_SIZES} <= text.keys():
        return ""
    try:
        read = read_hf_model({**text, "model_type": _USUAL}, "x")
    except UserInputError:
        return ""
    if read.unread:
        return ""
    return (
        f"; all its fields are those of {_USUAL}: if its layers are Llama's, as which it has "
        f"{model_parameters(read.spec):,} parameters, set model_type to {_USUAL}"
    )


def _unplannable(name: str, value: object, reason: str) -> UnplannableModelError:
    return UnplannableModelError(
        f"model {name}: model_type",
        value,
        reason,
        f"Supported: {', '.join(sorted(FAMILIES))}.",
    )
