"""Families whose layers a framework builds by code of its own: what they are, what that code needs.

Everything else of a family's configuration is read as of any other model (``recipe.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from nest_megatron.config.job import Requirement
from nest_megatron.integrations.fields import class_names, value_or
from nest_megatron.model.layer_pattern import pattern_from_ratios
from nest_megatron.model.spec import TransformerSpec

_CONTEXT = "context_parallel_size"
_VIRTUAL = "virtual_pipeline_model_parallel_size"
_TENSOR = "tensor_model_parallel_size"


def _nothing(_: Any, __: int) -> dict[str, Any]:
    return {}


def _no_needs(_: TransformerSpec) -> Mapping[str, str]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family of models.

    Args:
        fields: of a ``TransformerSpec``, by Megatron's names, from a configuration and the tokens
            of a sample: those that the family spells otherwise, or that its code fixes.
        ones: the degrees that its code takes only as 1, and why, for a model of it.
    """

    fields: Callable[[Any, int], dict[str, Any]] = _nothing
    ones: Callable[[TransformerSpec], Mapping[str, str]] = _no_needs


def family_fields(config: Any, seq_length: int) -> dict[str, Any]:
    """What a configuration's family says of its layers; nothing for megatron-core's own."""
    family = _family(config)
    return {} if family is None else family.fields(config, seq_length)


def family_requirements(config: Any, spec: TransformerSpec) -> dict[str, Requirement]:
    """The degrees that the code of a configuration's family fixes."""
    family = _family(config)
    ones = {} if family is None else family.ones(spec)
    fix = "plan another model"
    return {
        name: Requirement(value=1, reason=why, fix=fix, who=class_names(config)[0])
        for name, why in ones.items()
    }


def _family(config: Any) -> Family | None:
    return next((FAMILIES[name] for name in class_names(config) if name in FAMILIES), None)


def _llama4(config: Any, seq_length: int) -> dict[str, Any]:
    """NeMo cuts sequences that are longer than a chunk on every layer, rotated or not.

    Source: ``nemo.collections.llm.gpt.model.llama4_utils.Llama4SelfAttention.forward``.
    """
    chunk = value_or(config, "attention_chunk_size", seq_length)
    return {"attention_chunk_size": chunk if seq_length > chunk else None}


def _uncut(spec: TransformerSpec) -> Mapping[str, str]:
    why = "its chunks are cut from the part of a sequence that one rank holds"
    return {} if spec.attention_chunk_size is None else {_CONTEXT: why}


def _hybrid(config: Any, _: int) -> dict[str, Any]:
    """A pattern, or the shares that make one; 0.16.1 has no MTP layers there."""
    pattern = value_or(config, "hybrid_override_pattern", "")
    if not pattern:
        shares = (value_or(config, f"hybrid_{name}_ratio", 0.0) for name in ("attention", "mlp"))
        pattern = pattern_from_ratios(config.num_layers, *shares)
    return {"hybrid_layer_pattern": pattern}


def _nemotron_h(config: Any, seq_length: int) -> dict[str, Any]:
    """NeMo writes the squared ReLU of these models as a function without a name."""
    function = value_or(config, "activation_func", None)
    own = getattr(function, "__qualname__", "").startswith("NemotronHConfigBase.")
    return _hybrid(config, seq_length) | ({"activation": "squared_relu"} if own else {})


#: Base class of a family's configurations in NeMo or Megatron-Bridge -> the family.
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "MambaModelProvider": Family(fields=_hybrid),
        "NemotronHConfigBase": Family(fields=_nemotron_h),
        "SSMConfig": Family(fields=_hybrid),
        "Llama4Config": Family(fields=_llama4, ones=_uncut),
    }
)
