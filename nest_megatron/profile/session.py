"""A session of timing: which shapes, in which order, for how long, on which machine and ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from nest_megatron.cluster.discovery import open_nvml
from nest_megatron.errors import NestError, ProfileError, error_line, message_line
from nest_megatron.megatron_core.stage import Where
from nest_megatron.model.execution import Implementation
from nest_megatron.model.layer_pattern import LayerBlock
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.plain import frozen
from nest_megatron.profile.layer_timer import Measuring, can_time, time_block
from nest_megatron.profile.lookup import Point, point_of
from nest_megatron.profile.network import NetworkProfile
from nest_megatron.profile.records import Machine, Timing
from nest_megatron.units import Seconds


@dataclass(frozen=True, slots=True)
class Task:
    """One block to time in one shape."""

    block: LayerBlock
    shard: LayerShard

    def __str__(self) -> str:
        shard = self.shard
        experts = self.block is LayerBlock.EXPERTS
        ep = f", ep {shard.expert_model_parallel_size}" if experts else ""
        return (
            f"{self.block} at tp {shard.tensor_model_parallel_size}{ep}, "
            f"micro batch {shard.micro_batch_size}"
        )


@frozen
class Skipped:
    """A block that was not timed, and why; one that is too large does not fit on the device."""

    task: Task
    reason: str
    is_too_large: bool


#: A profile ends after so long where nothing else is said.
BUDGET_S: Seconds = 120.0
#: Degrees that layouts inside one node use; what lies beyond is interpolated.
TENSOR_SIZES = (1, 2, 4, 8)
EXPERT_SIZES = (8, 4, 2, 1)
MICRO_BATCH_SIZES = (1, 2, 4)


def usual_shards(spec: TransformerSpec, *, flash_attention: bool) -> tuple[LayerShard, ...]:
    """The shapes that layouts inside one node use, those of small micro batches first.

    A profile holds them where nobody knows yet which will be needed.
    """
    expert_sizes = [1]  # else the larger first: they hold less, and run more often
    if spec.is_moe and spec.num_experts is not None:
        expert_sizes = [ep for ep in EXPERT_SIZES if spec.num_experts % ep == 0]
    return tuple(
        LayerShard(
            tensor_model_parallel_size=tp,
            expert_model_parallel_size=ep,
            micro_batch_size=micro_batch_size,
            sequence_parallel=tp > 1,
            flash_attention=flash_attention,
        )
        for micro_batch_size in MICRO_BATCH_SIZES
        for ep in expert_sizes
        for tp in TENSOR_SIZES
        if divides(spec, tp)
    )


def divides(spec: TransformerSpec, tp: int) -> bool:
    """Whether megatron-core's layers can be built for so many tensor ranks."""
    groups = () if spec.multi_latent_attention else spec.query_group_counts
    inner = spec.ffn_hidden_sizes or (spec.ffn_hidden_size,)
    wide = (spec.num_attention_heads, *groups, *inner, spec.seq_length)
    return all(size % tp == 0 for size in wide)


def tasks_of(spec: TransformerSpec, shards: Sequence[LayerShard]) -> tuple[Task, ...]:
    """What shards need timed, the first shards' blocks first, each shape once.

    Attention under context parallelism is left out: one rank by itself sees no other's keys.
    """
    return tuple(_tasks_by_shape(spec, shards).values())


def _tasks_by_shape(
    spec: TransformerSpec, shards: Sequence[LayerShard]
) -> dict[tuple[LayerBlock, Point], Task]:
    found: dict[tuple[LayerBlock, Point], Task] = {}
    for shard in shards:
        for block in spec.blocks:
            if not block.mixes_tokens or shard.context_parallel_size == 1:
                found.setdefault((block, point_of(spec, block, shard)), Task(block, shard))
    return found


def telling_apart(spec: TransformerSpec, shards: Sequence[LayerShard]) -> tuple[Task, ...]:
    """What tells layouts apart: blocks in the shapes that some of them have and others have not."""
    tasks = _tasks_by_shape(spec, shards)
    common = set(tasks).intersection(*(_tasks_by_shape(spec, [shard]) for shard in shards))
    return tuple(
        task for shape, task in tasks.items() if can_time(task.block) and shape not in common
    )


def share_of(tasks: Sequence[Task], rank: int, num_ranks: int) -> tuple[Task, ...]:
    """The tasks of one of several ranks: every rank begins with what is needed first."""
    return tuple(tasks[rank::num_ranks])


