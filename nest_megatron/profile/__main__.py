"""``torchrun -m nest_megatron.profile``: the command ``nest-megatron profile`` on every rank.

``--from SCRIPT FLAGS...`` times the layers that a training script would build, as
``+nest=auto nest.profile.mode=measure`` does, plans with the times, and does not train.
"""

import sys
from collections.abc import Sequence

from nest_megatron.cli import main
from nest_megatron.errors import BAD_INPUT
from nest_megatron.integrations.megatron_lm.runner import names_script, run_script
from nest_megatron.printing import print_to_stderr

_FROM = "--from"
_WORDS = ("+nest=auto", "nest.profile.mode=measure", "nest.stop_before_training=true")


def profile(arguments: Sequence[str]) -> int:
    """Time a catalogue's model, or the job of a training script."""
    if _FROM not in arguments:
        return main(["profile", *arguments])
    first = arguments.index(_FROM)
    before, command = arguments[:first], arguments[first + 1 :]
    if before or not names_script(command):
        print_to_stderr(
            "error: --from is followed by a training script and its flags, and nothing stands "
            "before it.\n       "
            "python -m nest_megatron.profile --from pretrain_gpt.py <flags> [nest.KEY=VALUE ...]"
        )
        return BAD_INPUT
    return run_script([*command, *_WORDS])


if __name__ == "__main__":
    sys.exit(profile(sys.argv[1:]))
