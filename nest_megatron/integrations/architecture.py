"""Which model configurations of a framework can be planned: by their classes and all their fields.

A model is planned because its class and every field that it sets are known, not because nothing
about it looks strange. ``model_fields.toml`` says of each field whether it is read, has no effect,
or is refused; one that it does not name is refused as soon as it is set.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING
from importlib import resources
from types import FunctionType, MappingProxyType
from typing import Any

from nest_megatron.integrations.fields import ABSENT, attribute, value_or


def _table() -> dict[str, Any]:
    text = resources.files(__package__).joinpath("model_fields.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


_TABLE = _table()
#: Field that must be off -> what this planner lacks otherwise.
REFUSED: Mapping[str, str] = MappingProxyType(_TABLE["refused"])
#: Field that is planned for as if it were off -> what the plan then leaves out.
UNPRICED: Mapping[str, str] = MappingProxyType(_TABLE["unpriced"])
_REFUSED_OTHERWISE: Mapping[str, tuple[object, str]] = MappingProxyType(_TABLE["refused_otherwise"])
#: Every field whose part in a plan is known.
CLASSIFIED = frozenset(
    (*_TABLE["read"], *_TABLE["no_effect"], *REFUSED, *UNPRICED, *_REFUSED_OTHERWISE)
)
#: Functions that build megatron-core's own layers, by their names in the three frameworks.
_STANDARD_LAYERS = frozenset(
    {
        "default_layer_spec",
        "get_gpt_decoder_block_spec",
        "get_gpt_layer_with_transformer_engine_spec",
        "local_layer_spec",
        "transformer_engine_full_layer_spec",
        "transformer_engine_layer_spec",
    }
)
#: Classes that build a model by code of their own, and build what this planner supports: the bases
#: of both frameworks, and families that only scale embeddings or angles, or warn of an old name.
_SUPPORTED_CLASSES = frozenset(
    (
        "BertConfig",
        "DeepSeekConfig",
        "DeepSeekModelProvider",
        "DeepSeekProvider",
        "DeepSeekV2LiteModelProvider",
        "DeepSeekV2LiteProvider",
        "DeepSeekV2ModelProvider",
        "DeepSeekV2Provider",
        "DeepSeekV3ModelProvider",
        "DeepSeekV3Provider",
        "GPTConfig",
        "GPTModelProvider",
        "GPTOSSProvider",
        "GemmaModelProvider",
        "Llama31Config",
        "MLATransformerConfig",
        "ModelParallelConfig",
        "MoonlightModelProvider16B",
        "MoonlightProvider",
        "TransformerConfig",
    )
)
#: NeMo's models around them.
_SUPPORTED_MODELS = frozenset(
    (
        "Baichuan2Model",
        "BertModel",
        "ChatGLMModel",
        "DeepSeekModel",
        "GPTModel",
        "GPTOSSModel",
        "GemmaModel",
        "LlamaModel",
        "LlamaNemotronModel",
        "MistralModel",
        "MixtralModel",
        "NemotronModel",
        "Phi3Model",
        "Qwen2Model",
        "Qwen3Model",
        "Starcoder2Model",
        "StarcoderModel",
    )
)
#: What ``dataclass`` writes into a class by itself.
_GENERATED = frozenset(("__init__", "__repr__", "__eq__", "__hash__", "__replace__"))
_NOT_READ = "this field is set, and what it does to a model is not known here"


def refused_field(config: Any) -> tuple[str, Any, str] | None:
    """The first field that is set and cannot be planned for, its value, and what is lacking.

    Args:
        config: a built configuration, a provider, or the Fiddle ``Config`` that would build one.
    """
    for name, lacking in REFUSED.items():
        if (value := attribute(config, name)) is not ABSENT and value:
            return name, value, lacking
    for name, (described, lacking) in _REFUSED_OTHERWISE.items():
        if (value := attribute(config, name)) not in (ABSENT, None, described):
            return name, value, lacking
    builder = _layer_builder(attribute(config, "transformer_layer_spec"))
    if builder not in (None, *_STANDARD_LAYERS):
        return "transformer_layer_spec", builder, "these layers are not megatron-core's own"
    return next(((name, value, _NOT_READ) for name, value in _unknown(config)), None)


def refused_class(config: Any) -> tuple[str, str] | None:
    """The first class of a configuration that may build another model, and why.

    A family that only states sizes has nothing of its own but values of known fields, and those are
    looked at one by one; one that adds fields or overrides how a model is built must be known.
    """
    mro = getattr(getattr(config, "__fn_or_cls__", type(config)), "__mro__", ())
    for place, kind in enumerate(mro):
        if kind.__name__ in _SUPPORTED_CLASSES or "__dataclass_fields__" not in vars(kind):
            continue
        unknown = next(
            (n for n in vars(kind).get("__annotations__", ()) if n not in CLASSIFIED), None
        )
        if unknown is not None:
            return kind.__name__, f"what its field {unknown} does to a model is not known here"
        if (method := _overridden(kind, mro[place + 1 : -1])) is not None:
            return kind.__name__, f"its own {method} may build a model that is not supported"
    return None


def _overridden(kind: type, bases: tuple[type, ...]) -> str | None:
    """A method of the bases that a class has written anew."""
    made_here = (
        name
        for name, value in vars(kind).items()
        if isinstance(value, FunctionType | property | classmethod | staticmethod)
        if name not in _GENERATED and name not in CLASSIFIED
    )
    return next((name for name in made_here if any(name in vars(base) for base in bases)), None)


def refused_model(wrapper: Any) -> tuple[str, str] | None:
    """NeMo's class around a configuration, where it is none of those whose model is known.

    A user's own class may stand before one of NeMo's that is known.
    """
    built = getattr(wrapper, "__fn_or_cls__", type(wrapper))
    for kind in getattr(built, "__mro__", (built,)):
        if kind.__name__ in _SUPPORTED_MODELS:
            return None
        if kind.__module__.partition(".")[0] == "nemo":
            return kind.__name__, "such a model is not supported"
    return None


def unpriced_fields(config: Any) -> tuple[str, ...]:
    """As ``unpriced``, of a configuration as ``refused_field`` takes it."""
    return unpriced({name: value_or(config, name, None) for name in UNPRICED})


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


def _layer_builder(spec: Any) -> str | None:
    """The name of what makes a model's layers; ``None`` where the configuration says nothing."""
    if spec is ABSENT or spec is None:
        return None
    spec = getattr(spec, "__fn_or_cls__", spec)  # Fiddle's
    spec = getattr(spec, "func", spec)  # functools.partial's
    return str(getattr(spec, "__name__", type(spec).__name__))


def _unknown(config: Any) -> Iterator[tuple[str, Any]]:
    """Fields that are not classified and that are set.

    Set is what differs from the framework's own default; a field of one family of models alone, or
    of one object, has none, and is set where it is not empty.
    """
    kind = getattr(config, "__fn_or_cls__", type(config))
    own = getattr(kind, "__dataclass_fields__", {})
    set_here = getattr(config, "__arguments__", None) or getattr(config, "__dict__", {})
    for name in dict.fromkeys((*own, *set_here)):
        if name in CLASSIFIED or (name not in own and name.startswith("_")):
            continue
        value = attribute(config, name)
        if value is not ABSENT and value and value != _framework_default(kind, name):
            yield name, value


def _framework_default(kind: Any, name: str) -> Any:
    """A field's default in megatron-core's configuration, where a newer release has added it."""
    for base in getattr(kind, "__mro__", ()):
        if base.__name__ == "TransformerConfig" and name in base.__dataclass_fields__:
            field = base.__dataclass_fields__[name]
            return field.default if field.default_factory is MISSING else field.default_factory()
    return None
