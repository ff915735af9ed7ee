"""The file that a job's plan is kept in where the user names one: ``nest.out``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from nest_megatron.errors import UserInputError
from nest_megatron.files import check_output

WHAT = "nest.out"


def plan_output(named: str | None, inputs: Sequence[str | None] = ()) -> Path | None:
    """The file that the user wants the plan in, checked; to be asked before anything is planned.

    Args:
        named: the value of ``nest.out``.
        inputs: files that the job reads.

    Raises:
        UserInputError: for a file that must not or cannot be written.
    """
    if named in (None, "", "null"):
        return None
    out = Path(str(named).strip("'\"")).expanduser()
    check_output(WHAT, out, inputs=[Path(each) for each in inputs if each is not None])
    if not os.access(out.absolute().parent, os.W_OK):
        raise UserInputError(
            WHAT,
            value=str(out),
            limit=f"{out.parent} cannot be written to",
            fix="Name a file in a folder that you may write to.",
        )
    return out
