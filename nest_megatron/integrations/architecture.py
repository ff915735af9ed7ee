"""Which model configurations of a framework can be planned, and families with code of their own.

A model is planned because its class and every field that it sets are known, not because nothing
about it looks strange. ``model_fields.toml`` says of each field whether it is read, has no effect,
or is refused; one that it does not name is refused where it is not as its class makes it. A family
whose layers a framework builds by code of its own is a row of ``FAMILIES``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from types import FunctionType, MappingProxyType
from typing import Any

from nest_megatron.documents import packaged
from nest_megatron.errors import UnplannableModelError, UserInputError
from nest_megatron.integrations.fields import (
    FIELDS,
    changed_fields,
    class_names,
    classes_of,
    short_text,
    value_or,
)
from nest_megatron.model.catalogue import (
    EXPERT_NAMES,
    LINEAR_NAMES,
    SAME_NAMES,
    spec_from_arguments,
)
from nest_megatron.model.encoder import EncoderSpec
from nest_megatron.model.heterogeneous import read_heterogeneous_layers
from nest_megatron.model.hugging_face import read_vision_config
from nest_megatron.model.layer_pattern import pattern_from_ratios
from nest_megatron.model.spec import LATENT_SIZES, ModelFamily, TransformerSpec
from nest_megatron.model.variant import ModelVariant, NormPlacement
from nest_megatron.plain import frozen

_TABLE = packaged(__package__, "model_fields.toml")
#: Field that must be off -> what this planner lacks otherwise.
REFUSED = MappingProxyType(_TABLE["refused"])
#: Field that is planned for as if it were off -> what the plan then leaves out.
UNPRICED = MappingProxyType(_TABLE["unpriced"])
#: Fields that only the code of some families looks at.
OF_FAMILIES = frozenset(_TABLE["of_families"])
#: Every field whose part in a plan is known.
CLASSIFIED = frozenset(
    name
    for table in ("read", "no_effect", "refused", "unpriced", "refused_otherwise", "of_families")
    for name in _TABLE[table]
)
#: What else the configuration of a model names as Megatron's arguments do.
SHAPE = (*SAME_NAMES, *LINEAR_NAMES, *EXPERT_NAMES, *FIELDS["model"]["shape"].split())
#: Families of models by a word of their configuration's class.
_FAMILIES = {"Bert": ModelFamily.BERT, "T5": ModelFamily.T5}
#: What ``dataclass`` writes into a class by itself.
_GENERATED = frozenset(("__init__", "__repr__", "__eq__", "__hash__", "__replace__"))


def refuse_unplannable(
    config: Any, *wrappers: Any, assume_harmless: Collection[str] = ()
) -> tuple[str, ...]:
    """Raise ``UnplannableModelError`` for models that this planner does not support, naming why.

    Args:
        config: a built configuration, a provider, or the Fiddle ``Config`` that would build one.
        wrappers: what holds the config, such as NeMo's model class; looked at by name.
        assume_harmless: fields that are not known and are planned for all the same.

    Returns:
        A note on each field that was assumed to be harmless.
    """
    for what, value, lacking in _refused(config, wrappers):
        raise unplannable(what, short_text(value), lacking)
    # a pattern names every layer, so that their number may be left out
    patterns = (value_or(config, f"hybrid_{kind}_pattern") for kind in ("layer", "override"))
    for name in (*(() if any(patterns) else ("num_layers",)), "hidden_size", "num_attention_heads"):
        if not value_or(config, name, 0):
            raise unplannable(f"model.{name}", None, "it states no layers of megatron-core's")
    return tuple(
        note
        for part in _parts(config)
        for note in notes_on_assumed(
            "model", changed_fields(part, _TABLE["supported_classes"], CLASSIFIED), assume_harmless
        )
    )


def _parts(config: Any) -> tuple[Any, ...]:
    """A model's configuration, and that of its layers, which Megatron-Bridge 0.7 keeps inside."""
    inside = value_or(config, "transformer")
    return (config,) if inside is None else (config, inside)


def notes_on_unknown_fields(parts: Mapping[str, Any]) -> tuple[str, ...]:
    """Notes on fields outside the model that are set and not known.

    Args:
        parts: of a job, by the path that messages call them.
    """
    return tuple(
        f"{path}.{name} = {short_text(value)} is not known here, and a plan leaves it out of "
        "account."
        for path, part in parts.items()
        for name, value in changed_fields(part, class_names(part)[:1], _TABLE["training_parts"])
    )


