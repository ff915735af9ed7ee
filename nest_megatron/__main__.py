"""``python -m nest_megatron``: the command line, or a training script under ``+nest``."""

import sys

from nest_megatron.app import main
from nest_megatron.app.runner import names_script, run_script

if __name__ == "__main__":
    arguments = sys.argv[1:]
    sys.exit(run_script(arguments) if names_script(arguments) else main())
