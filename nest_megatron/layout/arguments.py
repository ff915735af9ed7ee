"""A layout by Megatron's names."""

from __future__ import annotations

from typing import Any

from nest_megatron.layout.dims import DEGREES
from nest_megatron.layout.layout import Layout
from nest_megatron.layout.recompute import RecomputeGranularity
from nest_megatron.layout.stage_layout import layout_string
from nest_megatron.layout.zero import STRATEGIES, DataParallelSharding
from nest_megatron.model.spec import TransformerSpec

#: Names that ``layout_arguments`` gives a value.
LAYOUT_ARGUMENTS = (
    *DEGREES,
    "sequence_parallel",
    "pipeline_model_parallel_layout",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "use_distributed_optimizer",
    "use_megatron_fsdp",
    "data_parallel_sharding_strategy",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "use_torch_fsdp2",
)


def layout_arguments(spec: TransformerSpec, layout: Layout) -> dict[str, Any]:
    """What a layout sets in a job, by Megatron's names; ``None`` is a flag left out."""
    recompute, granularity = layout.recompute, layout.recompute.granularity
    pipelined = layout.dims.pipeline_model_parallel_size > 1
    fsdp = layout.uses_megatron_fsdp
    return {
        **layout.dims.flags(),
        "sequence_parallel": layout.sequence_parallel,
        "pipeline_model_parallel_layout": (
            layout_string(spec, layout.partition) if pipelined else None
        ),
        "recompute_granularity": (
            None if granularity is RecomputeGranularity.NONE else granularity
        ),
        "recompute_method": recompute.method,
        "recompute_num_layers": recompute.num_layers,
        "recompute_modules": recompute.modules,
        "use_distributed_optimizer": layout.shards_optimizer,
        "use_megatron_fsdp": fsdp,
        "data_parallel_sharding_strategy": STRATEGIES[layout.zero] if fsdp else None,
        "overlap_grad_reduce": layout.overlap_grad_reduce,
        "overlap_param_gather": layout.shards_optimizer and layout.overlap_param_gather,
        "use_torch_fsdp2": layout.sharding is DataParallelSharding.TORCH_FSDP2,
    }
