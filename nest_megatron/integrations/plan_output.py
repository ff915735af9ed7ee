"""Files of plans that a launched job names: ``nest.out`` and ``nest.plan``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from nest_megatron.errors import UserInputError
from nest_megatron.files import check_output
from nest_megatron.planner.pins import Pin


def plan_output(named: str | None, inputs: Sequence[str | None] = ()) -> Path | None:
    """The file of ``nest.out``, checked before anything is planned: no input, and writable."""
    if named in (None, "", "null"):
        return None
    out = Path(str(named).strip("'\"")).expanduser()
    check_output("nest.out", out, inputs=[Path(each) for each in inputs if each is not None])
    if not os.access(out.absolute().parent, os.W_OK):
        limit, fix = f"{out.parent} cannot be written to", "Name a file where you may write."
        raise UserInputError("nest.out", value=str(out), limit=limit, fix=fix)
    return out


def told_where(path: Path) -> str:
    """What is said of a plan that was written."""
    return f"nest: the full plan is in {path} (`nest-megatron explain` shows it)"


def pinned_file(named: str | None) -> Path:
    """The file of the plan that ``+nest=pinned`` launches, which ``nest.plan`` must name."""
    if named is None:
        limit = "+nest=pinned launches a reviewed plan"
        fix = "Name it: nest.plan=FILE (`nest-megatron pin` makes one)."
        raise UserInputError("nest.plan", value=None, limit=limit, fix=fix)
    return Path(named).expanduser()


def pinned_by(pin: Pin) -> str:
    """What is said of who pinned a plan."""
    return f"Pinned {pin.created} by {pin.by}."
