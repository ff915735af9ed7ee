"""Why a module cannot be traced: which part of it, at which line, and what helps."""

from __future__ import annotations

import contextlib
import linecache
import traceback
from pathlib import Path
from typing import Any

from nest_megatron.errors import UnplannableModelError

#: Words of torch where a run needs a tensor's values; the classes differ from release to release.
_VALUE_WORDS = (
    "datadependent",
    "data-dependent",
    "data dependent",
    "dynamicoutputshape",
    "dynamic output shape",
    "tracing tensor",
    "unbacked",
    "meta tensors",
)
_ENTRY = "fx_trace.py"


def refuse(error: Exception, module: Any, path: str) -> UnplannableModelError:
    """The error for a module that cannot be run on shapes.

    Args:
        error: what its forward pass raised.
        path: of the module that was running.
    """
    part = module.get_submodule(path)
    where = f"{path or 'the model'} ({type(part).__name__})"
    place = _place(error)
    if _needs_values(error):
        return UnplannableModelError(
            "module",
            value=where,
            limit=f"it decides by the values of a tensor{place}, and a trace has shapes only",
            fix="Use a tensor operation instead (torch.where, masks), or extract the parts around "
            "it one by one.",
        )
    first = next(iter(str(error).strip().splitlines()), "")
    reason = f"{type(error).__name__}: {first}".rstrip(".: ")
    return UnplannableModelError(
        "module",
        value=where,
        limit=f"its forward pass fails on these inputs{place}: {reason}",
        fix="Check the inputs' number, shapes (--input) and number types (--dtype).",
    )


def _needs_values(error: Exception) -> bool:
    text = f"{type(error).__name__} {error}".lower()
    return any(word in text for word in _VALUE_WORDS)


def _place(error: Exception) -> str:
    """The innermost line of the model's own code, in words."""
    frames = traceback.extract_tb(error.__traceback__)
    start = max(
        (at + 1 for at, frame in enumerate(frames) if _is_entry(frame)), default=len(frames)
    )
    other = (Path(__file__).parent, _torch_folder(), Path(contextlib.__file__))
    own = [frame for frame in frames[start:] if not _inside(Path(frame.filename), other)]
    if not own:
        return ""
    last = own[-1]
    code = linecache.getline(last.filename, last.lineno or 0).strip()
    return f" at {last.filename}:{last.lineno}" + (f" (`{code}`)" if code else "")


def _is_entry(frame: traceback.FrameSummary) -> bool:
    """Whether the model's code begins under this frame (``fx_trace._forward``)."""
    return frame.name == "forward" and Path(frame.filename) == Path(__file__).with_name(_ENTRY)


def _torch_folder() -> Path:
    import torch

    return Path(torch.__file__).parent


def _inside(path: Path, folders: tuple[Path, ...]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)
