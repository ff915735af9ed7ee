"""Run a small model under FSDP on a CPU, and print what is whole at most, in bytes.

The collectives are those of a fake process group of eight ranks; what they would fill is allocated
and freed as on GPUs. ``python -m tests.megatron_core.fsdp_buffers`` runs in a process of its own,
since it replaces what of ``torch.cuda`` a CPU lacks.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

#: Ranks, width of a matrix, layers of two matrices, parameters of a bucket and of a unit.
RANKS, WIDTH, LAYERS, BUCKET, UNIT = 8, 16, 12, 512, 2048
LAYER = 2 * WIDTH * WIDTH
OUTSIDE = WIDTH * WIDTH  # of embedding and head each


class Layer(nn.Module):
    """Two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _matrix(), _matrix()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """As an MLP."""
        return inputs + self.second(torch.relu(self.first(inputs)))  # type: ignore[no-any-return]


class Net(nn.Module):
    """Layers between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = _matrix()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = _matrix()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """One after another."""
        hidden = self.embedding(inputs)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)  # type: ignore[no-any-return]


def _matrix() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)


def _inputs() -> torch.Tensor:
    return torch.randn(4, WIDTH, dtype=torch.bfloat16, requires_grad=True)


def _size(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().size()


def _watch(owner: Any, name: str, look: Callable[[], None]) -> None:
    """Look at memory before and after each call of a method."""
    method = getattr(owner, name)

    def watched(*args: Any, **kwargs: Any) -> Any:
        look()
        found = method(*args, **kwargs)
        look()
        return found

    setattr(owner, name, watched)


class _Stream:
    """What of streams and events Megatron-FSDP asks of a CPU."""

    def __init__(self, *_: Any) -> None: ...
    def wait_stream(self, *_: Any) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def record_event(self) -> _Stream:
        return self


def _stand_in_for_cuda() -> None:
    cuda: Any = torch.cuda
    cuda.Stream = cuda.Event = _Stream
    cuda.current_stream = lambda *_: _Stream()
    cuda.stream = lambda *_: contextlib.nullcontext()
    cuda.current_device = lambda: 0
    cuda.empty_cache = cuda.synchronize = lambda *_: None


def megatron_fsdp(strategy: str, **config: Any) -> dict[str, int]:
    """Of one of Megatron-FSDP's strategies.

    Returns:
        The most that is whole of layers or of buckets outside them, weights and gradients apart;
        of layers after the forward pass; what double buffers take; what is kept.
    """
    _stand_in_for_cuda()
    from megatron.core.distributed.fsdp.src.megatron_fsdp import mixed_precision, utils
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer as module
    from megatron.core.distributed.fsdp.src.megatron_fsdp.distributed_data_parallel_config import (
        DistributedDataParallelConfig,
    )
    from megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp import MegatronFSDP
    from torch.distributed.device_mesh import DeviceMesh

    module.validate_uneven_dtensor = lambda *_: None  # they ask other ranks for their shapes
    module.update_uneven_dtensor_chunk_metadata = lambda *_: None
    pool: dict[object, torch.Tensor] = {}

    def get_tensor(_: Any, shape: Any, dtype: torch.dtype, name: str, **__: Any) -> torch.Tensor:
        return pool.setdefault((name, dtype), torch.empty(shape, dtype=dtype))

    utils.GlobalMemoryBuffer.get_tensor = get_tensor
    mesh = DeviceMesh("cpu", torch.arange(RANKS).view(RANKS, 1), mesh_dim_names=("dp_cp", "tp"))
    index = utils.FSDPDistributedIndex(device_mesh=mesh, dp_shard_dim="dp_cp", tp_dim="tp")
    policy: dict[str, Any] = {}
    if hasattr(mixed_precision, "MixedPrecisionPolicy"):  # since 0.17
        kind = mixed_precision.MixedPrecisionPolicy
        policy["mixed_precision_policy"] = kind(main_grads_dtype=torch.float32)
    else:
        config["grad_reduce_in_fp32"] = True
    model = MegatronFSDP(
        Net(),
        index,
        ddp_config=DistributedDataParallelConfig(
            data_parallel_sharding_strategy=strategy,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            bucket_size=BUCKET,
            suggested_communication_unit_size=UNIT,
            **config,
        ),
        # as ``FullyShardedDataParallel`` of ``mcore_fsdp_adapter.py`` does
        fsdp_unit_modules=[Layer] if strategy == "optim_grads_params" else [],
        device=torch.device("cpu"),
        **policy,
    )
    buffer = model.param_and_grad_buffer
    groups, most = buffer.parameter_groups, dict.fromkeys(("weights", "gradients", "outside"), 0)

    def whole(allocator: Any, *, in_layer: bool) -> int:
        found = getattr(allocator, "buckets", {})
        return sum(
            _size(bucket.data)
            for number, bucket in found.items()
            if (groups[number].fsdp_unit_id is not None) == in_layer
        )

    def gradients(*, in_layer: bool) -> int:
        allocators = {
            id(a): a for a in (g.main_grad_buffer.temporary_bucket_allocator for g in groups)
        }
        return sum(whole(each, in_layer=in_layer) for each in allocators.values())

    def look() -> None:
        seen = {
            "weights": whole(buffer.weight_alloc, in_layer=True),
            "gradients": gradients(in_layer=True),
            "outside": gradients(in_layer=False),
        }
        most.update({name: max(most[name], size) for name, size in seen.items()})

    _watch(module.DataParallelBuffer, "fetch_bucket", look)
    ahead = 0  # 0.19 gathers layers at the head in the first pass alone
    for _ in range(2):
        outputs = model(_inputs())
        ahead = max(ahead, whole(buffer.weight_alloc, in_layer=True))
        outputs.float().sum().backward()
    names = ("model_weight_buffer", "main_weight_buffer", "main_grad_buffer")
    kept = {
        name: sum(_size(part.data) for g in groups if (part := getattr(g, name)) is not None)
        for name in names[:2]
    }
    kept["main_grad_buffer"] = sum(g.main_grad_buffer.data.nbytes for g in groups)
    return {**most, "ahead": ahead, "pool": sum(map(_size, pool.values())), **kept}


def fsdp2(*, reshard_after_forward: bool = True) -> dict[str, int]:
    """Of PyTorch's FSDP2: the most that is whole in a pass forward and in one backward."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    mesh, model = (
        init_device_mesh("cpu", (RANKS,)),
        nn.Sequential(*(Layer() for _ in range(LAYERS))),
    )
    for unit in (*model, model):
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard_after_forward)
    states: Any = [layer._get_fsdp_state()._fsdp_param_group for layer in model]
    most = {"forward": 0, "backward": 0}

    def tensors() -> Iterator[torch.Tensor]:
        for group in states:
            if group._all_gather_result is not None:
                yield group._all_gather_result.all_gather_output
            for param in group.fsdp_params:
                yield from getattr(param, "all_gather_outputs", ())
                unsharded = getattr(param, "_unsharded_param", None)
                if unsharded is not None and unsharded.grad is not None:
                    yield unsharded.grad
        shared = states[0].comm_ctx
        if shared.all_gather_state is not None:
            yield shared.all_gather_state.all_gather_result.all_gather_output
        yield from (each.reduce_scatter_input for each in shared.reduce_scatter_states)

    def look() -> None:
        most[phase] = max(most[phase], sum(map(_size, tensors())))

    phase = "forward"
    for name in ("unshard", "wait_for_unshard", "post_forward", "pre_backward", "post_backward"):
        _watch(FSDPParamGroup, name, look)
    for _ in range(2):
        phase = "forward"
        outputs = model(_inputs())
        phase = "backward"
        outputs.float().sum().backward()
    return most


if __name__ == "__main__":
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    strategies = ("no_shard", "optim", "optim_grads", "optim_grads_params")
    found = {name: megatron_fsdp(name) for name in strategies}
    for name in strategies[2:]:
        found[f"{name}, double"] = megatron_fsdp(name, fsdp_double_buffer=True)
    found["fsdp2"] = fsdp2()
    found["fsdp2, kept"] = fsdp2(reshard_after_forward=False)
    print(json.dumps(found))
