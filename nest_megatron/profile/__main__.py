"""``torchrun -m nest_megatron.profile``: the command ``nest-megatron profile`` on every rank."""

import sys

from nest_megatron.app import main

if __name__ == "__main__":
    sys.exit(main(["profile", *sys.argv[1:]]))