def notes_on_assumed(
    where: str, unknown: Iterator[tuple[str, Any]], assume_harmless: Collection[str]
) -> tuple[str, ...]:
    """Notes on the fields that are assumed to be harmless; the first other one is refused."""
    notes = []
    for name, value in unknown:
        field = f"{where}.{name}"
        lacking = "what it does to time and memory is not known here"
        if not {name, field}.intersection(assume_harmless):
            fix = "Launch this job without nest, or plan it as if the field were not set: "
            fix += f"--assume-harmless {name} (assume_harmless=[{name}])."
            raise UnplannableModelError(field, short_text(value), lacking, fix)
        notes.append(f"{field} = {short_text(value)} was assumed to be harmless: {lacking}.")
    return tuple(notes)


def unplannable(what: str, value: object, lacking: str) -> UnplannableModelError:
    """The error for a model that this planner does not support."""
    return UnplannableModelError(what, value, lacking, "Launch this job without nest.")


def unpriced(values: Mapping[str, Any]) -> tuple[str, ...]:
    """What a plan leaves out of account, one sentence for each field that is set.

    >>> unpriced({"qk_clip": True, "deterministic_mode": False})
    ('qk_clip = True is not modelled: the largest scores are found at no cost.',)
    """
    return tuple(
        f"{name} = {values[name]} is not modelled: {what}."
        for name, what in UNPRICED.items()
        if values.get(name)
    )


def _refused(config: Any, wrappers: tuple[Any, ...]) -> Iterator[tuple[str, Any, str]]:
    """What cannot be planned for: the model or a field that is set, its value, what is lacking."""
    for name in (name for each in (*wrappers, config) for name in class_names(each)):
        for pattern, lacking in _TABLE["refused_classes"].items():
            if name not in _TABLE["supported_classes"] and re.search(pattern, name):
                yield "model", name, lacking
    for part in _parts(config):
        yield from _refused_classes(part)
    for wrapper in wrappers:  # a user's own class may stand before one of NeMo's that is known
        for kind in classes_of(wrapper):
            if kind.__name__ in _TABLE["supported_models"]:
                break
            if kind.__module__.partition(".")[0] == "nemo":
                yield "model", kind.__name__, "such a model is not supported"
    yield from _refused_fields(config)


def _refused_fields(config: Any) -> Iterator[tuple[str, Any, str]]:
    for name, lacking in REFUSED.items():
        if value := value_or(config, name):
            yield f"model.{name}", value, lacking
    for name, (described, lacking) in _TABLE["refused_otherwise"].items():
        if (value := value_or(config, name, described)) != described:
            yield f"model.{name}", value, lacking
    names = {*class_names(config)}
    foreign = "these layers are not megatron-core's own"
    builder = layer_builder(value_or(config, "transformer_layer_spec"))
    for name, families in _TABLE["of_families"].items():
        if (value := value_or(config, name)) and names.isdisjoint(families):
            yield (
                f"model.{name}",
                value,
                f"of the supported models only {', '.join(families)} has it",
            )
    for name, builders in _TABLE["of_builders"].items():
        if (value := value_or(config, name)) and builder != builders:
            yield f"model.{name}", value, f"only {builders} builds such layers"
    of_no_family = names.isdisjoint(_TABLE["family_layers"].get(builder, ()))
    if of_no_family and builder not in (None, *_TABLE["standard_layers"]):
        yield "model.transformer_layer_spec", builder, foreign
    for name in ("mamba_stack_spec", "hybrid_stack_spec"):
        stack = value_or(config, name)
        if stack is not None and not _is_standard_stack(stack):
            yield f"model.{name}", layer_builder(stack), foreign


def _refused_classes(config: Any) -> Iterator[tuple[str, str, str]]:
    """Classes of a configuration that may build another model, and why.

    A family that only states sizes has nothing of its own but values of fields, and those are
    looked at one by one; one that overrides how a model is built must be known.
    """
    mro = classes_of(config)
    for place, kind in enumerate(mro):
        own = vars(kind)
        known = kind.__name__ in _TABLE["supported_classes"]
        if known or "__dataclass_fields__" not in own:
            continue
        for name, value in own.items():
            is_method = isinstance(value, FunctionType | property | classmethod | staticmethod)
            overrides = any(name in vars(base) for base in mro[place + 1 : -1])
            if is_method and overrides and name not in {*_GENERATED, *CLASSIFIED}:
                lacking = f"its own {name} may build a model that is not supported"
                yield "model", kind.__name__, lacking


