"""One rank of a world of any size, in one process: its groups exist, its communication does not."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.parallel.dims import ParallelDims
from nest_megatron.parallel.rules import launched_expert_tensor_size


def smallest_dims(spec: TransformerSpec, shard: LayerShard) -> ParallelDims:
    """The smallest world in which a layer is divided as the shard says.

    Context ranks are left out: they change no weight, and the tokens of one are given as they are.
    """
    tp = shard.tensor_model_parallel_size
    data = 1
    if spec.is_moe:
        experts = shard.expert_tensor_parallel_size * shard.expert_model_parallel_size
        data = next(n for n in range(1, experts + 1) if tp * n % experts == 0)
    return ParallelDims(
        tensor_model_parallel_size=tp,
        expert_model_parallel_size=shard.expert_model_parallel_size if spec.is_moe else 1,
        expert_tensor_parallel_size=(shard.expert_tensor_parallel_size if spec.is_moe else tp),
        data_parallel_size=data,
    )


@contextlib.contextmanager
def as_rank(spec: TransformerSpec, dims: ParallelDims, rank: int) -> Iterator[None]:
    """Be one rank of a job; what its groups communicate does nothing.

    Raises:
        RuntimeError: by torch, if this process is in a process group already.
    """
    from megatron.core import parallel_state

    vpp = dims.virtual_pipeline_model_parallel_size
    with fake_process_group(dims.world_size, rank):
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=dims.tensor_model_parallel_size,
            pipeline_model_parallel_size=dims.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
            context_parallel_size=dims.context_parallel_size,
            expert_model_parallel_size=dims.expert_model_parallel_size,
            expert_tensor_parallel_size=launched_expert_tensor_size(spec, dims),
            order=dims.rank_order.value,
            create_gloo_process_groups=False,
        )
        yield


@contextlib.contextmanager
def fake_process_group(world_size: int, rank: int) -> Iterator[None]:
    """A process group whose other members do not exist."""
    import torch
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook  # torch puts one before it that names the rank, for good
    torch.distributed.init_process_group(
        "fake", store=FakeStore(), rank=rank, world_size=world_size
    )
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
        sys.excepthook = hook
