"""Which model configurations of a framework can be planned: by their classes and all their fields.

A model is planned because its class and every field that it sets are known, not because nothing
about it looks strange. ``model_fields.toml`` says of each field whether it is read, has no effect,
or is refused; one that it does not name is refused where it is not as its class makes it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping
from types import FunctionType, MappingProxyType
from typing import Any

from nest_megatron.documents import packaged
from nest_megatron.errors import UnplannableModelError, UserInputError
from nest_megatron.integrations.fields import (
    changed_fields,
    class_names,
    classes_of,
    shown,
    value_or,
)
from nest_megatron.model.encoder import EXPERTS, Adapters, PeftScheme
from nest_megatron.model.spec import TransformerSpec

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
        raise unplannable(what, shown(value), lacking)
    for name in ("num_layers", "hidden_size", "num_attention_heads"):
        if not value_or(config, name, 0) and not (name == "num_layers" and _pattern(config)):
            raise unplannable(f"model.{name}", None, "it states no layers of megatron-core's")
    notes = (
        _assumed(
            "model",
            changed_fields(part, _TABLE["supported_classes"], CLASSIFIED),
            assume_harmless,
        )
        for part in _parts(config)
    )
    return tuple(note for each in notes for note in each)


def _parts(config: Any) -> tuple[Any, ...]:
    """A model's configuration, and that of its layers, which Megatron-Bridge 0.7 keeps inside."""
    inside = value_or(config, "transformer")
    return (config,) if inside is None else (config, inside)


def unknown_beside(parts: Mapping[str, Any]) -> tuple[str, ...]:
    """Notes on fields beside the model that are set and not known.

    Args:
        parts: of a job, by the path that messages call them.
    """
    return tuple(
        f"{path}.{name} = {shown(value)} is not known here, and a plan leaves it out of account."
        for path, part in parts.items()
        for name, value in changed_fields(part, class_names(part)[:1], _TABLE["beside_the_model"])
    )


def _pattern(config: Any) -> Any:
    """A pattern that names every layer, so that their number may be left out."""
    return value_or(config, "hybrid_layer_pattern") or value_or(config, "hybrid_override_pattern")


def _assumed(
    where: str, unknown: Iterator[tuple[str, Any]], assume_harmless: Collection[str]
) -> tuple[str, ...]:
    """Notes on the fields that are assumed to be harmless; the first other one is refused."""
    notes = []
    for name, value in unknown:
        field, lacking = f"{where}.{name}", "what it does to time and memory is not known here"
        if not {name, field}.intersection(assume_harmless):
            fix = "Launch this job without nest, or plan it as if the field were not set: "
            fix += f"--assume-harmless {name} (assume_harmless=[{name}])."
            raise UnplannableModelError(field, shown(value), lacking, fix)
        notes.append(f"{field} = {shown(value)} was assumed to be harmless: {lacking}.")
    return tuple(notes)


def unplannable(what: str, value: object, lacking: str) -> UnplannableModelError:
    """The error for a model that this planner does not support."""
    fix = "Launch this job without nest."
    return UnplannableModelError(what, value, lacking, fix)


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
        for name, lacking in _refused_classes(part):
            yield "model", name, lacking
    for wrapper in wrappers:  # a user's own class may stand before one of NeMo's that is known
        for kind in classes_of(wrapper):
            if kind.__name__ in _TABLE["supported_models"]:
                break
            if kind.__module__.partition(".")[0] == "nemo":
                yield "model", kind.__name__, "such a model is not supported"
    for name, value, lacking in _refused_fields(config):
        yield f"model.{name}", value, lacking


