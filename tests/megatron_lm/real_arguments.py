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
import traceback
import warnings
from collections.abc import Iterator
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

_DEVICE = SimpleNamespace(major=9, minor=0, name="stub", total_memory=80 << 30)
torch.cuda.get_device_properties = lambda *_, **__: _DEVICE
torch.cuda.get_device_capability = lambda *_, **__: (_DEVICE.major, 0)

import megatron.core  # noqa: E402
import megatron.core.utils  # noqa: E402
import megatron.training.arguments as arguments  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.common.embeddings import rope_utils  # noqa: E402
from megatron.core.transformer.moe import moe_utils  # noqa: E402
from megatron.core.transformer.multi_token_prediction import (  # noqa: E402
    get_mtp_num_layers_to_build,
)
from megatron.core.transformer.transformer_block import get_num_layers_to_build  # noqa: E402
from megatron.core.transformer.transformer_layer import (  # noqa: E402
    get_transformer_layer_offset,
)
from packaging.version import Version  # noqa: E402

try:
    from megatron.post_training.arguments import add_modelopt_args
except ImportError:
    add_modelopt_args = None  # pretrain_gpt.py does without it too

# Arguments are asked about on a machine without Transformer Engine: the release stands for one.
megatron.core.utils._te_version = Version("2.13.0")
rope_utils.fused_apply_rotary_pos_emb = rope_utils.fused_apply_rotary_pos_emb or print
for _name in ("fused_permute", "fused_permute_with_probs", "fused_sort_chunks_by_index"):
    for _kernel in (_name, f"{_name}_with_probs", "fused_unpermute"):
        setattr(moe_utils, _kernel, getattr(moe_utils, _kernel, None) or print)

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


def accept(
    argv: list[str],
    world_size: int,
    max_connections: str | None,
    architecture: int = 9,
    environment: dict[str, str] | None = None,
    script: str = "pretrain_gpt.py",
) -> dict[str, Any]:
    """Everything Megatron does with the arguments before it builds a model."""
    os.environ.update(environment or {}, WORLD_SIZE=str(world_size), RANK="0")
    _DEVICE.major = architecture
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    if max_connections is not None:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = max_connections
    sys.argv = [script, *argv]
    adds_its_own = any(word in script for word in ("vlm", "mimo", "flex"))
    args = arguments.parse_args(add_modelopt_args, ignore_unknown_args=adds_its_own)
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
        num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
        hierarchical_context_parallel_sizes=args.hierarchical_context_parallel_sizes,
        create_gloo_process_groups=False,
        order="tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
    )
    per_step = args.micro_batch_size * args.data_parallel_size
    if args.global_batch_size and args.global_batch_size % per_step:
        raise ValueError("global batch size")
    answer = {name: getattr(config, name) for name in ANSWERS}
    is_hybrid = any(getattr(args, f"hybrid_{name}_pattern", None) for name in ("override", "layer"))
    answer["stages"] = None if is_hybrid else list(stages(config))
    answer["activation"] = config.activation_func.__name__
    answer["data_parallel_size"] = args.data_parallel_size
    answer["moe_layer_freq"] = config.moe_layer_freq
    return answer


def stages(config: Any) -> Iterator[list[int]]:
    """First layer, number of layers and MTP layers of each virtual stage, in pipeline order.

    They are what ``TransformerBlock`` asks for when it builds a stage, with a layout and without.
    """
    chunks = config.virtual_pipeline_model_parallel_size
    for chunk in range(chunks or 1):
        virtual = None if chunks is None else chunk
        for rank in range(config.pipeline_model_parallel_size):
            parallel_state.set_pipeline_model_parallel_rank(rank)
            yield [
                get_transformer_layer_offset(config, virtual),
                get_num_layers_to_build(config, virtual),
                get_mtp_num_layers_to_build(config, virtual),
            ]
    parallel_state.set_pipeline_model_parallel_rank(None)


def _said(error: BaseException, output: str) -> str:
    """An error with the line that raised it; argparse says its reason on standard error."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    exits = isinstance(error, SystemExit)
    reason = output.splitlines()[-1] if exits and output else str(error)
    place = f"{frame.filename.partition('/megatron/')[2]}:{frame.lineno}"
    return f"{type(error).__name__}: {reason or frame.line} ({place})"


def main() -> None:
    """Answer every case on stdin."""
    answers = []
    for case in json.load(sys.stdin):
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                answers.append({"accepted": accept(**case)})
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever is raised is the answer
            answers.append({"refused": _said(error, said.getvalue())})
        finally:
            for name in case.get("environment") or {}:
                os.environ.pop(name, None)
            with contextlib.suppress(Exception):
                parallel_state.destroy_model_parallel()
            if dist.is_initialized():
                dist.destroy_process_group()
    print(json.dumps({"version": megatron.core.__version__, "answers": answers}))


if __name__ == "__main__":
    main()
