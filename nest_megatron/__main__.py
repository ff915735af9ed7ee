"""``python -m nest_megatron``."""

import sys

from nest_megatron.app import main

if __name__ == "__main__":
    sys.exit(main())
