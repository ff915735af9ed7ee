"""What of a device's memory PyTorch's allocator can give out.

``nvidia-smi`` shows some 0.5 GiB more than the driver gives to a process: 81,559 MiB of an H100, of
which ``torch`` sees 79.1 GiB. That is ``Accelerator.memory_bytes``. Of it the CUDA context, NCCL's
communicators, user buffers and pieces too small to be of use are gone before a tensor is.
"""

from __future__ import annotations

from nest_megatron.cluster.records import Accelerator
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.parallel.dims import ParallelDims
from nest_megatron.parallel.grid import Grid
from nest_megatron.units import GIB, Bytes

#: Share that the allocator holds in pieces too small to be of use. For one node of B200, SimuMax
#: prints peaks held of 1.03 to 1.08 times those given out (docs/b200 of MooreThreads/SimuMax), of
#: which it returns what is whole and unused before it runs out.
FRAGMENTATION = 0.04
#: Of a process, with the kernels that it has loaded: 0.3 GB lazily loaded, over 1 GB all at once
#: (pytorch/pytorch issue 107667).
CONTEXT_BYTES = GIB // 2
#: Of a communicator: 544 MB of two A100, 688 MB of more (NVIDIA/nccl issue 964); 0.65 GiB with
#: RCCL, whatever the number of ranks (Lumi-supercomputer/LUMI-AI-Guide issue 111).
COMMUNICATOR_BYTES = 650 * GIB // 1000
#: For each other rank that tokens are exchanged with: eight H100 take 3.3 GB more after their first
#: all-to-all (NVIDIA/nccl issue 1685). Not measured beyond a node, and taken to grow no further.
EXCHANGE_BYTES = 440 * GIB // 1000
_MOST_PEERS = 7
#: Products of a layer that have a user buffer each, of the whole micro batch in 16 bits, registered
#: outside the allocator (Transformer Engine, ``initialize_ub`` and ``CommOverlapBase``).
USER_BUFFERS = 10


def outside_bytes(spec: TransformerSpec, grid: Grid) -> Bytes:
    """What a process takes beside PyTorch's allocator: context, communicators, user buffers."""
    dims, buffers = grid.dims, 0
    if grid.execution.tp_comm_overlap and dims.tensor_model_parallel_size > 1:
        tokens = spec.seq_length * grid.micro_batch_size // dims.context_parallel_size
        buffers = USER_BUFFERS * tokens * spec.hidden_size * 2
    return CONTEXT_BYTES + communicator_bytes(dims) + buffers


def communicator_bytes(dims: ParallelDims) -> Bytes:
    """What NCCL takes for a rank's groups.

    With the context, two runs of experts on 16 B300 (PP 2, CP 8, EP 8; torch's messages, with
    basetenlabs/Megatron-LM, 2026-08) held 6.1 and 6.9 GiB when they ran out.

    >>> dims = ParallelDims(pipeline_model_parallel_size=2, context_parallel_size=8,
    ...     expert_model_parallel_size=8)
    >>> round((CONTEXT_BYTES + communicator_bytes(dims)) / GIB, 1)
    6.8
    """
    groups = [
        dims.world_size,
        dims.tensor_model_parallel_size,
        dims.pipeline_model_parallel_size,
        dims.context_parallel_size,
        dims.data_parallel_size * dims.context_parallel_size,
    ]
    if dims.expert_model_parallel_size > 1:
        groups += [dims.expert_ranks, dims.expert_data_parallel_size]
    communicators = sum(1 for size in groups if size > 1)
    peers = min(dims.expert_model_parallel_size - 1, _MOST_PEERS)
    return communicators * COMMUNICATOR_BYTES + peers * EXCHANGE_BYTES


def allocatable_bytes(
    accelerator: Accelerator, settings: CostSettings, outside: Bytes = 0
) -> Bytes:
    """What PyTorch's allocator can give out: the device less fragmentation and what is outside.

    Args:
        outside: what the job takes there (``outside_bytes``), ``memory_reserve_bytes`` at least.
    """
    usable = int(accelerator.memory_bytes * (1.0 - FRAGMENTATION))
    return max(0, usable - max(settings.memory_reserve_bytes, outside))
