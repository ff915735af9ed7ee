"""What of a device's memory can be given out, and the chance that a plan needs more.

``nvidia-smi`` shows some 0.5 GiB more than the driver gives to a process: 81,559 MiB of an H100, of
which ``torch`` sees 79.1 GiB. That is ``Accelerator.memory_bytes``. Of it the CUDA context, NCCL's
communicators, user buffers and pieces too small to be of use are gone before a tensor is.

The logarithm of a measured peak over its prediction lies above and below its median by halves of
Student's t distribution with two degrees of freedom, each with a scale of its own, fitted to public
peaks and runs that ran or ran out, every source weighing alike (``tools/calibration/peaks.py``,
``hydra_configs/calibration/memory.yaml``). Apart are jobs that gather weights or gradients (ZeRO-2
and 3, FSDP): what is whole of them at a time depends on the framework's buffers and streams.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Protocol

from nest_megatron.catalogue_files import catalogue_entry
from nest_megatron.cluster.records import Accelerator, Cluster
from nest_megatron.cost_model.distributions import cumulative, quantile
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.layout.dims import ParallelDims
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.rank_order import GroupKind, group_shape
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.model.execution import FlexBackend, TokenDispatcher
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.plain import frozen
from nest_megatron.units import GIB, Bytes

#: Share that the allocator holds in pieces too small to be of use. For one node of B200, SimuMax
#: prints peaks held of 1.03 to 1.08 times those given out (docs/b200 of MooreThreads/SimuMax), of
#: which it returns what is whole and unused before it runs out.
FRAGMENTATION = 0.04
#: Of a process, with the kernels that it has loaded: 0.3 GB lazily loaded, over 1 GB all at once
#: (pytorch/pytorch issue 107667).
CONTEXT_BYTES = GIB // 2
#: Of a communicator: 544 MB of two A100, 688 MB of more (NVIDIA/nccl issue 964); 0.65 GiB with
#: RCCL, whatever the number of ranks (Lumi-supercomputer/LUMI-AI-Guide issue 111). NVLink SHARP
#: takes more: 7 GB for all of a dense job, 9.5 GB with experts (TP 2, PP 2, DP 2 on eight H100,
#: verl-project/verl pull 6408). NVIDIA's recipes turn it off to save memory
#: (NVIDIA/NeMo-Framework-Launcher pull 127).
COMMUNICATOR_BYTES = 650 * GIB // 1000
#: For each other rank in reach of NVLink that NCCL exchanges tokens with: eight H100 take 3.3 GB
#: more after their first all-to-all (NVIDIA/nccl issue 1685). NCCL opens 32 channels to each peer,
#: with buffers of 10 and 2 MiB each, LL, LL128 and Simple (``ncclTopoGetNchannels``,
#: ``computeBuffSizes``, ``p2pRecvSetup``), each its own (issue 2294). Measured with seven peers;
#: read in the source for more. EP 64 on a rack of GB200 ran out of memory, and smaller buffers were
#: tried for it (marin-community/marin issue 8077).
ALL_TO_ALL_BYTES = 440 * GIB // 1000
#: For each such rank where others of the group are across the network, which leaves two channels;
#: and 16 chunks of 128 KiB of 32 channels both ways for all others (``ncclTopoComputeP2pChannels``,
#: ``sharedNetBuffersInit``).
_ALL_TO_ALL_NETWORK_BYTES, _NETWORK_BUFFERS = ALL_TO_ALL_BYTES // 16, 2 * 32 * 16 * 128 * 1024
#: DeepEP's buffers: 10 channels, 8 ranks in a node, places for 288 tokens of each of them and twice
#: 128 of each node, and what is sent with a token (``csrc/legacy/config.hpp``,
#: ``get_dispatch_config`` and ``Buffer.num_sms`` of deepseek-ai/DeepEP).
_DEEPEP_CHANNELS, _DEEPEP_RANKS, _DEEPEP_NEAR, _DEEPEP_FAR, _DEEPEP_BYTES = 10, 8, 288, 256, 2048
#: Products of a layer that have a user buffer each, of the whole micro batch in 16 bits, registered
#: outside the allocator (Transformer Engine, ``initialize_ub`` and ``CommOverlapBase``).
USER_BUFFERS = 10


def outside_bytes(spec: TransformerSpec, grid: PartialLayout, cluster: Cluster) -> Bytes:
    """What a process takes outside PyTorch's allocator: context, communicators, buffers."""
    dims, buffers = grid.dims, 0
    if grid.execution.tp_comm_overlap and dims.tensor_model_parallel_size > 1:
        tokens = spec.seq_length * grid.micro_batch_size // dims.context_parallel_size
        buffers = USER_BUFFERS * tokens * spec.hidden_size * 2
    all_to_all = all_to_all_bytes(spec, grid, cluster.group_sizes())
    return CONTEXT_BYTES + communicator_bytes(dims) + all_to_all + buffers


