"""``python -m nest_megatron SCRIPT ...``: a training script with planning.

For machines where ``.pth`` files are disabled; ``torchrun -m nest_megatron SCRIPT ...`` works too.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from nest_megatron import boot
from nest_megatron.errors import BAD_INPUT, OK, UserInputError

_MODULE = "-m"


def names_script(arguments: Sequence[str]) -> bool:
    """Whether arguments begin with a training script rather than a command of ours.

    >>> names_script(["pretrain_gpt.py", "--bf16"]), names_script(["plan"]), names_script([])
    (True, False, False)
    """
    return bool(arguments) and (arguments[0].endswith(".py") or arguments[0] == _MODULE)


def run_script(arguments: Sequence[str]) -> int:
    """Run a script, or ``-m MODULE``, as Python would, with ``+nest=auto`` unless it says else."""
    words = [*arguments, *([] if boot.is_asked_for(arguments) else ["+nest=auto"])]
    boot.install()
    if words[0] == _MODULE and len(words) > 1:
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return OK
    script = Path(words[0])
    if not script.is_file():
        from nest_megatron.report.console import print_error

        wrong = UserInputError("script", words[0], "there is no such file", "Check the path.")
        print_error(wrong, as_json=False)
        return BAD_INPUT
    sys.argv = words
    if not sys.flags.safe_path:  # as `python SCRIPT` has it; `python -m` put the current folder
        sys.path[0] = str(script.resolve().parent)
    runpy.run_path(str(script), run_name="__main__")
    return OK