def _refused_fields(config: Any) -> Iterator[tuple[str, Any, str]]:
    for name, lacking in REFUSED.items():
        if value := value_or(config, name):
            yield name, value, lacking
    for name, (described, lacking) in _TABLE["refused_otherwise"].items():
        if (value := value_or(config, name, described)) != described:
            yield name, value, lacking
    names, foreign = {*class_names(config)}, "these layers are not megatron-core's own"
    builder = layer_builder(value_or(config, "transformer_layer_spec"))
    for name, families in _TABLE["of_families"].items():
        if (value := value_or(config, name)) and names.isdisjoint(families):
            yield name, value, f"of the supported models only {', '.join(families)} has it"
    for name, builders in _TABLE["of_builders"].items():
        if (value := value_or(config, name)) and builder != builders:
            yield name, value, f"only {builders} builds such layers"
    of_no_family = names.isdisjoint(_TABLE["family_layers"].get(builder, ()))
    if of_no_family and builder not in (None, *_TABLE["standard_layers"]):
        yield "transformer_layer_spec", builder, foreign
    for name in ("mamba_stack_spec", "hybrid_stack_spec"):
        stack = value_or(config, name)
        if stack is not None and not _is_standard_stack(stack):
            yield name, layer_builder(stack), foreign


def _refused_classes(config: Any) -> Iterator[tuple[str, str]]:
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
                yield kind.__name__, lacking


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


_SCHEMES = {
    "LoRA": PeftScheme.LORA,
    "DoRA": PeftScheme.DORA,
    "CanonicalLoRA": PeftScheme.CANONICAL_LORA,
}
_READ = tuple(field.name for field in dataclasses.fields(Adapters) if field.name != "scheme")
#: Fields that change neither time nor memory: scaling, first values, what is derived, what a
#: checkpoint holds.
_NO_EFFECT = (
    *("alpha", "lora_A_init_method", "lora_B_init_method", "canonical_mapping", "params_to_save"),
)


def with_adapters(
    spec: TransformerSpec,
    peft: Any,
    where: str,
    config: Any,
    assume_harmless: Collection[str] = (),
) -> tuple[TransformerSpec, tuple[str, ...]]:
    """The model with what a job's ``peft`` trains, and notes; raises as ``read_adapters`` does.

    Args:
        config: of the model: without grouped products each expert would have adapters of its own.
    """
    adapters, notes = read_adapters(peft, where, assume_harmless)
    spec = dataclasses.replace(spec, adapters=adapters)
    grouped = value_or(config, "moe_grouped_gemm", False)
    if spec.adapters is None or not spec.is_moe or grouped:
        return spec, notes
    for path in EXPERTS:
        if spec.adapters.adapts(path, spec.num_layers):
            raise UserInputError(
                "model.moe_grouped_gemm",
                grouped,
                f"without it every expert has an adapter of its own on {path}, not priced here",
                f"Set it, or leave {path.rpartition('.')[2]} out of {where}.target_modules.",
            )
    return spec, notes


def read_adapters(
    peft: Any, where: str, assume_harmless: Collection[str] = ()
) -> tuple[Adapters | None, tuple[str, ...]]:
    """What a job's ``peft`` adapts (``None`` where it trains all weights), and notes.

    Args:
        peft: ``LoRA``, ``DoRA`` or ``CanonicalLoRA`` of ``nemo.collections.llm.peft`` or
            ``megatron.bridge.peft``, built or a Fiddle ``Config``.
        where: what messages call it.
        assume_harmless: as of ``refuse_unplannable``.

    Raises:
        UnplannableModelError: for another scheme, or a field whose effect is not known.
        UserInputError: for what cannot be priced, naming the field.
    """
    if peft is None:
        return None, ()
    name = class_names(peft)[0]
    if name not in _SCHEMES:
        raise unplannable(
            where, name, f"of fine-tuning schemes {', '.join(_SCHEMES)} are supported"
        )
    notes = _assumed(
        where, changed_fields(peft, (*_SCHEMES,), (*_READ, *_NO_EFFECT)), assume_harmless
    )
    stated = {field: value_or(peft, field) for field in _READ}
    given = {field: value for field, value in stated.items() if value is not None}
    if not (targets := tuple(given.pop("target_modules", ()))):
        raise UserInputError(
            f"{where}.target_modules",
            list(targets),
            "adapters on all but some modules are not priced",
            "Name target_modules.",
        )
    return Adapters(scheme=_SCHEMES[name], target_modules=targets, **given), notes
