"""What Megatron's arguments do to memory, by ``memory_flags.toml``.

By Megatron's own names (``dest``), of 0.16.1 and 0.20. A job whose flags are all priced gets a
verdict on memory; one with a flag that is not modelled is planned too, and the verdict names it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from nest_megatron.documents import packaged
from nest_megatron.layout.cuda_graphs import Flags

_TABLE = packaged(__package__, "memory_flags.toml")
#: Argument -> its values that change nothing. Any other value makes memory uncertain.
NOT_MODELLED: Mapping[str, list[object]] = MappingProxyType(_TABLE["not_modelled"])
#: Arguments that are read of a job, whatever holds them.
READ = (*_TABLE["priced"], *NOT_MODELLED, *_TABLE["execution"])
#: Optimizers whose states are known (``execution_flags``).
OPTIMIZERS = ("adam", "sgd", "muon", "dist_muon", "lion")
_OFF = (None, False, 0, "", "none")
#: Words of flags that may change what a model is.
_OF_MODEL = re.compile("expert|moe|head|layer|hidden|ffn|lora|adapter|attention|vision|vocab")


def memory_flags(values: Flags) -> Flags:
    """What a job says of all that its memory depends on beside the layout."""
    return MappingProxyType(
        {
            name: value
            for name in READ
            if (value := values.get(name)) is not None and not isinstance(value, Mapping)
        }
    )


def not_modelled(flags: Flags, *, as_fields: bool = False) -> tuple[str, ...]:
    """Flags of a job whose effect on memory is not known here, as they are typed.

    Args:
        as_fields: name the fields of a recipe, which have Megatron's names.

    >>> not_modelled({"fine_grained_activation_offloading": True, "bf16": True})
    ('--fine-grained-activation-offloading',)
    >>> not_modelled({"nccl_ub": True, "optimizer": "sophia"}, as_fields=True)
    ('nccl_ub', 'optimizer sophia')
    """
    values = {
        name: ""
        for name, inert in NOT_MODELLED.items()
        if name in flags and not _is_off(flags[name], inert)
    }
    if (impl := text(flags.get("transformer_impl"))) in ("local", "inference_optimized"):
        values["transformer_impl"] = f" {impl}"
    if (optimizer := text(flags.get("optimizer") or "adam")) not in OPTIMIZERS:
        values["optimizer"] = f" {optimizer}"
    return tuple(
        (name if as_fields else _TABLE["flags"].get(name, f"--{name.replace('_', '-')}")) + value
        for name, value in values.items()
    )


def may_change_model(flag: str) -> bool:
    """Whether a flag that Megatron lacks names a part of the model, of which no figure knows.

    >>> may_change_model("--moe-num-experts"), may_change_model("--log-dir")
    (True, False)
    """
    name = flag.lstrip("-").replace("-", "_")
    return name not in NOT_MODELLED and _OF_MODEL.search(name) is not None


def text(value: object) -> str:
    """Megatron's short word for an enum's member or a torch type; no torch is loaded for it.

    >>> text("torch.bfloat16"), text("fp32")
    ('bf16', 'fp32')
    """
    names = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "uint8": "fp8"}
    word = str(getattr(value, "name", value)).removeprefix("torch.")
    return names.get(word, word)


def _is_off(value: object, inert: list[object]) -> bool:
    plain = value if isinstance(value, bool | int | float | str | list | tuple) else text(value)
    if isinstance(plain, list | tuple):
        return not plain
    return plain in _OFF or plain in inert