def communicator_bytes(dims: ParallelDims) -> Bytes:
    """What NCCL takes for the collectives of a rank's groups."""
    groups = [
        dims.world_size,
        dims.tensor_model_parallel_size,
        dims.pipeline_model_parallel_size,
        dims.context_parallel_size,
        dims.data_parallel_size * dims.context_parallel_size,
    ]
    if dims.expert_model_parallel_size > 1:
        groups += [dims.expert_ranks, dims.expert_data_parallel_size]
    return sum(1 for size in groups if size > 1) * COMMUNICATOR_BYTES


def all_to_all_bytes(
    spec: TransformerSpec, grid: PartialLayout, group_sizes: tuple[int, ...]
) -> Bytes:
    """What the dispatcher of experts' tokens takes outside the allocator.

    NCCL's all-to-all has buffers for each peer, DeepEP its own; HybridEP's count among the
    activations. Two runs of experts on 16 B300 (PP 2, CP 8, EP 8; torch's messages, with
    basetenlabs/Megatron-LM, 2026-08) held 6.1 and 6.9 GiB outside the allocator when they ran out;
    6.8 GiB are predicted.
    """
    ranks, execution = grid.dims.expert_model_parallel_size, grid.execution
    if ranks == 1:
        return 0
    if execution.moe_flex_dispatcher_backend is FlexBackend.DEEPEP:
        nodes = ranks // _DEEPEP_RANKS if ranks > _DEEPEP_RANKS else 0
        tokens = min(ranks, _DEEPEP_RANKS) * _DEEPEP_NEAR + nodes * _DEEPEP_FAR
        return _DEEPEP_CHANNELS * tokens * (2 * spec.hidden_size + _DEEPEP_BYTES)
    if execution.moe_token_dispatcher_type is not TokenDispatcher.ALLTOALL:
        return 0
    near = group_shape(grid.dims, GroupKind.EP, group_sizes)[0]
    if near == ranks:
        return (ranks - 1) * ALL_TO_ALL_BYTES
    return (near - 1) * _ALL_TO_ALL_NETWORK_BYTES + _NETWORK_BUFFERS


def allocatable_bytes(
    accelerator: Accelerator, settings: CostSettings, outside: Bytes = 0
) -> Bytes:
    """What PyTorch's allocator can give out: the device less fragmentation and what is outside.

    Args:
        outside: what the job takes there (``outside_bytes``), ``memory_reserve_bytes`` at least.
    """
    usable = int(accelerator.memory_bytes * (1.0 - FRAGMENTATION))
    return max(0, usable - max(settings.memory_reserve_bytes, outside))


class PeakErrors(Protocol):
    """A distribution of ``log(measured / predicted)`` of peaks."""

    def at_most(self, error: float) -> float:
        """Chance of an error of at most this."""

    def quantile(self, share: float) -> float:
        """The error that a share of all errors is at most."""


@frozen
class PeakError:
    """``log(measured / predicted)`` of peaks of a source that was not fitted.

    Args:
        median: above 0 where predictions are too small.
        above, below: scales of Student's t distribution on either side of it.
    """

    median: float
    above: float
    below: float

    def at_most(self, error: float) -> float:
        """Chance of an error of at most this."""
        scale = self.above if error > self.median else self.below
        return cumulative((error - self.median) / scale)

    def quantile(self, share: float) -> float:
        """The error that a share of all errors is at most."""
        return self.median + (self.above if share > 0.5 else self.below) * quantile(share)


@functools.cache
def shipped_peak_errors() -> Mapping[str, PeakError]:
    """The catalogue's (``calibration/memory.yaml``): ``replicated`` and ``sharded``."""
    return {
        name: PeakError(**{key: fit[key] for key in ("median", "above", "below")})
        for name, fit in catalogue_entry("calibration", "memory").items()
    }


def peak_error(zero: ZeroStage) -> PeakError:
    """The error of the peaks of jobs with such a ZeRO stage."""
    return shipped_peak_errors()["sharded" if zero >= ZeroStage.GRADIENTS else "replicated"]


def out_of_memory_probability(peak_bytes: float, limit_bytes: float, error: PeakErrors) -> float:
    """Chance that a job with a predicted peak needs more than can be given out.

    >>> round(out_of_memory_probability(70e9, 75e9, peak_error(ZeroStage.OPTIMIZER)), 3)
    0.055
    >>> round(out_of_memory_probability(74e9, 75e9, peak_error(ZeroStage.OPTIMIZER)), 2)
    0.46
    """
    if peak_bytes <= 0:
        return 0.0
    if limit_bytes <= 0:
        return 1.0
    return 1.0 - error.at_most(math.log(limit_bytes / peak_bytes))