def layer_builder(spec: Any) -> str | None:
    """The name of what makes a model's layers; ``None`` where the configuration says nothing."""
    if spec is None:
        return None
    spec = getattr(spec, "__fn_or_cls__", spec)  # Fiddle's
    spec = getattr(spec, "func", spec)  # functools.partial's
    return str(getattr(spec, "__name__", type(spec).__name__))


def _is_standard_stack(stack: Any) -> bool:
    """Whether a hybrid model's layers are megatron-core's: named so, or all modules from there."""
    if layer_builder(stack) in _TABLE["standard_stacks"]:
        return True
    inside = getattr(getattr(stack, "submodules", None), "__dict__", {})
    names = [
        module.__module__
        for each in (stack, *inside.values())
        if (module := getattr(each, "module", None)) is not None
    ]
    return bool(names) and all(name.startswith("megatron.core.") for name in names)


@frozen
class Family:
    """One family of models.

    Args:
        fields: of a ``TransformerSpec``, by Megatron's names, from a configuration: those that the
            family spells otherwise, or that its code fixes.
        packs: its attention takes packed sequences.
        keeps_scores: its attention is ``DotProductAttention``, which is not fused.
    """

    fields: Callable[[Any], dict[str, Any]] = lambda _: {}
    packs: bool = True
    keeps_scores: bool = False


def family_of(config: Any) -> Family:
    """The family of a model's configuration; one without fields for megatron-core's own layers."""
    names = (layer_builder(value_or(config, "transformer_layer_spec")), *class_names(config))
    return next((FAMILIES[name] for name in names if name in FAMILIES), Family())


def _hybrid(config: Any) -> dict[str, Any]:
    """A pattern, or the shares that make one; 0.16.1 has no MTP layers there.

    Another number of layers beside a pattern is refused.

    Source: ``HybridModelProvider.finalize`` of Megatron-Bridge 0.6, ``allocate_layers`` of
    megatron-core's ``mamba_hybrid_layer_allocation``.
    """
    found = (value_or(config, f"hybrid_{name}_pattern") for name in ("layer", "override"))
    pattern = next(filter(None, found), "")
    if not pattern:
        shares = (value_or(config, f"hybrid_{name}_ratio", 0.0) for name in ("attention", "mlp"))
        pattern = pattern_from_ratios(config.num_layers, *shares)
    pattern = pattern.replace("|", "")
    main = pattern.partition("/")[0]
    predictors = value_or(config, "mtp_num_layers", 0)
    if (depth := value_or(config, "mtp_hybrid_override_pattern")) is not None:
        pattern = "/".join((main, *(depth,) * predictors))
    if value_or(config, "num_layers", len(main)) != len(main):
        raise UserInputError(
            "num_layers",
            config.num_layers,
            f"the pattern of the model has {len(main)} layers",
            "Change both, or neither.",
        )
    return {
        "hybrid_layer_pattern": pattern,
        "num_layers": len(main),
        "mtp_num_layers": predictors or None,
    }


