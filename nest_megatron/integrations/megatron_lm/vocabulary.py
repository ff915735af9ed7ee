"""The vocabulary that a job would have without us, read before Megatron itself builds it."""

from __future__ import annotations

import contextlib
import copy
import io
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from nest_megatron.errors import UserInputError


def padded_vocab_size(args: Namespace, defaults: Mapping[str, Any]) -> int | None:
    """Rows of the embedding under the user's own tensor-parallel size.

    Megatron's own tokenizer says it, on a copy of the arguments, because for most tokenizers the
    number is in their files alone.

    Args:
        args: Megatron's arguments before its validation.
        defaults: what the script sets where the user says nothing.

    Returns:
        ``None`` where Megatron does not pad at all.

    Raises:
        UserInputError: if the tokenizer cannot be built.
    """
    if args.padded_vocab_size is not None:
        return int(args.padded_vocab_size)
    if getattr(args, "pad_vocab_size", True) is False:
        return None
    copied = copy.copy(args)
    for name, value in defaults.items():
        if getattr(copied, name, None) is None:
            setattr(copied, name, value)
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # Megatron says it all again when it starts
            _build_tokenizer()(copied)
    except Exception as error:
        raise UserInputError(
            "--tokenizer-type",
            value=copied.tokenizer_type,
            limit=f"Megatron cannot build it: {error}",
            fix="Correct the tokenizer's flags, or give --padded-vocab-size.",
        ) from error
    return int(copied.padded_vocab_size)


def _build_tokenizer() -> Any:
    try:
        from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    except ImportError:  # 0.16
        from megatron.training.tokenizer import build_tokenizer
    return build_tokenizer
