"""What a framework's configuration says of memory, by Megatron's names.

NeMo, Megatron-Bridge and megatron-core spell most settings alike and keep them in several objects:
the recipe of mixed precision, the model's, the optimizer's and data parallelism's configuration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from nest_megatron.cost_model.memory_flags import READ
from nest_megatron.integrations.fields import ABSENT, attribute

#: Megatron's name -> other names for it in configurations.
_SPELLINGS = {
    "fp8_param_gather": ("fp8_param_gather", "fp8_params", "fp8_param"),
    "fp4_param_gather": ("fp4_param_gather", "fp4_param"),
}
_INSTANCES = "num_distributed_optimizer_instances"
#: Settings that follow from the number format, which each reader finds in a way of its own.
_OF_PRECISION = ("bf16", "fp16", "fp8", "fp8_recipe", "params_dtype")


def memory_fields(*holders: Any) -> Mapping[str, Any]:
    """Settings that memory depends on beside the layout, the first holder's word counting.

    Args:
        holders: objects or Fiddle configurations, the one whose settings the framework copies over
            the others' first; ``None`` is passed over.
    """
    names = [name for name in READ if name not in _OF_PRECISION]
    stated = {name: next(_stated(holders, name), None) for name in names}
    stated[_INSTANCES] = max((int(each) for each in _stated(holders, _INSTANCES)), default=None)
    wide = next(_stated(holders, "grad_reduce_in_fp32"), None)
    if wide is not None:
        stated["accumulate_allreduce_grads_in_fp32"] = bool(wide)
        stated["grad_reduce_in_bf16"] = not wide
    return MappingProxyType({name: value for name, value in stated.items() if value is not None})


def _stated(holders: tuple[Any, ...], name: str) -> Iterator[Any]:
    for holder in holders:
        for spelled in _SPELLINGS.get(name, (name,)):
            value = ABSENT if holder is None else attribute(holder, spelled)
            if value is not ABSENT and value is not None:
                yield value