def run(
    spec: TransformerSpec, tasks: Sequence[Task], measuring: Measuring, *, until: Seconds
) -> Iterator[Timing | Skipped]:
    """Time tasks in order, none begun after ``until`` on ``time.monotonic``.

    One that cannot be timed says why, and the others are timed all the same.

    Raises:
        ProfileError: if CUDA has failed for good: nothing more runs in this process.
    """
    for task in tasks:
        if not can_time(task.block):
            reason = "its layers are not built here, so that it keeps its analytic time"
            yield Skipped(task=task, reason=reason, is_too_large=False)
            continue
        left = until - time.monotonic()
        if left <= 0:
            return
        within = dataclasses.replace(measuring, max_seconds=min(measuring.max_seconds, left))
        try:
            found: Timing | Skipped = time_block(spec, task.block, task.shard, within)
        except MemoryError:
            found = Skipped(task=task, reason="it does not fit on this device", is_too_large=True)
        except Exception as error:  # noqa: BLE001 - whatever Megatron has against this shape
            found = Skipped(task=task, reason=error_line(error), is_too_large=False)
        yield found
        if isinstance(found, Skipped) and measuring.where is Where.GPU:
            _require_device(found)


def _require_device(skipped: Skipped) -> None:
    """Go on after an error if CUDA does: some it reports again at each call."""
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        fix = "What was timed before is stored; start again for the rest."
        limit = f"CUDA has failed for good: {skipped.reason}"
        raise ProfileError("timing", str(skipped.task), limit, fix) from error


def this_machine(where: Where, implementation: Implementation) -> Machine:
    """What blocks run on here, its clocks apart; torch's ``RuntimeError`` if there is no GPU."""
    import torch
    from megatron.core import __version__ as megatron_core

    from nest_megatron.profile.installed import driver_version, installed_versions, nccl_version

    versions, gpu = installed_versions(), None
    if where is not Where.CPU:
        gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Machine(
        device_name=_processor_name() if gpu is None else gpu.name,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if gpu is None
        else gpu.total_memory,
        driver=None if gpu is None else driver_version(),
        torch=str(torch.__version__),
        megatron_core=megatron_core,
        transformer_engine=versions.get("transformer_engine"),
        nccl=None if gpu is None else nccl_version().get("nccl"),
        graphics_mhz=None,
        memory_mhz=None,
        implementation=implementation,
        is_cpu=gpu is None,
    )


def with_clocks(machine: Machine) -> Machine:
    """A machine with the clocks that it has now: after its work, as a GPU at rest lowers them."""
    if machine.is_cpu:
        return machine
    graphics_mhz, memory_mhz = _clocks(gpu_uuid())
    return dataclasses.replace(machine, graphics_mhz=graphics_mhz, memory_mhz=memory_mhz)


def gpu_uuid() -> str:
    """What tells this process's GPU, or its part of one, from all others."""
    import torch

    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _clocks(uuid: str) -> tuple[int | None, int | None]:
    """Clocks of graphics and memory in MHz, as the driver finds them now.

    A process that is shown some GPUs alone counts them otherwise than the driver does.
    """
    import pynvml

    try:
        with open_nvml() as nvml:
            handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            kinds = (nvml.NVML_CLOCK_GRAPHICS, nvml.NVML_CLOCK_MEM)
            graphics, memory = (int(nvml.nvmlDeviceGetClockInfo(handle, kind)) for kind in kinds)
    except pynvml.NVMLError:
        return None, None
    return graphics, memory


#: Longest wait for the other ranks, which may still be timing their last block.
_PATIENCE = timedelta(minutes=10)


class Ranks(NamedTuple):
    """This process among those that torchrun started; alone without it."""

    rank: int
    size: int
    local_rank: int
    local_size: int


def ranks() -> Ranks:
    """Who this process is, by torchrun's variables."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    found = (
        int(os.environ.get(name, default)) for name, default in zip(names, "0101", strict=True)
    )
    return Ranks(*found)


def meet(where: Where, message: Any, *, to_measure: bool = True) -> tuple[list[Any], list[str]]:
    """Join the real process group; every rank's message, and the host of each.

    Args:
        to_measure: the network comes next: the group is of the backend that is measured.

    Raises:
        ProfileError: if the ranks do not come together.
    """
    import torch.distributed as dist

    backend = "nccl" if where is Where.GPU and to_measure else "gloo"
    with _naming_failures(backend):
        dist.init_process_group(backend, timeout=_PATIENCE)
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, (message, socket.gethostname()))
    return [words for words, _ in found], [host for _, host in found]


def measure_network(hosts: list[str], max_seconds: float) -> NetworkProfile | None:
    """Time collectives between the ranks; the profile is on rank 0 alone.

    Raises:
        ProfileError: if a collective fails, and with it all that follow.
    """
    import torch.distributed as dist

    from nest_megatron.profile.collectives import measure

    with _naming_failures(dist.get_backend()):
        return measure(dist.group.WORLD, hosts, max_seconds)


@contextlib.contextmanager
def _naming_failures(backend: str) -> Iterator[None]:
    try:
        yield
    except NestError:
        raise
    except (RuntimeError, ValueError) as error:  # as torch.distributed has them
        limit = f"it failed: {message_line(error)}"
        fix = "What was timed is stored. NCCL_DEBUG=INFO says more; --no-collectives times layers."
        raise ProfileError("process group", backend, limit, fix) from error


def leave() -> None:
    """Leave the process group."""
    import torch.distributed as dist

    dist.destroy_process_group()
