"""Run in a subprocess: Megatron-LM's own parse_args, validate_args, configuration and groups.

Reads ``[{"argv": [...], "world_size": n, "max_connections": s}]`` from stdin and writes Megatron's
version and one answer a case: the derived arguments, or the error that Megatron raises.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import warnings
from types import SimpleNamespace
from typing import Any

warnings.filterwarnings("ignore")
sys.path.insert(0, os.environ["MEGATRON_LM_HOME"])

import typing  # noqa: E402

import typing_extensions  # noqa: E402

if not hasattr(typing, "override"):  # Megatron 0.20 wants Python 3.12
    typing.override = typing_extensions.override  # type: ignore[attr-defined]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

_HOPPER = SimpleNamespace(major=9, minor=0, name="stub", total_memory=80 << 30)
torch.cuda.get_device_properties = lambda *_, **__: _HOPPER
torch.cuda.get_device_capability = lambda *_, **__: (9, 0)

import megatron.core  # noqa: E402
import megatron.training.arguments as arguments  # noqa: E402
from megatron.core import parallel_state  # noqa: E402

if hasattr(arguments, "core_transformer_config_from_args"):
    to_config = arguments.core_transformer_config_from_args
else:
    from megatron.training.argument_utils import (
        core_transformer_config_from_args as to_config,
    )

ANSWERS = [
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "normalization",
    "gated_linear_unit",
    "add_bias_linear",
    "qk_layernorm",
    "num_moe_experts",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "mtp_num_layers",
    "softmax_type",
    "multi_latent_attention",
    "layernorm_zero_centered_gamma",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "sequence_parallel",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "window_size",
    "bf16",
]


def accept(argv: list[str], world_size: int, max_connections: str | None) -> dict[str, Any]:
    """Everything Megatron does with the arguments before it builds a model."""
    os.environ.update(WORLD_SIZE=str(world_size), RANK="0")
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    if max_connections is not None:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = max_connections
    sys.argv = ["pretrain_gpt.py", *argv]
    args = arguments.parse_args()
    arguments.validate_args(args, {})
    config = to_config(args)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        create_gloo_process_groups=False,
        order="tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
    )
    per_step = args.micro_batch_size * args.data_parallel_size
    if args.global_batch_size % per_step:
        raise ValueError("global batch size")
    answer = {name: getattr(config, name) for name in ANSWERS}
    layout = config.pipeline_model_parallel_layout
    answer["layout"] = (
        None
        if layout is None
        else [[[layer.name for layer in stage] for stage in row] for row in layout.layout]
    )
    answer["activation"] = config.activation_func.__name__
    answer["data_parallel_size"] = args.data_parallel_size
    answer["moe_layer_freq"] = config.moe_layer_freq
    return answer


def main() -> None:
    """Answer every case on stdin."""
    answers = []
    for case in json.load(sys.stdin):
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                answers.append({"accepted": accept(**case)})
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever is raised is the answer
            answers.append({"refused": f"{type(error).__name__}: {error} {said.getvalue()[-200:]}"})
        finally:
            with contextlib.suppress(Exception):
                parallel_state.destroy_model_parallel()
            if dist.is_initialized():
                dist.destroy_process_group()
    print(json.dumps({"version": megatron.core.__version__, "answers": answers}))


if __name__ == "__main__":
    main()
