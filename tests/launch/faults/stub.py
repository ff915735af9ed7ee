"""A stand-in for Megatron-LM: its modules' names, its arguments, and ranks that join over gloo."""

from __future__ import annotations

import textwrap
from pathlib import Path

_FILES = {
    "megatron/core/__init__.py": "__version__ = '0.16.1'",
    "megatron/training/__init__.py": "import megatron.training.arguments",
    "megatron/training/arguments.py": """
        from nest_megatron.layout.stage_layout import expand_layout

        def validate_args(args, defaults={}):
            tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
            args.data_parallel_size = args.world_size // (tp * pp * args.context_parallel_size)
            layout = args.pipeline_model_parallel_layout
            stages = 1 if layout is None else len(expand_layout(layout)) // pp
            args.virtual_pipeline_model_parallel_size = stages if stages > 1 else None
    """,
    "megatron/training/tokenizer.py": """
        def build_tokenizer(args):
            multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
            args.padded_vocab_size = -(-(args.vocab_size + 1) // multiple) * multiple
    """,
    "pretrain_gpt.py": """
        import os, sys
        from datetime import timedelta
        from megatron.training import arguments
        from nest_megatron.integrations.megatron_lm.parser import read_command

        args = read_command(["pretrain_gpt.py", *sys.argv[1:]]).namespace()
        args.rank, args.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        args.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        arguments.validate_args(args)

        import torch
        torch.distributed.init_process_group(
            "gloo", timeout=timedelta(minutes=args.distributed_timeout_minutes)
        )
        one = torch.ones(1)
        torch.distributed.all_reduce(one)
        print(f"TRAINS: rank {args.rank} of {int(one)}", flush=True)
        torch.distributed.destroy_process_group()
    """,
}


def make_stub(folder: Path) -> Path:
    """Write the stand-in into a folder, which is then used as a Megatron-LM checkout."""
    for name, text in _FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip(), encoding="utf-8")
    return folder