def _nemotron_h(config: Any) -> dict[str, Any]:
    """NeMo writes the squared ReLU of these models as a function without a name."""
    name = getattr(value_or(config, "activation_func"), "__qualname__", "")
    own = name.startswith("NemotronHConfigBase.")
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
    """0.7 states a window for each layer, and one for them all."""
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
    window = value_or(config, "window_size", 512)
    if not isinstance(window, int):
        raise unplannable("model.window_size", window, "Gemma 3's class takes a number of tokens")
    return {
        "variant": ModelVariant(norm_placement=NormPlacement.SANDWICH),
        "qk_layernorm": True,
        "window_size": (window, 0),
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


_HETEROGENEOUS_LAYERS = ("heterogeneous_layer_spec", "get_gpt_heterogeneous_layer_spec")

#: Base class of a family's configurations in NeMo or Megatron-Bridge, or the function that builds
#: its layers -> the family.
FAMILIES: dict[str | None, Family] = {
    "ExaoneMoeModelProvider": Family(fields=_exaone_moe),
    "exaone4_layer_spec": Family(
        fields=lambda _: {"variant": ModelVariant(norm_placement=NormPlacement.POST)},
        packs=False,
        keeps_scores=True,
    ),
    "HybridModelProvider": Family(fields=_hybrid),
    "MambaModelProvider": Family(fields=_hybrid),
    "NemotronHConfigBase": Family(fields=_nemotron_h),
    "SSMConfig": Family(fields=_hybrid),
    "HeterogeneousTransformerConfig": Family(fields=_heterogeneous),
    "Gemma2Config": Family(fields=_gemma2, packs=False),
    "Gemma2ModelProvider": Family(fields=_gemma2, packs=False),
    "Gemma3Config": Family(fields=_gemma3),
    "Gemma3ModelProvider": Family(fields=_gemma3),
    "OlMoEModelProvider": Family(
        fields=lambda _: {"variant": ModelVariant(qk_norm_full_width=True)},
    ),
    "Qwen25VLModelProvider": Family(fields=_qwen_vl),
    "Qwen3VLModelProvider": Family(fields=_qwen_vl),
    "Qwen3VLMoEModelProvider": Family(fields=_qwen_vl),
    "Llama4Config": Family(
        # on every layer, rotated or not (``Llama4SelfAttention.forward`` of ``llama4_utils``)
        fields=lambda config: {"attention_chunk_size": value_or(config, "attention_chunk_size")},
    ),
}


def spec_of_config(
    config: Any, *, seq_length: int, vocab_size: int, vocab_is_padded: bool
) -> TransformerSpec:
    """The shape of a model that is known to be supported, but for its activation.

    Args:
        config: megatron-core's ``TransformerConfig`` with what the frameworks add to it.
        seq_length: tokens of one training sample, which the data decides.
        vocab_size: rows of the embedding; before padding, unless ``vocab_is_padded``.

    Source: ``TransformerConfig``, NeMo's ``GPTConfig``, Megatron-Bridge's ``GPTModelProvider``.
    """
    kind = value_or(config, "position_embedding_type", "rope")
    longest = max(seq_length, value_or(config, "seq_length", 0))
    values = {
        **{name: value_or(config, name) for name in (*SHAPE, "layernorm_zero_centered_gamma")},
        "group_query_attention": True,
        "num_experts": value_or(config, "num_moe_experts"),
        "position_embedding_type": kind,
        "max_position_embeddings": longest if kind == "learned_absolute" else None,
        "rotary_base": value_or(config, "rotary_base", 10_000),
    }
    own = family_of(config).fields(config)
    if (own.get("attention_chunk_size") or seq_length) >= seq_length:  # nothing is cut
        own.pop("attention_chunk_size", None)
    values |= {name: value for name, value in own.items() if name in values}
    values["rotary_base"] = int(values["rotary_base"])
    if not values["multi_latent_attention"]:
        values |= dict.fromkeys(LATENT_SIZES)
    function = value_or(config, "activation_func", "gelu")
    function = getattr(function, "func", function)  # functools.partial(gelu, approximate=...)
    name = function if isinstance(function, str) else getattr(function, "__name__", repr(function))
    activation = FIELDS["activations"].get(name)
    if activation is None and "activation" not in own:
        supported = ", ".join(sorted(FIELDS["activations"]))
        raise unplannable("model.activation_func", name, f"supported are {supported}")
    shared = value_or(config, "share_embeddings_and_output_weights", True)
    names = " ".join(class_names(config))
    family = next((kind for word, kind in _FAMILIES.items() if word in names), ModelFamily.GPT)
    if family is ModelFamily.T5:
        values["max_position_embeddings"] = value_or(config, "max_position_embeddings", longest)
        own["encoder_num_layers"] = value_or(config, "encoder_num_layers")
        own["decoder_seq_length"] = value_or(config, "seq_length_dec")
    return spec_from_arguments(
        values,
        "model.{}".format,
        name=class_names(config)[0],
        family=family,
        num_layers=own.pop("num_layers", None) or config.num_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=value_or(config, "ffn_hidden_size", 4 * config.hidden_size),
        seq_length=seq_length,
        vocab_size=vocab_size,
        vocab_is_padded=vocab_is_padded,
        activation=own.pop("activation", None) or activation,
        gated_linear_unit=value_or(config, "gated_linear_unit", False),
        untie_embeddings_and_output_weights=not shared,
        source="the framework's own configuration",
        **{name: value for name, value in own.items() if name not in values},
    )
