"""``python -m nest_megatron``: the command line, or a training script under ``+nest``."""

import sys

from nest_megatron.cli import run_process

if __name__ == "__main__":
    arguments = sys.argv[1:]
    # the same as runner.names_script, which is loaded for a script alone
    if arguments and (arguments[0].endswith(".py") or arguments[0] == "-m"):
        from nest_megatron.integrations.megatron_lm.runner import run_script

        sys.exit(run_script(arguments))
    sys.exit(run_process())
