"""The adapters of a recipe of NeMo or Megatron-Bridge, from the object that would make them."""

from __future__ import annotations

import dataclasses
from typing import Any

from nest_megatron.errors import UserInputError
from nest_megatron.integrations.architecture import unplannable
from nest_megatron.integrations.fields import class_names, set_fields, shown, value_or
from nest_megatron.model.adapters import EXPERTS, Adapters, PeftScheme
from nest_megatron.model.spec import TransformerSpec

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


def with_adapters(spec: TransformerSpec, peft: Any, where: str, config: Any) -> TransformerSpec:
    """The model with what a job's ``peft`` trains; raises as ``read_adapters`` does.

    Args:
        config: of the model: without grouped products each expert would have adapters of its own.
    """
    spec = dataclasses.replace(spec, adapters=read_adapters(peft, where))
    grouped = value_or(config, "moe_grouped_gemm", False)
    if spec.adapters is None or not spec.is_moe or grouped:
        return spec
    for path in EXPERTS:
        if spec.adapters.adapts(path, spec.num_layers):
            raise UserInputError(
                "model.moe_grouped_gemm",
                grouped,
                f"without it every expert has an adapter of its own on {path}, not priced here",
                f"Set it, or leave {path.rpartition('.')[2]} out of {where}.target_modules.",
            )
    return spec


def read_adapters(peft: Any, where: str) -> Adapters | None:
    """What a job's ``peft`` adapts; ``None`` where it trains all weights.

    Args:
        peft: ``LoRA``, ``DoRA`` or ``CanonicalLoRA`` of ``nemo.collections.llm.peft`` or
            ``megatron.bridge.peft``, built or a Fiddle ``Config``.
        where: what messages call it.

    Raises:
        UnplannableModelError: for another scheme, or a field whose effect is not known.
        UserInputError: for what cannot be priced, naming the field.
    """
    if peft is None:
        return None
    name = class_names(peft)[0]
    if name not in _SCHEMES:
        raise unplannable(
            where, name, f"of fine-tuning schemes {', '.join(_SCHEMES)} are supported"
        )
    for field, value in set_fields(peft):
        if field not in (*_READ, *_NO_EFFECT) and not field.startswith("_"):
            raise unplannable(
                f"{where}.{field}",
                shown(value),
                "what this field does to time and memory is not known here",
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
    return Adapters(scheme=_SCHEMES[name], target_modules=targets, **given)
