"""A layout in a few words: ``tp=8,pp=4``, settings, or Megatron's own flags."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from nest_megatron.config.compose import Composed, compose
from nest_megatron.config.overrides import parse
from nest_megatron.config.schema import section_keys
from nest_megatron.errors import UserInputError, nearest
from nest_megatron.parallel.dims import SHORT_DEGREES, RankOrder

_MICRO = "train.micro_batch_size"
#: Settings of a layout, by their names without the section.
_SETTINGS = {
    **{key.partition(".")[2]: key for key in section_keys() if key.startswith("parallel.")},
    "micro_batch_size": _MICRO,
}
_SHORT = {
    **{short.lower(): f"parallel.{name}" for name, short in SHORT_DEGREES.items()},
    "vp": "parallel.virtual_pipeline_model_parallel_size",
    "mbs": _MICRO,
    "zero": "parallel.zero_stage",
    "recompute": "parallel.recompute_granularity",
    # Megatron-LM's
    "num_virtual_stages_per_pipeline_rank": "parallel.virtual_pipeline_model_parallel_size",
}
#: Megatron's switches, as settings.
_SWITCHES = {
    "sequence_parallel": ("parallel.sequence_parallel", "true"),
    "use_distributed_optimizer": ("parallel.zero_stage", "1"),
    "use_tp_pp_dp_mapping": ("parallel.rank_order", RankOrder.TP_CP_EP_PP_DP.value),
}
#: A comma outside brackets, before another name.
_COMMA = re.compile(r",(?=\s*[A-Za-z_.\-]+\s*=)|,\s*(?=--)")


def layout_key(word: str) -> str | None:
    """The setting that a word for a size of a layout says.

    >>> layout_key("tp"), layout_key("zero"), layout_key("max_seconds")
    ('parallel.tensor_model_parallel_size', 'parallel.zero_stage', None)
    """
    return _SETTINGS.get(word) or _SHORT.get(word.lower())


def read_layout(text: str, option: str) -> Composed:
    """The settings of a layout, checked.

    Args:
        text: ``tp=8,pp=4,mbs=1``, ``parallel.tensor_model_parallel_size=8``, or
            ``--tensor-model-parallel-size 8 --pipeline-model-parallel-size 4``.
        option: that it was given to, for errors.

    Raises:
        UserInputError: for a word that says nothing of a layout, or a value of the wrong type.
    """
    found: dict[str, str] = {}
    for name, given in _pairs(text, option):
        key, value = _setting(name, given, option)
        if found.setdefault(key, value) != value:
            limit = f"{key}={found[key]} is given as well"
            raise UserInputError(option, value=f"{name}={value}", limit=limit, fix="Give one.")
    if not found:
        limit, fix = "it names no size", "For example tp=8,pp=4."
        raise UserInputError(option, value=text, limit=limit, fix=fix)
    settings = parse(f"{key}={value}" for key, value in found.items())
    return compose(settings)


def _pairs(text: str, option: str) -> Iterator[tuple[str, str | None]]:
    """Names with their values, ``None`` for a switch."""
    try:
        words = [word for part in _COMMA.split(text) for word in shlex.split(part)]
    except ValueError as error:
        fix = "Close the quotes."
        raise UserInputError(option, value=text, limit=str(error), fix=fix) from error
    while words:
        name, equals, value = words.pop(0).partition("=")
        if equals:
            yield name, value
        elif name.startswith("--") and words and not words[0].startswith("--"):
            yield name, words.pop(0)
        else:
            yield name, None


def _setting(name: str, value: str | None, option: str) -> tuple[str, str]:
    plain = name.lstrip("-").replace("-", "_")
    plain = re.sub(r"^(parallel|train)\.", "", plain)
    if plain in _SWITCHES and value is None:
        return _SWITCHES[plain]
    key = layout_key(plain)
    if key is None or value is None:
        limit = "it has no value" if key else "it says nothing of a layout"
        fix = "For example tp=8." if key else nearest(plain, {*_SETTINGS, *_SHORT, *_SWITCHES})
        raise UserInputError(option, value=name, limit=limit, fix=fix)
    if "," in value and not value.startswith("[") and not key.endswith("_layout"):
        limit, fix = "it has several values", "Give one layout."
        raise UserInputError(option, value=f"{name}={value}", limit=limit, fix=fix)
    return key, value
