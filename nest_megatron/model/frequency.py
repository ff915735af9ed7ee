"""Megatron's notations for which layers have something: a period, or a list of flags."""

from __future__ import annotations

import ast

from nest_megatron.errors import UserInputError

#: Most layers that are planned for: the deepest published transformer has 1,000, and a misprint
#: must not fill memory and time.
MAX_LAYERS = 2_000
_MAX_TEXT = 10_000


def layer_flags(
    what: str, value: int | tuple[int, ...] | None, num_layers: int
) -> tuple[bool, ...]:
    """Which layers a frequency marks: of every N all but the N-th, or those that a list marks.

    Megatron's ``window_attn_skip_freq`` marks the sliding layers by it, ``linear_attention_freq``
    the linear ones and ``no_rope_freq``, other way around, those that are rotated. ``None`` marks
    all.

    Raises:
        UserInputError: for a number below 1, or a list of another length.

    >>> layer_flags("window_attn_skip_freq", 3, 4)
    (True, True, False, True)
    """
    if value is None:
        return (True,) * num_layers
    if isinstance(value, int):
        if value < 1:
            limit, fix = "a period must be at least 1", "Write for example 4, or a list of 0 and 1."
            raise UserInputError(what, value, limit, fix)
        return tuple((layer + 1) % value != 0 for layer in range(num_layers))
    if len(value) != num_layers or any(flag not in (0, 1) for flag in value):
        limit = f"it must give one 0 or 1 for each of the {num_layers} layers"
        raise UserInputError(what, value, limit, fix="Give one number for each layer.")
    return tuple(map(bool, value))


def read_frequency(text: str) -> int | list[int]:
    """A frequency in Megatron's notation: a whole number, or a list made by ``+`` and ``*``.

    Raises:
        UserInputError: if it is neither.
    """
    if len(text) > _MAX_TEXT:
        raise _refused(text[:40] + "...", f"the text may have at most {_MAX_TEXT} characters")
    try:
        return _evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _refused(text, f"it cannot be read ({error})") from error


class _MalformedError(ValueError):
    """The text is not in Megatron's notation."""


def moe_layer_pattern(moe_layer_freq: object, num_layers: int) -> tuple[int, ...]:
    """Expand Megatron's ``moe_layer_freq`` to one flag for each layer.

    Args:
        moe_layer_freq: an integer N (layers 0, N, 2N, ... route), a list of a 1 for each
            mixture-of-experts layer and a 0 for a dense one, or such a list in Megatron's notation.

    Raises:
        UserInputError: if the value is none of these, or has another length.

    Source: ``megatron.core.models.gpt.gpt_layer_specs`` and Megatron's ``moe_freq_type``.

    >>> moe_layer_pattern("([0]*2+[1]*3)", 5)
    (0, 0, 1, 1, 1)
    >>> moe_layer_pattern(2, 5)
    (1, 0, 1, 0, 1)
    """
    if num_layers > MAX_LAYERS:
        limit, fix = f"it must be at most {MAX_LAYERS:,}", "Correct the model's description."
        raise UserInputError("num_layers", num_layers, limit, fix)
    value = read_frequency(moe_layer_freq) if isinstance(moe_layer_freq, str) else moe_layer_freq
    if isinstance(value, list | tuple) and all(type(flag) is int for flag in value):
        flags = tuple(value)
    elif isinstance(value, int) and not isinstance(value, bool):
        if value < 1:
            raise _refused(value, "a period must be at least 1")
        flags = tuple(int(layer % value == 0) for layer in range(num_layers))
    else:
        limit = "it must be a whole number, a list of 0 and 1, or such a list as text"
        raise _refused(moe_layer_freq, limit)
    if len(flags) != num_layers or any(flag not in (0, 1) for flag in flags):
        limit = f"it must give one 0 or 1 for each of the {num_layers} layers"
        raise _refused(moe_layer_freq, limit)
    return flags


def _evaluate(node: ast.expr) -> int | list[int]:
    """Value of an expression made of whole numbers, lists of them, ``+`` and ``*``."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        items = [_evaluate(item) for item in node.elts]
        if any(isinstance(item, list) for item in items):
            raise _MalformedError("lists may not be nested")
        return [item for item in items if isinstance(item, int)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        left, right = _evaluate(node.left), _evaluate(node.right)
        return _repeat(left, right) if isinstance(node.op, ast.Mult) else _join(left, right)
    raise _MalformedError("only lists of 0 and 1, + and * are allowed")


def _repeat(left: int | list[int], right: int | list[int]) -> list[int]:
    flags, count = (right, left) if isinstance(left, int) else (left, right)
    if isinstance(flags, int) or not isinstance(count, int):
        raise _MalformedError("* needs a list and a whole number")
    _require_length(len(flags) * count)
    return flags * count


def _join(left: int | list[int], right: int | list[int]) -> list[int]:
    if isinstance(left, int) or isinstance(right, int):
        raise _MalformedError("+ needs two lists")
    _require_length(len(left) + len(right))
    return left + right


def _require_length(num_layers: int) -> None:
    if num_layers > MAX_LAYERS:
        raise _MalformedError(f"it has more than {MAX_LAYERS} layers")


def _refused(value: object, limit: str) -> UserInputError:
    fix = "Write for example 1 (all layers), 2 (every other) or ([0]*3+[1]*58)."
    return UserInputError("moe_layer_freq", value, limit, fix)
