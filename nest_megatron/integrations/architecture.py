"""Which model configurations of a framework can be planned: by their classes and all their fields.

A model is planned because its class and every field that it sets are known, not because nothing
about it looks strange. ``model_fields.toml`` says of each field whether it is read, has no effect,
or is refused; one that it does not name is refused as soon as it is set.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING
from types import FunctionType, MappingProxyType
from typing import Any

from nest_megatron.documents import packaged
from nest_megatron.errors import UnplannableModelError
from nest_megatron.integrations.fields import ABSENT, attribute, class_names, shown, value_or

_TABLE: Mapping[str, Any] = packaged(__package__, "model_fields.toml")
#: Field that must be off -> what this planner lacks otherwise.
REFUSED: Mapping[str, str] = MappingProxyType(_TABLE["refused"])
#: Field that is planned for as if it were off -> what the plan then leaves out.
UNPRICED: Mapping[str, str] = MappingProxyType(_TABLE["unpriced"])
#: Fields that only the code of some families looks at.
OF_FAMILIES = frozenset(_TABLE["of_families"])
#: Every field whose part in a plan is known.
CLASSIFIED = frozenset(
    name
    for table in ("read", "no_effect", "refused", "unpriced", "refused_otherwise", "of_families")
    for name in _TABLE[table]
)
#: What ``dataclass`` writes into a class by itself.
_GENERATED = frozenset(("__init__", "__repr__", "__eq__", "__hash__", "__replace__"))


def refuse_unplannable(config: Any, *wrappers: Any) -> None:
    """Raise ``UnplannableModelError`` for models that this planner does not support, naming why.

    Args:
        config: a built configuration, a provider, or the Fiddle ``Config`` that would build one.
        wrappers: what holds the config, such as NeMo's model class; looked at by name.
    """
    names = (name for each in (*wrappers, config) for name in class_names(each))
    for name in (name for name in names if name not in _TABLE["supported_classes"]):
        for pattern, lacking in _TABLE["refused_classes"].items():
            if re.search(pattern, name):
                raise unplannable("model", name, lacking)
    for refused in filter(None, (_refused_class(config), *map(refused_model, wrappers))):
        raise unplannable("model", *refused)
    for name, value, lacking in _refused_fields(config):
        raise unplannable(f"model.{name}", shown(value), lacking)
    for name in ("num_layers", "hidden_size", "num_attention_heads"):
        if not value_or(config, name, 0):
            raise unplannable(f"model.{name}", None, "its layers are not megatron-core's")


def unplannable(what: str, value: object, lacking: str) -> UnplannableModelError:
    """The error for a model that this planner does not support."""
    fix = "Launch this job without nest."
    return UnplannableModelError(what, value, limit=lacking, fix=fix)


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


def refused_model(wrapper: Any) -> tuple[str, str] | None:
    """NeMo's class around a configuration, where it is none of those whose model is known.

    A user's own class may stand before one of NeMo's that is known.
    """
    built = getattr(wrapper, "__fn_or_cls__", type(wrapper))
    for kind in getattr(built, "__mro__", (built,)):
        if kind.__name__ in _TABLE["supported_models"]:
            return None
        if kind.__module__.partition(".")[0] == "nemo":
            return kind.__name__, "such a model is not supported"
    return None


def _refused_fields(config: Any) -> Iterator[tuple[str, Any, str]]:
    """Fields that are set and cannot be planned for, their values, and what is lacking."""
    for name, lacking in REFUSED.items():
        if value := value_or(config, name, None):
            yield name, value, lacking
    for name, (described, lacking) in _TABLE["refused_otherwise"].items():
        if (value := value_or(config, name, described)) != described:
            yield name, value, lacking
    builder = layer_builder(value_or(config, "transformer_layer_spec", None))
    for name, families in _TABLE["of_families"].items():
        if (value := value_or(config, name, None)) and not {*families} & {*class_names(config)}:
            yield name, value, f"of the supported models only {', '.join(families)} has it"
    for name, builders in _TABLE["of_builders"].items():
        if (value := value_or(config, name, None)) and builder != builders:
            yield name, value, f"only {builders} builds such layers"
    of_family = {*_TABLE["family_layers"].get(builder, ())} & {*class_names(config)}
    if not of_family and builder not in (None, *_TABLE["standard_layers"]):
        yield "transformer_layer_spec", builder, "these layers are not megatron-core's own"
    stack = value_or(config, "mamba_stack_spec", None)
    if stack is not None and not _is_standard_stack(stack):
        yield "mamba_stack_spec", layer_builder(stack), "these layers are not megatron-core's own"
    for name, value in _unknown(config):
        yield name, value, "this field is set, and what it does to a model is not known here"


def _refused_class(config: Any) -> tuple[str, str] | None:
    """The first class of a configuration that may build another model, and why.

    A family that only states sizes has nothing of its own but values of known fields, and those are
    looked at one by one; one that adds fields or overrides how a model is built must be known.
    """
    mro = getattr(getattr(config, "__fn_or_cls__", type(config)), "__mro__", ())
    for place, kind in enumerate(mro):
        known = kind.__name__ in _TABLE["supported_classes"]
        if known or "__dataclass_fields__" not in vars(kind):
            continue
        for name in vars(kind).get("__annotations__", ()):
            if name not in CLASSIFIED:
                return kind.__name__, f"what its field {name} does to a model is not known here"
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
    modules = (getattr(each, "module", None) for each in (stack, *inside.values()))
    names = [module.__module__ for module in modules if module is not None]
    return bool(names) and all(name.startswith("megatron.core.") for name in names)


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
