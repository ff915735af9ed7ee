"""A PyTorch model of the user's own, by the name of what builds it."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nest_megatron.errors import UserInputError, nearest
from nest_megatron.model.chain import TensorShape


def read_inputs(inputs: Sequence[str], dtypes: Sequence[str]) -> list[TensorShape]:
    """Shapes as typed: ``1,2048`` or ``input_ids=1,2048``, and their number types.

    >>> read_inputs(["1,2048"], ["int64"])
    [TensorShape(sizes=(1, 2048), dtype='int64', keyword='')]

    Raises:
        UserInputError: for a shape that is none, or number types that do not match the inputs.
    """
    if not inputs:
        raise UserInputError(
            "--input",
            value=None,
            limit="a module is traced on the shapes of its inputs, and none is given",
            fix="Add for example --input 1,2048 --dtype int64.",
        )
    if len(dtypes) not in (0, 1, len(inputs)):
        raise UserInputError(
            "--dtype",
            value=", ".join(dtypes),
            limit=f"there are {len(inputs)} inputs",
            fix="Give one number type for all, or one for each.",
        )
    every = [*dtypes] * (len(inputs) if len(dtypes) == 1 else 1) or ["float32"] * len(inputs)
    return [_shape(text, dtype) for text, dtype in zip(inputs, every, strict=True)]


def _shape(text: str, dtype: str) -> TensorShape:
    keyword, _, sizes = text.rpartition("=")
    words = sizes.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise UserInputError(
            "--input",
            value=text,
            limit="a shape is whole numbers with commas between them",
            fix="Give for example --input 1,2048, or --input input_ids=1,2048.",
        )
    return TensorShape(sizes=tuple(map(int, words)), dtype=dtype, keyword=keyword.strip())


def build(name: str) -> Any:
    """The model that a name stands for.

    Args:
        name: ``package.module:function``; modules of the current folder count.

    Raises:
        UserInputError: if there is no such function, or it makes no model.
    """
    from torch import nn

    path, _, attribute = name.partition(":")
    if not path or not attribute:
        limit = "it names a Python module and what to call in it, with a colon between them"
        raise _wrong(name, limit, "Write for example mypackage.mymodule:build.")
    made = _found(name, _imported(name, path), attribute)
    if not isinstance(made, nn.Module):
        made = _called(name, made)
    if not isinstance(made, nn.Module):
        limit = f"it returns {type(made).__name__}, not a torch.nn.Module"
        raise _wrong(name, limit, "Return the model itself.")
    return made


def _wrong(name: str, limit: str, fix: str) -> UserInputError:
    return UserInputError("--module", value=name, limit=limit, fix=fix)


def _imported(name: str, path: str) -> Any:
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{path}.".startswith(f"{error.name}."):
            raise _fails(name, error, "importing it fails") from error
        limit = f"there is no Python module {error.name}, neither installed nor in {folder}"
        fix = "Check the name, or run the command in the folder that holds it."
        raise _wrong(name, limit, fix) from error
    except Exception as error:  # whatever the user's own code raises
        raise _fails(name, error, "importing it fails") from error


def _found(name: str, module: Any, attribute: str) -> Any:
    if not hasattr(module, attribute):
        known = [key for key, value in vars(module).items() if callable(value) and key[:1] != "_"]
        fix = nearest(attribute, known) if known else "It has nothing that can be called."
        raise _wrong(name, f"{module.__name__} has no {attribute}", fix)
    return getattr(module, attribute)


def _called(name: str, function: Any) -> Any:
    if not callable(function):
        limit = f"it is {type(function).__name__}, which cannot be called"
        raise _wrong(name, limit, "Name a function that takes nothing and returns the model.")
    try:
        return function()
    except Exception as error:  # whatever the user's own code raises
        raise _fails(name, error, "calling it without arguments fails") from error


def _fails(name: str, error: Exception, what: str) -> UserInputError:
    last = traceback.extract_tb(error.__traceback__)[-1]
    first = next(iter(str(error).splitlines()), "")
    reason = f"{type(error).__name__}: {first}".rstrip(".: ")
    inside = "" if Path(last.filename) == Path(__file__) else f" at {last.filename}:{last.lineno}"
    return _wrong(name, f"{what}{inside}: {reason}", "Correct the module.")
