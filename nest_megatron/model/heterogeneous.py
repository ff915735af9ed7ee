"""Heterogeneous models: layers of unlike shapes, as neural architecture search finds them.

Source: ``megatron.core.transformer.heterogeneous.heterogeneous_config`` and
``get_gpt_heterogeneous_layer_spec``, which read the ``block_configs`` of Hugging Face's
``nemotron-nas`` models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nest_megatron.documents import parse_json
from nest_megatron.errors import UserInputError
from nest_megatron.files import read_text
from nest_megatron.model.layer_pattern import LayerBlock, LayerKind

#: What ``ffn_mult`` gives is a multiple of it.
_STEP = 256
_SIZES = {"attention": "num_query_groups", "mlp": "ffn_hidden_size"}
_HALVES = {
    "attention": (LayerBlock.ATTENTION, LayerBlock.LINEAR_FOR_ATTENTION),
    "mlp": (LayerBlock.DENSE, LayerBlock.LINEAR_FOR_MLP),
}


def heterogeneous_layers(
    block_configs: Sequence[Mapping[str, Any]],
    what: str,
    *,
    hidden_size: int,
    num_attention_heads: int,
    num_query_groups: int,
    ffn_hidden_size: int,
) -> tuple[LayerKind, ...]:
    """The layers that megatron-core builds of ``block_configs``.

    Args:
        block_configs: of each layer ``attention`` and ``ffn`` (or ``mlp``): a ``no_op``, one to
            ``replace_with_linear``, or of a size: ``num_query_groups`` or heads in a group,
            ``ffn_hidden_size`` or ``ffn_mult``.
        what: where they stand, for messages.
        num_query_groups, ffn_hidden_size: of a layer that does not say its own.

    Raises:
        UserInputError: for what megatron-core cannot read or build.

    >>> sizes = dict(hidden_size=768, num_attention_heads=8, num_query_groups=8)
    >>> block = {"attention": {"n_heads_in_group": 4}, "ffn": {"ffn_mult": 1.0}}
    >>> heterogeneous_layers([block], "layers", **sizes, ffn_hidden_size=3072)[0].value
    'attention[2]+dense[512]'
    """
    found = []
    for number, config in enumerate(block_configs):
        try:
            first, second = config["attention"], config.get("ffn") or config["mlp"]
            groups = _query_groups(first, num_attention_heads)
            halves = (
                _half(first, groups, "attention", num_query_groups),
                _half(second, _inner_size(second, hidden_size), "mlp", ffn_hidden_size),
            )
            found.append(LayerKind("+".join(filter(None, halves)) or LayerKind.NO_OP))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise UserInputError(
                f"{what}: layer {number}",
                config,
                f"megatron-core cannot build it ({error!r})",
                "Correct the layer: {attention: {num_query_groups: 8}, ffn: {no_op: true}}.",
            ) from None
    return tuple(found)


def read_heterogeneous_layers(
    text: str | None, path: str | None, spelled: Callable[[str], str], **sizes: int
) -> tuple[LayerKind, ...]:
    """The layers of a text in JSON, or of a file that holds it.

    Args:
        text, path: Megatron's ``heterogeneous_layers_config_encoded_json`` and ``..._path``.
        spelled: how the user writes an argument, for messages.
        sizes: as ``heterogeneous_layers`` takes them.

    Raises:
        UserInputError: for a file that cannot be read, or what is none of such layers.
    """
    what, value = spelled("heterogeneous_layers_config_encoded_json"), "its text"
    fix = 'Give {"block_configs": [...]}, as config.json of Llama-Nemotron has it.'
    try:
        if not text:
            what, value = spelled("heterogeneous_layers_config_path"), str(path)
            text = read_text(Path(path or ""), what)
        blocks = list(parse_json(text, what)["block_configs"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserInputError(what, value, f"it cannot be read ({error!r})", fix) from None
    return heterogeneous_layers(blocks, what, **sizes)


def _query_groups(attention: Mapping[str, Any], heads: int) -> int | None:
    own = attention.get("num_query_groups")
    if "num_query_groups" in attention:
        return own
    in_group = attention["n_heads_in_group"]
    if in_group is not None and heads % in_group:
        raise ValueError(f"{heads} attention heads are not a multiple of n_heads_in_group")
    return None if in_group is None else heads // in_group


def _inner_size(mlp: Mapping[str, Any], hidden_size: int) -> int | None:
    own = mlp.get("ffn_hidden_size")
    if "ffn_hidden_size" in mlp:
        return own
    factor = mlp["ffn_mult"]
    return None if factor is None else -(-int(2 * factor * hidden_size / 3) // _STEP) * _STEP


def _half(block: Mapping[str, Any], size: int | None, half: str, otherwise: int) -> str:
    """The text of a layer's half; the model's own size is that of one that says nothing."""
    name, linear = _HALVES[half]
    is_replaced = block.get("no_op") or block.get("replace_with_linear")
    if is_replaced and size is not None:
        raise ValueError(f"its {half} has a size, and is left out or replaced")
    if is_replaced:
        return "" if block.get("no_op") else linear
    return f"{name}[{otherwise if size is None else size}]"


def block_configs(layers: Iterable[LayerKind]) -> dict[str, Any]:
    """Layers as megatron-core reads them.

    >>> block_configs([LayerKind("dense[512]")])["block_configs"][0]["attention"]["no_op"]
    True
    """
    found = []
    for kind in layers:
        halves = {}
        for half, (own, linear) in _HALVES.items():
            block = next((b for b in kind.blocks if b.base in (own, linear)), None)
            halves[half] = {
                "no_op": block is None,
                "replace_with_linear": block is linear,
                _SIZES[half]: None if block is None else block.size,
            }
        found.append(halves)
    return {"block_configs": found}


def require_layers(
    name: str, layers: Sequence[LayerKind], num_layers: int, num_attention_heads: int
) -> None:
    """Refuse heterogeneous layers that megatron-core's builder does not build."""
    what = f"model {name}: heterogeneous_layers"
    fix = "Name every layer once, as attention[8]+dense[1024], dense[512] or no_op."
    if len(layers) != num_layers:
        raise UserInputError(what, f"{len(layers)} layers", f"num_layers is {num_layers}", fix)
    for kind in dict.fromkeys(layers):
        limit = "a heterogeneous model has no layers of this kind"
        groups = [b.size for b in kind.blocks if b.base is LayerBlock.ATTENTION and b.size]
        if groups and num_attention_heads % groups[0]:
            limit = f"query groups must divide num_attention_heads ({num_attention_heads})"
        elif kind.is_heterogeneous:
            continue
        raise UserInputError(what, kind.value, limit, fix)
